"""What does privacy cost end to end? `DPSVI.run` with Poisson sampling over a non-private scan.

The non-private scan draws the same Poisson batches with the same sampler and takes SVI's step on
them, padding masked. N = 30,000 records. Then the same on full batches, without any sampler, where
nothing hides what the arithmetic costs; and the sampler alone, at N = 30,000 and N = 1,000,000.

    python benchmarks/end_to_end.py --json end_to_end.json
"""

import contextlib
import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import interleaved, interleaved_rounds, logistic_data, logistic_model, parse_args, write
from jax import lax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPSVI, Privacy, secret_key
from numpyro_dp.accounting import RDP
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.samplers import FullBatch, Poisson

# Without an estimator, DPSVI takes centred(aligned()).
ESTIMATORS = {"default": lambda: None, "aligned": aligned, "vanilla": vanilla}
NUM_EXAMPLES = 30_000
CASES = [(16, 128), (100, 300), (100, 3000), (1000, 1000)]
FULL = [(100, 1000), (100, 3000), (1000, 1000), (1000, 3000)]


def masked_model(features, label, mask):
    """The same model on a padded batch."""
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([features.shape[1]]).to_event(1))
    plate = numpyro.plate("records", NUM_EXAMPLES, subsample_size=features.shape[0])
    with plate, numpyro.handlers.mask(mask=mask):
        numpyro.sample("label", dist.Bernoulli(logits=features @ weights), obs=label)


def floor(data, sampler):
    """Non-private SVI in one scan, with the sampler inside, as a function of the steps."""
    scan, *start = floor_scan(data, sampler)
    return lambda num_steps: scan(num_steps, *start)[0].optim_state


def floor_scan(data, sampler):
    """The compiled scan, and its arguments after the number of steps."""
    features, label = data
    svi = SVI(masked_model, AutoDiagonalNormal(masked_model), optax.adam(1e-3), Trace_ELBO())
    start = sampler.init(secret_key(0), NUM_EXAMPLES)
    size = sampler.next(start)[0].indices.shape[0]
    state = svi.init(jax.random.key(0), features[:size], label[:size], jnp.ones(size, bool))

    @functools.partial(jax.jit, static_argnums=0)
    def scan(num_steps, state, batches, features, label):
        def step(carry, _):
            state, batches = carry
            batch, batches = sampler.next(batches)
            rows = batch.indices
            state, _ = svi.update(state, features[rows], label[rows], batch.mask)
            return (state, batches), None

        return lax.scan(step, (state, batches), None, length=num_steps)[0]

    return scan, state, start, features, label


def full_floor(data):
    """Non-private SVI on full batches in one loop, as a function of the steps."""
    svi = SVI(logistic_model, AutoDiagonalNormal(logistic_model), optax.adam(1e-3), Trace_ELBO())
    start = svi.init(jax.random.key(0), *data)

    @jax.jit
    def loop(num_steps, state, data):
        return lax.fori_loop(0, num_steps, lambda _, s: svi.update(s, *data)[0], state)

    return lambda num_steps: loop(num_steps, start, data).optim_state


def private(data, sampler, estimator):
    """DPSVI.run as a function of the number of steps."""
    svi = DPSVI(
        logistic_model,
        AutoDiagonalNormal(logistic_model),
        optax.adam(1e-3),
        estimator=estimator(),
        clip_norm=1.0,
        sampler=sampler,
        privacy=Privacy(
            noise_multiplier=10.0, accountant=RDP(), data_plate="records"
        ),  # with (1000, 1000) numbers either axis could count records
    )

    def run(num_steps):
        return svi.run(jax.random.key(0), num_steps, *data, progress_bar=False).params

    return run


def seconds_per_step(calls, rounds, num_steps):
    """Marginal cost of a step in each round: what a run's fixed costs (init, accounting) leave."""
    short = num_steps // 10
    timed = {}
    for name, call in calls.items():
        timed[name, short] = lambda call=call: call(short)
        timed[name, num_steps] = lambda call=call: call(num_steps)
    seconds = interleaved_rounds(timed, rounds)
    return {
        name: (np.array(seconds[name, num_steps]) - seconds[name, short]) / (num_steps - short)
        for name in calls
    }


def sampling(num_examples, rate, num_steps):
    """The sampler alone, in a scan."""
    sampler = Poisson(rate)

    @jax.jit
    def scan(state):
        def step(state, _):
            batch, state = sampler.next(state)
            return state, (batch.indices[-1], batch.mask[-1])

        return lax.scan(step, state, None, length=num_steps)[1]

    state = sampler.init(secret_key(0), num_examples)
    return lambda: scan(state)


def progress_bar(data, num_steps, rounds):
    """Milliseconds of a whole run with and without its progress bar, of SVI and of DPSVI."""
    plain = SVI(logistic_model, AutoDiagonalNormal(logistic_model), optax.adam(1e-3), Trace_ELBO())
    svi = DPSVI(
        logistic_model,
        AutoDiagonalNormal(logistic_model),
        optax.adam(1e-3),
        estimator=aligned(),
        clip_norm=1.0,
        sampler=FullBatch(),
        privacy=Privacy(noise_multiplier=5.0),
    )

    def run(driver, bar):
        with contextlib.redirect_stderr(io.StringIO()):
            return driver.run(jax.random.key(0), num_steps, *data, progress_bar=bar).params

    calls = {
        (name, bar): functools.partial(run, driver, bar)
        for name, driver in {"SVI": plain, "DPSVI": svi}.items()
        for bar in (False, True)
    }
    seconds = {name: np.array(each) for name, each in interleaved_rounds(calls, rounds).items()}
    return [
        {
            "what": name,
            "without ms": 1e3 * np.median(seconds[name, False]),
            "with ms": 1e3 * np.median(seconds[name, True]),
            "ratio": np.median(seconds[name, True] / seconds[name, False]),
        }
        for name in ("SVI", "DPSVI")
    ]


def compare(base, data, sampler, rounds, num_steps):
    """Steps per second of the non-private loop and of DPSVI, and their ratios."""
    calls = {"SVI": base}
    calls |= {name: private(data, sampler, make) for name, make in ESTIMATORS.items()}
    seconds = seconds_per_step(calls, rounds, num_steps)
    row = {f"{name} steps/s": 1 / np.median(each) for name, each in seconds.items()}
    # Within a round the machine's other load is the same: the median of ratios is steadier.
    return row | {f"{name}/SVI": np.median(seconds[name] / seconds["SVI"]) for name in ESTIMATORS}


def main():
    args = parse_args(__doc__.splitlines()[0])
    rounds, num_steps = (3, 2_000) if args.quick else (9, 20_000)
    rows, full = [], []
    for dim, batch in CASES:
        data = logistic_data(NUM_EXAMPLES, dim)
        sampler = Poisson(batch / NUM_EXAMPLES)
        # Long enough for the steps to outweigh the jitter of a run's fixed costs: a second or two.
        steps = num_steps // max(1, dim * batch // 40_000)
        found = compare(floor(data, sampler), data, sampler, rounds, steps)
        rows.append({"d": dim, "qN": batch} | found)
    for dim, number in FULL:
        data = logistic_data(number, dim)
        # A second or more: the marginal cost of a step is a difference of two runs.
        steps = num_steps // max(1, dim * number // 150_000)
        found = compare(full_floor(data), data, FullBatch(), rounds, steps)
        full.append({"d": dim, "N": number} | found)
    # SVI takes all records in each step, and so does DPSVI here.
    # Few steps: under its bar SVI stacks one array a step, which takes minutes to compile for many.
    bar = progress_bar(logistic_data(300, 100), 1000, rounds)
    num_steps = 2000
    alone = {n: sampling(n, 300 / n, num_steps) for n in (30_000, 1_000_000)}
    seconds = interleaved(alone, rounds)
    sampler_rows = [
        {"N": n, "qN": 300, "us per step": 1e6 * s / num_steps} for n, s in seconds.items()
    ]
    tables = {
        "DPSVI.run": rows,
        "Full batches": full,
        "Poisson sampling alone": sampler_rows,
        "Progress bar": bar,
    }
    write(args, tables)


if __name__ == "__main__":
    main()

"""Attacks on drivers, estimators, samplers and mechanisms, and on six planted bugs.

A row has the lower bound on epsilon that an attack found with 95 % confidence, and the claim at
delta = 0.02. The first attacks see the sum of one step many times, with and without a canary. The
last see one run with many canaries. A planted bug is found if its bound is above the claim.

    python benchmarks/audits.py --json audits.json
"""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import experiment_parser, save
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoMultivariateNormal

import numpyro_dp as dp
from numpyro_dp.estimators import (
    aligned,
    aligned_natural,
    centred,
    natural,
    preconditioned,
    vanilla,
)
from numpyro_dp.mechanisms import AdaptiveClip, LossRelease
from numpyro_dp.privacy.mechanism import gaussian
from numpyro_dp.samplers import FixedSize, FullBatch, Permutation, Poisson

BUDGET = dp.PrivacyBudget(1.5, 0.02)
REPLACED = dp.PrivacyBudget(1.5, 0.02, "replace_one")
CLIP, WHOLE = 0.7, FullBatch()


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def records():
    """Ordinary records along two axes, and the canary, which comes last, along the third."""
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=(7, 2)), np.zeros((7, 1))], axis=1)
    x = np.concatenate([x, [[0.0, 0.0, 50.0]]])
    return jnp.asarray(x, jnp.float32), jnp.asarray([0, 1, 1, 0, 1, 0, 1, 0])


def linear(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def svi(estimator=None, sampler=WHOLE, guide=AutoDiagonalNormal, clip_norm=CLIP,
        budget=BUDGET, fn=model, **more):  # fmt: skip
    given = {} if estimator is None else {"estimator": estimator}
    return dp.DPSVI(fn, guide(fn), optax.sgd(1e-3), clip_norm=clip_norm, sampler=sampler,
                    budget=budget, **given, **more)  # fmt: skip


def chain(kernel):
    return dp.DPMCMC(kernel(model), num_warmup=0, num_samples=1, clip_norm=CLIP,
                     sampler=FullBatch(), budget=BUDGET)  # fmt: skip


def columns():
    x, y = records()
    return jnp.concatenate([x / 50, y[:, None]], axis=1)


DRIVERS = {
    "DPSVI, default": svi,
    "DPSVI, default, any outcome": lambda: svi(fn=linear),
    "aligned": lambda: svi(aligned()),
    "vanilla": lambda: svi(vanilla()),
    "preconditioned": lambda: svi(preconditioned()),
    "natural": lambda: svi(natural()),
    "aligned natural": lambda: svi(aligned_natural()),
    "centred vanilla": lambda: svi(centred(vanilla())),
    "full rank": lambda: svi(aligned(), guide=AutoMultivariateNormal),
    "point estimate (DP-SGD)": lambda: svi(aligned(), Poisson(0.4), AutoDelta),
    "Poisson": lambda: svi(aligned(), Poisson(0.4)),
    "permuted epochs": lambda: svi(aligned(), Permutation(8)),
    "replace one": lambda: svi(aligned(), budget=REPLACED, fn=linear),
    "fixed size, replace one": lambda: svi(aligned(), FixedSize(4), budget=REPLACED, fn=linear),
    "AdaptiveClip": lambda: svi(aligned(), clip_norm=AdaptiveClip(CLIP)),
    "clip norms by entry": lambda: svi(vanilla(), clip_norm={"auto_loc": 0.5, ...: 0.5}),
    "a loss curve": lambda: svi(aligned(), privacy=dp.Privacy(loss_release=LossRelease(1.0, 0.1))),
    "microbatches": lambda: svi(aligned(), execution=dp.Execution(microbatch_size=3)),
    "units of two rows": lambda: svi(aligned(), privacy=dp.Privacy(max_rows_per_unit=2)),
    "DPSEP": lambda: dp.DPSEP(model, clip_norm=CLIP, sampler=FullBatch(), budget=BUDGET),
    "SGLD": lambda: chain(dp.SGLD),
    "preconditioned SGLD": lambda: chain(dp.PreconditionedSGLD),
    "SGHMC": lambda: chain(dp.SGHMC),
    "DPEM": lambda: dp.DPEM(2, clip_norm=CLIP, sampler=FullBatch(), budget=BUDGET),
    "DPPBP": lambda: dp.DPPBP(dp.RegressionNetwork((3,)), clip_norm=CLIP, sampler=FullBatch(),
                              budget=BUDGET),
}  # fmt: skip


def attacked(name, draws):
    x, y = records()
    args, kwargs = (x, y), {}
    if name == "DPEM":
        args = (x,)
    if name == "DPPBP" or "replace one" in name or "any outcome" in name:
        args = (x, y.astype(jnp.float32).at[-1].set(500))
    if "replace one" in name:
        kwargs = {"neighbour": (x, args[1].at[-1].set(-500))}
    if "fixed size" in name:
        # Worst if all other records are like the canary's other value.
        x, y = jnp.tile(x[-1:], (8, 1)), jnp.full(8, 500.0)
        args, kwargs = (x, y.at[-1].set(-500)), {"neighbour": (x, y)}
    if name == "units of two rows":
        kwargs = {"unit": np.array([0, 0, 1, 2, 2, 3, 3, 4])}
    return dp.audit(DRIVERS[name](), jax.random.key(0), *args, draws=draws, **kwargs)


def times(fn, factor):
    """A function that returns a multiple of what ``fn`` returns."""
    return lambda *args, **kwargs: factor * fn(*args, **kwargs)


def without_last(fn):
    """Noise that leaves out the last entry."""

    def patched(key, total, *rest):
        noisy = fn(key, total, *rest)
        return jax.tree.map(lambda leaf, own: leaf.at[-1].set(own[-1]), noisy, total)

    return patched


BUGS = {
    "0.7 times the noise": ("aligned", gaussian, "spacing_of",
                            lambda fn: lambda norm, noise, *rest: fn(norm, 0.7 * noise, *rest)),
    "clipped at 1.5 times the norm": ("aligned", gaussian, "_factor", lambda fn: times(fn, 1.5)),
    "nothing is clipped": ("aligned", gaussian, "_factor",
                           lambda fn: lambda norm, square, finite: jnp.where(finite, 1.0, 0.0)),
    "no noise in one entry": ("aligned", gaussian, "_with_noise", without_last),
    "all records in every Poisson batch": (
        "Poisson", Poisson, "next",
        lambda fn: lambda self, state: (fn(self, state)[0]._replace(
            indices=jnp.arange(8), mask=jnp.ones(8, bool)), state),
    ),
    "an event of half the sensitivity": (
        "aligned", gaussian, "_event",
        lambda fn: lambda noise, norm: fn(noise if gaussian.is_tracer(noise) else 2 * noise, norm),
    ),
}  # fmt: skip


def with_bug(name, draws):
    driver, place, function, change = BUGS[name]
    with mock.patch.object(place, function, change(getattr(place, function))):
        jax.clear_caches()
        return attacked(driver, draws)


def whole_run(epsilon, num_steps, size=200):
    """One run with a canary along each of many axes."""

    def wide(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    rng = np.random.default_rng(0)
    x = np.concatenate([50 * np.eye(size), 0.01 * rng.normal(size=(50, size))])
    y = np.concatenate([np.full(size, 50.0), rng.normal(size=50)])
    driver = dp.DPSVI(wide, AutoDelta(wide), optax.sgd(1e-4), estimator=aligned(), clip_norm=1.0,
                      sampler=Poisson(0.3), budget=dp.PrivacyBudget(epsilon, 1e-5))  # fmt: skip
    args = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    return dp.audit_run(driver, jax.random.key(0), num_steps, *args, canaries=range(size))


def row(kind, name, found):
    print(f"| {kind} | {name} | {found.lower:.2f} | {found.claim:.2f} | "
          f"{found.lower / found.claim:.2f} |", flush=True)  # fmt: skip
    return {"kind": kind, "name": name, "ratio": found.lower / found.claim} | found._asdict()


def main():
    parser = experiment_parser(__doc__, "three drivers, two bugs and a short run, few draws")
    parser.add_argument("--draws", type=int, default=400_000)
    args = parser.parse_args()
    drivers, bugs, draws, steps = list(DRIVERS), list(BUGS), args.draws, 100
    if args.quick:
        drivers, bugs, draws, steps = drivers[:3], bugs[:2], 20_000, 10
    print("| attack | on | epsilon >= | claim | ratio |\n|---|---|---|---|---|")
    rows = []
    for name in drivers:
        rows.append(row("one step", name, attacked(name, draws)))
    for name in bugs:
        rows.append(row("planted bug", name, with_bug(name, draws)))
    jax.clear_caches()
    for epsilon in (1.0, 4.0, 10.0):
        rows.append(row("one run", f"{steps} steps of aligned", whole_run(epsilon, steps)))
    save(args, rows=rows)


if __name__ == "__main__":
    main()

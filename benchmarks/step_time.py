"""What does privacy cost per step? Private `DPSVI.update` over non-private `SVI.update`.

Logistic regression, float32, Adam, one jitted step on a batch of B records; both steps are timed
in turn in one process: median time of the rounds, and median of the rounds' ratios. Memory is what
XLA plans for temporaries. A second table times the noise alone: integers on a grid as released, and
`jax.random.normal` with the same generator, as a part of the aligned step.

    python benchmarks/step_time.py --json step_time.json
"""

import jax
import numpy as np
import optax
from common import chained, interleaved_rounds, logistic_data, logistic_model, parse_args, write
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_dp import DPSVI
from numpyro_dp.estimators import aligned, aligned_natural, natural, preconditioned, vanilla
from numpyro_dp.privacy.keys import secret_key
from numpyro_dp.privacy.noise import discrete_gaussian
from numpyro_dp.samplers import FullBatch

MAIN = {"aligned": aligned, "vanilla": vanilla}
OTHERS = {"preconditioned": preconditioned, "natural": natural, "aligned natural": aligned_natural}
CASES = [
    (AutoDiagonalNormal, 16, 128),
    (AutoDiagonalNormal, 100, 300),
    (AutoDiagonalNormal, 100, 3000),
    (AutoDiagonalNormal, 1000, 1000),
    (AutoMultivariateNormal, 100, 100),
    (AutoMultivariateNormal, 200, 100),
    (AutoMultivariateNormal, 100, 3000),
    (AutoMultivariateNormal, 200, 1000),
]
DRAWS = 200  # of noise in one timed call


def steps(guide_type, dim, batch):
    """Returns the compiled steps by name, with their states."""
    data = logistic_data(batch, dim)
    drivers = {
        "SVI": SVI(logistic_model, guide_type(logistic_model), optax.adam(1e-3), Trace_ELBO())
    }
    for name, estimator in (MAIN | OTHERS).items():
        drivers[name] = DPSVI(
            logistic_model,
            guide_type(logistic_model),
            optax.adam(1e-3),
            estimator=estimator(),
            clip_norm=1.0,
            sampler=FullBatch(),
            noise_multiplier=1.0,
            data_plate="records",  # with (1000, 1000) numbers either axis could count records
        )
    compiled, calls = {}, {}
    for name, driver in drivers.items():
        state = driver.init(jax.random.key(0), *data)
        compiled[name] = jax.jit(driver.update).lower(state, *data).compile()
        calls[name] = chained(compiled[name], state, data)
    return compiled, calls


def noise_calls(size):
    """One draw of noise for ``size`` numbers inside compiled code, from key to key."""
    draws = {
        "grid": lambda key: discrete_gaussian(key, size),
        "float": lambda key: jax.random.normal(key, (size,)),
    }

    def repeated(draw):
        @jax.jit
        def run(key):
            def body(_, carry):
                key, total = carry
                key, own = jax.random.split(key)
                return key, total + draw(own).astype(total.dtype)

            # The sum keeps XLA from dropping a draw.
            return jax.lax.fori_loop(0, DRAWS, body, (key, jax.numpy.zeros(size)))[1]

        key = secret_key(0)
        return lambda: run(key).block_until_ready()

    return {name: repeated(draw) for name, draw in draws.items()}


def main():
    args = parse_args(__doc__.splitlines()[0])
    rows, others, noise = [], [], []
    for guide_type, dim, batch in CASES:
        compiled, calls = steps(guide_type, dim, batch)
        rounds = interleaved_rounds(calls, 9 if args.quick else 41)
        seconds = {name: np.array(each) for name, each in rounds.items()}
        # Within a round the machine's other load is the same: the median of ratios is steadier.
        ratio = {name: np.median(each / seconds["SVI"]) for name, each in seconds.items()}
        memory = {
            name: step.memory_analysis().temp_size_in_bytes for name, step in compiled.items()
        }
        num_params = 2 * dim if guide_type is AutoDiagonalNormal else dim + dim * (dim + 1) // 2
        case = {"guide": guide_type.__name__, "d": dim, "B": batch}
        row = case | {f"{name} us": 1e6 * np.median(seconds[name]) for name in ("SVI", *MAIN)}
        row |= {f"{name}/SVI": ratio[name] for name in MAIN}
        row |= {f"{name} MB": memory[name] / 1e6 for name in ("SVI", *MAIN)}
        row |= {"4 B d MB": 4 * batch * dim / 1e6, "4 B P MB": 4 * batch * num_params / 1e6}
        rows.append(row)
        if guide_type is AutoDiagonalNormal:
            found = interleaved_rounds(noise_calls(dim), 9 if args.quick else 41)
            grid, plain = (1e6 * np.median(found[name]) / DRAWS for name in ("grid", "float"))
            step_us = row["aligned us"]
            noise.append(
                {"d": dim, "B": batch, "step us": step_us, "grid us": grid, "float us": plain}
                | {"(grid - float) / step": (grid - plain) / step_us}
            )
        others.append(case | {f"{name}/SVI": ratio[name] for name in OTHERS})
    write(args, "step_time", {"One step": rows, "Noise": noise, "Other variants": others})


if __name__ == "__main__":
    main()

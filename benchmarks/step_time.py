"""What does privacy cost per step? Private `DPSVI.update` over non-private `SVI.update`.

Logistic regression, float32, Adam, one jitted step on a batch of B records; both steps are timed
in turn in one process: median time of the rounds, and median of the rounds' ratios. Memory is what
XLA plans for temporaries. A second table compares the noise, which is integers on a grid, with
floating-point noise of the same generator: ratios of whole steps.

    python benchmarks/step_time.py --json step_time.json
"""

import dataclasses

import jax
import numpy as np
import optax
from common import (
    chained,
    interleaved_rounds,
    logistic_data,
    logistic_model,
    parse_args,
    save,
    write,
)
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_dp import DPSVI, Privacy
from numpyro_dp.estimators import aligned, aligned_natural, natural, preconditioned, vanilla
from numpyro_dp.mechanisms import GaussianMechanism
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


def steps(guide_type, dim, batch):
    """Returns the compiled steps by name, with their states."""
    data = logistic_data(batch, dim)
    drivers = {
        "SVI": SVI(logistic_model, guide_type(logistic_model), optax.adam(1e-3), Trace_ELBO())
    }
    floats = {f"{name}, floats": estimator for name, estimator in MAIN.items()}
    for name, estimator in (MAIN | OTHERS | floats).items():
        drivers[name] = DPSVI(
            logistic_model,
            guide_type(logistic_model),
            optax.adam(1e-3),
            estimator=estimator(),
            clip_norm=1.0,
            sampler=FullBatch(),
            privacy=Privacy(
                noise_multiplier=1.0,
                mechanism=FloatNoise() if name in floats else GaussianMechanism(),
                data_plate="records",
            ),  # with (1000, 1000) numbers either axis could count records
        )
    compiled, calls = {}, {}
    for name, driver in drivers.items():
        state = driver.init(jax.random.key(0), *data)
        compiled[name] = jax.jit(driver.update).lower(state, *data).compile()
        calls[name] = chained(compiled[name], state, data)
    return compiled, calls


@dataclasses.dataclass(frozen=True)
class FloatNoise:
    """The same mechanism with `jax.random.normal`, whose guarantee is for real numbers."""

    def __call__(self, clip_norm, noise_multiplier):
        base = GaussianMechanism()(clip_norm, noise_multiplier)

        def privatise(key, total, state):
            leaves, treedef = jax.tree.flatten(total)
            keys = jax.random.split(key, len(leaves))
            noisy = [
                leaf + base.noise_scale * jax.random.normal(own, leaf.shape)
                for own, leaf in zip(keys, leaves, strict=True)
            ]
            return treedef.unflatten(noisy), state

        return base._replace(privatise=privatise)


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
        noise.append(
            case
            | {
                f"{name} / with floats": np.median(seconds[name] / seconds[f"{name}, floats"])
                for name in MAIN
            }
        )
        others.append(case | {f"{name}/SVI": ratio[name] for name in OTHERS})
        tables = {"One step": rows, "Noise": noise, "Other variants": others}
        save(args, **tables)  # what has been found so far
    write(args, tables)


if __name__ == "__main__":
    main()

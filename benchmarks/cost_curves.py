"""How do time and memory of a private step grow as N, B, d or P double?

N records, of which B are expected in a batch; a logistic regression in d numbers, by a mean-field
and by a full-rank guide; a network with one hidden layer and P weights. Times are of a compiled
`DPSVI.update`, which draws its batch: medians of rounds in which all sizes take their turn. Memory
is what XLA plans for temporaries of that step. The line that the algorithm predicts goes through
the largest size: level for N (a batch is drawn by its size, not by a coin for each record), in
proportion to B, d (its square for full rank) and P; memory of `vanilla()` is level in B and d, for
it looks at some rows of a batch at a time.

    python benchmarks/cost_curves.py --json cost_curves.json
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from common import (
    chained,
    experiment_parser,
    interleaved,
    logistic_data,
    logistic_model,
    save,
)
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoMultivariateNormal
from numpyro.infer.initialization import init_to_sample

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "dp_bnn"))

from images import MLP, model_of, random_images

from numpyro_dp import DPSVI, Privacy
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.samplers import FullBatch, Poisson


class Curve(NamedTuple):
    """A line of a panel: ``case(size)`` is a driver with its data; time grows as size^power."""

    axis: str
    label: str
    sizes: list[int]
    power: int
    case: Callable[[int], tuple]
    level: bool = False  # in memory


def driver(model, guide, estimator, sampler, plate="records"):
    return DPSVI(
        model, guide, optax.sgd(1e-4), estimator=estimator(), clip_norm=1.0, sampler=sampler,
        privacy=Privacy(noise_multiplier=1.0, data_plate=plate),
    )  # fmt: skip


def regression(number, dim, estimator, guide=AutoDiagonalNormal, batch=None):
    sampler = FullBatch() if batch is None else Poisson(batch / number)
    svi = driver(logistic_model, guide(logistic_model), estimator, sampler)
    return svi, logistic_data(number, dim)


def network(units, estimator, batch=256):
    model = model_of(functools.partial(MLP, units=units), activation="relu")
    guide = AutoDelta(model, init_loc_fn=init_to_sample)
    return driver(model, guide, estimator, FullBatch(), "images"), random_images(batch)


def weights(units):
    return 785 * units + (units + 1) * 10


def doubled(first, last):
    return [2**n for n in range(first, last + 1)]


def curves():
    full = AutoMultivariateNormal
    for name, how in {"aligned": aligned, "vanilla": vanilla}.items():
        yield Curve("N", f"{name}, B = 512, d = 20", doubled(14, 20), 0,
                    lambda n, how=how: regression(n, 20, how, batch=512))  # fmt: skip
        some = name == "vanilla"  # rows at a time
        yield Curve("B", f"{name}, mean field, d = 100", doubled(7, 15), 1,
                    lambda b, how=how: regression(b, 100, how), some)  # fmt: skip
        yield Curve("B", f"{name}, full rank, d = 100", doubled(7, 15), 1,
                    lambda b, how=how: regression(b, 100, how, full), some)  # fmt: skip
        yield Curve("d", f"{name}, mean field, B = 512", doubled(4, 13), 1,
                    lambda d, how=how: regression(512, d, how), some)  # fmt: skip
        yield Curve("d", f"{name}, full rank, B = 128", doubled(4, 9), 2,
                    lambda d, how=how: regression(128, d, how, full))  # fmt: skip
        yield Curve("P", f"{name}, network, B = 256", doubled(3, 11), 1,
                    lambda units, how=how: network(units, how))  # fmt: skip


def measure(curve, rounds):
    """A row for each size."""
    calls, planned = {}, {}
    for size in curve.sizes:
        svi, data = curve.case(size)
        state = svi.init(jax.random.key(0), *data)
        step = jax.jit(svi.update).lower(state, *data).compile()
        calls[size] = chained(step, state, data)
        planned[size] = step.memory_analysis().temp_size_in_bytes / 1e6
    shown = weights if curve.axis == "P" else int
    return [
        {"axis": curve.axis, "curve": curve.label, "size": shown(size)}
        | {"us": 1e6 * seconds, "us power": curve.power}
        | {"MB": planned[size], "MB power": 0 if curve.level else curve.power}
        for size, seconds in interleaved(calls, rounds).items()
    ]


def main():
    args = experiment_parser(__doc__, "two sizes of each curve, three rounds").parse_args()
    rows, doublings = [], []
    for curve in curves():
        some = curve._replace(sizes=curve.sizes[:2]) if args.quick else curve
        found = measure(some, 3 if args.quick else 15)
        rows += found
        for row in found:
            print(f"{row['curve']:32} {row['size']:8} {row['us']:10.1f} us {row['MB']:9.3f} MB")
        before, last = found[-2:]
        doubling = dict(last)
        for name, key in (("time", "us"), ("memory", "MB")):
            doubling[name] = last[key] / before[key]
            doubling[f"{name} predicted"] = 2 ** last[f"{key} power"]
        doublings.append(doubling)
        factors = f"time {doubling['time']:.2f}, memory {doubling['memory']:.2f}"
        print(f"{'':32} last doubling: {factors}", flush=True)
        save(args, rows=rows, doublings=doublings)


if __name__ == "__main__":
    main()

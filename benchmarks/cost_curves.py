"""How do time and memory of a step grow as N, B, d or P double?

N records, of which B are expected in a batch; a logistic regression in d numbers, by a mean-field
and by a full-rank guide; a network with a hidden layer and P weights. Times are of whole runs: what
a long one takes more than a short one, by turns, medians. Memory is what XLA plans for temporaries
of one step. The line that is predicted goes through the largest case: nothing for N (batches are
drawn by their size), in proportion to B, d (its square for full rank) and P.

    python benchmarks/cost_curves.py --json cost_curves.json --figure docs/cost_curves.png
"""

import functools
import pathlib
import statistics
import sys
import time
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import experiment_parser, logistic_data, logistic_model, panels, save
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoMultivariateNormal
from numpyro.infer.initialization import init_to_sample

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "dp_bnn"))

from images import model_of

from numpyro_dp import DPSVI, RDP, FullBatch, Poisson, aligned, vanilla

MODES = {"aligned": aligned, "vanilla": vanilla}


class Curve(NamedTuple):
    """One line of a panel: ``case(size, estimator)`` is a run whose cost should follow a power."""

    axis: str
    label: str
    sizes: list[int]
    power: float
    case: object


class Hidden(nn.Module):
    """One hidden layer."""

    dropout: float = 0.0
    activation: str = "relu"
    units: int = 32

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(getattr(nn, self.activation)(nn.Dense(self.units)(x)))


def driver(model, guide, mode, sampler):
    return DPSVI(
        model, guide, optax.sgd(1e-4), estimator=MODES[mode](), clip_norm=1.0, sampler=sampler,
        noise_multiplier=1.0, accountant=RDP(),
    )  # fmt: skip


def regression(number, dim, mode, batch=None, guide=AutoDiagonalNormal):
    sampler = FullBatch() if batch is None else Poisson(batch / number)
    data = logistic_data(number, dim)
    return driver(logistic_model, guide(logistic_model), mode, sampler), data


def network(units, mode, batch=256):
    model = model_of(functools.partial(Hidden, units=units), activation="relu")
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.uniform(size=(batch, 784)).astype(np.float32))
    labels = jnp.asarray(rng.integers(0, 10, batch))
    return driver(model, AutoDelta(model, init_loc_fn=init_to_sample), mode, FullBatch()), (
        images,
        labels,
    )


def powers(first, last):
    return [2**n for n in range(first, last + 1)]


def curves(modes):
    for mode in modes:
        yield Curve(
            "N", f"{mode}, B = 512, d = 20", powers(14, 19), 0,
            lambda n, mode=mode: regression(n, 20, mode, batch=512),
        )  # fmt: skip
        yield Curve(
            "B", f"{mode}, d = 100", powers(8, 14), 1, lambda b, mode=mode: regression(b, 100, mode)
        )
        yield Curve(
            "d", f"{mode}, mean field, B = 512", powers(5, 12), 1,
            lambda d, mode=mode: regression(512, d, mode),
        )  # fmt: skip
        yield Curve(
            "d", f"{mode}, full rank, B = 128", powers(4, 9), 2,
            lambda d, mode=mode: regression(128, d, mode, guide=AutoMultivariateNormal),
        )  # fmt: skip
        yield Curve(
            "P", f"{mode}, network, B = 256", [785 * u + 10 * (u + 1) for u in powers(5, 11)], 1,
            lambda p, mode=mode: network((p - 10) // 795, mode),
        )  # fmt: skip


def planned(svi, data):
    """MB of temporaries of one step."""
    state = svi.init(jax.random.key(0), *data)
    step = jax.jit(svi.update).lower(state, *data).compile()
    return step.memory_analysis().temp_size_in_bytes / 1e6


def seconds_per_step(runs, rounds):
    """Medians over rounds, in turn, of runs of some 0.2 s."""

    def elapsed(call, steps):
        begin = time.perf_counter()
        call(steps)
        return time.perf_counter() - begin

    counts, found = [], [[] for _ in runs]
    for call in runs:
        elapsed(call, 10)
        once = max(1e-6, elapsed(call, 110) - elapsed(call, 10)) / 100
        counts.append(max(20, int(0.2 / once)))
    for _ in range(rounds):
        for call, count, times in zip(runs, counts, found, strict=True):
            times.append((elapsed(call, 10 + count) - elapsed(call, 10)) / count)
    return [statistics.median(times) for times in found]


def measure(curve, rounds):
    """A row for each size."""
    pairs = [curve.case(size) for size in curve.sizes]

    def run(svi, data, steps):
        result = svi.run(jax.random.key(0), steps, *data, progress_bar=False)
        jax.block_until_ready(result.params)

    seconds = seconds_per_step([functools.partial(run, *pair) for pair in pairs], rounds)
    return [
        {"axis": curve.axis, "curve": curve.label, "size": size, "us": 1e6 * each}
        | {"MB": planned(*pair), "predicted power": curve.power}
        for size, each, pair in zip(curve.sizes, seconds, pairs, strict=True)
    ]


def main():
    parser = experiment_parser(__doc__, "two sizes of each curve, one round")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    args, rows = parser.parse_args(), []
    for curve in curves(args.modes):
        some = curve._replace(sizes=curve.sizes[:2]) if args.quick else curve
        found = measure(some, 1 if args.quick else 5)
        for row in found:
            print(f"{row['curve']:36} {row['size']:8} {row['us']:10.1f} us {row['MB']:9.3f} MB")
        growth = found[-1]["us"] / found[-2]["us"]
        print(f"{'':36} last doubling: {growth:.2f}, by theory {2**curve.power}", flush=True)
        rows += found
        save(args, rows=rows)
    if args.figure:
        draw(args.figure, rows)


def draw(path, rows):
    """Time above, memory below; a column for each of N, B, d, P."""
    names = list(dict.fromkeys(row["axis"] for row in rows))
    with panels(path, len(names), 2, (4.2 * len(names), 7), sharex="col") as axes:
        for column, axis in enumerate(names):
            part = [row for row in rows if row["axis"] == axis]
            for number, label in enumerate(dict.fromkeys(row["curve"] for row in part)):
                line = [row for row in part if row["curve"] == label]
                sizes = np.array([row["size"] for row in line])
                for at, key in enumerate(("us", "MB")):
                    values, color = np.array([row[key] for row in line]), f"C{number}"
                    axes[at][column].loglog(sizes, values, ".-", color=color, label=label)
                    theory = values[-1] * (sizes / sizes[-1]) ** line[0]["predicted power"]
                    axes[at][column].loglog(sizes, theory, ":", color=color)
            axes[0][column].legend(fontsize=7)
            axes[1][column].set_xlabel(axis)
        axes[0][0].set_ylabel("µs a step (dotted: predicted)")
        axes[1][0].set_ylabel("MB of temporaries")


if __name__ == "__main__":
    main()

"""How many kernels does a step launch? Counted in the compiled loops of SVI and of `DPSVI.run`.

A kernel is an operation of the optimised program that computes something: a fusion, a copy, a
product. Loops count as often as they run, and of two branches the one that a step usually takes:
the larger one, but for the rare refill of a Poisson batch. Batches of 300 of 30,000 records, d =
100, as in `end_to_end.py`.

    python benchmarks/kernels.py --json kernels.json
"""

import re

import jax
import jax.numpy as jnp
import optax
from common import logistic_data, logistic_model, parse_args, write
from end_to_end import ESTIMATORS, NUM_EXAMPLES, floor_scan
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPSVI, Privacy
from numpyro_dp.samplers import Poisson

DIM, BATCH = 100, 300
# Operations that only name values, or hold programs.
NOTHING = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call",
    "conditional", "after-all",
}  # fmt: skip
OPERATION = re.compile(r"\s+(?:ROOT )?%[\w.\-]+ = (?:\([^=]*\)|\S+) ([\w\-]+)\(")


def programs_of(text):
    """Lines of operations by the name of their program."""
    found, lines = {}, []
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if opened := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = found[opened[1]] = []
        elif OPERATION.match(line):
            lines.append(line)
    return found


def kernels(programs, name):
    """How many kernels a call of a program launches."""
    count = 0
    for line in programs[name]:
        kind = OPERATION.match(line)[1]
        if kind == "while":
            times = re.search(r'known_trip_count":\{"n":"(\d+)', line)
            body = re.search(r"body=%?([\w.\-]+)", line)[1]
            count += int(times[1]) * (kernels(programs, body) + 1) if times else 0
        elif kind == "call":
            count += kernels(programs, re.search(r"to_apply=%?([\w.\-]+)", line)[1])
        elif kind == "conditional":
            names = re.search(r"branch_computations=\{([^}]*)\}", line)[1].replace("%", "")
            branches = [kernels(programs, each) for each in names.split(", ")]
            count += min(branches) if "poisson_batch" in line else max(branches)
        count += kind not in NOTHING
    return count


def of_a_step(text):
    """Kernels of the body of the loop over steps, the largest body of all loops."""
    programs = programs_of(text)
    bodies = {re.search(r"body=%?([\w.\-]+)", line)[1] for lines in programs.values()
              for line in lines if OPERATION.match(line)[1] == "while"}  # fmt: skip
    step = max(bodies, key=lambda name: len(programs[name]))
    return kernels(programs, step)


def private(data, sampler, estimator):
    """The text of the compiled loop of `DPSVI.run`."""
    svi = DPSVI(
        logistic_model, AutoDiagonalNormal(logistic_model), optax.adam(1e-3),
        estimator=estimator(), clip_norm=1.0, sampler=sampler,
        privacy=Privacy(noise_multiplier=10.0),
    )  # fmt: skip
    state = svi.init(jax.random.key(0), *data)
    session = svi._session(data, {})
    progress = session.begin(state, 6, 2)[1]
    called = (*progress[:2], session.rows(data, {}), *map(jnp.int32, (0, 2, 3)))
    return session._loop_for(None).lower(*called).compile().as_text()


def main():
    args = parse_args(__doc__.splitlines()[0])
    data, sampler = logistic_data(NUM_EXAMPLES, DIM), Poisson(BATCH / NUM_EXAMPLES)
    scan, *start = floor_scan(data, sampler)
    texts = {"SVI": scan.lower(10, *start).compile().as_text()}
    texts |= {name: private(data, sampler, make) for name, make in ESTIMATORS.items()}
    counts = {name: of_a_step(text) for name, text in texts.items()}
    rows = [
        {"run": name, "kernels": count, "over SVI": count / counts["SVI"]}
        for name, count in counts.items()
    ]
    write(args, {"Kernels of a step": rows})


if __name__ == "__main__":
    main()

"""How long does a budget take to become noise? Poisson sampling, add or remove one record.

Each case runs in a fresh process, so that its peak memory is its own; seconds exclude imports.

    python benchmarks/calibration.py --json calibration.json
"""

import json
import subprocess
import sys

from common import parse_args, write

CASES = [
    # rate, steps, epsilon, delta
    (0.01, 1_000, 1.0, 1 / 30_162),
    (0.01, 100_000, 1.0, 1 / 30_162),
    (0.01, 400_000, 1.0, 1 / 30_162),
    (1 / 7000, 700_000, 1.0, 1e-6),
    (0.01, 40_000, 0.01, 1e-6),
    (0.01, 40_000, 50.0, 1e-6),
    (0.01, 40_000, 1.0, 1e-12),
]

CHILD = """
import json, resource, sys, time
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from numpyro_dp import PrivacyBudget
from numpyro_dp.accounting import PLD, PRV, RDP, UnsupportedEventError
from numpyro_dp.privacy.calibration import calibrate_noise
rate, steps, epsilon, delta = json.loads(sys.argv[1])
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def event(z):
    return SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), steps)
start = time.perf_counter()
noise, bound = calibrate_noise(event, PrivacyBudget(epsilon, delta))
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
row = {"noise": noise, "epsilon": bound.epsilon, "by": bound.accountant, "s": seconds,
       "MB more": (peak - base) / 1024}
for accountant in (PLD(), PRV(), RDP()):
    try:
        other = accountant.epsilon(event(noise), delta, "add_or_remove_one")
        row[accountant.name] = f"{other.upper:.4f}"
        if accountant.name == "PRV":
            row["PRV lower"] = f"{other.lower:.4f}"
    except ValueError as error:
        row[accountant.name] = type(error).__name__
        if accountant.name == "PRV":
            row["PRV lower"] = "-"
print(json.dumps(row))
"""


def main():
    args = parse_args(__doc__.splitlines()[0])
    rows = []
    for case in CASES[:3] if args.quick else CASES:
        command = [sys.executable, "-c", CHILD, json.dumps(case)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rate, steps, epsilon, delta = case
        given = {"rate": rate, "steps": steps, "budget": epsilon, "delta": f"{delta:.3g}"}
        rows.append(given | json.loads(done.stdout))
    write(args, {"Calibrating the noise": rows})


if __name__ == "__main__":
    main()

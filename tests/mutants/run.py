"""Plants each bug of ``bugs.toml`` in a copy, and runs the tests that should catch it.

    python tests/mutants/run.py --jobs 2 > table.md

Prints a table. Fails if a bug lives, or no longer applies to the code. Not part of ``.ci/run``.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace

ROOT = pathlib.Path(__file__).resolve().parents[2]
LONGEST = 600  # seconds of tests of one bug
TIERS = ("not slow and not extended", "slow", "extended")  # one after the other
README = ("not slow and not full and not extended",)  # what the README's command runs


def copied(place):
    """A copy of what git knows, so that nothing else is found by the tests."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\n")
    for name in filter(None, names):
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)


def verdict(bug, place, tiers):
    """How a bug ended, and the test that found it."""
    path = place / "numpyro_dp" / bug.file
    text = path.read_text()
    if text.count(bug.before) != 1:
        return "does not apply", f"{text.count(bug.before)} times"
    path.write_text(text.replace(bug.before, bug.after))
    tests = [f"tests/{name}" for name in bug.tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m"]
    environment = os.environ | {"PYTHONPATH": str(place)}
    try:
        for test in tests:  # one by one, because the first should be enough
            for tier in tiers:
                done = subprocess.run(
                    [*command, tier, test], cwd=place, env=environment, timeout=LONGEST,
                    capture_output=True, text=True,
                )  # fmt: skip
                if done.returncode in (1, 2):
                    told = done.stdout.splitlines()
                    failed = [line for line in told if line.startswith(("FAILED", "ERROR"))]
                    return "dies", failed[0].split(" - ")[0].split("/", 1)[1] if failed else test
                if done.returncode not in (0, 5):  # 5: no test was found
                    return "does not apply", done.stdout[-300:]
    except subprocess.TimeoutExpired:
        return "dies", "time"
    finally:
        path.write_text(text)
    return "LIVES", bug.tests


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="bugs whose name has this")
    parser.add_argument("--since", default="", help="this bug and those after it")
    parser.add_argument("--readme", action="store_true", help="the tests of the README alone")
    options = parser.parse_args()
    found = tomllib.loads(pathlib.Path(__file__).with_name("bugs.toml").read_text())["bug"]
    if options.since:
        found = found[[bug["name"] for bug in found].index(options.since) :]
    chosen = [SimpleNamespace(**bug) for bug in found if options.only in bug["name"]]
    places, bad = Queue(), 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as threads:
        for number in range(options.jobs):
            place = pathlib.Path(folder) / str(number)
            copied(place)
            places.put(place)

        def one(bug):
            place, begun = places.get(), time.monotonic()
            try:
                return *verdict(
                    bug, place, README if options.readme else TIERS
                ), time.monotonic() - begun
            finally:
                places.put(place)

        print("| bug | file | | found by | s |\n|---|---|---|---|---|")
        for bug, (end, found, took) in zip(chosen, threads.map(one, chosen), strict=True):
            print(f"| {bug.name} | `{bug.file}` | {end} | `{found}` | {took:.0f} |", flush=True)
            bad += end != "dies"
    print(f"\n{len(chosen) - bad} of {len(chosen)} bugs die.")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()

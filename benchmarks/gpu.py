"""What the benchmarks of speed say on one accelerator, in one command that names it.

Step times, a sweep of 1,000 runs, steps of networks, the CNN on MNIST and whole runs, each by its
own script in a process of its own (this one does not touch the device), with the JAX and the device
that are there; on a machine without an accelerator that is its CPU. Each part has a file of its own
in the folder, which stands as it is if a later part fails.

    NUMPYRO_DP_DATA=... python benchmarks/gpu.py --folder docs/benchmarks/results/accelerator
"""

import argparse
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
CNN = ["--networks", "CNN", "--methods", "SGD", "--priors", "flat", "--kinds", "private"]
PARTS = {  # name -> script, its arguments
    "steps": ("step_time.py", []),
    "sweep": ("sweep.py", ["--seeds", "250", "--epochs", "40"]),
    "networks": ("dp_bnn/epoch_time.py", []),
    "cnn": ("dp_bnn/mnist.py", CNN),
    "runs": ("end_to_end.py", ["--quick"]),  # of small steps, which wait for the device
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, help="write the results to files in it")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    args = parser.parse_args()
    failed = []
    for name in args.parts:
        print(f"\n== {name}", flush=True)
        script, arguments = PARTS[name]
        command = [sys.executable, str(HERE / script), *arguments, *["--quick"][: args.quick]]
        if args.folder:
            command += ["--json", str(args.folder / f"{name}.json")]
        failed += [name] * bool(subprocess.run(command, check=False).returncode)
    if failed:
        raise SystemExit(f"These parts failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

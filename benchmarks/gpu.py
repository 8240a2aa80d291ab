"""What the benchmarks of speed say on one accelerator, in one file that names it.

Step times, whole runs, a sweep of 1,000 runs, steps of networks and the CNN on MNIST, each by its
own script in a process of its own (this one does not touch the device), with the JAX and the device
that are there; on a machine without an accelerator that is its CPU.

    NUMPYRO_DP_DATA=... python benchmarks/gpu.py --json gpu.json
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from common import make_parser

HERE = pathlib.Path(__file__).resolve().parent
PARTS = {  # name -> script, its arguments
    "steps": ("step_time.py", []),
    "whole runs": ("end_to_end.py", []),
    "sweep": ("sweep.py", ["--seeds", "250"]),
    "networks": ("dp_bnn/epoch_time.py", []),
    "MNIST": (
        "dp_bnn/mnist.py",
        ["--networks", "CNN", "--methods", "SGD", "--priors", "flat", "--kinds", "private"],
    ),
}


def run(script, arguments, quick):
    """The JSON that a script writes; it prints as it goes."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "found.json"
        command = [sys.executable, HERE / script, *arguments, "--json", path]
        subprocess.run([*command, *["--quick"][:quick]], check=True)
        return json.loads(path.read_text())


def main():
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    args = parser.parse_args()
    found = {}
    for name in args.parts:
        print(f"\n== {name}", flush=True)
        found[name] = run(*PARTS[name], args.quick)
        device = found[name]["machine"]
        print(f"on {device['device']} ({device['platform']}), jax {device['jax']}")
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Sets environment variables so that tests compile quickly. Imported before JAX is.

The compiler takes most of the tests' time. It optimises little here, and programs that many tests
build are compiled once. Set ``XLA_FLAGS`` to anything, even nothing, to compile as users do.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile

# Which of these a jaxlib knows changes with its version, and an unknown one ends the process.
FLAGS = ("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false")


def _known(flag):
    """Whether a new process with this flag can start JAX."""
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=os.environ | {"XLA_FLAGS": flag}, capture_output=True, check=False,
    )  # fmt: skip
    return done.returncode == 0


def set_up():
    """Sets flags and a cache of compiled programs; worker processes inherit both."""
    if "XLA_FLAGS" not in os.environ:
        os.environ["XLA_FLAGS"] = " ".join(flag for flag in FLAGS if _known(flag))
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="numpyro_dp_tests_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

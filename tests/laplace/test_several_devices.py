"""Three devices share the records of a release, and noise is added once."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile_models import MODELS

from numpyro_dp import DPLaplace, Execution, Privacy, PrivacyBudget


def check_same():
    assert jax.device_count() == 3
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 3)).astype(np.float32)
    y = (rng.random(500) < 1 / (1 + np.exp(-x[:, 0]))).astype(np.int32)
    for name in ("bernoulli", "poisson"):
        found = []
        for mesh in (None, jax.make_mesh((3,), ("records",))):
            laplace = DPLaplace(
                MODELS[name][0], budget=PrivacyBudget(3.0, 1e-5),
                privacy=Privacy(secret_key=1, repetition=True), execution=Execution(mesh=mesh),
            )  # fmt: skip
            posterior = laplace.run(jax.random.key(0), jnp.asarray(x), jnp.asarray(y))
            found.append(np.asarray(posterior.sample(jax.random.key(1), 500)["w"]))
        one, other = found
        assert np.abs((one - other) / one.std(0)).max() < 0.02


@pytest.mark.extended
def test_devices_share_the_records_of_a_release():
    others = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    flags = " ".join([*others, "--xla_force_host_platform_device_count=3"])
    done = subprocess.run(
        [sys.executable, "-c", "import test_several_devices as t; t.check_same()"],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=os.path.dirname(__file__), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

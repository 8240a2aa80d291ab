"""Checks the package's array annotations at run time, in the tests only."""

import jax
import pytest
from jaxtyping import install_import_hook

_CHECKED = (
    "core", "aggregate", "step", "session", "results", "svi", "model", "estimators",
    "privacy.mechanism",
)  # fmt: skip

install_import_hook([f"numpyro_dp.{name}" for name in _CHECKED], "_typecheck.checked")


@pytest.fixture
def empty_caches():
    """For tests that count compilations: JAX drops the oldest of 4096 programs of a process."""
    jax.clear_caches()

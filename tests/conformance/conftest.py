"""Settings of the conformance tests."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request):
    """Compiles faster, to slower code: these tests compile much and compute little.

    Bounds on rounding are of the code that users run.
    """
    if request.module.__name__.endswith(("test_products", "test_rounding")):
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()

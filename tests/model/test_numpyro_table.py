"""docs/numpyro.md says what of NumPyro works: each row of it runs here under its name."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from numpyro import handlers
from numpyro.contrib import control_flow, module
from numpyro.infer import autoguide, elbo
from numpyro_cases import CASES

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "numpyro.md"
ROW = re.compile(r"^\| `(.+?)` \| (works|refused) \|(.*)\|$", re.MULTILINE)


def rows() -> Iterator[tuple[str, str, str]]:
    """Name, verdict and remark of each row of the page."""
    yield from ROW.findall(PAGE.read_text())


@pytest.fixture(autouse=True)
def _quick_compilation() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_each_row_has_a_case_and_each_case_a_row() -> None:
    names = [name for name, _, _ in rows()]
    assert len(set(names)) == len(names)
    assert set(names) == set(CASES)


def test_the_page_names_all_that_numpyro_has() -> None:
    page = PAGE.read_text()
    losses = [name for name in vars(elbo) if name.endswith("ELBO")]
    networks = [name for name in vars(module) if name.endswith("_module")]
    for names in (autoguide.__all__, losses, handlers.__all__, control_flow.__all__, networks):
        assert names
        for name in names:
            assert re.search(rf"`[^`]*\b{name}\b[^`]*`", page), name


def _rows_to_run() -> list:
    """Every sixth row; the others are extended."""
    found = enumerate(rows())
    return [
        pytest.param(*r, id=r[0], marks=pytest.mark.extended) if n % 6 else
        pytest.param(*r, id=r[0]) for n, r in found
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.table
@pytest.mark.filterwarnings("ignore:init_to_uniform.. skipping initialization")
@pytest.mark.parametrize(("name", "verdict", "remark"), _rows_to_run())
def test_a_row_says_what_happens(name: str, verdict: str, remark: str) -> None:
    build, parts = CASES[name]
    if verdict == "works":
        assert not parts
        params = jax.tree.leaves(build().steps(1))
        assert params and all(np.isfinite(each).all() for each in params)
        return
    assert remark.strip(), "a refusal needs its reason, and what to write instead"
    with pytest.raises((ValueError, TypeError)) as error:
        build().initialise()
    for part in parts or pytest.fail("what must the error say?"):
        assert part in str(error.value)

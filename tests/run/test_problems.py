"""What is fitted is one contract, whatever the method."""

import jax.numpy as jnp
import optax
import pytest
from flat import dpsvi, grouped
from models import mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPEM, DPPBP, DPSEP, RegressionNetwork
from numpyro_dp.core import Problem
from numpyro_dp.samplers import FullBatch

X = jnp.linspace(-1.0, 1.0, 12)
NOISE = {"clip_norm": 1.0, "sampler": FullBatch(), "noise_multiplier": 1.0}

model = mean_of(plate="rows")

DRIVERS = {
    "DPSVI": (lambda: dpsvi(model, AutoDiagonalNormal, optax.sgd(0.1), **NOISE), (X,)),
    "DPSEP": (lambda: DPSEP(model, **grouped(**NOISE)), (X,)),
    "DPEM": (lambda: DPEM(2, **grouped(**NOISE)), (X[:, None],)),
    "DPPBP": (lambda: DPPBP(RegressionNetwork((2,)), **grouped(**NOISE)), (X[:, None], X)),
}  # fmt: skip


@pytest.mark.parametrize("name", DRIVERS)
def test_every_method_fits_a_problem(name):
    make, args = DRIVERS[name]
    problem = make()._session(args, {}).problem
    assert isinstance(problem, Problem)
    assert problem.num_examples == 12
    blank = problem.blank_example()
    rows = problem.rows(args, {})
    assert [leaf.shape for leaf in blank] == [leaf.shape[1:] for leaf in rows.arrays]
    assert problem.numbered == (len(blank) > len(args))
    assert isinstance(problem.at(rows.shared), Problem)

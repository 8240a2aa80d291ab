"""In the limit of no noise our vanilla gradient is d3p's, at one draw for all records."""

import json
import os
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import models
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi

from numpyro_dp.estimators import vanilla

WORKER = pathlib.Path(__file__).parents[1] / "benchmarks" / "peers" / "of_d3p.py"


@pytest.fixture(scope="module")
def d3p_gradient():
    """Asks d3p, in the environment that benchmarks/peers/environments.sh made."""
    folder = os.environ.get("NUMPYRO_DP_PEERS")
    python = pathlib.Path(folder or "", "d3p", "bin", "python")
    if not folder or not python.exists():
        pytest.skip("no environment of d3p: NUMPYRO_DP_PEERS names no folder with one")

    def ask(**arguments):
        request = json.dumps({"task": "gradient", "arguments": arguments})
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
        done = subprocess.run(
            [python, str(WORKER)], input=request, capture_output=True, text=True, check=True,
            env=clean,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        assert "error" not in answer, answer["error"]
        return answer

    return ask


class OneDraw(dist.Normal):
    """A normal distribution whose draw is given."""

    def __init__(self, loc, scale, draw):
        super().__init__(loc, scale)
        self.draw = draw

    def sample(self, key, sample_shape=()):
        return self.loc + self.scale * self.draw


model = models.logistic()


def our_gradient(features, label, clip_norm, loc, raw_scale, draw):
    """What one step without noise hands to the optimiser."""

    def guide(features, label):
        where = numpyro.param("loc", jnp.asarray(loc))
        scale = numpyro.param(
            "scale", jax.nn.softplus(raw_scale), constraint=dist.constraints.softplus_positive
        )
        numpyro.sample("w", OneDraw(where, scale, jnp.asarray(draw)).to_event(1))

    svi = dpsvi(model, guide, optax.sgd(1.0), estimator=vanilla(), clip_norm=clip_norm,
                noise_multiplier=0.0, public="captured")  # fmt: skip
    state = svi.init(jax.random.key(0), features, label)
    before = svi.optim.get_params(state.optim_state)
    after = svi.optim.get_params(svi.update(state, features, label)[0].optim_state)
    return {name: np.asarray(before[name] - after[name], np.float64) for name in before}


@pytest.mark.parametrize(("clip_norm", "number"), [(100.0, 50), (0.5, 10_000_000)])
def test_a_step_moves_as_in_d3p(d3p_gradient, clip_norm, number):
    """d3p clips a record's share of prior and entropy too: of 10 million, it is nothing."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(50, 6)).astype(np.float32)  # gradients have norms of some units
    label = rng.integers(0, 2, 50)
    loc, raw, draw = rng.normal(size=(3, 6)).astype(np.float32)
    ours = our_gradient(features, label, clip_norm, loc, raw, draw)
    theirs = d3p_gradient(
        records=[features.tolist(), label.tolist()], number=number, clip_norm=clip_norm,
        loc=loc.tolist(), raw_scale=raw.tolist(), draw=draw.tolist(),
    )  # fmt: skip
    if number == len(label):  # nothing is clipped
        for name, value in ours.items():
            np.testing.assert_allclose(value, theirs[name], rtol=1e-4, atol=1e-4)
        return
    scale, slope = np.log1p(np.exp(raw)), 1 / (1 + np.exp(-raw))
    weights = loc + scale * draw
    rest = {"loc": weights, "scale": slope * (weights * draw - 1 / scale)}
    for name, value in ours.items():
        clipped = np.asarray(theirs[name]) * len(label) / number
        np.testing.assert_allclose(value - rest[name], clipped, rtol=1e-3, atol=1e-3)
        assert np.linalg.norm(clipped) > 1  # a sum worth comparing

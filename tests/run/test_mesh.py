"""Three devices that share a batch: each record counts on one of them, and noise is added once."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from models import scored
from numpyro.infer.autoguide import AutoDelta
from test_devices import environment

from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.mechanisms import AdaptiveClip
from numpyro_dp.samplers import FullBatch, Poisson

NUMBER, STEPS, RATE = 7, 2000, 1e-3  # three devices do not divide seven records
SIGMA = 5.0  # of the statistic's own standard error


linear = scored(lambda x, w: x @ w, w=dist.Normal(0, 1).expand([NUMBER]).to_event(1))


def released(x, steps, clip_norm=2.0, estimator=aligned, **options):
    """Sums that the steps release, found from the moves of plain gradient descent."""
    mesh = jax.make_mesh((jax.device_count(),), ("records",))
    svi = dpsvi(linear, AutoDelta, optax.sgd(RATE), estimator=estimator(), data_plate="records",
                mesh=mesh, clip_norm=clip_norm, **options)  # fmt: skip
    start = {"w_auto_loc": jnp.zeros(NUMBER)}
    result = svi.run(jax.random.key(0), steps, x, progress_bar=False, init_params=start,
                     trace_size=steps)  # fmt: skip
    for leaf in jax.tree.leaves((result.params, result.trace)):
        copies = [np.asarray(s.data) for s in getattr(leaf, "addressable_shards", ())]
        assert all(np.array_equal(copy, copies[0]) for copy in copies)
    after = np.asarray(result.trace.params["w_auto_loc"], np.float64)
    before = np.concatenate([np.zeros((1, NUMBER)), after[:-1]])
    return (after - before) / RATE + before, result


def check_counts():
    """Record i pulls at coordinate i alone."""
    assert jax.device_count() == 3
    x = np.eye(NUMBER, dtype=np.float32)
    quiet = {"noise_multiplier": 0.0, "sampler": FullBatch()}
    one_by_one = {"estimator": lambda: lambda p: vanilla()(p)._replace(factored=None)}
    for options in ({}, {"microbatch_size": 2}, one_by_one):
        sums, _ = released(x, 3, **quiet, **options)
        np.testing.assert_allclose(sums, 1, atol=1e-3)
    # Half of what is released of an adaptive norm is how many were below it.
    _, result = released(x, 1, AdaptiveClip(2.0, 0.5, learning_rate=1.0), **quiet)
    clip = result.state.mechanism_state.clip_norm.given
    np.testing.assert_allclose(clip.initial, 2.0 * np.exp(-0.5), rtol=1e-5)
    sums, _ = released(x, 200, noise_multiplier=0.0, sampler=Poisson(0.5), secret_key=1)
    np.testing.assert_allclose(sums / 2, np.round(sums / 2), atol=1e-2)
    assert set(np.unique(np.round(sums / 2))) == {0, 1}


def check_noise():
    """Records that are not numbers count as nothing: what is left is noise."""
    x = np.full((NUMBER, NUMBER), np.nan, np.float32)
    sums, _ = released(x, STEPS, noise_multiplier=3.0, sampler=FullBatch(), secret_key=2)
    assert abs(np.mean((sums / 6) ** 2) - 1) < SIGMA * np.sqrt(2 / sums.size)


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_counts, check_noise])
def test_devices_share_a_batch(check):
    done = subprocess.run(
        [sys.executable, "-c", f"import test_mesh; test_mesh.{check.__name__}()"],
        env=environment(3), cwd=pathlib.Path(__file__).parent,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

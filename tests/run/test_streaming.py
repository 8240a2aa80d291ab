"""Records on the host: a run fetches its batches, and is the run that has them on the device."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsep, dpsvi, grouped
from models import logistic, mean_of
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPLaplace, PrivacyBudget
from numpyro_dp.core import Fold
from numpyro_dp.mechanisms import LossRelease
from numpyro_dp.run import loop
from numpyro_dp.samplers import FixedSize, FullBatch, Permutation, Poisson

KEY = jax.random.key(0)
N = 60

model = logistic()


def with_codes(x, y):
    """Each record has a latent of its own."""
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        code = numpyro.sample("code", dist.Normal(0, 1))
        numpyro.sample("y", dist.Bernoulli(logits=x[:, 0] * code + shift), obs=y)


def encoder(x, y):
    loc = numpyro.param("loc", 0.0)
    numpyro.sample("shift", dist.Normal(loc, 0.1))
    slope = numpyro.param("slope", 0.1)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("code", dist.Normal(slope * x[:, 0], 1))


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 3))  # 64 bits wide, as files have it
    return x, (x[:, 0] > 0).astype(np.int64)


def driver(sampler=None, fitted=model, guide=None, **options):
    options = {"noise_multiplier": 1.0, "secret_key": 3, "repetition": True} | options
    return dpsvi(fitted, guide or AutoDiagonalNormal, optax.adam(0.05),
                 sampler=sampler or Poisson(0.2), **options)  # fmt: skip


MEANS = Fold(lambda p: p, lambda s, p: jax.tree.map(jnp.add, s, p), lambda s: s)

CASES = {
    "Poisson": (lambda: driver(), {}),
    "fixed size": (lambda: driver(FixedSize(7)), {}),
    "permutation": (lambda: driver(Permutation(7)), {}),
    "fold": (lambda: driver(), {"fold": MEANS}),
    "short trace": (lambda: driver(), {"trace_size": 2}),
    "private losses": (lambda: driver(loss_release=LossRelease(5.0)), {"trace_size": 3}),
    "latents of records": (lambda: driver(fitted=with_codes, guide=encoder), {}),
    "message passing": (lambda: dpsep(model, sampler=Poisson(0.2), secret_key=3, repetition=True),
        {}),
}  # fmt: skip


FAST = ["Poisson", "latents of records"]
further = pytest.mark.extended


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=further) for n in CASES]
)
@pytest.mark.parametrize(
    "longest", [3, pytest.param(1, marks=further), pytest.param(256, marks=further)]
)
@pytest.mark.full
def test_a_streamed_run_is_the_run(name, longest, monkeypatch):
    monkeypatch.setattr(loop, "_LONGEST", longest)
    make, options = CASES[name]
    options = {"progress_bar": False} | options
    known = make().run(KEY, 11, *data(), **options)
    found = make().run(KEY, 11, *data(), stream=True, **options)
    assert str(found.privacy) == str(known.privacy)
    for part in ("params", "trace", "folded", "losses"):
        leaves = (jax.tree.leaves(getattr(result, part)) for result in (known, found))
        for a, b in zip(*leaves, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=part)
    keys = [jax.random.key_data(r.state.sampler_state.key) for r in (known, found)]
    assert np.array_equal(*keys)  # the batches to come are the same too


@pytest.mark.full
def test_zeros_after_the_last_records_do_not_count(monkeypatch):
    """60 records in parts of 7 leave 3 zeros, which would say that the mean is 0."""
    x = (5 + np.random.default_rng(0).normal(size=N)).astype(np.float32)
    own = {"secret_key": 3, "repetition": True, "budget": PrivacyBudget(1e4, 1e-5)}
    whole = DPLaplace(mean_of(3), **grouped(**own)).run(KEY, x).sample(KEY, 3)["mean"]
    monkeypatch.setattr(loop, "_BYTES", 7 * x.itemsize)
    parts = DPLaplace(mean_of(3), **grouped(**own)).run(KEY, x, stream=True).sample(KEY, 3)["mean"]
    np.testing.assert_allclose(parts, whole, rtol=1e-5)


@pytest.mark.full
def test_a_streamed_run_is_resumed_by_one_that_is_not(capsys):
    svi = driver(num_steps=9)
    whole = svi.run(KEY, 9, *data(), progress_bar=False)
    part = svi.run(KEY, 4, *data(), stream=True)
    assert "step 4 of 4" in capsys.readouterr().err
    rest = svi.run(KEY, 5, *data(), progress_bar=False, init_state=part.state)
    np.testing.assert_allclose(rest.params["auto_loc"], whole.params["auto_loc"], rtol=1e-5)


def test_all_records_in_every_step_are_refused():
    with pytest.raises(ValueError, match=r"stream=True, got FullBatch\(\).*Poisson"):
        driver(FullBatch()).run(KEY, 2, *data(), stream=True)


LARGE = """
import json, resource, sys
import jax, numpy as np, optax
sys.path.insert(0, sys.argv[1])
from test_streaming import driver
from numpyro_dp.samplers import Poisson
rows, dim = 2_000_000, 250
x = np.memmap(sys.argv[2], np.float64, "w+", shape=(rows, dim))  # 4 GB, sparse: zeros
x[:1000] = 1.0
y = np.zeros(rows, np.int8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = driver(Poisson(1e-4)).run(jax.random.key(0), 20, x, y, progress_bar=False, stream=True)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loc = np.asarray(result.params["auto_loc"])
print(json.dumps({"MB": (after - before) / 1e3, "finite": bool(np.isfinite(loc).all())}))
"""


@pytest.mark.extended
def test_a_file_larger_than_memory_need_not_be_in_it(tmp_path):
    command = [sys.executable, "-c", LARGE, "tests/run", str(tmp_path / "records")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["finite"]
    assert found["MB"] < 1_000, found  # of 4,000

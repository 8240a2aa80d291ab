"""Posteriors in files: equal draws anywhere, nothing from records, and no answer from damage."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpmcmc, dpsep, dpsvi
from models import given, slopes
from models import logistic as logistic_model
from numpyro.contrib.module import flax_module
from numpyro.infer.autoguide import AutoDiagonalNormal
from safetensors.numpy import save_file

import numpyro_dp
from numpyro_dp import DPPBP, SGLD, DPLaplace, PrivacyBudget, RegressionNetwork
from numpyro_dp.posterior.saved import _hash_of, read_file
from numpyro_dp.samplers import FullBatch

KEY = jax.random.key(0)
BUDGET = PrivacyBudget(2.0, 1e-4)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(400, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -1.0, 0.5]) + RNG.normal(size=400)).astype(np.float32)


logistic = logistic_model()


def regression(prior=dist.HalfNormal(2.0), likelihood=dist.Normal):  # noqa: B008
    return given(
        lambda x, w, scale: likelihood(x @ w, scale),
        w=lambda x: dist.Laplace(0, 1).expand([x.shape[1]]).to_event(1), scale=prior,
    )  # fmt: skip


linear = regression()


def moving(x, y=None):
    low = numpyro.sample("low", dist.Normal(0, 1))
    high = numpyro.sample("high", dist.Uniform(low, low + 3))  # the support depends on low
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Normal(high, 1), obs=y)


def by_laplace(model=logistic, y=Y > 0):
    return DPLaplace(model, budget=BUDGET).run(KEY, X, y)


def by_svi(model=linear, steps=200, rate=0.02, y=Y, budget=BUDGET, **options):
    svi = dpsvi(model, AutoDiagonalNormal, optax.adam(rate), budget=budget, **options)
    return svi.run(KEY, steps, X, y, progress_bar=False)


def by_sep():
    return dpsep(logistic, budget=BUDGET).run(KEY, 10, X, Y > 0, progress_bar=False).posterior


def by_chain():
    mcmc = dpmcmc(SGLD(linear), num_warmup=50, num_samples=100, budget=BUDGET)
    mcmc.run(KEY, X, Y)
    return mcmc.posterior


def by_network():
    network = RegressionNetwork((3,), weight_precision=None)
    pbp = DPPBP(network, clip_norm=0.5, sampler=FullBatch(), budget=BUDGET)
    return pbp.run(KEY, 5, X, Y, progress_bar=False).posterior


POSTERIORS = {
    "normal": by_laplace,
    "no privacy": lambda: (
        by_svi(logistic, 30, y=Y > 0, budget=None, noise_multiplier=0.0).posterior
    ),
    "rows": lambda: by_laplace(linear, Y),
    "DPSVI": lambda: by_svi().posterior,
    "DPSEP": by_sep,
    "DPMCMC": by_chain,
    "guide": lambda: by_svi().plain_posterior,
    "network": by_network,
    "moving support": lambda: by_laplace(moving, Y),
}


def assert_same(one, other):
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


@pytest.mark.table
@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.filterwarnings("ignore::numpyro_dp.posterior.PosteriorWarning")
def test_a_loaded_posterior_is_the_saved_one(kind, tmp_path):
    posterior, file = POSTERIORS[kind](), tmp_path / "a.posterior"
    posterior.save(file)
    loaded = numpyro_dp.load(file)
    assert loaded.notes == posterior.notes
    assert str(loaded) == str(posterior)
    assert str(loaded.summary(0.8)) == str(posterior.summary(0.8))
    own = posterior.sample(jax.random.key(0), 4000)
    stored = loaded.sample(KEY, 4000)
    assert_same(*({n: np.sort(v, 0) for n, v in draws.items()} for draws in (own, stored)))
    assert len(next(iter(loaded.sample(KEY, 9000).values()))) == 9000
    assert loaded.method == posterior.method
    assert loaded.privacy == posterior.privacy.statement()
    assert (loaded.privacy.epsilon == math.inf) == (kind == "no privacy")
    assert str(loaded.diagnose()) == str(posterior.diagnose())
    assert loaded.to_arviz(10).attrs == posterior.to_arviz(10).attrs
    if posterior.released:
        assert_same(
            loaded.released, numpyro_dp.posterior.posterior.named_leaves(posterior.released)
        )
    again = tmp_path / "b.posterior"
    loaded.save(again)
    assert again.read_bytes() == file.read_bytes()
    # No array has an axis as long as the records have.
    assert all(400 not in value.shape for value in read_file(file)[1].values())


@pytest.mark.full
def test_another_process_needs_the_file_alone(saved, tmp_path):
    code = (
        "import sys, jax, numpy, numpyro_dp\n"
        "draws = numpyro_dp.load(sys.argv[1]).sample(jax.random.key(5), 50)\n"
        "numpy.save(sys.argv[2], draws['w'])"
    )
    out = tmp_path / "draws.npy"
    subprocess.run([sys.executable, "-c", code, saved, out], check=True)
    loaded = numpyro_dp.load(saved)
    np.testing.assert_array_equal(np.load(out), loaded.sample(jax.random.key(5), 50)["w"])


def by_age(pick):
    """Poisson counts by an integer that ``pick`` turns into a predictor."""

    def model(x, age, y=None):
        rates = lambda x, w: dist.Poisson(jnp.exp(0.1 * pick(w, age)))  # noqa: E731
        given(rates, w=dist.Normal(0, 1).expand([4]).to_event(1))(x, y)

    return model


def reloaded(posterior, file, model, atol=0.1, **static):
    """The posterior from a file, whose mean predictions are the same."""
    posterior.save(file)
    loaded = numpyro_dp.load(file, model, **static)
    one, other = (p.predict(KEY, X[:3], num_samples=4000)["y"] for p in (posterior, loaded))
    np.testing.assert_allclose(one.mean(0), other.mean(0), atol=atol)
    np.testing.assert_allclose(one.std(0), other.std(0), rtol=0.1)
    return loaded


@pytest.mark.extended
@pytest.mark.parametrize("picks", [
    (lambda w, a: w[0] * a, lambda w, a: w[0] * a**2),
    (lambda w, a: w[0] * (a == 1), lambda w, a: w[0] * (a >= 1)),
    (lambda w, a: w[jnp.clip(a, 0, 3)], lambda w, a: w[jnp.clip(a, 0, 2)]),
])  # fmt: skip
def test_models_that_differ_at_some_integers_are_told_apart(picks, tmp_path):
    one, other = map(by_age, picks)
    age, counts = RNG.integers(0, 4, 400), RNG.poisson(1.0, 400)
    driver = DPLaplace(one, budget=BUDGET)
    driver.run(KEY, X, age, counts, progress_bar=False).save(tmp_path / "a.posterior")
    assert numpyro_dp.load(tmp_path / "a.posterior", one).predict(KEY, X[:2], age[:2])
    with pytest.raises(ValueError, match="another model than that of the run"):
        numpyro_dp.load(tmp_path / "a.posterior", other)


@pytest.mark.full
def test_the_model_of_the_run_predicts_and_no_other_does(tmp_path):
    posterior, file = by_laplace(linear, Y), tmp_path / "a.posterior"
    loaded = reloaded(posterior, file, linear)
    with pytest.raises(ValueError, match=r"load\(path, model\)"):
        numpyro_dp.load(file).predict(KEY, X[:3])
    for each in (posterior, loaded):
        with pytest.raises(ValueError, match="as many columns"):
            each.predict(KEY, np.ones((3, 2), np.float32))

    def more(x, y=None):
        numpyro.sample("extra", dist.Normal(0, 1))
        linear(x, y)

    same = dist.HalfNormal(2.0)
    numpyro_dp.load(file, regression(same))
    for model, site in (
        (logistic, "scale"), (more, "extra"), (regression(dist.Normal(0, 2.0)), "scale"),
        (regression(dist.HalfNormal(2.001)), "scale"), (regression(same, dist.Cauchy), "y"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"another model than that of the run: .'{site}'"):
            numpyro_dp.load(file, model)
    with pytest.raises(TypeError, match="model as a function"):
        numpyro_dp.load(file, "linear")
    with pytest.raises(ValueError, match="no sampler"):
        loaded.prior_draws(KEY, 3)


@pytest.mark.full
def test_static_keywords_belong_to_the_model(tmp_path):
    def model(x, y=None, *, sd):
        given(lambda x, w: dist.Bernoulli(logits=x @ w), w=slopes(sd))(x, y)

    driver, file = DPLaplace(model, budget=BUDGET, sd=0.5), tmp_path / "a.posterior"
    posterior = driver.run(KEY, X, Y > 0, progress_bar=False)
    reloaded(posterior, file, model, atol=0.05, sd=0.5)
    for keywords in ({"sd": 0.6}, {}):
        with pytest.raises(ValueError, match="static keywords"):
            numpyro_dp.load(file, model, **keywords)


@pytest.mark.extended
def test_parameters_of_a_network_are_in_the_file(tmp_path):
    """Its site holds a tree of arrays, where a file has names."""
    linen = pytest.importorskip("flax.linen")

    def model(x, y=None):
        net = flax_module("net", linen.Dense(1), input_shape=(1, 3))
        given(lambda x, sd: dist.Normal(net(x)[..., 0], sd), sd=dist.HalfNormal(1))(x, y)

    loaded = reloaded(by_svi(model, 60, 0.05).posterior, tmp_path / "a", model)
    assert np.ptp(loaded.predict(KEY, X[:3], num_samples=4000)["y"].mean(0)) > 0.5


@pytest.mark.full
def test_a_model_whose_arguments_a_file_cannot_tell(tmp_path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Study:
        x: jax.Array

    def model(study, y=None):
        return logistic(study.x, y)

    study = Study(jnp.asarray(X))
    DPLaplace(model, budget=BUDGET).run(KEY, study, Y > 0).save(tmp_path / "a")
    with pytest.warns(UserWarning, match="does not tell which model"):
        numpyro_dp.load(tmp_path / "a", model).predict(KEY, Study(jnp.asarray(X[:3])))


@pytest.mark.full
def test_parameters_of_the_model_are_in_the_file(tmp_path):
    def model(x, y=None):
        shift = numpyro.param("shift", jnp.asarray(2.0))
        centre = lambda x, mean: dist.Normal(mean + shift + 0 * x[:, 0], 1)  # noqa: E731
        given(centre, mean=dist.Normal(0, 1))(x, y)

    result = by_svi(model, 60, 0.1)
    assert abs(result.params["shift"] - 2) > 1
    reloaded(result.posterior, tmp_path / "a", model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    file = tmp_path_factory.mktemp("saved") / "a.posterior"
    by_laplace().save(file)
    return file


@pytest.mark.parametrize("number", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_damage_never_gives_another_answer(saved, tmp_path, number):
    content, rng, damaged = saved.read_bytes(), np.random.default_rng(number), tmp_path / "damaged"
    expected, refused = numpyro_dp.load(saved).sample(KEY, 3), 0
    for _ in range(number):
        changed = bytearray(content)
        kind = rng.integers(4)
        place = int(rng.integers(len(content)))
        if kind == 0:
            changed[place] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            del changed[place:]
        elif kind == 2:
            changed[place : place + 8] = rng.bytes(8)
        else:
            changed[place:place] = rng.bytes(3)
        damaged.write_bytes(changed)
        try:
            found = numpyro_dp.load(damaged)
        except ValueError as error:
            assert "damaged" in str(error)
            refused += 1
        else:  # the damage is in a part of the archive that says nothing
            assert_same(found.sample(KEY, 3), expected)
    assert refused > 0.7 * number


@pytest.mark.every_case
@pytest.mark.parametrize(("changes", "arrays", "honest", "words"), [
    ({"method": ...}, {}, True, "damaged"),
    ({"method": 3}, {}, True, "damaged"),
    ({"notes": None}, {}, True, "damaged"),
    ({"privacy": ...}, {}, True, "damaged"),
    ({"findings": [["one"]]}, {}, True, "damaged"),
    ({}, {"draws/w": np.ones((4, 2))}, True, "do not fit"),
    ({}, {"shares/w": np.ones((4, 2))}, True, "do not fit"),
    ({}, {"draws/v": np.ones((4, 2))}, True, "do not fit"),
    ({"version": 2}, {}, True, "'version': 1.*, got .*'version': 2"),
    ({"method": "other"}, {}, False, "was changed"),
    ({}, {"draws/w": np.ones((4, 3))}, False, "was changed"),
])  # fmt: skip
def test_files_that_make_no_sense_are_refused(saved, tmp_path, changes, arrays, honest, words):
    """Some of them have the hash of what they hold."""
    about, values = read_file(saved)
    told = _hash_of(about, values)
    about = {n: value for n, value in (about | changes).items() if value is not ...}
    values = values | arrays
    about["sha256"] = _hash_of(about, values) if honest else told
    save_file(values, tmp_path / "changed", {"about": json.dumps(about)})
    with pytest.raises(ValueError, match=words):
        numpyro_dp.load(tmp_path / "changed")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        numpyro_dp.load(tmp_path / "nowhere")
    pathlib.Path(tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="not a saved posterior"):
        numpyro_dp.load(tmp_path / "text")


def test_a_failed_save_leaves_the_old_file(saved, tmp_path, monkeypatch):
    file = tmp_path / "a.posterior"
    file.write_bytes(b"old")
    posterior = numpyro_dp.load(saved)
    posterior.released = {"odd": np.array(["text"])}
    with pytest.raises(Exception, match="str"):
        posterior.save(file)
    assert file.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["a.posterior"]


def test_a_link_stays_one_and_its_file_keeps_its_permissions(saved, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to(file)
    numpyro_dp.load(saved).save(link)
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert numpyro_dp.load(file).method == numpyro_dp.load(saved).method

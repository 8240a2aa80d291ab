"""Records hide in what a model draws, and in what it does without outcomes: all drivers refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import dpsvi
from hostile import KEY, LABELS, D, N, X, Y, located, mcmc, sep, svi, weights
from numpyro import handlers
from numpyro.distributions import biject_to, transforms
from numpyro.distributions.util import lazy_property
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from numpyro.infer.initialization import init_to_mean, init_to_median, init_to_sample

import numpyro_dp
from numpyro_dp import SGLD, DPLaplace, PrivacyBudget, UnsupportedModelError, fit
from numpyro_dp.posterior import rehearse

TINY = PrivacyBudget(1e-3, 1e-5)


class Prior(dist.Normal):
    """A standard normal density. Subclasses take something from records."""

    def __init__(self):
        super().__init__(jnp.zeros(D), 1.0)


def prior_with(**methods: Any) -> Any:
    return type("Changed", (Prior,), methods)


def means(*shape: int) -> Any:
    return jnp.asarray(X).mean(0) + jnp.zeros((*shape, D))


def called(self, *args, **kwargs):
    value, rest = super(Prior, self).__call__(*args, **kwargs)
    return value + means(), rest


def drawn_from(values: Any, kind: Any = Prior) -> Any:
    """A distribution that is drawn by a bootstrap of values."""

    def sample(self, key, sample_shape=()):
        shape = sample_shape + self.batch_shape[values.ndim - 1 :]
        return jnp.asarray(values)[jax.random.randint(key, shape, 0, N)]

    return type("Resampled", (kind,), {"sample": sample})


Bootstrap, Residuals = drawn_from(X), drawn_from(Y, dist.Normal)
NORMAL = dist.Normal(0, 1).expand([D])
Fitted = prior_with(
    sample=lambda self, key, sample_shape=(): means() + 0.01 * NORMAL.sample(key, sample_shape)
)


def rule_with_records(order: int) -> Any:
    """A density whose derivative of an order has a rule that holds records."""

    @jax.custom_jvp
    def found(value):
        return -0.5 * value**2

    @found.defjvp
    def _(inputs, slopes):
        (value,), (slope,) = inputs, slopes
        shift = means() if order == 1 else 0.0
        first = rule_with_records(1)(value) if order == 2 else -value
        return found(value), (first + shift) * slope

    return found


class Transformed(dist.constraints.Constraint):
    """A support whose transform shifts by records, in one direction."""

    event_dim = 0

    def __init__(self, inverse):
        self.inverse = inverse

    def __call__(self, x):
        return x == x

    def tree_flatten(self):
        return (), ((), {"inverse": self.inverse})


class Shifting(transforms.AffineTransform):
    def __init__(self, inverse):
        super().__init__(0.0, 1.0)
        self.inverse = inverse

    def __call__(self, x):
        return x if self.inverse else x + jnp.asarray(X).mean()

    def _inverse(self, y):
        return y - jnp.asarray(X).mean() if self.inverse else y

    def log_abs_det_jacobian(self, x, y, intermediates=None):
        return jnp.zeros_like(x)


biject_to.register(Transformed)(lambda constraint: Shifting(constraint.inverse))


def logistic(shift: Any = lambda y: 0.0, prior: Any = None) -> Callable[..., None]:
    def model(x, y=None):
        w = weights() if prior is None else numpyro.sample("w", prior())
        eta = x @ w + shift(y)
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)

    return model


def with_prior(prior: Callable[[], Any]) -> Callable[..., None]:
    return logistic(prior=lambda: prior().to_event(1))


def site(add: Callable[[], Any]) -> Callable[..., None]:
    """A logistic regression with one more site, which the likelihood does not read."""

    def model(x, y=None):
        add()
        logistic()(x, y)

    return model


def leak(values: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: numpyro.deterministic("leak", values())


def in_a_dict(data):
    behind_a_missing_outcome(data["x"], data["y"])


def behind_a_missing_outcome(x, y=None):
    if y is None:
        numpyro.deterministic("training", jnp.asarray(LABELS))
    logistic()(x, y)


def second_of_two_outcomes(x, y=None, z=None):
    w = weights()
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)
        if z is None and y is not None:
            numpyro.deterministic("training", jnp.asarray(X))
        numpyro.sample("z", dist.Bernoulli(logits=x @ w), obs=z)


def scaled(x, y=None):
    with handlers.scale(scale=jnp.abs(jnp.asarray(X).sum())):
        w = weights()
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def a_latent_of_the_record(x, y=None):
    """The latents of records are drawn too, for `predict`."""
    w = weights()
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)
        if y is None:
            numpyro.sample("own", Residuals(0 * x[:, 0], 1.0))


KEYS = np.stack([np.arange(N), np.arange(N)], axis=1).astype(np.uint32)


def cut_by_records():
    """Cuts a range at numbers of records, which are then parameters of the program."""
    incomes = 200 + np.arange(N) * 70 % 610
    return jnp.stack([jnp.arange(1000)[income] for income in incomes.tolist()])


PRIORS: dict[str, Any] = {
    "a bootstrap": Bootstrap,
    "a fitted prior": Fitted,
    "a sampler with a compiled helper": prior_with(
        sample=lambda self, key, sample_shape=(): (
            NORMAL.sample(key, sample_shape) + jax.jit(lambda: means())()
        )
    ),
    # Draws are standard normal, and the density knows better.
    "a density of the prior": prior_with(
        log_prob=lambda self, value: -50 * jnp.square(value - means())
    ),
    "a slope of the prior": prior_with(log_prob=lambda self, value: rule_with_records(1)(value)),
    "a curvature of the prior": prior_with(
        log_prob=lambda self, value: rule_with_records(2)(value)
    ),
    "a transform of a support": prior_with(support=Transformed(inverse=False)),
    "its inverse": prior_with(support=Transformed(inverse=True)),
    "a cached property": prior_with(
        table=lazy_property(lambda self: jnp.asarray(X)),
        sample=lambda self, key, sample_shape=(): (
            self.table.mean(0) + jnp.zeros((*sample_shape, D))
        ),
    ),
    "a sampler that prints": prior_with(
        sample=lambda self, key, sample_shape=(): (
            jax.debug.print("{}", key) or NORMAL.sample(key, sample_shape)
        )
    ),
}  # fmt: skip
SITES: dict[str, Callable[[], Any]] = {
    "many keys": leak(lambda: jax.random.wrap_key_data(KEYS)),
    "a list of keys": leak(lambda: [jax.random.key(n) for n in range(N)]),
    "places of cuts": leak(cut_by_records),
    "a parameter that nothing reads": lambda: numpyro.param("leak", jnp.asarray(X)),
    "a deterministic site": leak(means),
    "a list in a deterministic site": leak(lambda: Y.tolist()),
    "a latent that nothing reads": lambda: numpyro.sample(
        "leak", dist.Normal(jnp.asarray(Y).mean(), 1)
    ),
}
MODELS: dict[str, Callable[..., None]] = {
    "a sampler with intermediates": logistic(prior=prior_with(
        sample_with_intermediates=lambda self, key, sample_shape=(): (means(*sample_shape), [])
    )),
    "a distribution that is called": logistic(prior=prior_with(__call__=called)),
    "a scale of the prior": scaled,
    "labels of records": located(likelihood=drawn_from(LABELS, dist.BernoulliLogits)),
    "behind a missing outcome": behind_a_missing_outcome,
    "a shift without outcome": logistic(lambda y: jnp.asarray(Y).mean() if y is None else 0.0),
    "a latent of the record": a_latent_of_the_record,
}  # fmt: skip
HOLES: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    **{name: (with_prior(prior), (X, LABELS)) for name, prior in PRIORS.items()},
    **{name: (site(add), (X, LABELS)) for name, add in SITES.items()},
    **{name: (model, (X, LABELS)) for name, model in MODELS.items()},
    "a bootstrap of residuals": (located(likelihood=lambda eta: Residuals(eta, 1.0)), (X, Y)),
    "in a dict": (in_a_dict, ({"x": X, "y": LABELS},)),
    "second of two outcomes": (second_of_two_outcomes, (X, LABELS, LABELS)),
}

DRIVERS: dict[str, Callable[..., Any]] = {
    "fit": lambda model, *args: fit(model, *args, budget=TINY, rng_key=KEY),
    "DPLaplace": lambda model, *args: DPLaplace(model, budget=TINY).run(KEY, *args),
    "DPSVI": lambda model, *args: svi(model, *args).make().run(KEY, 2, *args),
    "DPSEP": lambda model, *args: sep(model, *args).make().run(KEY, 2, *args),
    "DPMCMC": lambda model, *args: mcmc(SGLD(model, 1e-3), *args).make().run(KEY, *args),
}


@pytest.mark.every_case
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.usefixtures("no_run")
def test_all_drivers_refuse_before_they_begin(driver: str) -> None:
    for hole, (model, args) in HOLES.items():
        with pytest.raises(UnsupportedModelError) as error:
            DRIVERS[driver](model, *args)
        words = ("is not an argument", "debug_", "has the parameters", "single numbers")
        assert any(word in str(error.value) for word in words), hole


class WithMean(dist.Normal):
    """A normal distribution that gives records as its mean."""

    @property
    def mean(self):
        return jnp.asarray(X).mean(0)


@pytest.mark.every_case
@pytest.mark.parametrize("start", [init_to_sample, init_to_median, init_to_mean])
@pytest.mark.usefixtures("no_run")
def test_starts_that_are_drawn_are_looked_at(start: Any) -> None:
    kind = (lambda: WithMean(jnp.zeros(D), 1.0)) if start is init_to_mean else Fitted
    model = with_prior(kind)
    for guide in (AutoDelta, AutoDiagonalNormal):
        call = svi(model, X, LABELS, guide=guide(model, init_loc_fn=start))
        with pytest.raises(UnsupportedModelError, match=r"\(60, 3\)"):
            call.initialise()
    with pytest.raises(UnsupportedModelError, match=r"\(60, 3\)"):
        mcmc(SGLD(model, 1e-3, init_strategy=start), X, LABELS).make().run(KEY, X, LABELS)


def late(x, y=None, again=False):
    """Holds records in code that only a prediction with a further argument runs."""
    logistic()(x, y)
    if again:
        numpyro.deterministic("training", jnp.asarray(Y[:5]))


@pytest.mark.full
def test_predict_looks_at_what_it_is_about_to_run(tmp_path: Any) -> None:
    posterior = fit(late, X, LABELS, epsilon=1.0, rng_key=KEY, progress_bar=False)
    posterior.save(tmp_path / "a.posterior")
    for each in (posterior, numpyro_dp.load(tmp_path / "a.posterior", late)):
        assert each.predict(KEY, X[:2], num_samples=3)["y"].shape == (3, 2)
        with pytest.raises(UnsupportedModelError, match=r"\(5,\), which the run did not have"):
            each.predict(KEY, X[:2], None, True)
        with pytest.raises(UnsupportedModelError, match="did not have"):
            each.predict(KEY, X[:2], again=True)


def by_type(x, y=None):
    """Has records if its argument has values, as a prediction outside of jit would give it."""
    if isinstance(x, np.ndarray) and len(x) < N:
        numpyro.deterministic("training", Y[:5])
    logistic()(x, y)


@pytest.mark.full
def test_predict_runs_what_was_looked_at() -> None:
    posterior = fit(by_type, X, LABELS, epsilon=1.0, rng_key=KEY, progress_bar=False)
    assert "training" not in posterior.predict(KEY, X[:3], num_samples=2)


@pytest.mark.full
def test_predict_takes_what_the_run_took(tmp_path: Any) -> None:
    """Public arrays, small ones, arrays of one value, counts, parameters, values of arguments."""
    table, small = jnp.asarray(np.linspace(-1, 1, 50)), np.array([0.5, 1.0, 1.5], np.float32)

    def model(x, group, y=None, scale=None):
        shift = numpyro.param("shift", jnp.zeros(3)).sum() + table[jnp.asarray(group)]
        w = numpyro.sample("w", dist.Normal(0, scale).to_event(1))
        numpyro.deterministic("number", jnp.asarray(np.arange(x.shape[0])))
        mean = jnp.asarray(x) * small @ w + shift + np.zeros(x.shape[0])
        if y is None:
            numpyro.deterministic("largest", jnp.full(int(np.max(group)), 1.0))
        with numpyro.plate("records", x.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    group, scale = np.arange(N) % 50, np.array([1.0, 2.0, 3.0])
    driver = dpsvi(model, AutoDiagonalNormal, optax.adam(0.01), budget=TINY, public=[table],
                   estimator=None, scale=scale)  # fmt: skip
    posterior = driver.run(KEY, 3, X, group, Y, progress_bar=False).posterior
    posterior.save(tmp_path / "a.posterior")
    for each in (posterior, numpyro_dp.load(tmp_path / "a.posterior", model, scale=scale)):
        assert each.predict(KEY, X[:2], group[:2], num_samples=3)["y"].shape == (3, 2)
        assert each.predict(KEY, X, group, num_samples=3)["largest"].shape == (3, 49)


def test_rehearsal_draws_from_checked_models_only() -> None:
    driver = DPLaplace(with_prior(Bootstrap), budget=TINY)
    with pytest.raises(UnsupportedModelError, match=r"\(60, 3\)"):
        rehearse(driver, KEY, X, None, num_simulations=2)

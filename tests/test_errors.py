"""Wrong inputs over the public interface: each error says what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flat import grouped
from models import mean_of
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from numpyro_dp import DPSVI, BudgetError, PrivacyBudget, UnsupportedModelError, fit, secret_key
from numpyro_dp.accounting import GDP, PLD, PRV, Best, UnsupportedEventError
from numpyro_dp.core import Fold
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.mechanisms import AdaptiveClip, LossRelease
from numpyro_dp.posterior import tail_average
from numpyro_dp.run.session import Session
from numpyro_dp.samplers import FixedSize, FullBatch, Poisson

N = 20
KEY = jax.random.key(0)
SECRET_RECORD = 77.125
X = np.full(N, SECRET_RECORD, np.float32)
BUDGET = PrivacyBudget(1.0, 1e-5)
REPLACE = PrivacyBudget(1.0, 1e-5, "replace_one")

model = mean_of()


def fixed(x):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("records", N, subsample_size=5):
        numpyro.sample("x", dist.Normal(mean, 1), obs=x)


def counts_groups(x):
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([int(x.max())]).to_event(1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean[0], 1), obs=x)


def standardises(x):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    z = (x - x.mean(0)) / x.std(0)
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(mean + z, 1), obs=x)


def driver(**changes: Any) -> DPSVI:
    options = dict(
        model=model, guide=AutoNormal(model), optim=optax.adam(0.1), estimator=aligned(),
        clip_norm=1.0, sampler=FullBatch(), noise_multiplier=1.0,
    )  # fmt: skip
    return DPSVI(**grouped(**options | changes))


def run(num_steps: Any = 3, data: Any = X, rng_key: Any = KEY, **changes: Any) -> Any:
    names = ("trace_size", "init_state", "fold")
    options = {name: changes.pop(name) for name in names if name in changes}
    return driver(**changes).run(rng_key, num_steps, data, progress_bar=False, **options)


def init(**changes: Any) -> Any:
    return driver(**changes).init(KEY, X)


def planned(**changes: Any) -> Any:
    return init(noise_multiplier=None, budget=BUDGET, num_steps=4, **changes)


def own(model: Any) -> dict[str, Any]:
    return {"model": model, "guide": AutoNormal(model)}


def at_end(state: Any) -> Any:
    return state._replace(step=state.max_steps)


def svi_state() -> Any:
    svi = SVI(model, AutoNormal(model), optax.adam(0.1), Trace_ELBO())
    return svi.init(KEY, jnp.asarray(X))


PLATEAU = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
NEITHER = {"budget": None, "noise_multiplier": None}
WITH_BUDGET = {"budget": BUDGET, "noise_multiplier": None}

V, T, B = ValueError, TypeError, BudgetError

# name: (call, error, parts of the message: value, range, remedy, separated by |)
TABLE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # The budget.
    "epsilon 0": (lambda: PrivacyBudget(0.0, 1e-5), V, "epsilon=0.0 | > 0 | finite budget"),
    "epsilon infinite": (lambda: PrivacyBudget(np.inf, 1e-5), V, "epsilon=inf | finite budget"),
    "epsilon text": (lambda: PrivacyBudget("1", 1e-5), T, "epsilon='1' | real number"),
    "delta 0": (lambda: PrivacyBudget(1.0, 0), V, "delta=0 | (0, 1) | 1 / num_examples"),
    "delta 1": (lambda: PrivacyBudget(1.0, 1.0), V, "delta=1.0 | (0, 1) | Choose a delta"),
    "relation": (lambda: PrivacyBudget(1.0, 1e-5, "replace"), V,
        "relation='replace' | 'add_or_remove_one', 'replace_one' | usual choice"),
    "neither budget nor noise": (lambda: driver(**NEITHER), V, "got neither | PrivacyBudget("),
    "budget is a number": (lambda: driver(budget=1.0), T, "PrivacyBudget(epsilon, delta), got 1.0"),
    "budget without bound": (lambda: driver(budget=BUDGET, noise_multiplier=None, clip_norm=np.inf),
        B, "clip_norm=inf | finite clip_norm | noise_multiplier=0.0 without a budget"),
    "budget without bound of one entry": (lambda: driver(budget=BUDGET, clip_norm={"mean": np.inf}),
        B, "clip_norm={'mean': inf} | finite clip_norm"),
    "budget without noise": (lambda: driver(budget=BUDGET, noise_multiplier=0.0), B,
        "noise_multiplier > 0 | got 0.0 | let the budget choose"),
    "budget without steps": (lambda: init(**WITH_BUDGET), B,
        "num_steps together with a budget | DPSVI(..., num_steps=T) | run()"),
    "too little noise for the budget": (lambda: run(budget=BUDGET, noise_multiplier=0.5), B,
        "3 steps | noise_multiplier=0.5 | epsilon=1.0 | Take fewer steps or more noise"),
    # Noise and clip.
    "noise below 0": (lambda: driver(noise_multiplier=-1.0), V,
        "noise_multiplier=-1.0 | [0, 1e+30] | standard deviation"),
    "noise nan": (lambda: driver(noise_multiplier=float("nan")), V,
        "noise_multiplier=nan | standard deviation"),
    "noise text": (lambda: driver(noise_multiplier="auto"), T,
        "noise_multiplier='auto' | real number"),
    "clip 0": (lambda: driver(clip_norm=0.0), V,
        "clip_norm=0.0 | [1e-12, 1e+12] | bounds the norm of one record"),
    "clip nan": (lambda: driver(clip_norm=float("nan")), V,
        "clip_norm=nan | [1e-12, 1e+12] | bounds the norm"),
    "clip None": (lambda: driver(clip_norm=None), T,
        "clip_norm=None | real number in [1e-12, 1e+12] | bounds the norm"),
    "clip of no entry": (lambda: driver(clip_norm={}), V, "clip_norm | empty dict"),
    "clip of one entry below 0": (lambda: driver(clip_norm={"mean": -1.0}), V,
        "clip_norm['mean']=-1.0 | [1e-12, 1e+12]"),
    "clip of an unknown entry": (lambda: init(clip_norm={"men": 1.0}), V,
        "['mean'] | ['men'] | the key ..."),
    "clip of no entry, vanilla": (lambda: init(estimator=vanilla(), clip_norm={"mean": 1.0}), V,
        "'mean_auto_loc', 'mean_auto_scale' | ['mean']"),
    "adaptive clip 0": (lambda: driver(clip_norm=AdaptiveClip(0.0)), V,
        "clip_norm.initial=0.0 | [1e-12, 1e+12] | norm of the first step"),
    "adaptive clip of norms by entry": (lambda: driver(clip_norm=AdaptiveClip({"mean": 1.0})), T,
        "clip_norm.initial={'mean': 1.0} | real number | a dict of AdaptiveClip(...)"),
    "adaptive clip of nothing": (lambda: driver(clip_norm=AdaptiveClip(np.inf)), V,
        "clip_norm.initial=inf | [1e-12, 1e+12] | norm of the first step"),
    "adaptive clip at no cost": (lambda: driver(clip_norm=AdaptiveClip(share=0.0)), V,
        "clip_norm.share=0.0 | [1e-06, 0.99] | part of the privacy cost"),
    "adaptive clip of all": (lambda: driver(clip_norm=AdaptiveClip(quantile=1.0)), V,
        "clip_norm.quantile=1.0 | (0, 1) | should not be clipped"),
    "adaptive clip, quantile 0": (lambda: driver(clip_norm={"mean": AdaptiveClip(quantile=0)}), V,
        "clip_norm['mean'].quantile=0 | (0, 1)"),
    "adaptive clip that stands still": (lambda: driver(clip_norm=AdaptiveClip(learning_rate=0.0)),
        V, "clip_norm.learning_rate=0.0 | (0, 1e+06] | 0.2 is usual"),
    "adaptive clip at all of the cost": (lambda: driver(clip_norm=AdaptiveClip(share=1.0)), V,
        "clip_norm.share=1.0 | [1e-06, 0.99] | part of the privacy cost"),
    "adaptive clip without parentheses": (lambda: driver(clip_norm=AdaptiveClip), T,
        "AdaptiveClip(initial=1.0) | Add the parentheses"),
    # Samplers.
    "rate 0": (lambda: Poisson(0.0), V, "rate=0.0 | (0, 1]"),
    "rate above 1": (lambda: Poisson(1.5), V, "rate=1.5 | (0, 1]"),
    "batch size 0": (lambda: FixedSize(0), V, "batch_size=0 | >= 1"),
    "batch larger than the data": (lambda: init(sampler=FixedSize(21)), V,
        "batch_size=21 | [1, 20] | Use a smaller batch, or FullBatch()"),
    "sampler is a rate": (lambda: driver(sampler=0.01), T, "Poisson(rate) | got 0.01"),
    "sampler is a class": (lambda: driver(sampler=Poisson), T, "Poisson(rate) | class"),
    # Accountants.
    "fixed size, add or remove": (lambda: run(sampler=FixedSize(5), **WITH_BUDGET),
        UnsupportedEventError,
        "WithoutReplacement(5 of 20 | 'add_or_remove_one' | fixed size under 'replace_one'"),
    "fixed size, PRV": (
        lambda: run(sampler=FixedSize(5), budget=REPLACE, noise_multiplier=None, accountant=PRV()),
        UnsupportedEventError,
        "WithoutReplacement(5 of 20 | PRV | fixed size under 'replace_one'",
    ),
    "Poisson, GDP": (lambda: run(sampler=Poisson(0.2), accountant=GDP(), **WITH_BUDGET),
        UnsupportedEventError, "Poisson(0.2 | GDP | exact for full | Poisson batches under"),
    "accountant is a class": (lambda: driver(accountant=PLD), T, "Best(), PLD() | Leave it out"),
    "no accountant": (lambda: Best(accountants=()), V, "accountants=() | at least one"),
    # Model, guide, estimator, optimiser, loss.
    "estimator without parentheses": (lambda: driver(estimator=aligned), T,
        "aligned() | Add the parentheses"),
    "builder of something else": (lambda: run(estimator=lambda problem: 3), T,
        "build an Estimator, got int"),
    "optimiser that reads the loss": (lambda: driver(optim=PLATEAU), T, "reads the loss"),
    "line search": (lambda: driver(optim=optax.lbfgs()), T, "reads the loss"),
    "groups counted in the model": (lambda: run(**own(counts_groups)), UnsupportedModelError,
        "static keywords"),
    "no records": (lambda: run(data=X[:0]), V, "at least one record | args[0] | (0, | whole data"),
    "columns standardised in the model": (lambda: run(**own(standardises)), UnsupportedModelError,
        "static keywords"),
    "estimator is a name": (lambda: driver(estimator="vanilla"), T, "vanilla() | 'vanilla'"),
    "model is no function": (lambda: driver(model=X), T, "model | DPSVI(model, guide, optim"),
    "guide is no function": (lambda: driver(guide=None), T, "guide | got NoneType"),
    "optimiser is a name": (lambda: driver(optim="adam"), T, "optax.GradientTransformation | str"),
    "optimiser evaluates the loss": (lambda: driver(optim=numpyro.optim.Minimize()), T,
        "Minimize | numpyro.optim.Adam or optax"),
    "loss without parentheses": (lambda: driver(loss=Trace_ELBO), T,
        "got the class Trace_ELBO | Add the ()"),
    "loss": (lambda: driver(loss=RenyiELBO()), UnsupportedModelError,
        "Trace_ELBO(num_particles=K) | RenyiELBO"),
    "data plate": (lambda: init(data_plate="rows"), UnsupportedModelError,
        "['records'] | 'rows' | leave data_plate out"),
    "loss release is a number": (lambda: driver(loss_release=10.0), T,
        "LossRelease(clip, share) | 10.0"),
    "loss release without bound": (lambda: driver(loss_release=LossRelease(np.inf)), V,
        "LossRelease.clip=inf | in nats"),
    "loss release takes all": (lambda: driver(loss_release=LossRelease(1.0, 1.0)), V,
        "LossRelease.share=1.0 | (0, 1) | part of the privacy cost"),
    # Keys.
    "secret key of the wrong generator": (lambda: driver(secret_key=KEY), T,
        "ChaCha20 | secret_key()"),
    "secret key of text": (lambda: driver(secret_key="hello"), V, "64 hexadecimal digits"),
    "secret key too short": (lambda: secret_key(b"short"), V, "32 bytes | 5 bytes"),
    "secret key below 0": (lambda: secret_key(-1), V, ">= 0 | negative"),
    "rng key is a number": (lambda: run(rng_key=0), T, "rng_key | int | jax.random.key(0)"),
    "eps for fit": (lambda: fit(model, X, eps=1.0, rng_key=KEY), T, "'eps' | epsilon="),
    "steps for fit": (lambda: fit(model, X, epsilon=1.0, num_steps=9, rng_key=KEY), T,
        "'num_steps' | Use DPSVI"),
    "lists for fit": (lambda: fit(model, [[1.0], [2.0]], epsilon=1.0, rng_key=KEY), T,
        "a list of lists | numpy.asarray"),
    # Calls.
    "no step": (lambda: run(0), V, "num_steps=0 | [1, "),
    "steps no integer": (lambda: run(1e3), T, "num_steps=1000.0 | integer"),
    "steps of the driver": (lambda: driver(num_steps=0), V, "num_steps=0 | >= 1"),
    "no mesh": (lambda: driver(mesh=jax.devices()), T, "mesh=None | jax.sharding.Mesh | list"),
    "no microbatch": (lambda: driver(microbatch_size=0), V,
        "microbatch_size=0 | >= 1 | None finds"),
    "microbatch no number": (lambda: driver(microbatch_size="all"), T,
        "microbatch_size='all' | integer >= 1 | None finds"),
    "steps forgotten": (lambda: driver().run(KEY, X, progress_bar=False), T,
        "array of shape (20,) | run(rng_key, num_steps, *args)"),
    "trace of nothing": (lambda: run(trace_size=0), V, "trace_size=0 | >= 1"),
    "fold not built": (lambda: run(fold=tail_average), T,
        "tail_average(num_steps) | or a Fold | got function"),
    "fold of another length": (lambda: run(fold=tail_average(40, num_batches=2)), V,
        "the 3 steps | one for 40 | same num_steps"),
    "growing fold": (lambda: run(fold=Fold(lambda p: jnp.zeros(1), lambda s, p: jnp.zeros(2), len)),
        T, "fold.update | float32[1] | got float32[2] | constant"),
    "forward mode": (lambda: driver().run(KEY, 3, X, forward_mode_differentiation=True), V,
        "forward_mode_differentiation=False | Leave it out"),
    "evaluate": (lambda: driver().evaluate(init(), X), V,
        "not protected | loss_release= | numpyro.infer.SVI"),
    "one update more": (lambda: driver(num_steps=4, **WITH_BUDGET).update(at_end(planned()), X), B,
        "4 updates | all have been taken | num_steps=T"),
    "resumed": (lambda: run(2, init_state=planned()._replace(step=jnp.asarray(3)), **WITH_BUDGET),
        B, "num_steps <= 1 | after 3 steps | got 2 | num_steps=T"),
    "more steps than planned": (lambda: driver(num_steps=4, **WITH_BUDGET).run(KEY, 5, X), B,
        "num_steps <= 4 | got 5 | num_steps=T"),
    "state of SVI": (lambda: run(init_state=svi_state()), T, "result.state | SVIState"),
    "state of SVI in update": (lambda: driver().update(svi_state(), X), T, "DPSVI.init | SVIState"),
    # Data.
    "text data": (lambda: run(data=np.array(["a"] * N)), T,
        "dtype <U1 | args[0] | Encode it as numbers"),
    "listed data": (lambda: driver(model=lambda x: model(jnp.asarray(x))).run(KEY, 3, X.tolist()),
        T, "20 Python numbers | jnp.asarray"),
    "rows of another size": (lambda: driver(model=fixed).run(KEY, 3, X[:5]), V,
        "with 20 rows | ('args[0]', (5,)) | Pass the whole data set"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_users_have_it() -> Any:
    """Without the type checks of conftest.py, which would raise errors of their own first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def _no_record_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a step runs, or if records are put on their way to one."""

    def read(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a record was read before the error")

    for name in ("rows", "run", "update"):
        monkeypatch.setattr(Session, name, read)


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.usefixtures("_no_record_is_read")
def test_a_wrong_input_is_named_with_its_range_and_remedy(name: str) -> None:
    call, error, parts = TABLE[name]
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for part in parts.split(" | "):
        assert part in message
    assert str(SECRET_RECORD) not in message


@pytest.mark.full
@pytest.mark.usefixtures("_no_record_is_read")
def test_the_guard_notices_a_read() -> None:
    with pytest.raises(AssertionError, match="a record was read"):
        run()
    with pytest.raises(AssertionError, match="a record was read"):
        driver().update(init(), X)


@pytest.mark.parametrize("missing", ["clip_norm", "sampler"])
def test_what_has_no_default_must_be_given(missing: str) -> None:
    options = {"clip_norm": 1.0, "sampler": FullBatch()}
    del options[missing]
    with pytest.raises(TypeError, match=missing):
        DPSVI(model, AutoNormal(model), optax.adam(0.1), **grouped(noise_multiplier=1.0, **options))


@pytest.mark.full
def test_an_error_leaves_no_trace_in_the_driver() -> None:
    """After a refused run the same object runs, with the whole budget."""
    svi = driver(num_steps=3, **WITH_BUDGET)
    with pytest.raises(BudgetError):
        svi.run(KEY, 4, X, progress_bar=False)
    result = svi.run(KEY, 3, X, progress_bar=False)
    assert result.privacy.num_steps == 3
    assert 0.9 < result.privacy.epsilon <= 1.0

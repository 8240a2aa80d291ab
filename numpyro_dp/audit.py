r"""Audits: attacks on a driver that give a lower bound on its epsilon.

**One step, many draws** (:func:`audit`). A canary is in the records, or it is not. The attacker
knows everything else, and sees the noisy sum of one step. Its component along the canary's signal
tells the two worlds apart. Let a threshold have the error rates :math:`\alpha` (false positives)
and :math:`\beta` (false negatives). An (epsilon, delta)-private step has

.. math:: e^\varepsilon \ge \max\Big(\frac{1 - \delta - \beta}{\alpha},
          \frac{1 - \delta - \alpha}{\beta}\Big).

Clopper-Pearson bounds on the two rates give a lower bound on epsilon. The threshold is chosen on
other draws.

**One run, many canaries** (:func:`audit_run`). Each of m canaries is in the records with
probability 1/2. The attacker sees all noisy sums of one run, and guesses r of the m coins. If the
run is :math:`\varepsilon`-private, the number of right guesses is at most as large as a binomial
of probability :math:`e^\varepsilon / (1 + e^\varepsilon)`, in distribution, up to a term of order
:math:`m\,\delta`. The attacker also compares the noise of each step with that of the step before.
If two steps share their noise, its difference gives an exact sum, and no epsilon holds.

Reference:
    M. Nasr et al. (2023), Tight auditing of differentially private machine learning, USENIX
    Security. T. Steinke, M. Nasr, M. Jagielski (2023), Privacy auditing with one (1) training run,
    NeurIPS, Theorem 5.2.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from scipy import optimize

from numpyro_dp._lazy import stats
from numpyro_dp._validate import check_int, check_num_steps, check_real
from numpyro_dp.core import Args, Batch, Kwargs, PyTree
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.model.records import Rows
from numpyro_dp.privacy.keys import check_rng_key, secret_key
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.driver import Driver
from numpyro_dp.run.session import Session
from numpyro_dp.run.state import RunState, spent_by

_TRIES = 50  # batches in which to look for the canary
_TOGETHER = 4096  # draws computed at once
_FEWEST = 10  # values of noise from which a correlation is judged
# First steps whose noise is compared, and values of it in memory.
_COMPARED, _IN_MEMORY = 2000, 10**7
_BY_CHANCE = 1e-8  # probability that independent noise is taken for shared


class Audit(NamedTuple):
    """A lower bound on epsilon, and the claim.

    Attributes:
        lower: Lower bound on epsilon.
        claim: Epsilon of the privacy report.
        delta: Delta of both.
        confidence: Probability, at least, with which ``lower`` is a lower bound.
        attack: What the attacker saw.
    """

    lower: float
    claim: float
    delta: float
    confidence: float
    attack: str

    @property
    def holds(self) -> bool:
        """Whether the claim is not refuted."""
        return self.lower <= self.claim

    def __str__(self) -> str:
        """The bound beside the claim."""
        verdict = "" if self.holds else " THE CLAIM IS WRONG."
        return (
            f"epsilon >= {self.lower:.3g} with {self.confidence:.0%} confidence, and the claim is "
            f"epsilon <= {self.claim:.3g}, at delta={self.delta:g} ({self.attack}).{verdict}"
        )


def audit(
    driver: object,
    rng_key: Array,
    *args: PyTree,
    canary: int = -1,
    neighbour: Args | None = None,
    draws: int = 100_000,
    confidence: float = 0.95,
    **kwargs: PyTree,
) -> Audit:
    """Attacks one step of a driver, with many draws of its noise and batches.

    Pass invented records: the attack is not private. Let the canary be as extreme as possible, and
    alone in its direction. In the other world no batch has it. One step cannot show noise that two
    steps share: :func:`audit_run` looks for that.

    Args:
        driver: A :class:`~numpyro_dp.DPSVI`, ``DPSEP``, ``DPMCMC``, ``DPEM``, ``DPPBP`` or driver
            of your own, with a budget or noise. The claim is that of a run of one step.
        rng_key: Key of the first values and of the draw of the step.
        *args: Arguments of the model.
        canary: Row of the canary.
        neighbour: Arguments in the other world, in place of ``args``. A driver whose budget is for
            ``replace_one`` is attacked best by a canary and its opposite.
        draws: Number of draws in each world.
        confidence: Of the bound.
        **kwargs: Keyword arguments of the model.

    Raises:
        TypeError: If the driver is none of these.
        ValueError: If the canary adds nothing to the sum.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget, audit
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), clip_norm=1.0,
        ...             sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-2))
        >>> found = audit(svi, jax.random.key(0), jnp.array([0.1, -0.2, 50.0]), draws=20_000)
        >>> 0.4 < found.lower < 1.2  # a little above the claim at most once in 20 attacks
        True
    """
    check_int("draws", draws, low=1000)
    check_real("confidence", confidence, low=0, high=1, low_open=True, high_open=True)
    attack = _Attack.of(driver, rng_key, 1, args, kwargs)
    other = attack.without(np.array([canary]))
    if neighbour is not None:
        other = attack._replace(rows=attack.session.rows(*as_arrays(neighbour, kwargs)))
    direction = _direction(other, attack)

    def score(key: Array, world: _Attack) -> Array:
        return world.released(world.fresh(key)) @ direction

    def scores(world: _Attack) -> np.ndarray:
        keys = jax.random.split(secret_key(), draws)
        of_all = functools.partial(score, world=world)
        found = jax.jit(lambda keys: lax.map(of_all, keys, batch_size=_TOGETHER))(keys)
        return np.asarray(found, np.float64)

    lower = _distinguished(scores(other), scores(attack), attack.report.delta, confidence)
    attacked = f"one step, {draws} draws of it with and without a canary"
    return Audit(lower, attack.report.epsilon, attack.report.delta, confidence, attacked)


def audit_run(
    driver: object,
    rng_key: Array,
    num_steps: int,
    *args: PyTree,
    canaries: Sequence[int],
    guesses: int | None = None,
    confidence: float = 0.95,
    **kwargs: PyTree,
) -> Audit:
    """Attacks one run of a driver, with many canaries that are in the records by chance.

    A fair coin decides for each canary whether it is in the records. Pass invented records, as for
    :func:`audit`. Each canary should have a direction of its own, so
    there should be fewer of them than parameters.

    Args:
        driver: As for :func:`audit`.
        rng_key: Key of the first values and of the draws of the run.
        num_steps: Number of steps.
        *args: Arguments of the model.
        canaries: Rows of the canaries.
        guesses: Number of coins that the attacker guesses, chosen before the run. By default a
            third of them, those with the largest and the smallest scores.
        confidence: Of the bound.
        **kwargs: Keyword arguments of the model.

    Raises:
        TypeError, ValueError: As :func:`audit`.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget, audit_run
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(X, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        ...     with numpyro.plate("records", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(X @ w, 1), obs=y)
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), clip_norm=1.0,
        ...             sampler=FullBatch(), budget=PrivacyBudget(4.0, 1e-5))
        >>> X, y = 10 * jnp.eye(50)[:40], jnp.full(40, 50.0)  # each canary has its own direction
        >>> found = audit_run(svi, jax.random.key(0), 20, X, y, canaries=range(40))
        >>> 0 <= found.lower <= 4.0
        True
    """
    check_num_steps(num_steps, 2**31 - 2)
    places = np.asarray(canaries)
    number = len(places)
    guesses = max(2, number // 3) if guesses is None else guesses
    check_int("guesses", guesses, low=2, high=number)
    attack = _Attack.of(driver, rng_key, num_steps, args, kwargs)
    coins = np.asarray(jax.random.bernoulli(secret_key(), shape=(number,)))
    examples = jax.tree.map(lambda leaf: leaf[places], attack.rows.arrays)
    attack = attack.without(places[~coins])

    def step(carry: tuple[RunState, Array], _: object) -> tuple[tuple[RunState, Array], Array]:
        state, scores = carry
        new, taken = attack.session._step(state, attack.rows)
        quiet = attack.released(state._replace(noise_multiplier=jnp.zeros(())))
        noise = ravel_pytree(taken.released.total)[0] - quiet
        estimator = attack.session._estimator(attack.rows.shared, state.mechanism_state)
        public = estimator.prepare(taken.rng_key, taken.params)

        def along(example: PyTree) -> Array:
            parts = estimator.signal(public, example)
            signal = ravel_pytree(parts)[0]
            own = {name: taken.released.total[name] for name in parts}
            size = jnp.linalg.norm(signal)
            return ravel_pytree(own)[0] @ (signal / jnp.where(size > 0, size, 1))

        return (new, scores + jax.vmap(along)(examples)), noise

    begun = attack.fresh(secret_key())
    start = begun, jnp.zeros(number)
    width = jax.eval_shape(attack.released, begun).size
    compared = min(num_steps, _COMPARED, max(2, _IN_MEMORY // width))
    carry, noise = jax.jit(lambda c: lax.scan(step, c, length=compared))(start)
    quick = jax.jit(lambda c: lax.fori_loop(compared, num_steps, lambda _, c: step(c, None)[0], c))
    _, scores = quick(carry)
    scores = np.asarray(scores)
    order = np.argsort(scores)
    few = guesses // 2
    right = int(np.sum(~coins[order[:few]]) + np.sum(coins[order[number - (guesses - few) :]]))
    report = attack.report
    lower = _guessed(number, guesses, right, report.delta, confidence)
    attacked = f"one run, {right} of {guesses} guesses about {number} canaries right"
    independent = attack.session._mechanism(begun.mechanism_state, 1.0).compose is None
    if independent and _shared(np.asarray(noise, np.float64)):
        lower, attacked = math.inf, "one run, whose steps share their noise"
    return Audit(lower, report.epsilon, report.delta, confidence, attacked)


class _Attack(NamedTuple):
    """What an attacker knows.

    Attributes:
        session: Compiled functions of the driver.
        state: The state before the first step.
        rows: All records, canaries included.
        report: The claim.
    """

    session: Session
    state: RunState
    rows: Rows
    report: PrivacyReport

    @classmethod
    def of(
        cls, driver: object, rng_key: Array, num_steps: int, args: Args, kwargs: Kwargs
    ) -> _Attack:
        check_rng_key(rng_key)
        inner = getattr(driver, "_driver", driver)
        if not isinstance(inner, Driver):
            raise TypeError(
                f"An audit needs a driver whose steps are alike, got {type(driver).__name__}. Use "
                "DPSVI, DPSEP, DPMCMC, DPEM, DPPBP, or extend.Driver."
            )
        args, kwargs = as_arrays(args, kwargs)
        state = inner._init(rng_key, num_steps, args, kwargs, None)
        session = inner._session(args, kwargs)
        report = spent_by(inner.settings, state, num_steps)
        return cls(session, state.opened, session.rows(args, kwargs), report)

    def fresh(self, key: Array) -> RunState:
        """The state with noise and batches of its own."""
        noise, batches = jax.random.split(key)
        sampler = self.session.settings.sampler
        own = sampler.init(batches, self.session.num_examples)
        return self.state._replace(secret_key=noise, sampler_state=own)

    def without(self, places: np.ndarray) -> _Attack:
        """The world in which no batch has some of the records."""
        sampler = self.session.settings.sampler
        inside = np.ones(self.session.num_examples, bool)
        inside[places] = False

        def draw(state: PyTree) -> tuple[Batch, PyTree]:
            batch, new = sampler.next(state)
            kept = jnp.asarray(inside)
            if batch.indices is not None:
                kept = kept[jnp.clip(batch.indices, 0, len(inside) - 1)]
            return Batch(batch.indices, kept if batch.mask is None else kept & batch.mask), new

        session = copy.copy(self.session)
        session._build(draw)
        return self._replace(session=session)

    def released(self, state: RunState) -> Array:
        """The noisy sum of a step, as a vector."""
        return ravel_pytree(self.session._step(state, self.rows)[1].released.total)[0]


def _direction(other: _Attack, attack: _Attack) -> Array:
    """The direction in which the canary moves the sum, from a batch that has it."""

    @jax.jit
    def moved(key: Array) -> Array:
        quiet = attack.fresh(key)._replace(noise_multiplier=jnp.zeros(()))
        return attack.released(quiet) - other.released(quiet)

    tried = np.stack([moved(key) for key in jax.random.split(secret_key(), _TRIES)])
    sizes = np.linalg.norm(tried, axis=1)
    # Two programs may round a batch without the canary in two ways, which is no direction.
    if not sizes.max() > 1e-4 * float(attack.report.plan.sensitivity):
        raise ValueError(
            f"The canary moves no sum of {_TRIES} steps. Choose a row with a large, finite score."
        )
    return jnp.asarray(tried[np.argmax(sizes)] / sizes.max())


def _distinguished(
    without: np.ndarray, with_canary: np.ndarray, delta: float, confidence: float
) -> float:
    """The bound from the scores of two worlds. One half of them chooses the threshold."""
    half, each = len(without) // 2, (1 + confidence) / 2  # so that both rates hold
    pooled = np.concatenate([without[:half], with_canary[:half]])
    thresholds = np.quantile(pooled, np.linspace(1e-4, 1 - 1e-4, 2001))

    def bound(part: slice, at: np.ndarray) -> np.ndarray:
        number = len(without[part])
        above = number - np.searchsorted(np.sort(without[part]), at, side="right")
        below = np.searchsorted(np.sort(with_canary[part]), at, side="right")
        alpha, beta = (
            np.where(n < number, stats.beta.ppf(each, n + 1, np.maximum(number - n, 1)), 1.0)
            for n in (above, below)
        )
        with np.errstate(divide="ignore"):
            one = np.log(np.maximum(1 - delta - beta, 0) / alpha)
            other = np.log(np.maximum(1 - delta - alpha, 0) / beta)
        return np.maximum(one, other)

    best = thresholds[np.argmax(bound(slice(0, half), thresholds))]
    return max(0.0, float(bound(slice(half, None), best)))


def _shared(noise: np.ndarray) -> bool:
    """Whether two steps, or all steps of one distance, have correlated noise, of either sign.

    Args:
        noise: A row for each step.
    """
    size = np.sqrt(np.mean(noise**2, axis=0))  # values may have other scales
    noise = noise / np.where(size > 0, size, 1)
    products, steps, width = noise @ noise.T, *noise.shape
    squares = np.maximum(np.diag(products), np.finfo(float).tiny)
    pairs = (products / np.sqrt(np.outer(squares, squares)))[np.triu_indices(steps, 1)]
    apart = [
        np.trace(products, n) / np.sqrt(np.sum(squares[n:]) * np.sum(squares[:-n]))
        for n in range(1, steps)
    ]
    found = np.abs(np.r_[pairs, apart])
    values = width * np.r_[np.ones(len(pairs)), steps - np.arange(1, steps)]
    enough = values >= _FEWEST
    # Fisher's transform of a correlation is nearly normal.
    sizes = np.arctanh(np.minimum(found[enough], 1 - 1e-12)) * np.sqrt(values[enough] - 3)
    return bool(np.any(sizes > stats.norm.isf(_BY_CHANCE / (2 * max(1, len(sizes))))))


def _guessed(number: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """The largest epsilon at which so many right guesses are too unlikely."""

    def chance(epsilon: float) -> float:
        prob = 1 / (1 + np.exp(-epsilon))
        # How much delta can add: the largest mean of probabilities of the values just below.
        below = np.cumsum(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, prob))
        most = np.max(below / np.arange(1, right + 1), initial=0.0)
        return float(stats.binom.sf(right - 1, guesses, prob) + 2 * number * delta * most)

    if chance(0.0) >= 1 - confidence:
        return 0.0
    # SciPy's type is that of all its options.
    return cast(float, optimize.brentq(lambda e: chance(e) - (1 - confidence), 0.0, 50.0))

"""What a run returns, the sums of scores in it, and a forecast of how much noise it will have."""

from __future__ import annotations

import copy
import html
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from numpyro_dp._tree import on_device
from numpyro_dp.core import Observation, PyTree, Values
from numpyro_dp.privacy.plan import Plan, PrivacyReport
from numpyro_dp.run.state import SensitiveState

MOST_LATENTS = 300  # sums of scores hold a few matrices of this size
WARMUP = 0.5  # part of the steps of a run that come before the sums of points and scores
_OF_POSTERIOR = ("sample", "predict", "summary", "diagnose", "to_arviz", "save")


class Trace(NamedTuple):
    """Thinned private iterates. They post-process released values, so you may publish them.

    Attributes:
        steps: Step after which each iterate was kept, shape ``(kept,)``.
        params: Constrained parameters with a leading axis ``kept``.
        clip_norm: Clip norm of the step after each iterate, for an
            :class:`~numpyro_dp.mechanisms.AdaptiveClip`. Shape ``(kept,)``, or a dict by entry of
            the signal, with ``"..."`` for all other entries. ``None`` if all norms are fixed.
    """

    steps: Int[np.ndarray, " kept"]
    params: Values
    clip_norm: PyTree = None

    def __repr__(self) -> str:
        """Shows the size, not the values."""
        return f"Trace({len(self.steps)} iterates of {sorted(self.params)})"


class PrivateLosses(NamedTuple):
    """A loss curve released through the mechanism. You may publish it.

    Attributes:
        steps: Last step of each window.
        values: Mean over each window of the noisy negative evidence lower bound. Its log
            likelihoods are clipped.
    """

    steps: Int[np.ndarray, " kept"]
    values: Float[np.ndarray, "... kept"]


class _RunResult(NamedTuple):
    params: Values
    state: SensitiveState | None
    losses: PrivateLosses | None


class RunResult(_RunResult):
    """Result of a private run: a triple like ``SVIRunResult``, with more attributes.

    Attributes:
        params: Constrained parameters. You may publish them.
        state: Sensitive state to resume from. A pickle of the result leaves it out (``None``).
        losses: :class:`PrivateLosses`, or ``None``.
        trace: Thinned private iterates. You may publish them.
        privacy: Report of the privacy spent. You may publish it.
        folded: Result of ``run(..., fold=...)``, else ``None``. You may publish it.
        scores: Sums of the released scores, from which ``posterior`` is computed, or ``None``. You
            may publish them.
        posterior: Draws, predictions and a summary of the latents. You may publish them. The result
            has its ``sample``, ``predict``, ``summary``, ``diagnose``, ``to_arviz`` and ``save``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), clip_norm=1.0,
        ...             sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5))
        >>> result = svi.run(jax.random.key(0), 200, jnp.full(1000, 0.5), progress_bar=False)
        >>> sorted(result.params), result.privacy.num_steps
        (['auto_loc', 'auto_scale'], 200)
        >>> bool(abs(result.posterior.summary()["mean"]["mean"] - 0.5) < 0.2)
        True
    """

    trace: Trace
    privacy: PrivacyReport
    folded: PyTree
    scores: ScoreSums | None
    _make_posterior: Callable[..., Any] | None
    _posterior: Any

    def __new__(
        cls,
        params: Values,
        state: SensitiveState | None,
        losses: PrivateLosses | None,
        trace: Trace,
        privacy: PrivacyReport,
        folded: PyTree = None,
        make_posterior: Callable[..., Any] | None = None,
        scores: ScoreSums | None = None,
    ) -> RunResult:
        """Makes the triple and adds the attributes that SVI's result does not have.

        ``posterior`` calls ``make_posterior`` with the result and ``False`` at its first use.
        """
        result = super().__new__(cls, params, state, losses)
        result.trace, result.privacy, result.folded = trace, privacy, folded
        result._make_posterior, result._posterior, result.scores = make_posterior, None, scores
        return result

    @property
    def posterior(self) -> Any:
        """The :class:`~numpyro_dp.Posterior` of the latents.

        Its intervals include the noise of privacy if ``scores`` is not ``None``. Its ``notes`` tell
        which kind of intervals it has.

        Raises:
            ValueError: If the driver gives point estimates, or the result comes from a pickle. A
                pickle does not hold the model.
        """
        if self._posterior is None:
            self._posterior = self._made(plain=False)
            self._posterior.warn()
        return self._posterior

    @property
    def plain_posterior(self) -> Any:
        """The same from the parameters alone, whose intervals leave out the noise of privacy."""
        return self._made(plain=True)

    def __getattr__(self, name: str) -> Any:
        """The posterior's methods, so that a result is used as what ``fit`` returns."""
        if name in _OF_POSTERIOR:
            return getattr(self.posterior, name)
        raise AttributeError(f"A RunResult has no {name!r}.")

    def _made(self, plain: bool) -> Any:
        if self._make_posterior is None:
            raise ValueError(
                "This result comes from a pickle, which does not hold the model that posterior "
                "needs. Draw with posterior_samples(rng_key, guide, result.params, num_samples), "
                "or pickle the draws that you need."
            )
        posterior = self._make_posterior(self, plain)
        released = {"params": self.params, "iterates": self.trace.params, "steps": self.trace.steps}
        posterior.released = released | ({} if self.folded is None else {"folded": self.folded})
        return posterior

    def __reduce__(self) -> tuple[object, ...]:
        """Leaves out the state, which is sensitive, and the model, which pickle may not support.

        To keep the state, pickle ``result.state`` by itself.
        """
        kept = self.losses, self.trace, self.privacy, self.folded, None, self.scores
        return RunResult, (self.params, None, *kept)

    def __copy__(self) -> RunResult:
        """A copy in this process has the same state."""
        rest = self.trace, self.privacy, self.folded, self._make_posterior, self.scores
        return RunResult(*self, *rest)

    def __deepcopy__(self, memo: dict[int, object]) -> RunResult:
        """A copy in this process has the same state."""
        rest = copy.deepcopy((self.losses, self.trace, self.privacy, self.folded), memo)
        params = copy.deepcopy(self.params, memo)
        return RunResult(params, self.state, *rest, self._make_posterior, self.scores)

    def __str__(self) -> str:
        """The posterior with a verdict, in ten lines. Without a posterior, names and epsilon."""
        found = self._shown()
        return repr(self) if found is None else str(found)

    def __repr__(self) -> str:
        """Names the fields and shows what was spent."""
        return f"RunResult(params of {sorted(self.params)}, {self.trace!r}, {self.privacy!r})"

    def _repr_html_(self) -> str:
        """The posterior, or the names of the parameters, and the privacy statement."""
        found = self._shown()
        if found is not None:
            return found._repr_html_()
        names = html.escape(", ".join(sorted(self.params)))
        return f"<p>Parameters: {names}</p>{self.privacy._repr_html_()}"

    def _shown(self) -> Any:
        """The posterior, or ``None`` if there is none: point estimates, results of a pickle."""
        try:
            return self.posterior
        except ValueError:
            return None


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C stopped a run between two of its parts. Nothing is lost.

    Attributes:
        result: The :class:`RunResult` of the steps so far, with what they spent. In a notebook:
            ``import sys; result = sys.last_value.result``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), clip_norm=1.0,
        ...             sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5))
        >>> try:
        ...     result = svi.run(jax.random.key(0), 200, jnp.full(1000, 0.5), progress_bar=False)
        ... except RunInterrupted as stopped:  # Ctrl-C
        ...     result = stopped.result
        >>> 0 < result.privacy.num_steps <= 200
        True
    """

    def __init__(self, result: RunResult, num_steps: int, has_checkpoint: bool = False) -> None:
        self.result = result
        taken = result.privacy.num_steps
        how = "repeat the call" if has_checkpoint else "pass init_state=result.state"
        super().__init__(
            f"Ctrl-C stopped the run after {taken} steps of {num_steps}. The result so far is the "
            f"attribute `result` of this exception. To go on, {how}."
        )


class ScoreSums(NamedTuple):
    r"""Sums over the steps of a run of released scores and their points. You may publish them.

    Near the optimum :math:`\phi` of the data, the score at a point z is :math:`H(\phi - z)`. So the
    scores of all steps and their points z tell where the optimum is, and the curvature H. A loop
    keeps the sums that this needs, and no iterates. :mod:`numpyro_dp.posterior.scores` reads them.

    Points move because of earlier noise, which would bias a regression of scores on points. So each
    point comes with a *shift*: the part of it that was drawn fresh in this step, with mean 0. The
    rest of the point is the *centre* of the step.

    Points and scores count from the second half of a run on, when the points are near the optimum.
    Products of scores and shifts are added up for both halves. A guide becomes narrow, and a narrow
    draw tells little about the curvature. Points are counted from an origin, the first point of the
    sums, so that no digits are lost.

    Attributes:
        begins: First step of all sums but ``products``.
        count: Number of steps in them.
        origin: Their first point (d,).
        point, score: Sums of points and scores (d,).
        point_square, shift_square: Sums of the squared entries of points and shifts (d,).
        noise_square: Sum of the squared standard deviations of the noise of each score (d,).
        curvature: Sum of the released curvatures (d, d) or (d,). If there are any, ``products`` is
            ``None``.
        curvature_square: Sum of the squared standard deviations of their noise.
        products: Sums of products over the steps with finite values.
    """

    begins: Array
    count: Array
    origin: Array
    point: Array
    score: Array
    point_square: Array
    shift_square: Array
    noise_square: Array
    curvature: Array | None = None
    curvature_square: Array | None = None
    products: Products | None = None


class Products(NamedTuple):
    """Sums of products of score, shift and centre, side by side as one vector u (3 d,).

    They have a leading axis for the steps before and after the other sums begin.

    Attributes:
        origin: First centre of each half (2, d), from which its centres are counted.
        count: Number of steps (2,).
        noise_square: Sum of the squared standard deviations of the noise of each score (2, d).
        sum: Sum of u (2, 3 d).
        square: Sum of the products of u with itself (2, 3 d, 3 d).
    """

    origin: Array
    count: Array
    noise_square: Array
    sum: Array
    square: Array


def score_sums(like: Observation, first_step: int, num_steps: int) -> ScoreSums:
    """Returns empty sums for a run of ``num_steps`` steps from ``first_step`` on.

    ``like`` has the shapes of an observation.
    """

    def empty(like: Observation) -> ScoreSums:
        count = jnp.zeros((), jnp.int32)
        sums = ScoreSums(count, count, like.point, **_terms(like, like.point), products=None)
        if like.shift is None:
            return sums
        size, dtype = like.point.size, like.point.dtype
        halves = [jnp.zeros((2, *shape), dtype) for shape in (
            (size,), (3 * size,), (3 * size, 3 * size)
        )]  # fmt: skip
        products = Products(halves[0], jnp.zeros(2, jnp.int32), *halves)
        return sums._replace(products=products)

    # From shapes, because JAX would compile each operation.
    shapes = jax.eval_shape(empty, like)
    sums = jax.tree.map(lambda leaf: on_device(np.zeros(leaf.shape, leaf.dtype)), shapes)
    begins = first_step + math.floor(WARMUP * num_steps)
    return sums._replace(begins=on_device(begins, np.int32))


def with_observation(sums: ScoreSums, step: Array, seen: Observation) -> ScoreSums:
    """Adds what was released in a step."""
    counts = step >= sums.begins
    origin = jnp.where(counts & (sums.count == 0), seen.point, sums.origin)
    # `where`, not a product: a value that overflows before the sums begin must not enter them.
    added = {
        name: getattr(sums, name) + jnp.where(counts, term, 0)
        for name, term in _terms(seen, origin).items()
    }
    found = ScoreSums(sums.begins, sums.count + counts.astype(jnp.int32), origin, **added)
    if sums.products is None or seen.shift is None:
        return found
    return found._replace(products=_with_products(sums.products, counts, seen, seen.shift))


def _terms(seen: Observation, origin: Array) -> dict[str, Array]:
    """What an observation adds to each sum but the products."""
    point, noise = seen.point - origin, seen.curvature_noise
    terms = {
        "point": point,
        "score": seen.score,
        "point_square": point**2,
        "shift_square": jnp.zeros_like(point) if seen.shift is None else seen.shift**2,
        "noise_square": seen.noise_scale**2,
        "curvature": seen.curvature,
        "curvature_square": None if noise is None else jnp.asarray(noise) ** 2,
    }
    return {name: term for name, term in terms.items() if term is not None}


def _with_products(products: Products, half: Array, seen: Observation, shift: Array) -> Products:
    """Adds a step, unless a value of it is not finite."""
    centre = seen.point - shift
    finite = jnp.all(jnp.isfinite(jnp.concatenate([seen.score, shift, centre])))
    half = half.astype(jnp.int32)
    before = products.origin[half]
    origin = jnp.where(finite & (products.count[half] == 0), centre, before)
    both = jnp.concatenate([seen.score, shift, centre - origin])
    added = jnp.asarray(1), seen.noise_scale**2, both, jnp.outer(both, both)
    sums = [
        total.at[half].add(jnp.where(finite, term, 0).astype(total.dtype))
        for total, term in zip(products[1:], added, strict=True)
    ]
    return Products(products.origin.at[half].set(origin), *sums)


class Forecast(NamedTuple):
    """What the noise of a run will do at best. It prints as a few lines.

    Attributes:
        num_examples: Number of records N.
        num_latents: Number of latents d, in unconstrained coordinates.
        noise_multiplier: Standard deviation of the noise of a step, over the sensitivity.
        noise: How far the noise moves a latent, in standard deviations of the posterior without
            noise. A root mean square, and the smallest one that is possible.

    Example:
        >>> Forecast(num_examples=1000, num_latents=2, noise_multiplier=5.0, noise=0.75).width
        1.25
    """

    num_examples: int
    num_latents: int
    noise_multiplier: float
    noise: float

    @property
    def width(self) -> float:
        """Standard deviation of the posterior with noise over the one without, at best."""
        return math.sqrt(1 + self.noise**2)

    def __str__(self) -> str:
        """The figures, and what they mean."""
        if self.noise < 0.5:
            verdict = "The noise matters less than the number of records."
        elif self.noise < 3:
            verdict = "The noise matters as much as the number of records."
        else:
            verdict = (
                "The noise decides. Expect wide intervals, or the prior. More records, a larger "
                "epsilon or fewer latents would tell more."
            )
        return (
            f"{self.num_latents} latents, {self.num_examples} records, noise multiplier "
            f"{self.noise_multiplier:.4g}.\nAt best, the noise moves a latent by {self.noise:.2g} "
            f"posterior standard deviations, and intervals are {self.width:.2f} times as wide as "
            f"without privacy.\n{verdict}"
        )

    __repr__ = __str__


def forecast(plan: Plan, num_latents: int, counted_steps: float) -> Forecast:
    r"""Returns the forecast of a run in which ``counted_steps`` steps decide the posterior.

    A clipped score has norm at most C. So the records have at most the information :math:`N C^2`
    about all d latents together, in the sum over orthogonal directions. With inclusion probability
    q, the mean score of T steps has noise of standard deviation :math:`\sigma C / (q \sqrt T)` in a
    direction. Without the prior, the noise moves the optimum in a direction of information I by
    :math:`\sigma C / (q \sqrt T I)`, and its standard deviation without noise is :math:`I^{-1/2}`.
    The root mean square of the ratios is at least

    .. math:: r = \sigma \sqrt{d / (q^2 T N)},

    whatever the clip norm. It is reached if all directions have the same information, all scores
    have the clip norm, and the curvature is known. :func:`~numpyro_dp.posterior.rehearse` shows
    what a run really gives.
    """
    number, noise = plan.num_examples, plan.noise_multiplier
    prob = plan.sampler.inclusion_prob(number)
    moved = noise * math.sqrt(num_latents / (counted_steps * number)) / prob
    return Forecast(number, num_latents, noise, moved)

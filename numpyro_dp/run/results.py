"""What a run returns."""

from __future__ import annotations

import copy
import html
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.score_sums import ScoreSums
from numpyro_dp.run.state import SensitiveState

__all__ = [
    "PrivateLosses",
    "RunInterrupted",
    "RunResult",
    "Trace",
]


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
    params: dict[str, Any]
    clip_norm: Any = None

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


_OF_POSTERIOR = ("sample", "predict", "summary", "diagnose", "to_arviz", "save")


class _RunResult(NamedTuple):
    params: dict[str, Any]
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
    folded: Any
    scores: ScoreSums | None
    _make_posterior: Callable[..., Any] | None
    _posterior: Any

    def __new__(
        cls,
        params: dict[str, Any],
        state: SensitiveState | None,
        losses: PrivateLosses | None,
        trace: Trace,
        privacy: PrivacyReport,
        folded: Any = None,
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves out the state, which is sensitive, and the model, which pickle may not support.

        To keep the state, pickle ``result.state`` by itself.
        """
        kept = self.losses, self.trace, self.privacy, self.folded, None, self.scores
        return RunResult, (self.params, None, *kept)

    def __copy__(self) -> RunResult:
        """A copy in this process has the same state."""
        rest = self.trace, self.privacy, self.folded, self._make_posterior, self.scores
        return RunResult(*self, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> RunResult:
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

r"""``Posterior``: what a private run knows of the latents, whatever the method.

The share of the prior of one entry of a latent site is the squared ratio of two widths,

.. math::
    s = \Big(\frac{q_{.84} - q_{.16}}{p_{.84} - p_{.16}}\Big)^2,

with quantiles q of the posterior and p of the prior, in unconstrained coordinates. For normal
distributions it is the ratio of the variances: near 0 the records decide, at 1 the prior does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro.infer import Predictive

from numpyro_dp._validate import check_int, check_real
from numpyro_dp.posterior._draws import draws_by_name
from numpyro_dp.posterior._table import shown, table_lines
from numpyro_dp.posterior.inference_data import to_arviz
from numpyro_dp.posterior.posterior_summary import PosteriorSummary, entry_name, share_text
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.checks import check_rng_key

__all__ = ["Posterior"]

_NUM_DRAWS, _FEWEST = 4000, 200
_MOST_VALUES = 10**8  # of all draws together: 400 MB in float32
_LINES, _MOST_ROWS, _FEWEST_ROWS = 12, 5, 2
_HALF = 0.5

Draws = Callable[[Array, int], dict[str, Array]]


class Posterior:
    r"""What a private run knows of the latents: draws, predictions and a summary.

    ``print`` shows the privacy that was spent, some latents, and a verdict. Methods make it:
    ``DPSVI.run(...).posterior``, say. All of it is of the global latents: those in the plate over
    records are left out.

    Args:
        model: The NumPyro model, with static keywords and its own parameters filled in.
        draws: ``(rng_key, num_samples)`` -> draws by site, in the model's own units, with a
            leading axis ``num_samples``.
        prior: The same for the prior, or ``None`` if it cannot be drawn from.
        unconstrain: Draws by site -> the same in unconstrained coordinates.
        privacy: What was spent.
        method: One line that says how the posterior was found.
        notes: What a reader has to know, one sentence each.
        converged: Whether nothing speaks against the run having converged; else the verdict is
            conditional.

    Attributes:
        privacy: The :class:`~numpyro_dp.PrivacyReport` of the run.
        method: One line that says how the posterior was found.
        notes: What a reader has to know.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget
        >>> from numpyro_dp.estimators import aligned
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x, size=None):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", len(x) if size is None else size):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), estimator=aligned(),
        ...             clip_norm=4.0, sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5))
        >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
        >>> posterior = svi.run(jax.random.key(0), 300, x, progress_bar=False).posterior
        >>> posterior.sample(jax.random.key(2), 5)["mean"].shape
        (5,)
        >>> posterior.predict(jax.random.key(3), None, size=2, num_samples=7)["x"].shape
        (7, 2)
        >>> sorted(posterior.summary()["mean"])
        ['lower', 'mean', 'prior_share', 'sd', 'upper']
        >>> print(str(posterior).splitlines()[-1])  # doctest: +ELLIPSIS
        If the run has converged: every latent is known well beyond its prior (largest share ...).

    Guarantee:
        Reads what the run released, and no record. Draws, summaries and predictions at public
        inputs may be published. Predictions at the inputs of records may not: they pair the
        posterior with a private row.
    """

    def __init__(
        self,
        *,
        model: Callable[..., Any],
        draws: Draws,
        prior: Draws | None,
        unconstrain: Callable[[dict[str, Any]], dict[str, Any]],
        privacy: PrivacyReport,
        method: str,
        notes: tuple[str, ...] = (),
        converged: bool = True,
    ) -> None:
        self._converged = converged
        self.privacy, self.method, self.notes = privacy, method, tuple(notes)
        self._model, self._draws, self._prior, self._unconstrain = model, draws, prior, unconstrain

    def sample(self, rng_key: Array, num_samples: int) -> dict[str, Array]:
        """Draws the global latent sites, in the model's own units.

        Args:
            rng_key: Key of the draws; it need not be secret.
            num_samples: Number of draws. The draws of a sampler are taken from its chains, again
                if more are asked for than there are.

        Returns:
            Draws by site, with a leading axis ``num_samples``.

        Raises:
            TypeError: If ``rng_key`` is not a JAX key, or ``num_samples`` not an integer.
            ValueError: If ``num_samples`` is below 1.
        """
        check_rng_key(rng_key)
        return self._draws(rng_key, check_int("num_samples", num_samples, low=1))

    def predict(
        self, rng_key: Array, *args: Any, num_samples: int = 1000, **kwargs: Any
    ) -> dict[str, Array]:
        """Draws what the model observes, by ``numpyro.infer.Predictive``.

        Args:
            rng_key: Key of the latents and of what the model draws given them.
            *args: Arguments of the model, with ``None`` in the place of what is to be predicted.
            num_samples: Number of draws.
            **kwargs: Keywords of the model. Static keywords of the driver are filled in.

        Returns:
            Draws of the other sites of the model by name, with a leading axis ``num_samples``.

        Raises:
            TypeError: If ``rng_key`` is not a JAX key, or ``num_samples`` not an integer.
            ValueError: If ``num_samples`` is below 1.

        Guarantee:
            May be published for public arguments, and not for the rows of private records.
        """
        check_rng_key(rng_key)
        latent_key, rng_key = jax.random.split(rng_key)
        latents = self.sample(latent_key, num_samples)
        return Predictive(self._model, posterior_samples=latents)(rng_key, *args, **kwargs)

    def summary(self, prob: float = 0.9) -> PosteriorSummary:
        """Returns mean, standard deviation, interval and share of the prior of every latent.

        They are found from 4,000 draws with a fixed key; from fewer, and 200 at least, if those
        would hold more than 10^8 values.

        Args:
            prob: Mass of the equal-tailed interval, in (0, 1).

        Returns:
            A mapping from sites to ``{"mean", "sd", "lower", "upper", "prior_share"}``, arrays of
            the site's shape; it prints as a table. The share is ``nan`` for what has no spread
            (point estimates, entries that are constant), and if the prior cannot be drawn from.
            For sites with fewer unconstrained coordinates than entries, such as a simplex, it is
            found in the site's own units.

        Raises:
            TypeError, ValueError: If ``prob`` is not a number in (0, 1).
        """
        prob = check_real("prob", prob, low=0, high=1, low_open=True, high_open=True)
        found = {}
        for name, values in self._fixed_draws.items():
            lower, upper = np.quantile(values, [(1 - prob) / 2, (1 + prob) / 2], axis=0)
            mean, sd = self._moments[name]
            found[name] = {
                "mean": mean, "sd": sd, "lower": lower, "upper": upper,
                "prior_share": self._prior_shares[name],
            }  # fmt: skip
        return PosteriorSummary(found, prob)

    def to_arviz(self, num_samples: int = 1000) -> Any:
        """Returns draws for ArviZ, marked with what was spent.

        See :func:`~numpyro_dp.posterior.to_arviz`.

        Args:
            num_samples: Number of draws, by a fixed key.

        Raises:
            ImportError: Without ArviZ.
            TypeError, ValueError: If ``num_samples`` is not an integer above 0.
        """
        return to_arviz(self.sample(jax.random.key(0), num_samples), self.privacy)

    def __str__(self) -> str:
        """What was spent, some latents, notes and a verdict, in at most twelve lines."""
        notes = [" ".join(note.split()) for note in self.notes]
        total = sum(share.size for share in self._prior_shares.values())
        free = _LINES - 4 - len(notes)  # besides four lines that are always there
        if total > min(_MOST_ROWS, free):
            free -= 1  # for the line that says how many more there are
        entries = list(itertools.islice(self._rows(), min(_MOST_ROWS, max(_FEWEST_ROWS, free))))
        private = math.isfinite(self.privacy.epsilon)
        spent = "NOT PRIVATE: epsilon is infinite"
        if private:
            bound = self.privacy.bound
            spent = f"epsilon <= {bound.upper:.5g} at delta={bound.delta:g} under {bound.relation}"
        lines = [f"Posterior of {_count(total)}, {spent}", self.method]
        lines += table_lines([["", "mean", "sd", "share of the prior"], *entries])
        if total > len(entries):
            lines.append(f"... and {total - len(entries)} more: summary()")
        room = _LINES - len(lines) - 1
        if len(notes) > room:
            notes = [*notes[: room - 1], f"... and {len(notes) - room + 1} more: notes"]
        verdict = self._verdict(private)
        if not self._converged:
            verdict = f"If the run has converged: {verdict[0].lower()}{verdict[1:]}"
        return "\n".join([*lines, *notes, verdict])

    __repr__ = __str__

    def _rows(self) -> Iterator[list[str]]:
        for name, (mean, sd) in self._moments.items():
            for index in np.ndindex(mean.shape):
                share = share_text(float(self._prior_shares[name][index]))
                own_mean, own_sd = float(mean[index]), float(sd[index])
                values = shown(own_mean, own_sd), shown(own_sd, own_sd)
                yield [entry_name(name, index), *values, share]

    def _verdict(self, private: bool) -> str:
        shares = np.concatenate([share.ravel() for share in self._prior_shares.values()])
        if self._prior is None:
            return "The prior cannot be drawn from: the share of the prior is not known."
        known = shares[np.isfinite(shares)]
        if not known.size:
            return "No latent has a spread: this does not say how well they are known."
        total, wide = known.size, int(np.sum(known > _HALF))
        largest = f"(largest share of the prior: {known.max():.2f})"
        if 2 * wide >= total:
            little = "The budget buys little here" if private else "The records say little here"
            verb = "is" if wide == 1 else "are"
            return f"{little}: {wide} of {_count(total)} {verb} more than half prior."
        if wide:
            verb = "is" if wide == 1 else "are"
            return f"{wide} of {_count(total)} {verb} more than half prior {largest}."
        if known.max() > 0.1:
            return f"The records say more than the prior about every latent {largest}."
        return f"Every latent is known well beyond its prior {largest}."

    @functools.cached_property
    def _fixed_draws(self) -> dict[str, np.ndarray]:
        """Draws by a fixed key, so that two summaries of one posterior agree."""
        one = draws_by_name(self.sample(jax.random.key(0), 1))
        entries = max(1, sum(value.size for value in one.values()))
        number = max(_FEWEST, min(_NUM_DRAWS, _MOST_VALUES // entries))
        return draws_by_name(self.sample(jax.random.key(0), number))

    @functools.cached_property
    def _moments(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        return {
            name: (values.mean(0, dtype=np.float64), values.std(0, ddof=1, dtype=np.float64))
            for name, values in self._fixed_draws.items()
        }

    @functools.cached_property
    def _prior_shares(self) -> dict[str, np.ndarray]:
        own = self._fixed_draws
        if self._prior is None:
            return {name: np.full(values.shape[1:], np.nan) for name, values in own.items()}
        number = len(next(iter(own.values())))
        prior = draws_by_name(self._prior(jax.random.key(1), number))
        free, free_prior = (draws_by_name(self._unconstrain(each)) for each in (own, prior))
        return {
            name: _share(free[name], free_prior[name])
            if free[name].shape == values.shape
            else _share(values, prior[name])
            for name, values in own.items()
        }


def _share(posterior: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Squared ratio of the widths; ``nan`` for what has no spread.

    For normal draws the width has a relative standard error of 0.96 / sqrt(n), by the variances
    of two quantiles and their covariance; the squared ratio of two widths one of 2.7 / sqrt(n).
    Up to three of those above 1 a share is 1.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        after, before = (np.diff(np.quantile(x, [0.16, 0.84], axis=0), axis=0)[0]
                         for x in (posterior, prior))  # fmt: skip
        share = np.where((after > 0) & (before > 0), (after / before) ** 2, np.nan)
    by_chance = (share > 1) & (share < 1 + 3 * 2.7 / math.sqrt(len(posterior)))
    return np.where(by_chance, 1.0, share)


def _count(number: int) -> str:
    return "1 latent" if number == 1 else f"{number} latents"

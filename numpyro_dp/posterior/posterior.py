r"""``Posterior``: the posterior of the latents after a private run of any method.

The share of the prior of one entry of a latent site is the squared ratio of two widths,

.. math::
    s = \Big(\frac{q_{.84} - q_{.16}}{p_{.84} - p_{.16}}\Big)^2,

with quantiles q of the posterior and p of the prior, in unconstrained coordinates. For normal
distributions it is the ratio of the variances. Near 0 the posterior follows the records. At 1 it
is as wide as the prior.
"""

from __future__ import annotations

import copy
import functools
import html
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro.infer import Predictive
from scipy.special import softmax

from numpyro_dp._validate import check_int
from numpyro_dp.core import PyTree, Values
from numpyro_dp.model.draw_checks import predict
from numpyro_dp.model.public import PublicValues
from numpyro_dp.posterior.densities import Densities
from numpyro_dp.posterior.diagnosis import OF_PRIOR, Diagnosis, Finding, findings_of_shares
from numpyro_dp.posterior.draws import Draws
from numpyro_dp.posterior.evidence import Evidence, evidence
from numpyro_dp.posterior.inference_data import draws_by_name, named_leaves, to_arviz
from numpyro_dp.posterior.prior import ModelPrior
from numpyro_dp.posterior.released import Likelihood
from numpyro_dp.posterior.saved import write_file
from numpyro_dp.posterior.summary import (
    PosteriorSummary,
    count_of,
    entry_name,
    entry_rows,
    interval,
    table_lines,
)
from numpyro_dp.privacy.budget import LARGEST_EPSILON
from numpyro_dp.privacy.keys import check_rng_key
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.statement import Statement

_NUM_DRAWS, _FEWEST = 4000, 200
_MOST_VALUES = 10**8  # of all draws together: 400 MB in float32
_LINES, _MOST_ROWS, _FEWEST_ROWS = 10, 5, 2
_IN_SHARES = ("prior", "convergence")  # findings that the line about shares tells


class Posterior:
    r"""The posterior of the latents after a private run: draws, predictions and a summary.

    Drivers create it, for example ``DPSVI.run(...).posterior``. ``print`` shows the privacy that
    was spent, some latents, and a verdict. Latents in the plate over records are left out.

    Args:
        model: The NumPyro model, with static keywords and its own parameters filled in.
        draws: ``(rng_key, num_samples)`` -> draws by site, in the model's own units, with a
            leading axis ``num_samples``.
        prior: The same function for the prior. ``None`` if the prior cannot be sampled.
        unconstrain: Draws by site -> the same draws in unconstrained coordinates.
        privacy: The privacy report of the run.
        method: One line that describes the method.
        notes: Warnings and remarks for the reader, one sentence each.
        converged: False if the run may not have converged. The verdict is then conditional.
        findings: What the run showed, for :meth:`diagnose`.
        params: Constrained values of the ``numpyro.param`` of the model.
        released: See the attribute.
        public: What was accepted as public, for :meth:`predict`. ``None`` for a model that holds
            nothing of the user's.
        densities: Returns log densities of the model, for :meth:`save`.
        likelihood: The released likelihood, if the method has one.
        source: The parts of the model, for :meth:`refit` (a ``ModelSource``).

    Attributes:
        privacy: The :class:`~numpyro_dp.PrivacyReport` of the run.
        method: One line that describes the method.
        notes: Warnings and remarks for the reader.
        released: Further released values, such as parameters and iterates of the run.
        coords: Names of the entries of sites, by site. See :meth:`named`.

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
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.03), estimator=aligned(),
        ...             clip_norm=4.0, sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5))
        >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
        >>> posterior = svi.run(jax.random.key(0), 300, x, progress_bar=False).posterior
        >>> posterior.sample(jax.random.key(2), 5)["mean"].shape
        (5,)
        >>> posterior.predict(jax.random.key(3), None, size=2, num_samples=7)["x"].shape
        (7, 2)
        >>> bool(posterior.evidence(mean=0.0).probability < 0.01)  # of the model without a mean
        True
        >>> posterior.probability(lambda latents: latents["mean"] > 2)
        1.0
        >>> sorted(posterior.summary()["mean"])
        ['lower', 'mean', 'prior_share', 'sd', 'upper']
        >>> print(str(posterior).splitlines()[-1])  # doctest: +ELLIPSIS
        Every latent is known well beyond its prior (largest share ...).

    Guarantee:
        Reads only released values and no record. You may publish draws, summaries, and
        predictions at public inputs. Do not publish predictions at the inputs of private records:
        they contain a private row.
    """

    privacy: PrivacyReport | Statement
    method: str
    notes: tuple[str, ...]

    def __init__(
        self,
        *,
        model: Callable[..., object] | None,
        draws: Draws,
        prior: Draws | None,
        unconstrain: Callable[[Values], Values] | None,
        privacy: PrivacyReport | Statement,
        method: str,
        notes: tuple[str, ...] = (),
        converged: bool = True,
        findings: tuple[Finding, ...] = (),
        params: Values | None = None,
        released: Values | None = None,
        public: PublicValues | None = None,
        densities: Callable[[], Densities | None] = lambda: None,
        likelihood: Likelihood | None = None,
        source: Any = None,
    ) -> None:
        self.released: Values = {} if released is None else released
        self.coords: dict[str, tuple[str, ...]] = {}
        self._params = {} if params is None else params
        self._public, self._densities = public, densities
        self._likelihood, self._source = likelihood, source
        self._findings = tuple(findings)
        self._converged = converged
        self.privacy, self.method, self.notes = privacy, method, tuple(notes)
        self._model, self._draws, self._prior, self._unconstrain = model, draws, prior, unconstrain

    def named(self, **coords: Sequence[object]) -> Posterior:
        """Returns the same posterior with names for the entries of some sites.

        Print, summary, ArviZ and the saved file show them, and ``evidence`` knows them.

        Args:
            **coords: Public names for the entries of a site with one dimension, such as
                ``w=design.names``.

        Raises:
            ValueError: If there is no such site, or the number of names is another, or two are
                equal.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_dp
            >>> def model(x):
            ...     mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
            ...     with numpyro.plate("records", x.shape[0]):
            ...         numpyro.sample("x", dist.Normal(mean, 1).to_event(1), obs=x)
            >>> posterior = numpyro_dp.fit(model, jnp.ones((2000, 2)), epsilon=1.0,
            ...                            rng_key=jax.random.key(0))
            >>> named = posterior.named(mean=["height", "weight"])
            >>> [line.split()[0] for line in str(named).splitlines()[3:5]]
            ['mean[height]', 'mean[weight]']
        """
        for site, names in coords.items():
            shape = np.shape(self._moments[site]["mean"]) if site in self._moments else None
            if shape != (len(names),) or len({*map(str, names)}) < len(names):
                raise ValueError(
                    f"Expected different names for the entries of a site with one dimension, got "
                    f"{site}={list(names)}. The sites are "
                    f"{ {n: np.shape(m['mean']) for n, m in self._moments.items()} }."
                )
        found = copy.copy(self)
        found.coords = self.coords | {n: tuple(map(str, names)) for n, names in coords.items()}
        return found

    def sample(self, rng_key: Array, num_samples: int) -> dict[str, Array]:
        """Draws the global latent sites, in the model's own units.

        Args:
            rng_key: Key of the draws. It need not be secret.
            num_samples: Number of draws. For MCMC they come from the stored chains. They repeat
                if you ask for more than are stored.

        Returns:
            Draws by site, with a leading axis ``num_samples``.

        Raises:
            TypeError: If ``rng_key`` is not a JAX key, or ``num_samples`` not an integer.
            ValueError: If ``num_samples`` is below 1.
        """
        check_rng_key(rng_key)
        return self._draws(rng_key, check_int("num_samples", num_samples, low=1))

    def prior_draws(self, rng_key: Array, num_samples: int) -> dict[str, Array]:
        """Draws the global latent sites from the prior, like :meth:`sample`.

        Raises:
            ValueError: If the prior cannot be drawn from.
        """
        if self._prior is None:
            raise ValueError("The prior of this model has no sampler, as an improper prior.")
        return self._prior(rng_key, num_samples)

    def predict(
        self, rng_key: Array, *args: PyTree, num_samples: int = 1000, **kwargs: PyTree
    ) -> dict[str, Array]:
        """Draws predictions of the observed sites, with ``numpyro.infer.Predictive``.

        Args:
            rng_key: Key of the latents and of the predictions.
            *args: Arguments of the model, with ``None`` in place of the values to predict.
            num_samples: Number of draws.
            **kwargs: Keywords of the model. Static keywords of the driver are filled in.

        Returns:
            Draws of all sites except the global latents, with a leading axis ``num_samples``.

        Raises:
            TypeError: If ``rng_key`` is not a JAX key, or ``num_samples`` not an integer.
            ValueError: If ``num_samples`` is below 1, the model of a loaded posterior is missing,
                or latents have other shapes with these arguments.
            UnsupportedModelError: If the prediction would read arrays that the model holds and the
                run did not have, such as records behind ``if y is None``.

        Guarantee:
            You may publish predictions for public arguments, but not for private records.
        """
        check_rng_key(rng_key)
        if self._model is None:
            raise ValueError(
                "This posterior comes from a file, which does not hold the model. Call "
                "load(path, model) to predict."
            )
        latent_key, rng_key = jax.random.split(rng_key)
        latents = self.sample(latent_key, num_samples)
        if self._public is not None:
            return predict(self._model, self._public, rng_key, latents, args, kwargs)
        return Predictive(self._model, posterior_samples=latents)(rng_key, *args, **kwargs)

    @property
    def likelihood(self) -> Likelihood:
        """What the run released about the latents: a normal likelihood of unconstrained latents.

        Raises:
            ValueError: If the method of the run has none.
        """
        if self._likelihood is None:
            raise ValueError(
                f"{self.method} does not release a likelihood apart from its prior, or was saved "
                "without it. Use DPLaplace, DPSEP, or DPSVI with the default estimator."
            )
        return self._likelihood

    def refit(
        self, model: Callable[..., object], rng_key: Array | None = None, **static_kwargs: object
    ) -> Posterior:
        """Returns the posterior of the same release under another prior.

        The other model may have other priors, and further latent sites such as scales of a
        hierarchy. The latents of :attr:`likelihood` keep names, shapes and supports, and the
        likelihood stays the same.

        Args:
            model: The NumPyro model with the other priors.
            rng_key: Key of the draws, if the prior is not normal. It need not be secret.
            **static_kwargs: Static keywords of the model.

        Raises:
            ValueError: If latents or the likelihood are not those of the run, or if the model of a
                loaded posterior is missing.
            UnsupportedModelError: If the model has parameters or a prior without a sampler.

        Warns:
            PosteriorWarning: If the prior and the released values disagree.

        Example:
            >>> import jax, numpyro, numpyro.distributions as dist
            >>> from numpyro_dp import fit
            >>> def model(x, sd=10.0):
            ...     mean = numpyro.sample("mean", dist.Normal(0, sd))
            ...     with numpyro.plate("records", x.shape[0]):
            ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
            >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
            >>> posterior = fit(model, x, epsilon=1.0, rng_key=jax.random.key(0))
            >>> narrower = posterior.refit(model, sd=1.0)
            >>> bool(narrower.summary()["mean"]["mean"] < posterior.summary()["mean"]["mean"])
            True

        Guarantee:
            Reads released values and the model. It costs no budget.
        """
        if not callable(model):
            raise TypeError(f"Expected model as a function, got {type(model).__name__}.")
        likelihood, source = self.likelihood, self._known_source()
        rng_key = jax.random.key(0) if rng_key is None else rng_key
        check_rng_key(rng_key)
        fn = functools.partial(model, **static_kwargs) if static_kwargs else model
        method = f"{self.method}, with another prior"
        kept = [each for each in self._findings if each.name not in OF_PRIOR]
        found = source.with_model(fn, likelihood).with_prior(
            likelihood, rng_key, self.privacy, method, self.notes, self._converged, kept
        )
        found.coords = dict(self.coords)
        found.warn()
        return found

    def evidence(
        self, fixed: Mapping[str, ArrayLike] | None = None, **sites: ArrayLike
    ) -> Evidence:
        """Returns the Bayes factor of the model in which some latents are fixed.

        Both models see the same released values, so this has no privacy cost. The prior of the
        fixed latents must not depend on other latents.

        Args:
            fixed: Values by site, or by entry such as ``{"w[2]": 0.0}``, or ``{"w[age]": 0.0}`` if
                entries have names (:meth:`named`).
            **sites: Values by site, such as ``w=0``.

        Raises:
            ValueError: If a name or value does not fit, the prior depends on other latents, or the
                posterior is too far from normal for a reliable number.

        Guarantee:
            Reads released values and the model.
        """
        places = {
            entry_name(site, (number,), self.coords): entry_name(site, (number,))
            for site, names in self.coords.items() for number in range(len(names))
        }  # fmt: skip
        given = {
            places.get(name, name): value for name, value in {**(fixed or {}), **sites}.items()
        }
        return evidence(self._model_prior, self.likelihood, given)

    def compare(self, **models: Mapping[str, ArrayLike]) -> dict[str, float]:
        """Returns probabilities of nested models, all equally probable before.

        Args:
            **models: What each model fixes, as for :meth:`evidence`: ``no_age={"w[0]": 0}``.

        Returns:
            A probability for each name, and one for ``"all"``, the model of the run.

        Raises:
            ValueError: As for :meth:`evidence`.
        """
        logs = {name: self.evidence(fixed).log_bayes_factor for name, fixed in models.items()}
        names, values = zip(*{"all": 0.0, **logs}.items(), strict=True)
        return dict(zip(names, map(float, softmax(np.array(values))), strict=True))

    def probability(self, event: Callable[[Values], ArrayLike]) -> float:
        """Returns the probability of a statement about the latents, from 4,000 draws.

        Args:
            event: Latents by site -> whether the statement holds. For example
                ``lambda latents: latents["w"][0] > latents["w"][1]``.
        """
        draws = {name: jnp.asarray(value) for name, value in self._fixed_draws.items()}
        return float(np.mean(np.asarray(jax.vmap(event)(draws), float)))

    @functools.cached_property
    def _model_prior(self) -> ModelPrior:
        return self._known_source().read_prior(self.likelihood.sites)

    def _known_source(self) -> Any:
        if self._source is None:
            raise ValueError(
                "This posterior comes from a file, which does not hold the model. Call "
                "load(path, model). If the model takes public arrays, do it before saving."
            )
        return self._source

    def summary(self, prob: float = 0.9) -> PosteriorSummary:
        """Returns mean, standard deviation, interval and share of the prior of every latent.

        The summary uses 4,000 draws with a fixed key. If these would hold more than 10^8 values,
        it uses fewer, but at least 200.

        Args:
            prob: Mass of the equal-tailed interval, in (0, 1).

        Returns:
            A mapping from sites to ``{"mean", "sd", "lower", "upper", "prior_share"}``, arrays of
            the site's shape. It prints as a table. The share is ``nan`` for entries without spread
            (point estimates, constants), and if the prior cannot be sampled. If unconstrained
            coordinates have another shape than the site (a simplex), the share is computed in the
            site's own units.

        Raises:
            TypeError, ValueError: If ``prob`` is not a number in (0, 1).
        """
        found = {}
        for name, values in self._fixed_draws.items():
            lower, upper = interval(values, prob)
            share = self._prior_shares[name]
            found[name] = self._moments[name] | {
                "lower": lower, "upper": upper, "prior_share": share
            }  # fmt: skip
        return PosteriorSummary(found, prob, self.coords)

    def diagnose(self) -> Diagnosis:
        """Returns what is wrong with this posterior, from released and public values alone.

        It looks at convergence, the mixing of chains, values that are not finite, and clip norms
        that slid. It also looks at delta, the budget, and the shares of the prior.
        """
        told = any(finding.name == "prior" for finding in self._findings)
        private = math.isfinite(self.privacy.epsilon) and not told
        return Diagnosis.of(*self._findings, *findings_of_shares(self._all_shares, private))

    def warn(self) -> None:
        """Warns if the run showed that its posterior should not be believed as it is."""
        Diagnosis.of(*self._findings).warn()

    def to_arviz(self, num_samples: int = 1000) -> Any:
        """Returns draws for ArviZ, with the privacy report as attributes.

        See :func:`~numpyro_dp.posterior.to_arviz`.

        Args:
            num_samples: Number of draws. Their key is fixed.

        Raises:
            ImportError: If ArviZ is not installed.
            TypeError, ValueError: If ``num_samples`` is not an integer above 0.
        """
        named = {f"{site} names": list(names) for site, names in self.coords.items()}
        dims = {site: [f"{site} names"] for site in self.coords}
        draws = self.sample(jax.random.key(0), num_samples)
        return to_arviz(draws, self.privacy, coords=named or None, dims=dims or None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the posterior to a file, which you may publish. :func:`~numpyro_dp.load` reads it.

        The file has the draws that :meth:`summary` uses, the privacy statement, findings, shares
        of the prior, and ``released``, whose nested entries get one name each, with dots. It has
        log densities of the model at invented records, and hashes of public arrays. It has no
        record, no code and no key. Equal posteriors give equal files. Static keywords and the
        model itself are not in it.

        Args:
            path: The file, such as ``"visits.posterior"``.

        Raises:
            OSError: If the file cannot be written.

        Example:
            >>> import jax, numpyro, numpyro.distributions as dist, os, tempfile
            >>> import numpyro_dp
            >>> def model(x):
            ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
            ...     with numpyro.plate("records", x.shape[0]):
            ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
            >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
            >>> posterior = numpyro_dp.fit(model, x, epsilon=1.0, rng_key=jax.random.key(0))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     posterior.save(os.path.join(folder, "mean.posterior"))
            ...     loaded = numpyro_dp.load(os.path.join(folder, "mean.posterior"))
            >>> str(loaded.summary()) == str(posterior.summary())
            True

        Guarantee:
            Writes released and public values only.
        """
        privacy = self.privacy
        statement = privacy if isinstance(privacy, Statement) else privacy.statement()
        about = {
            "method": self.method, "notes": list(self.notes), "converged": self._converged,
            "findings": [[f.name, bool(f.bad), f.text] for f in self._findings],
            "privacy": json.loads(statement.to_json()), "model": self._densities(),
            "public": None if self._public is None else self._public.to_json(),
            "coords": {site: list(names) for site, names in self.coords.items()},
        }  # fmt: skip
        parts = [
            ("draws", self._fixed_draws), ("shares", self._prior_shares),
            ("params", named_leaves(self._params)), ("released", named_leaves(self.released)),
        ]  # fmt: skip
        if self._likelihood is not None:
            own = self._likelihood
            sites = {name: list(shape) for name, shape in own.sites.items()}
            about["likelihood"] = {"sites": sites, "approximate": own.approximate}
            parts.append(("likelihood", {"precision": own.precision, "linear": own.linear}))
        write_file(path, about, {
            f"{part}/{name}": value for part, values in parts for name, value in values.items()
        })  # fmt: skip

    def __str__(self) -> str:
        """The privacy spent, some latents, notes and a verdict, in at most ten lines."""
        notes = [" ".join(note.split()) for note in self.notes]
        total = self._all_shares.size
        free = _LINES - 4 - len(notes)  # four lines are always shown
        if total > min(_MOST_ROWS, free):
            free -= 1  # for the line that counts the latents not shown
        shares = self._prior_shares
        sites = {name: own | {"prior_share": shares[name]} for name, own in self._moments.items()}
        most = min(_MOST_ROWS, max(_FEWEST_ROWS, free))
        entries = list(itertools.islice(entry_rows(sites, ("mean", "sd"), self.coords), most))
        private = math.isfinite(self.privacy.epsilon)
        spent = "NOT PRIVATE: epsilon is infinite"
        if private:
            spent = (
                f"epsilon <= {self.privacy.epsilon:.5g} at delta={self.privacy.delta:g} under "
                f"{self.privacy.relation}"
            ) + (", which promises nothing" if self.privacy.epsilon > LARGEST_EPSILON else "")
        lines = [f"Posterior of {count_of(total)}, {spent}", self.method]
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

    def _repr_html_(self) -> str:
        """The text, and the privacy statement as a table."""
        return f"<pre>{html.escape(str(self))}</pre>{self.privacy._repr_html_()}"

    def _verdict(self, private: bool) -> str:
        shares = self._all_shares
        known = shares[np.isfinite(shares)]
        if self._prior is None and not known.size:
            return "The prior cannot be drawn from: the share of the prior is not known."
        if not known.size:
            return "No latent has a spread: this does not say how well they are known."
        bad = [each.name for each in self._findings if each.bad and each.name not in _IN_SHARES]
        if bad:
            return f"Do not believe this yet: {', '.join(bad)}. diagnose() says what to do."
        total, wide = known.size, int(np.sum(known > 0.5))
        largest = f"(largest share of the prior: {known.max():.2f})"
        verb = "is" if wide == 1 else "are"
        if 2 * wide >= total:
            little = "The budget buys little here" if private else "The records say little here"
            if any(finding.name == "convergence" for finding in self._findings):
                little = "The run ended far from its optimum"
            return f"{little}: {wide} of {count_of(total)} {verb} more than half prior."
        if wide:
            return f"{wide} of {count_of(total)} {verb} more than half prior {largest}."
        if known.max() > 0.1:
            return f"The records say more than the prior about every latent {largest}."
        return f"Every latent is known well beyond its prior {largest}."

    @property
    def _all_shares(self) -> np.ndarray:
        return np.concatenate([share.ravel() for share in self._prior_shares.values()])

    @functools.cached_property
    def _fixed_draws(self) -> dict[str, np.ndarray]:
        """Draws with a fixed key. Two summaries of one posterior then agree."""
        one = draws_by_name(self.sample(jax.random.key(0), 1))
        entries = max(1, sum(value.size for value in one.values()))
        number = max(_FEWEST, min(_NUM_DRAWS, _MOST_VALUES // entries))
        return draws_by_name(self.sample(jax.random.key(0), number))

    @functools.cached_property
    def _moments(self) -> dict[str, dict[str, np.ndarray]]:
        return {
            name: {"mean": x.mean(0, dtype=np.float64), "sd": x.std(0, ddof=1, dtype=np.float64)}
            for name, x in self._fixed_draws.items()
        }

    @functools.cached_property
    def _prior_shares(self) -> dict[str, np.ndarray]:
        own = self._fixed_draws
        if self._prior is None or self._unconstrain is None:
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
    """Squared ratio of the widths, or ``nan`` for entries without spread.

    For n normal draws, the width has a relative standard error of 0.96 / sqrt(n), from the
    variances and the covariance of two quantiles. The squared ratio of two widths has a standard
    error of 2.7 / sqrt(n). A share less than three standard errors above 1 counts as 1.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        after, before = (np.diff(np.quantile(x, [0.16, 0.84], axis=0), axis=0)[0]
                         for x in (posterior, prior))  # fmt: skip
        share = np.where((after > 0) & (before > 0), (after / before) ** 2, np.nan)
    by_chance = (share > 1) & (share < 1 + 3 * 2.7 / math.sqrt(len(posterior)))
    return np.where(by_chance, 1.0, share)

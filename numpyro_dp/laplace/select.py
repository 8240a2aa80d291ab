r"""The choice of a model by private, held-out log scores.

Half of the records fit all models. Each record of the other half has a log score
:math:`l_m = \log \operatorname{mean}_r p(y \mid x, z_{mr})` in model m, at draws :math:`z_{mr}` of
the posterior. It adds the regrets

.. math:: e_m = \min(\max_k l_k - l_m,\, C), \qquad c = e - \operatorname{mean}_m e.

Of M regrets between 0 and C, one of them 0, the centred vector is at most
:math:`C \sqrt{\lfloor M/2 \rfloor \lceil M/2 \rceil / M}` long. The difference of the sums of two
regrets is the difference of the log scores, except for what C cuts off. A histogram of how far
apart the two best models of each record are comes first, and C follows from it.

The private score is the project's own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.special import ndtri

from numpyro_dp.core import Args, Arrays, Kwargs, PyTree, Values
from numpyro_dp.laplace.dplaplace import DPLaplace
from numpyro_dp.laplace.signal import symmetric
from numpyro_dp.model.density import Model
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.model.outcomes import Outcomes
from numpyro_dp.model.public import own_constants
from numpyro_dp.model.records import RecordsProblem, is_finite
from numpyro_dp.model.structure import ModelStructure
from numpyro_dp.model.units import UNIT, split_unit
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.keys import check_rng_key, keys_of_run
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.sampling import FullBatch
from numpyro_dp.run.driver import OneSum
from numpyro_dp.run.settings import Privacy, RunSettings, without
from numpyro_dp.run.state import RunIdentity, charge, plan_for, report_for, secret_of

_DRAWS = 100  # of each posterior
_MOST, _FEWEST_RECORDS = 10, 100  # models, records
_HALVES = 1000  # number of the key of the halves, next to those of runs
# Bounds of the classes of the histogram, in nats, which are the clip norms to choose from.
_EDGES = 2.0 ** np.arange(8)
_MIDDLES = np.append(np.sqrt(_EDGES[:-1] * _EDGES[1:]), 1.5 * _EDGES[-1])
_HISTOGRAM, _SQUARES = 0.15, 0.1  # parts of the budget, the rest for the regrets
# Standard errors of a count that is believed, and of one next to a class that is believed.
_SURE, _LIKELY = 2.5, 1.5
_MISSED = 0.1  # how often an interval of any two models misses their difference, at most


class Selection(NamedTuple):
    """Models by their log score on records that they were not fitted to. You may publish it.

    Attributes:
        scores: Log score of each model minus that of the best one, over all held-out records, in
            nats. Each record counts at most ``clip``.
        errors: Standard errors of these differences, with the noise of privacy.
        clip: Largest difference of one record, in nats. What is above it does not count, neither in
            scores nor in errors.
        records: Number of held-out records.
        posteriors: The posterior of each model. Half of the records fitted it.
        privacy: What all of this spent together.
    """

    scores: dict[str, float]
    errors: dict[str, float]
    clip: float
    records: int
    posteriors: dict[str, Posterior]
    privacy: PrivacyReport

    @property
    def _width(self) -> float:
        """Half length of simultaneous 90 % intervals, in standard errors (Bonferroni)."""
        pairs = len(self.scores) * (len(self.scores) - 1) / 2
        return float(ndtri(1 - _MISSED / 2 / pairs))

    @property
    def best(self) -> str:
        """Name of the model with the highest log score."""
        return max(self.scores, key=self.scores.__getitem__)

    def __str__(self) -> str:
        """A line for each model, best first, and what was spent."""
        width = max(map(len, self.scores)) + 2
        lines = [f"{'':{width}}log score, simultaneous 90 % interval of the difference"]
        for name in sorted(self.scores, key=self.scores.__getitem__, reverse=True):
            score, half = self.scores[name], self._width * self.errors[name]
            apart = name == self.best or score + half < 0
            told = "best" if name == self.best else f"{score:.1f} ({score - half:.1f} to "
            told += "" if name == self.best else f"{score + half:.1f})"
            lines.append(f"{name:{width}}{told}{'' if apart else ', may be as good'}")
        return "\n".join([*lines, f"{self.records} held-out records. {self.privacy!r}"])


def select(
    models: Mapping[str, Callable[..., object]] | Sequence[Callable[..., object]],
    *args: PyTree,
    budget: PrivacyBudget,
    rng_key: Array,
    privacy: Privacy = Privacy(),
    **kwargs: PyTree,
) -> Selection:
    r"""Compares models of the same records by their log scores on records held out from the fits.

    Half of the records fit all models, each by :class:`~numpyro_dp.DPLaplace`. The other half
    scores them. A record is in one half, so each half may spend the whole budget.

    Args:
        models: From 2 to 10 NumPyro models that take the same arguments, by name or in a list.
        *args: Arguments of the models, with the records.
        budget: Epsilon and delta to spend in all, such as ``ledger.budget(1.0, purpose="choice")``.
        rng_key: Key of draws from the posteriors, neither of noise nor of the halves.
        privacy: As for :class:`~numpyro_dp.DPLaplace`.
        **kwargs: Keyword arguments of the models.

    Raises:
        TypeError, ValueError: If models or budget are none, there are fewer than 100 records, or
            the models have other outcomes or split the arguments in different ways.
        UnsupportedModelError: If ``DPLaplace`` does not take a model. No budget is spent.
        BudgetError: If earlier runs have spent the budget.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_dp
        >>> def straight(x, y=None, square=0.0):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        ...     with numpyro.plate("people", x.shape[0]):
        ...         centre = w[0] + w[1] * x + square * w[2] * x**2
        ...         numpyro.sample("y", dist.Normal(centre, 1.0), obs=y)
        >>> def curved(x, y=None):
        ...     straight(x, y, square=1.0)
        >>> x = jax.random.normal(jax.random.key(1), (5000,))
        >>> y = x + 0.4 * x**2 + jax.random.normal(jax.random.key(2), (5000,))
        >>> found = numpyro_dp.select([straight, curved], x, y, rng_key=jax.random.key(0),
        ...                           budget=numpyro_dp.PrivacyBudget(1.0, 1e-5))
        >>> found.best
        'curved'

    Guarantee:
        With the noise multiplier s of a single Gaussian release under the budget, each of M fits
        has the multiplier :math:`s \sqrt{M}`, and the histogram and the sums of scores
        :math:`s / \sqrt{.15}` and :math:`s / \sqrt{.85}`. So the fits together are one Gaussian
        mechanism of multiplier s, and the scores another. Secret coins say which of the two reads a
        record, by its place or the id of its unit, never by its values. So both together spend what
        one of them spends. A record adds one entry of 1 to the histogram. Its regrets and their
        squares are divided by their bounds and multiplied by weights whose squares sum to 1. A
        record adds nothing if it is not possible in one of the models, or has a number that is not
        finite. The numbers of records in both halves are public. The budget is charged before any
        record enters a computation.
    """
    if not isinstance(budget, PrivacyBudget):
        raise TypeError(f"Expected budget=PrivacyBudget(...), got {type(budget).__name__}.")
    check_rng_key(rng_key)
    named = _named(models)
    own = without(privacy, "select", "mechanism", "loss_release", "noise_multiplier")
    args, kwargs = as_arrays(args, kwargs)
    structure = own.given_model(next(iter(named.values())), {}).structure(args, kwargs)
    if structure.layout.num_examples < _FEWEST_RECORDS:
        raise ValueError(
            f"Expected at least {_FEWEST_RECORDS} records (or units) to compare models, got "
            f"{structure.layout.num_examples}."
        )
    draw_key, *fit_keys = jax.random.split(rng_key, 1 + len(named))
    settings = RunSettings(clip_norm=1.0, sampler=FullBatch(), budget=budget, privacy=own)
    # The secret of this call. Later calls on the same records have another one.
    secret = keys_of_run(secret_of(settings), budget.earlier)[0]
    fitted, held = _halves(structure, args, kwargs, jax.random.fold_in(secret, _HALVES))
    report = _report(settings, structure)
    noise = report.noise_multiplier

    def part(share: float, number: int) -> Privacy:
        """The settings of one run that has this share of the budget."""
        given = own.secret_key is not None
        return dataclasses.replace(
            own, noise_multiplier=noise / math.sqrt(share),
            secret_key=jax.random.fold_in(secret, number) if given else None,
        )  # fmt: skip

    drivers = {
        name: DPLaplace(fn, privacy=part(1 / len(named), number))
        for number, (name, fn) in enumerate(named.items())
    }
    # Refuses a model before the budget is touched.
    outcomes = [driver._prepared_for(*fitted)[1].outcomes for driver in drivers.values()]
    _check_alike(named, outcomes)
    read = [each.model for each in outcomes]
    charge(settings, lambda: [report])
    posteriors = {
        name: driver.run(key, *fitted[0], progress_bar=False, **fitted[1])
        for (name, driver), key in zip(drivers.items(), fit_keys, strict=True)
    }
    keys = jax.random.split(draw_key, len(named))
    latents = [
        each._known_source().unconstrained(each.sample(key, _DRAWS))
        for each, key in zip(posteriors.values(), keys, strict=True)
    ]
    # The same structures, for another number of records.
    layout, size = read[0].structure.layout, len(named)
    number = structure.layout.num_examples - layout.num_examples
    layout = layout._replace(num_examples=number)
    scored = [m._replace(structure=m.structure._replace(layout=layout)) for m in read]
    shared = layout.rows(*held).shared

    def summed(
        share: float,
        run: int,
        zeros: Values,
        entries: Callable[..., Values],
        *public: Array,
    ) -> Values:
        def signal(public: PyTree, key: Array, example: Arrays) -> Values:
            latents, shared, *rest = public
            regrets, good = _regrets(scored, latents, shared, example)
            return {n: jnp.where(good, x, 0) for n, x in entries(regrets, *rest).items()}

        given = dataclasses.replace(settings, budget=None, privacy=part(share, size + run))
        problem = RecordsProblem(scored[0].structure.records)
        driver = OneSum(given, problem, (latents, shared, *public), zeros, signal)
        return driver.total(draw_key, *held[0], **held[1])[0]

    counts = summed(_HISTOGRAM, 0, {"counts": jnp.zeros(len(_MIDDLES) + 1)}, _classes)["counts"]
    clip = _clip(counts, noise, size)
    share = 1 - _HISTOGRAM
    zeros = {"sums": jnp.zeros(size), "squares": jnp.zeros(size * (size + 1) // 2)}
    sums = summed(share, 1, zeros, _moments, jnp.float32(clip))
    scores, errors = _differences(sums, clip, noise / math.sqrt(share), number)
    reports = [p.privacy for p in posteriors.values() if isinstance(p.privacy, PrivacyReport)]
    public = tuple(dict.fromkeys(each for r in reports for each in r.public))
    report = dataclasses.replace(report, public=public, timed=any(r.timed for r in reports))
    for each in posteriors.values():
        each.privacy = report  # so that later budgets count all of this call
        each.notes = (*each.notes, "Half of the records fitted it, with a part of select's budget.")
    return Selection(
        dict(zip(named, scores, strict=True)), dict(zip(named, errors, strict=True)), clip,
        number, posteriors, report,
    )  # fmt: skip


def _named(models: object) -> dict[str, Callable[..., object]]:
    """The models by name."""
    if isinstance(models, Mapping):
        found = {str(name): fn for name, fn in models.items()}
    else:
        found = {}
        for number, fn in enumerate(models if isinstance(models, Sequence) else (), start=1):
            name = getattr(fn, "__name__", f"model {number}")
            found[name if name not in found else f"{name}, model {number}"] = fn
    given = len(models) if isinstance(models, Mapping | Sequence) else 0
    if not 2 <= len(found) <= _MOST or len(found) < given or not all(map(callable, found.values())):
        raise TypeError(
            f"Expected models as a list or dict of 2 to {_MOST} NumPyro models, got "
            f"{type(models).__name__} with {len(found)}. Write select([one, other], X, y, ...)."
        )
    return found


def _check_alike(named: Mapping[str, object], outcomes: list[Outcomes]) -> None:
    """Raises ValueError if models split the arguments, or observe them, in different ways."""
    layout = outcomes[0].model.structure.layout
    seen = []
    for name, each in zip(named, outcomes, strict=True):
        if each.model.structure.layout != layout:
            raise ValueError(
                f"The model {name} splits the arguments into records and public values in another "
                "way than the first one. Give all models the same arguments and plates."
            )
        values = [each.own(tuple(x[0] for x in rows)) for rows in layout.invented_records(1)]
        flat = [sorted(np.ravel(x).astype(float).tolist() for x in own.values()) for own in values]
        seen.append(flat)
        if flat != seen[0]:
            raise ValueError(
                f"The model {name} observes other values than the first one. Log scores of other "
                "outcomes, or of a transformed one, cannot be compared."
            )


def _halves(
    structure: ModelStructure, args: Args, kwargs: Kwargs, key: Array
) -> tuple[tuple[Args, Kwargs], tuple[Args, Kwargs]]:
    """The arguments with one half of the records, and with the other."""
    layout = structure.layout
    ids, kwargs = split_unit(kwargs, layout.max_rows)
    seed = np.asarray(jax.random.key_data(key)).tobytes()
    if ids is None:
        number = layout.num_examples
        first = np.arange(number) < number // 2
        first = np.random.default_rng(np.frombuffer(seed, np.uint32)).permutation(first)
    else:
        known, places = np.unique(np.asarray(ids), return_inverse=True)
        # A unit's half must not depend on which other units there are.
        hashes = (hashlib.blake2b(repr(x).encode(), key=seed) for x in known.tolist())
        first = np.array([each.digest()[0] % 2 == 0 for each in hashes])[places]
    leaves, treedef = jax.tree.flatten((args, kwargs))

    def taken(rows: np.ndarray) -> tuple[Args, Kwargs]:
        kept = [
            np.asarray(leaf)[rows] if kind == "r" else leaf
            for kind, leaf in zip(layout.kinds, leaves, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(treedef, kept)
        return args, kwargs if ids is None else kwargs | {UNIT: np.asarray(ids)[rows]}

    return taken(np.flatnonzero(first)), taken(np.flatnonzero(~first))


def _report(settings: RunSettings, structure: ModelStructure) -> PrivacyReport:
    """What one release spends that has the whole budget. Raises BudgetError if none is left."""
    layout, privacy, charges = structure.layout, settings.privacy, settings.charges
    identity = RunIdentity(
        layout.num_examples, settings.sampler, settings.clip_norm, privacy.mechanism, None,
        settings.budget, privacy.secret_key is not None, privacy.repetition, ("select",),
        structure.data_plate, (), "" if charges is None else str(charges.ledger.path),
        layout.max_rows,
    )  # fmt: skip
    return report_for(plan_for(settings, layout.num_examples, 1), 1, identity)


def _regrets(
    models: list[Model], latents: list[Values], shared: Arrays, example: Arrays
) -> tuple[Array, Array]:
    """How much lower each model's log score is than the best one's, and whether all are known."""

    def score(model: Model, latents: Values) -> Array:
        def one(values: Values) -> Array:
            return model.log_likelihood(values, {}, example, shared, model.any_key())

        return jax.nn.logsumexp(jax.vmap(one)(latents)) - math.log(_DRAWS)

    scores = jnp.stack([score(*each) for each in zip(models, latents, strict=True)])
    good = ~jnp.any(jnp.isnan(scores)) & jnp.isfinite(jnp.max(scores)) & is_finite(example)
    return jnp.where(good, jnp.max(scores) - scores, 0), good


def _classes(regrets: Array) -> dict[str, Array]:
    """In which class the difference of the two best models lies."""
    (edges,) = own_constants(_EDGES.astype(np.float32))
    place = jnp.sum(jnp.sort(regrets)[1] > edges)
    return {"counts": jax.nn.one_hot(place, len(_MIDDLES) + 1, dtype=regrets.dtype)}


def _longest(size: int) -> float:
    """Norm of the longest centred vector of regrets between 0 and 1."""
    return math.sqrt((size // 2) * ((size + 1) // 2) / size)


def _moments(regrets: Array, clip: Array) -> dict[str, Array]:
    """The clipped and centred regrets, and their products."""
    regrets = jnp.minimum(regrets, clip)
    centred = (regrets - jnp.mean(regrets)) / (clip * _longest(regrets.size))
    rows, columns = np.triu_indices(regrets.size)
    (twice,) = own_constants(np.where(rows == columns, 1, math.sqrt(2)).astype(np.float32))
    products = centred[rows] * centred[columns] * twice
    sums, squares = math.sqrt(1 - _SQUARES) * centred, math.sqrt(_SQUARES) * products
    return {"sums": sums, "squares": squares}


def _clip(counts: np.ndarray, noise: float, size: int) -> float:
    """The clip norm with the smallest error of a difference, by noise and by what it cuts off."""
    error, likely = noise / math.sqrt(_HISTOGRAM), True
    above = np.zeros(len(_MIDDLES))
    for place, count in enumerate(counts[1:]):
        likely = bool(count > (_LIKELY if likely else _SURE) * error)
        above[place] = count * likely
    cut = [above @ np.maximum(0, _MIDDLES - clip) for clip in _EDGES]
    share = (1 - _HISTOGRAM) * (1 - _SQUARES)
    noises = _EDGES * _longest(size) * noise * math.sqrt(2 / share)
    return float(_EDGES[np.argmin(np.hypot(cut, noises))])


def _differences(
    sums: Values, clip: float, noise: float, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Log scores minus that of the best model, and their standard errors."""
    regrets, bound = sums["sums"], clip * _longest(len(sums["sums"]))
    best = int(np.argmin(regrets))
    lower = bound * (regrets - regrets[best]) / math.sqrt(1 - _SQUARES)
    squares = bound**2 * symmetric(sums["squares"]) / math.sqrt(_SQUARES)
    own = np.diag(squares)
    sampling = own + own[best] - 2 * squares[best] - lower**2 / number
    # The noise of these moments has this standard deviation, so they may be too small.
    unsure = 2 * bound**2 * noise / math.sqrt(_SQUARES)
    variance = 2 * (bound * noise) ** 2 / (1 - _SQUARES) + np.maximum(sampling, 0) + unsure
    return -lower, np.sqrt(variance) * (np.arange(len(own)) != best)

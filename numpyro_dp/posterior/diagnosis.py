"""What is wrong with a posterior, as far as released and public values show it."""

from __future__ import annotations

import math
import pathlib
import sys
import warnings
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from numpyro_dp._lazy import stats
from numpyro_dp.posterior.algebra import solve
from numpyro_dp.posterior.draws import Normal, Vectors
from numpyro_dp.posterior.likelihood import Prior
from numpyro_dp.privacy.budget import LARGEST_EPSILON
from numpyro_dp.privacy.plan import PrivacyReport

if TYPE_CHECKING:
    from numpyro_dp.posterior.prior import ModelPrior
    from numpyro_dp.run.results import RunResult

# Good runs stay below these (benchmarks/believe/zoo.py).
_FARTHEST = 3.0  # posterior sds between the points of a run and the optimum of its scores
_WIDEST = 2.0  # posterior sds over which the points of a run move, fresh draws left out
_MOST_BENT = 0.1  # the same times the prior sds over which they move
_MOST_PRIOR = 0.6  # part of the variance of the prior, as a mean over latents
# Latents of a site that a hierarchy may pool, a posterior much narrower than the release, and a
# release that leaves so much of the prior.
_POOLED, _MUCH_NARROWER, _LITTLE = 3, 0.4, 1 / 3
_UNLIKELY = 1e-3
_GUESSED = 0.3  # share of the prior above which the prior of decoding matters
# Findings that follow from the prior or from the report, and are made again under another prior.
OF_PRIOR = ("prior", "conflict", "likelihood", "pooling", "delta", "epsilon", "budget")
_CONFLICT = 2.0  # prior sds between the means of posterior and prior, root mean square
_PACKAGE = str(pathlib.Path(__file__).parents[1])
_MORE = (
    "More records, a larger epsilon, fewer latents or columns of about unit scale would tell more."
)
_MISFIT = 1.1  # variance of scores relative to what the model says
_WIDE = 4.0  # standard deviation of a prior from which many stages may be needed
_SURELY = 3.0  # standard errors by which scores vary more than the model says
_SLID = 10.0  # factor by which an adaptive clip norm may change
_UNUSED = 0.9  # part of the budget


class PosteriorWarning(UserWarning):
    """A posterior should not be believed as it is.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import fit
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", PosteriorWarning)  # you look below
        ...     posterior = fit(model, jnp.full(100, 0.5), epsilon=0.001, rng_key=jax.random.key(0))
        >>> [finding.name for finding in posterior.diagnose().findings]
        ['prior']
    """


class Finding(NamedTuple):
    """One fact about a posterior.

    Attributes:
        name: What was looked at.
        bad: Whether it makes the posterior unreliable.
        text: What was found, and what to do about it.

    Example:
        >>> finding = Finding("prior", bad=False, text="1 of 3 latents is more than half prior.")
        >>> print(Diagnosis((finding,)))
        note prior: 1 of 3 latents is more than half prior.
    """

    name: str
    bad: bool
    text: str


class Diagnosis(NamedTuple):
    """All findings about a posterior. It prints as one line for each.

    Attributes:
        findings: The findings, bad ones first.

    Example:
        >>> clipped = Finding("clipping", bad=True, text="Most records are clipped.")
        >>> prior = Finding("prior", bad=False, text="No latent is more than half prior.")
        >>> [finding.name for finding in Diagnosis((clipped, prior)).bad]
        ['clipping']
    """

    findings: tuple[Finding, ...]

    @property
    def bad(self) -> tuple[Finding, ...]:
        """The findings that make the posterior unreliable."""
        return tuple(finding for finding in self.findings if finding.bad)

    def warn(self) -> None:
        """Warns of bad findings, with one :class:`PosteriorWarning` for all."""
        if self.bad:
            told = " ".join(finding.text for finding in self.bad)
            text = f"Do not believe this posterior yet. {told}"
            if sys.version_info >= (3, 12):  # points at the line outside of this package
                warnings.warn(text, PosteriorWarning, skip_file_prefixes=(_PACKAGE,))
            else:
                warnings.warn(text, PosteriorWarning, 4)

    def __str__(self) -> str:
        """One line for each finding."""
        if not self.findings:
            return "No problem was found."
        return "\n".join(
            f"{'BAD ' if each.bad else 'note'} {each.name}: {each.text}" for each in self.findings
        )

    __repr__ = __str__

    @classmethod
    def of(cls, *findings: Finding) -> Diagnosis:
        """Sorts findings."""
        return cls(tuple(sorted(findings, key=lambda finding: not finding.bad)))


def findings_of_report(privacy: PrivacyReport) -> list[Finding]:
    """What the report of a run shows."""
    found, plan = [], privacy.plan
    if privacy.delta >= 1 / plan.num_examples:
        found.append(Finding("delta", True, (
            f"delta={privacy.delta:g} is not below 1 / {plan.num_examples}, so the guarantee "
            "allows a run to publish whole records. Leave delta out, or choose a smaller one."
        )))  # fmt: skip
    if LARGEST_EPSILON < privacy.epsilon < math.inf:
        found.append(Finding("epsilon", False, (
            f"epsilon={privacy.epsilon:.3g} promises nothing about any record, as any above "
            f"{LARGEST_EPSILON:g}. Choose a smaller budget, such as 1."
        )))  # fmt: skip
    budget = plan.budget
    if budget is not None and privacy.epsilon < _UNUSED * budget.epsilon:
        found.append(Finding("budget", False, (
            f"The run spent epsilon={privacy.epsilon:.3g} of {budget.epsilon:g}. Plan for the "
            "steps that you take."
        )))  # fmt: skip
    return found


def findings_of_run(result: RunResult) -> list[Finding]:
    """What parameters and trace of a run show.

    Example:
        >>> from types import SimpleNamespace
        >>> trace = SimpleNamespace(clip_norm=None)
        >>> findings_of_run(SimpleNamespace(params={"mean": np.nan}, trace=trace))[0].name
        'values'
    """
    found = []
    if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(result.params)):
        text = "The parameters have infinite or NaN entries. Take smaller steps."
        found.append(Finding("values", True, text))
    norms = result.trace.clip_norm  # the path of each one that adapts
    norms = norms if isinstance(norms, dict) else {} if norms is None else {"": norms}
    for name, path in norms.items():
        ratio, name = float(path[-1]) / float(path[0]), f" of {name!r}" if name else ""
        if not 1 / _SLID < ratio < _SLID:
            found.append(Finding("clip norm", True, (
                f"The clip norm{name} changed by a factor {ratio:.2g} during the run. Start it "
                f"near {float(path[-1]):.2g}."
            )))  # fmt: skip
    return found


def finding_of_clipping(avoidable: bool) -> Finding:
    """A finding about clipping that sees outcomes. ``avoidable``: if it need not have seen them."""
    remedy = (
        "Use the default: centred() in DPSVI, unbiased_clipping=True in DPSEP, centring= of an "
        "estimator of your own."
    )
    remedy = remedy if avoidable else "DPLaplace has no such bias, on models that it supports."
    return Finding("clipping", avoidable, (
        "Clipping saw the outcomes. If many records were clipped, the posterior is biased, and "
        f"nothing that was released shows it. {remedy}"
    ))  # fmt: skip


def findings_of_shares(shares: np.ndarray, private: bool) -> list[Finding]:
    """What the shares of the prior show."""
    wide, known = int(np.sum(shares > 0.5)), int(np.sum(np.isfinite(shares)))
    text = f"{wide} of {known} latents are more than half prior. {_MORE}"
    return [Finding("prior", False, text)] if private and wide else []


def findings_of_path(distance: float, width: float, of_prior: float) -> list[Finding]:
    """What the points of a run show.

    The curvature of a likelihood changes over a standard deviation of the prior or so, if columns
    have a scale near 1. Over moves of w posterior and v prior standard deviations, this moves the
    mean by some v w posterior ones. Larger columns show as a very large w.

    Args:
        distance: Distance of the mean point from the optimum that the scores point to, in posterior
            standard deviations.
        width: Root mean square distance of the points from their mean without the fresh draws, in
            the same unit.
        of_prior: The like of ``width`` in prior standard deviations.
    """
    if not math.isfinite(distance):
        return [Finding("convergence", True, (
            "The run left no finite scores at two different points, so this is the prior. If the "
            "loss is not finite, take smaller steps. If it is, take more of them: one or two do "
            "not tell how sure the scores are."
        ))]  # fmt: skip
    found = []
    if distance >= 1:
        found.append(Finding("convergence", distance > _FARTHEST, (
            f"The run ended {distance:.1f} posterior standard deviations from the optimum that its "
            "scores point to. The intervals allow for that as far as the likelihood is quadratic. "
            "More or larger steps make them narrower."
        )))  # fmt: skip
    if width > _WIDEST and (width > 5 * _WIDEST or width * of_prior > _MOST_BENT):
        found.append(Finding("steps", True, (
            f"The points of the run move over {width:.1f} posterior standard deviations, where the "
            "likelihood need not be quadratic. If the run was still on its way, take more steps or "
            "larger ones. If not, take smaller ones. Give columns a scale near 1."
        )))  # fmt: skip
    return found


def findings_of_normal(mean: np.ndarray, covariance: np.ndarray, prior: Prior) -> list[Finding]:
    """What a normal posterior shows beside its prior."""
    found, before = [], np.diag(prior.covariance)
    share = float(np.mean(np.diag(covariance) / before))
    if share > _MOST_PRIOR:
        found.append(Finding("prior", True, (
            f"This is mostly the prior: latents keep {100 * share:.0f} % of its variance. "
            + _more(prior)
        )))  # fmt: skip
    away = float(np.sqrt(np.mean((mean - prior.mean) ** 2 / before)))
    if away > _CONFLICT:
        found.append(Finding("conflict", False, (
            f"The posterior is {away:.1f} prior standard deviations from the prior. If that is a "
            "surprise, look for separable outcomes, or for columns of another scale than the prior "
            "expects."
        )))  # fmt: skip
    return found


def findings_of_conflict(precision: np.ndarray, linear: np.ndarray, prior: Prior) -> list[Finding]:
    r"""Whether a released likelihood and another prior disagree.

    Under the prior, :math:`b - P p_0` has the covariance :math:`P + P \Lambda^{-1} P`.
    """
    pull, size = linear - precision @ prior.mean, len(linear)
    covariance = precision + precision @ prior.covariance @ precision
    distance = float(pull @ solve(covariance, pull))
    if stats.chi2.sf(distance, size) > _UNLIKELY:
        return []
    return [Finding("conflict", True, (
        "The prior and the released values disagree: they are "
        f"{math.sqrt(distance / size):.1f} standard deviations apart, as a root mean square over "
        "latents. Check the prior, or make it wider."
    ))]  # fmt: skip


def findings_of_guess(approximate: bool, covariance: np.ndarray, prior: Prior) -> list[Finding]:
    """Whether a likelihood that tells little was decoded with an approximate prior."""
    share = float(np.max(np.diag(covariance) / np.diag(prior.covariance)))
    if not approximate or share < _GUESSED:
        return []
    return [Finding("likelihood", False, (
        f"A latent keeps {100 * share:.0f} % of its prior variance, and the likelihood was decoded "
        "with a normal prior in place of that of the run. Under another prior it is a guess."
    ))]  # fmt: skip


def findings_of_pooling(
    prior: ModelPrior, vectors: Normal | Vectors, released: np.ndarray
) -> list[Finding]:
    """What a hierarchy makes of effects that the released values hardly tell.

    Errors of a release are bounds, and may be smaller. Effects then scatter less than the bounds
    allow, which a prior with an unknown scale takes as a sign that all are alike.

    Args:
        prior: The prior.
        vectors: Draws of the posterior.
        released: Covariance of the posterior under ``prior.decoded``, for the latents that records
            see.
    """
    if not isinstance(vectors, Vectors):
        return []
    sds = np.sqrt(np.diag(released))
    ratios = np.std(vectors.rows[:, prior.seen], axis=0) / sds
    shares, start, found = sds / np.sqrt(np.diag(prior.decoded.covariance)), 0, []
    for site in sorted(prior.outcomes.seen):
        own = slice(start, start := start + int(np.prod(prior.outcomes.shapes[site])))
        pooled = np.median(ratios[own]) < _MUCH_NARROWER and np.median(shares[own]) > _LITTLE
        if pooled and len(ratios[own]) >= _POOLED:
            found.append(Finding("pooling", True, (
                f"The released values tell little about {site}. That its values are alike "
                "follows from the prior of their scale, and may be wrong. Take a larger "
                "budget, fewer groups, or a narrower prior of the scale."
            )))  # fmt: skip
    return found


def finding_of_arrival(step: float, prior: Prior) -> Finding:
    """A run whose last step was long, so that it has not arrived at the posterior.

    Args:
        step: The longest of the last steps, in posterior standard deviations.
        prior: The prior, in unconstrained coordinates.
    """
    return Finding("arrival", True, (
        f"The run has not arrived: its last step was {step:.2g} standard deviations long, so the "
        f"intervals may be wrong. {_more(prior)}"
    ))  # fmt: skip


def _more(prior: Prior) -> str:
    """What would tell more."""
    widest = float(np.sqrt(np.max(np.diag(prior.covariance))))
    if widest < _WIDE:
        return _MORE
    return (
        f"The widest prior has a standard deviation of {widest:.3g}. With columns of about unit "
        "scale, 2.5 or less is enough, and needs a smaller budget."
    )


def findings_of_spread(
    ratio: float,
    error: float,
    of_units: bool = False,
    listed: bool = False,
    misplaced: float = 0.0,
    bias: float = 0.0,
) -> list[Finding]:
    """What the spread of scores shows about the model.

    Args:
        ratio: Variance of the scores of the outcomes, relative to what the model says.
        error: Its standard error.
        of_units: Whether records are units of several rows.
        listed: Whether there are few possible outcomes, such as 0 and 1.
        misplaced: Share of records whose score has another size than the model says, as far as it
            is sure.
        bias: What clipping their scores may move the posterior by, in standard deviations.
    """
    remedy = "Use a likelihood with more spread: NegativeBinomial2 for counts, StudentT for values."
    if listed:
        remedy = "Check that columns have about unit scale, and that the model is right."
    if of_units:
        remedy = "Rows of one unit may depend on each other: give the model what they share."
    if ratio < _MISFIT or ratio - _SURELY * error <= 1:
        if not misplaced:
            return []
        return [Finding("misfit", bias > 1, (
            f"Outcomes are not distributed as the model says: {100 * misplaced:.2g} % of scores "
            "have another size. Clipping may then move a latent by some "
            f"{bias:.2g} standard deviations, which the intervals allow for. {remedy}"
        ))]  # fmt: skip
    return [Finding("misfit", True, (
        f"Outcomes vary more than the model says: scores have {ratio:.2g} times its variance, or "
        "more. The intervals allow for part of it, but clipping biases the fit of a wrong model. "
        + remedy
    ))]  # fmt: skip


def findings_of_unseen(share: float, bias: float) -> list[Finding]:
    """What a budget is too small to see.

    Args:
        share: Share of records that may be far out and pass for noise.
        bias: What they may move the posterior by, in standard deviations.
    """
    if bias <= 1:
        return []
    return [Finding("unseen", False, (
        f"Outcomes far out in up to {100 * share:.2g} % of the records would not be noticed at "
        f"this budget. They could move a latent, mostly a scale, by {bias:.2g} standard deviations "
        "or more. If you expect some, use a likelihood that allows them, such as StudentT."
    ))]  # fmt: skip

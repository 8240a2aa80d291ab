"""What is wrong with a posterior, as far as released and public values show it."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_dp.privacy.plan import PrivacyReport

__all__ = [
    "Diagnosis",
    "Finding",
    "PosteriorWarning",
    "finding_of_distance",
    "findings_of_report",
    "findings_of_run",
    "findings_of_shares",
    "without_noise",
]

_SLID = 10.0  # factor by which an adaptive clip norm may change
_UNUSED = 0.9  # part of the budget


class PosteriorWarning(UserWarning):
    """A posterior should not be believed as it is."""


class Finding(NamedTuple):
    """One fact about a posterior.

    Attributes:
        name: What was looked at.
        bad: Whether it makes the posterior unreliable.
        text: What was found, and what to do about it.
    """

    name: str
    bad: bool
    text: str


class Diagnosis(NamedTuple):
    """All findings about a posterior. It prints as one line for each.

    Attributes:
        findings: The findings, bad ones first.
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
            warnings.warn(f"Do not believe this posterior yet. {told}", PosteriorWarning, 4)

    def __str__(self) -> str:
        """One line for each finding."""
        if not self.findings:
            return "Nothing was found."
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
    budget = plan.budget
    if budget is not None and privacy.epsilon < _UNUSED * budget.epsilon:
        found.append(Finding("budget", False, (
            f"The run spent epsilon={privacy.epsilon:.3g} of {budget.epsilon:g}. Plan for the "
            "steps that you take."
        )))  # fmt: skip
    return found


def findings_of_run(result: Any) -> list[Finding]:
    """What parameters and trace of a run show."""
    found = []
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.params)]
    if not all(np.all(np.isfinite(leaf)) for leaf in leaves):
        found.append(Finding("values", True, (
            "The parameters have infinite or NaN entries. Take smaller steps."
        )))  # fmt: skip
    for name, path in _norms(result.trace.clip_norm).items():
        ratio = float(path[-1]) / float(path[0])
        if not 1 / _SLID < ratio < _SLID:
            found.append(Finding("clip norm", True, (
                f"The clip norm{name} changed by a factor {ratio:.2g} during the run. Start it "
                f"near {float(path[-1]):.2g}."
            )))  # fmt: skip
    return found


def findings_of_shares(shares: np.ndarray, private: bool) -> list[Finding]:
    """What the shares of the prior show."""
    known = shares[np.isfinite(shares)]
    wide = int(np.sum(known > 0.5))
    if not private or not wide:
        return []
    return [Finding("prior", False, (
        f"{wide} of {known.size} latents are more than half prior. More records, a larger epsilon "
        "or fewer latents would tell more."
    ))]  # fmt: skip


def finding_of_distance(distance: float) -> list[Finding]:
    """What the distance of a run's points from its optimum shows, in posterior sds."""
    if not math.isfinite(distance):
        return [Finding("convergence", True, (
            "The run left no finite scores, so this is the prior. Take smaller steps, or more."
        ))]  # fmt: skip
    if distance < 1:
        return []
    return [Finding("convergence", False, (
        f"The run ended {distance:.1f} posterior standard deviations from the optimum that its "
        "scores point to. The intervals allow for that. More or larger steps make them narrower."
    ))]  # fmt: skip


def without_noise(noise: bool) -> list[Finding]:
    """A finding about intervals that leave out the noise of privacy, if there is any."""
    if not noise:
        return []
    return [Finding("intervals", True, (
        "The intervals leave out the noise of privacy, so they are too narrow."
    ))]  # fmt: skip


def _norms(clip_norm: Any) -> dict[str, np.ndarray]:
    """The path of each clip norm that adapts."""
    if clip_norm is None:
        return {}
    if isinstance(clip_norm, dict):
        return {f" of {name!r}": np.asarray(path) for name, path in clip_norm.items()}
    return {"": np.asarray(clip_norm)}

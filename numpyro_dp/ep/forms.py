"""The two forms of private stochastic expectation propagation; see ``DPSEP(as_printed=...)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from numpyro_dp._validate import check_int, check_real
from numpyro_dp.core import Estimator, Sampler
from numpyro_dp.ep.damping import Damped
from numpyro_dp.ep.estimator import stochastic_ep
from numpyro_dp.ep.families import isotropic_normal
from numpyro_dp.ep.paper_form import Printed, paper_form
from numpyro_dp.ep.problem import EPProblem
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm

__all__ = ["Release", "choose_form"]

_SHARED = "True is one number for all coordinates, k is one for each of k blocks."


class Release(NamedTuple):
    """How precisions are released, and floored."""

    precision_weight: float = 1.0
    shared_precision: bool | int = False
    floor: float = 2.0

    def check(self, family: Any) -> None:
        """Raises unless the numbers are in range and suit the family."""
        check_real("precision_weight", self.precision_weight, low=0, low_open=True)
        check_real("floor", self.floor, low=0)
        if not isinstance(self.shared_precision, bool):
            check_int("shared_precision", self.shared_precision, low=1, remedy=_SHARED)
        if family is isotropic_normal and self.shared_precision:
            raise ValueError(
                "Expected shared_precision=False with isotropic_normal, which has one precision "
                f"number, got {self.shared_precision}. Use diagonal_normal or normal."
            )
        if isinstance(family, Mapping) and (self.precision_weight != 1 or self.shared_precision):
            raise ValueError(
                "Expected precision_weight=1.0 and shared_precision=False with families by site, "
                f"got {self.precision_weight} and {self.shared_precision}. Use a normal family."
            )


def choose_form(
    as_printed: bool, release: Release, damping: Any, clip_norm: ClipNorm, sampler: Sampler
) -> tuple[Callable[[EPProblem], Estimator], Damped]:
    """Returns estimator and optimiser of ``DPSEP(as_printed=...)``.

    Raises:
        ValueError: If an argument is out of range, or belongs to the other form.
    """
    if not as_printed:
        if not callable(damping):
            check_real("damping", damping, low=0, low_open=True, high=1)
        estimator = stochastic_ep(release.precision_weight, release.shared_precision)
        return estimator, Damped(damping, release.floor)
    if release != Release():
        raise ValueError(
            f"Expected {Release()} with as_printed=True, got {release}. Leave them out."
        )
    if not isinstance(clip_norm.given, float):
        raise ValueError(f"Expected one number as clip_norm with as_printed=True, got {clip_norm}.")
    gamma = check_real("damping", damping, low=0, low_open=True, remedy="It is gamma.")
    return paper_form(gamma, sampler), Printed(clip_norm.given)

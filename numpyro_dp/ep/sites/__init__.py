"""Sites: approximations of one record's likelihood, one file each."""

from numpyro_dp.ep.problem import EPProblem
from numpyro_dp.ep.sites.base import Site, SiteBuilder
from numpyro_dp.ep.sites.conjugate import conjugate, is_conjugate
from numpyro_dp.ep.sites.evidence import evidence, probit
from numpyro_dp.ep.sites.importance import importance
from numpyro_dp.ep.sites.mixture import normal_mixture
from numpyro_dp.ep.sites.quadrature import is_linear, quadrature
from numpyro_dp.model.public import UnsupportedModelError

__all__ = [
    "Site",
    "SiteBuilder",
    "choose_site",
    "conjugate",
    "evidence",
    "importance",
    "normal_mixture",
    "probit",
    "quadrature",
]


def choose_site(problem: EPProblem) -> SiteBuilder:
    """Returns the kind for a model: exact sites where it is conjugate, else those by quadrature.

    Raises:
        UnsupportedModelError: If the likelihood is neither.
    """
    if is_conjugate(problem):
        return conjugate()
    if is_linear(problem):
        return quadrature()
    raise UnsupportedModelError(
        "Expected a likelihood that is conjugate to the family or sees all latents through one "
        "product with the record. Name another: site=evidence(log_evidence) with a closed form of "
        "its evidence, or site=importance(); or use DPSVI."
    )

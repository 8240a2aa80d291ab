"""Sites: approximations of one record's likelihood."""

from numpyro_dp.extend import UnsupportedModelError
from numpyro_dp.methods.ep.problem import EPProblem, Site, SiteBuilder
from numpyro_dp.methods.ep.sites.any_likelihood import evidence, importance
from numpyro_dp.methods.ep.sites.conjugate import conjugate, is_conjugate
from numpyro_dp.methods.ep.sites.mixture import normal_mixture
from numpyro_dp.methods.ep.sites.quadrature import is_linear, quadrature

__all__ = [
    "Site",
    "SiteBuilder",
    "choose_site",
    "conjugate",
    "evidence",
    "importance",
    "normal_mixture",
    "quadrature",
]


def choose_site(problem: EPProblem) -> SiteBuilder:
    """Returns the kind of site for a model: ``conjugate()`` if it fits, else ``quadrature()``.

    Raises:
        UnsupportedModelError: If neither fits the likelihood.
    """
    if is_conjugate(problem):
        return conjugate()
    if is_linear(problem):
        return quadrature()
    raise UnsupportedModelError(
        "The likelihood is not conjugate to the family, and does not depend on the latents only "
        "through one product with the record, x @ w + b. Pass site=evidence(log_evidence) with a "
        "closed form of its evidence or site=importance(), both with a normal family, or use "
        "DPSVI."
    )

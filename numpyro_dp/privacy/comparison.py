"""The epsilon of one run by every accountant."""

from __future__ import annotations

import math
from typing import NamedTuple

from numpyro_dp.privacy.accounting import (
    GDP,
    PLD,
    PRV,
    RDP,
    UnreliableBoundError,
    UnsupportedEventError,
)
from numpyro_dp.privacy.accounting.bounds import gaussian_steps, reason_of
from numpyro_dp.privacy.accounting.gdp import gaussian_epsilon
from numpyro_dp.privacy.calibration import clt_mu
from numpyro_dp.privacy.plan import PrivacyReport

__all__ = ["AccountantComparison", "compare_accountants"]


class AccountantComparison(NamedTuple):
    """Bounds of several accountants for one run. ``print`` shows one line for each.

    Attributes:
        bounds: Upper bound on epsilon by each accountant that supports the run.
        refusals: Why each other accountant has no bound.
        approximation: Epsilon by the central limit theorem, with **no guarantee**. ``nan`` for
            batches of fixed size.
        delta: The delta of all values.
    """

    bounds: dict[str, float]
    refusals: dict[str, str]
    approximation: float
    delta: float

    def __str__(self) -> str:
        lines = [f"{name:8} epsilon <= {bound:.4f}" for name, bound in self.bounds.items()]
        lines += [f"{name:8} refused: {reason}" for name, reason in self.refusals.items()]
        lines.append(f"{'GDP-CLT':8} epsilon ~  {self.approximation:.4f} (no guarantee)")
        return "\n".join(lines)


def compare_accountants(report: PrivacyReport) -> AccountantComparison:
    r"""Bounds the epsilon of a run by each accountant, and adds the approximation of papers.

    The central limit theorem replaces T steps of Poisson batches at rate q by one Gaussian
    mechanism (:mod:`numpyro_dp.privacy.calibration` has the formula). This holds as T goes to
    infinity with :math:`q\sqrt T` fixed. For finite T there is no bound on the error, so the value
    may lie below the true epsilon. It is shown because papers report it.

    Raises:
        TypeError: If ``report`` is not ``result.privacy``.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import DPMCMC, PrivacyBudget, SGLD
        >>> from numpyro_dp.accounting import compare_accountants
        >>> from numpyro_dp.samplers import Poisson
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> mcmc = DPMCMC(SGLD(model), num_warmup=10, num_samples=190, clip_norm=5.0,
        ...               sampler=Poisson(0.1), budget=PrivacyBudget(1.0, 1e-5),
        ...               progress_bar=False)
        >>> mcmc.run(jax.random.key(0), jax.numpy.ones(1000))
        >>> found = compare_accountants(mcmc.privacy)
        >>> sorted(found.bounds), list(found.refusals)
        (['PLD', 'PRV', 'RDP'], ['GDP'])
        >>> found.approximation < found.bounds["PLD"] < found.bounds["RDP"]
        True

    Guarantee:
        Each of ``bounds`` is an upper bound. ``approximation`` is not. Only the report is read.

    Reference:
        Bu, Dong, Long, Su (2020), Deep learning with Gaussian differential privacy, Harvard Data
        Science Review; Zhang, Bu, Chen, Long (2021), Theorems 2 and 3.
    """
    if not isinstance(report, PrivacyReport):
        raise TypeError(f"Expected result.privacy, got {type(report).__name__}.")
    bounds, refusals = {}, {}
    for accountant in (GDP(), PLD(), PRV(), RDP()):
        try:
            found = report.plan.spent(report.num_steps, delta=report.delta, accountant=accountant)
        except (UnsupportedEventError, UnreliableBoundError) as error:
            refusals[accountant.name] = reason_of(error, accountant.name)
        else:
            bounds[accountant.name] = found.epsilon
    limit = math.nan
    if not any(step.sampling == "without_replacement" for step in gaussian_steps(report.event)):
        mu = clt_mu(report.event)  # beyond 700 nothing is private
        limit = gaussian_epsilon(mu, report.delta) if mu < 700.0 else math.inf
    return AccountantComparison(bounds, refusals, limit, report.delta)

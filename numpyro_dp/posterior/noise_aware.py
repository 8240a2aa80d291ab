r"""Noise-aware posteriors: the guide, widened by the effect of privacy noise on its location.

With the averaged location :math:`\bar m`, its variance :math:`v` over runs, and the averaged
covariance :math:`\Sigma` of the guide, the posterior is

.. math:: N(\bar m,\; \Sigma + \mathrm{diag}(v)).

:math:`v` is estimated from the iterates of a single run, by an AR(1) fit with finite-window
corrections (:mod:`numpyro_dp.posterior.averaging`). The variance of n iterates would be too large
for the variance of their mean. Divided by n it would be too small.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpyro.infer import autoguide

from numpyro_dp._compat import latent_sites
from numpyro_dp.core import Values
from numpyro_dp.model.variational import guide_kind
from numpyro_dp.posterior.averaging import Average, Check, average
from numpyro_dp.run.results import RunResult


class NoiseAware(NamedTuple):
    """A posterior that includes the effect of privacy noise. It may be published.

    Attributes:
        params: Parameters of the guide, for ``Predictive(model, guide=guide, params=...)``.
        average: The averaged iterates.
        unconverged: Number of coordinates of the location that have not converged. Their variance
            is not known. Do not trust their intervals.
        dominated: Number of coordinates of the location with more privacy noise than posterior
            variance. Their sum is not a Bayesian posterior, because the prior does not narrow it.
            Use a larger budget or a stronger prior.

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
        >>> from numpyro_dp.posterior import noise_aware
        >>> found = noise_aware(result, svi.guide)
        >>> sorted(found.params)
        ['auto_loc', 'auto_scale']
    """

    params: Values
    average: Average
    unconverged: int
    dominated: int


def noise_aware(result: RunResult, guide: Any, check: Check | None = None) -> NoiseAware:
    """Returns the guide at the averaged iterates, widened by the privacy noise.

    Args:
        result: The result of ``DPSVI.run``, with its trace.
        guide: The guide of the run: ``AutoDiagonalNormal``, ``AutoNormal`` or
            ``AutoMultivariateNormal``.
        check: The check of a window, as for :func:`~numpyro_dp.posterior.average`.

    Raises:
        TypeError: For other guides, whose location is not a parameter.
        ValueError: If the trace has fewer than 20 iterates.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget
        >>> from numpyro_dp.estimators import aligned
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> x = 3 + jax.random.normal(jax.random.key(1), (1000,))
        >>> guide = AutoDiagonalNormal(model)
        >>> svi = DPSVI(model, guide, optax.adam(0.02), estimator=aligned(), clip_norm=2.0,
        ...             sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5))
        >>> result = svi.run(jax.random.key(0), 5000, x, progress_bar=False)
        >>> posterior = noise_aware(result, guide)
        >>> abs(posterior.params["auto_loc"][0] - 3) < 0.5
        np.True_

    Guarantee:
        Reads only the private iterates.

    Reference:
        Jälkö, Prediger, Honkela, Kaski (2024), DPVIm, TMLR, section 3.2 and appendix E.
    """
    pairs = _pairs(guide)
    mean = average(result.trace, check)
    # The scales are replaced below, and the averages keep their own.
    params = {name: value.copy() for name, value in mean.params.items()}
    unconverged = dominated = 0
    for loc, scale in pairs:
        variance = np.square(mean.dp_sd[loc])
        spread = mean.params[scale]
        if guide_kind(guide) is not autoguide.AutoMultivariateNormal:
            own = np.square(spread)
            params[scale] = np.sqrt(own + variance)
        else:
            covariance = spread @ spread.T
            own = np.diag(covariance)
            params[scale] = np.linalg.cholesky(covariance + np.diag(variance))
        unconverged += int(np.sum(~mean.converged[loc]))
        dominated += int(np.sum(variance > own))
    return NoiseAware(params, mean, unconverged, dominated)


def _pairs(guide: Any) -> list[tuple[str, str]]:
    """Names of the location and scale parameters of each normal factor."""
    kind = guide_kind(guide)
    if kind is autoguide.AutoDiagonalNormal:
        return [(f"{guide.prefix}_loc", f"{guide.prefix}_scale")]
    if kind is autoguide.AutoMultivariateNormal:
        return [(f"{guide.prefix}_loc", f"{guide.prefix}_scale_tril")]
    if kind is autoguide.AutoNormal:
        return [
            (f"{site}_{guide.prefix}_loc", f"{site}_{guide.prefix}_scale")
            for site in latent_sites(guide)
        ]
    raise TypeError(
        "noise_aware needs a guide of type AutoDiagonalNormal, AutoNormal or "
        f"AutoMultivariateNormal, got {type(guide).__name__}. It widens the covariance that these "
        "have as a parameter. For other guides use average() and its dp_sd."
    )

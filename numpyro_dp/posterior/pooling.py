r"""``pool``: the posteriors of several holders or years of the same model, as one.

Their released likelihoods are multiplied, and the prior counts once. If latents differ by holder,
holder k has :math:`w_k \sim N(\mu, \mathrm{diag}(\tau^2))` in unconstrained coordinates. Its
released likelihood with precision P and linear term b is then, without :math:`w_k`,

.. math::
    \log L_k(\mu, \tau) = b^\top \mu - \tfrac12 \mu^\top P \mu
        + \tfrac12 (S r)^\top A^{-1} S r - \tfrac12 \log\det A, \qquad
    r = b - P \mu, \quad S = \mathrm{diag}(\tau), \quad A = I + S P S.

The prior of :math:`\mu` is that of the model. NUTS samples :math:`\mu` and :math:`\tau`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import cho_solve
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC, NUTS

from numpyro_dp._lazy import stats
from numpyro_dp._validate import check_in, check_real
from numpyro_dp.core import Values
from numpyro_dp.posterior.densities import other_densities
from numpyro_dp.posterior.diagnosis import OF_PRIOR, Finding
from numpyro_dp.posterior.draws import SiteDraws, generator
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.prior import ModelPrior
from numpyro_dp.posterior.released import Likelihood
from numpyro_dp.privacy.keys import check_rng_key
from numpyro_dp.privacy.statement import Statement, joint_statement

# Sum over holders of the shares of the prior. Errors of single releases add up above it: measured
# with logistic models and 5 to 40 holders of 200 to 4,000 records, see docs/benchmarks/pool.md.
_MOST_SHARES = 1.0
_UNLIKELY = 1e-3
_MIXED = 1.1  # largest R-hat
_CHAINS, _WARMUP, _KEPT = 2, 1000, 2000


def pool(
    posteriors: Sequence[Posterior],
    *,
    persons: str,
    random: str | None = None,
    spread: float = 0.5,
    rng_key: Array | None = None,
) -> Posterior:
    """Returns one posterior from those of several holders, years or releases of the same model.

    Args:
        posteriors: At least two. One of them must know the model: that of a run, or of
            ``load(path, model)``. Its prior is used, once.
        persons: ``"disjoint"`` if no person is in the records of two of them. The largest epsilon
            then holds for all. ``"overlapping"`` if they may share persons, as several years do.
            Then epsilons and deltas add up. Rows must differ in any case: two releases of the same
            rows would count them twice.
        random: If given, latents may differ by holder, and this is what a holder is called, such as
            ``"site"``. The posterior then has the values of the population under the model's names,
            those of the holders as ``"w_site"``, with a leading axis, and the standard deviation
            between holders as ``"w_site_sd"``, in unconstrained coordinates.
        spread: Scale of the half-normal prior of that standard deviation, in standard deviations of
            the latent's own prior.
        rng_key: Key of the draws. It need not be secret.

    Returns:
        A posterior. Its ``privacy`` is a statement about all releases together.

    Raises:
        ValueError: If models, latents or neighbouring relations differ, or none has a model.

    Warns:
        PosteriorWarning: If holders differ by more than chance, if single releases told too little,
            so that their errors add up, or if one of them was not to be believed.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import fit
        >>> from numpyro_dp.posterior import pool
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> keys = jax.random.split(jax.random.key(1), 2)
        >>> own = [fit(model, jax.random.normal(key, (2000,)), epsilon=1.0, rng_key=key)
        ...        for key in keys]
        >>> pooled = pool(own, persons="disjoint")
        >>> ratio = pooled.summary()["mean"]["sd"] / own[0].summary()["mean"]["sd"]
        >>> bool(ratio < 0.9), pooled.privacy.num_examples
        (True, 4000)

    Guarantee:
        Reads released values alone. The statement covers all releases: if two data sets differ in
        one record, and the holders' records are disjoint, only one release changes.
    """
    check_in("persons", persons, ("disjoint", "overlapping"))
    check_real("spread", spread, low=0, low_open=True)
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    check_rng_key(rng_key)
    posteriors = list(posteriors)
    if len(posteriors) < 2 or not all(isinstance(each, Posterior) for each in posteriors):
        raise TypeError(f"Expected a list of two or more posteriors, got {posteriors!r}.")
    sources = [each._source for each in posteriors if each._source is not None]
    if not sources:
        raise ValueError("No posterior knows its model. Read one of them with load(path, model).")
    _check_same(posteriors, sources[0])
    likelihoods = [each.likelihood for each in posteriors]
    privacy = joint_statement(
        [p if isinstance(p := each.privacy, Statement) else p.statement() for each in posteriors],
        disjoint=persons == "disjoint",
    )
    prior = sources[0].read_prior(likelihoods[0].sites)
    findings = [*_findings_of(posteriors), *_findings_of_shares(likelihoods, prior)]
    converged = all(each._converged for each in posteriors)
    method = f"{len(posteriors)} releases, pooled"
    if random is None:
        joint = dataclasses.replace(
            likelihoods[0],
            precision=sum(each.precision for each in likelihoods),
            linear=sum(each.linear for each in likelihoods),
            approximate=any(each.approximate for each in likelihoods),
        )
        findings += _findings_of_differences(likelihoods, joint)
        found = sources[0].with_prior(
            joint, rng_key, privacy, method, (), converged, findings, prior
        )
    else:
        drawn, mixing = _random(prior, likelihoods, spread, rng_key)
        findings += mixing
        found = Posterior(
            privacy=privacy, method=f"{method}, latents differ by {random}", converged=converged,
            findings=tuple(findings),
            **_with_holders(sources[0], prior, random, spread, drawn),
        )  # fmt: skip
    found.warn()
    return found


def _check_same(posteriors: list[Posterior], source: Any) -> None:
    """Raises if latents or likelihoods differ."""
    first, inside = posteriors[0], sorted(source.inside)
    for number, each in enumerate(posteriors[1:], 2):
        first.likelihood.check_same(each.likelihood)
        own, other = first._densities(), each._densities()
        if own and other and (changed := other_densities(own, other, inside)):
            raise ValueError(
                f"Posterior {number} has another model than the first: {changed} are missing, or "
                "have other densities or shapes. Pool posteriors of one model."
            )


def _findings_of(posteriors: list[Posterior]) -> list[Finding]:
    """What was wrong with single posteriors."""
    return [
        Finding(found.name, True, f"Of posterior {number}: {found.text}")
        for number, each in enumerate(posteriors, 1) for found in each._findings
        if found.bad and found.name not in OF_PRIOR
    ]  # fmt: skip


def _findings_of_shares(likelihoods: list[Likelihood], prior: ModelPrior) -> list[Finding]:
    """Whether single releases told enough to be added up."""
    before = np.diag(prior.decoded.covariance)
    shares = [
        float(np.mean(np.diag(prior.decoded.updated(each.precision, each.linear)[1]) / before))
        for each in likelihoods
    ]
    if sum(shares) <= _MOST_SHARES:
        return []
    return [Finding("pooling", True, (
        f"Single releases told too little: their shares of the prior add up to {sum(shares):.2g}. "
        "Each likelihood is normal by approximation, and errors of all of them add up. Let fewer "
        "holders with more records each take part, or fit their records together."
    ))]  # fmt: skip


def _findings_of_differences(likelihoods: list[Likelihood], joint: Likelihood) -> list[Finding]:
    """Whether holders agree, by Cochran's Q."""
    distance = sum(each.value @ each.value for each in likelihoods) - joint.value @ joint.value
    degrees = (len(likelihoods) - 1) * len(joint.value)
    if stats.chi2.sf(distance, degrees) > _UNLIKELY:
        return []
    return [Finding("differences", True, (
        f"The holders' latents differ by more than chance (Cochran's Q is {distance:.0f} with "
        f"{degrees} degrees of freedom), so no common value is that of all of them. Use "
        'random="site", by which each holder has latents of its own.'
    ))]  # fmt: skip


def _random(
    prior: ModelPrior, likelihoods: list[Likelihood], spread: float, rng_key: Array
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], list[Finding]]:
    """Draws of population (n, all), latents of each holder (n, K, d), and tau (n, d).

    Also what is wrong with the chains.
    """
    dtype = jnp.result_type(float)
    precisions = np.stack([each.precision for each in likelihoods])
    linears = np.stack([each.linear for each in likelihoods])
    centre, covariance = prior.decoded.updated(precisions.sum(0), linears.sum(0))
    # Relative to the centre, so that large terms do not cancel in single precision.
    pulls, size = linears - precisions @ centre, len(centre)
    scales = spread * np.sqrt(np.diag(prior.decoded.covariance))
    given = [jnp.asarray(x, dtype) for x in (precisions, pulls, centre, scales)]

    def potential(point: dict[str, Array]) -> Array:
        matrices, linear, middle, scale = given
        log_tau = point["log_tau"]
        mean, tau = point["flat"][prior.seen] - middle, jnp.exp(log_tau)
        residual = linear - matrices @ mean
        inner = jnp.eye(size) + tau[:, None] * matrices * tau
        lower, turned = jnp.linalg.cholesky(inner), tau * residual
        gain = jax.vmap(lambda low, right: right @ cho_solve((low, True), right))(lower, turned)
        logs = linear @ mean - (matrices @ mean) @ mean / 2 + gain / 2
        logs -= jnp.sum(jnp.log(jnp.diagonal(lower, axis1=1, axis2=2)), axis=1)
        of_tau = log_tau - (tau / scale) ** 2 / 2  # half-normal, in log tau
        return -jnp.sum(logs) - jnp.sum(of_tau) - prior.log_prior(point["flat"])

    noise = generator(rng_key).normal(size=(_CHAINS, size))
    starts = np.tile(prior.median, (_CHAINS, 1))
    starts[:, prior.seen] = centre + noise * np.sqrt(np.diag(covariance))
    first = {"flat": starts, "log_tau": np.log(np.tile(scales / 4, (_CHAINS, 1)))}
    dense = starts.shape[1] + size <= 50
    mcmc = MCMC(
        NUTS(potential_fn=potential, dense_mass=dense, target_accept_prob=0.95),
        num_warmup=_WARMUP, num_samples=_KEPT, num_chains=_CHAINS, chain_method="vectorized",
        progress_bar=False,
    )  # fmt: skip
    mcmc.run(
        jax.random.split(rng_key, _CHAINS),
        init_params={name: jnp.asarray(value, dtype) for name, value in first.items()},
    )
    chains = mcmc.get_samples(group_by_chain=True)
    worst = max(float(np.max(split_gelman_rubin(np.asarray(x)))) for x in chains.values())
    mixing = [Finding("mixing", True, (
        f"The chains disagree (R-hat {worst:.2f}). Pool more holders, or take a smaller spread=."
    ))] if not worst < _MIXED else []  # fmt: skip
    drawn = {name: np.asarray(x, np.float64) for name, x in mcmc.get_samples().items()}
    tau, flat = np.exp(drawn["log_tau"]), drawn["flat"]
    rng, holders = generator(jax.random.fold_in(rng_key, 1)), []
    mean = flat[:, prior.seen]
    for precision, pull in zip(precisions, pulls, strict=True):
        # Normal given the population, with precision P + 1 / tau^2.
        residual = pull - (mean - centre) @ precision
        inner = np.eye(size) + tau[:, :, None] * precision * tau[:, None]
        upper = np.linalg.cholesky(inner).swapaxes(1, 2)
        right = np.stack(
            [
                np.linalg.solve(upper.swapaxes(1, 2), (tau * residual)[..., None])[..., 0],
                rng.normal(size=mean.shape),
            ]
        ).sum(0)
        holders.append(mean + tau * np.linalg.solve(upper, right[..., None])[..., 0])
    return (flat, np.stack(holders, 1), tau), mixing


def _with_holders(
    source: Any, prior: ModelPrior, random: str, spread: float, drawn: tuple[np.ndarray, ...]
) -> dict[str, Any]:
    """Arguments of the posterior with latents of the population and of each holder."""

    def sites(flat: np.ndarray, holders: np.ndarray, tau: np.ndarray) -> Values:
        dtype = jnp.result_type(float)
        found = dict(prior.constrain(jnp.asarray(flat, dtype)))
        rows = np.repeat(flat[:, None], holders.shape[1], axis=1)
        rows[:, :, prior.seen] = holders
        own = prior.constrain(jnp.asarray(rows.reshape(-1, flat.shape[1]), dtype))
        start = 0
        for name, shape in prior.likelihood(*prior.nothing).sites.items():
            stop = start + math.prod(shape)
            found[f"{name}_{random}"] = own[name].reshape(*holders.shape[:2], *own[name].shape[1:])
            found[f"{name}_{random}_sd"] = jnp.asarray(
                tau[:, start:stop].reshape(-1, *shape), dtype
            )
            start = stop
        return found

    def of_prior(rng_key: Array, number: int) -> Values:
        rng, (_, holders, tau) = generator(rng_key), drawn
        flat = prior.vectors(*prior.nothing, rng_key)(rng_key, number)
        scale = spread * np.sqrt(np.diag(prior.decoded.covariance))
        tau = np.abs(rng.normal(size=(number, tau.shape[1]))) * scale
        shape = number, holders.shape[1], tau.shape[1]
        return sites(flat, flat[:, None, prior.seen] + tau[:, None] * rng.normal(size=shape), tau)

    return {
        "draws": SiteDraws(sites(*drawn)), "prior": of_prior, "unconstrain": dict,
        **source.fixed_parts,
    }  # fmt: skip

"""Posterior draws for ArviZ, marked with what they have spent."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from numpyro_dp.posterior._draws import draws_by_name
from numpyro_dp.privacy.plan import PrivacyReport

__all__ = ["to_arviz"]

_INDEPENDENT = "independent draws of a differentially private posterior"
_NEVER = "observed_data holds private records: never publish it"


def to_arviz(
    samples: dict[str, Any],
    privacy: PrivacyReport,
    *,
    posterior_predictive: dict[str, Any] | None = None,
    sensitive_observed_data: dict[str, Any] | None = None,
    coords: dict[str, Any] | None = None,
    dims: dict[str, Any] | None = None,
    group_by_chain: bool = False,
) -> Any:
    """Returns draws in the form that ArviZ takes.

    Independent draws are one chain, whose R-hat says nothing. Dots replace slashes in site names.

    Args:
        samples: Draws by site: ``posterior_samples``, ``Predictive``, ``DPMCMC.get_samples``.
        privacy: ``result.privacy`` of the run behind the draws.
        posterior_predictive: Draws of observed sites, for a group of their own.
        sensitive_observed_data: The private records by site, without an axis of draws, for plots
            that you keep to yourself. By default they are left out.
        coords: Labels by dimension, as ArviZ takes them.
        dims: Names of the dimensions by site, as ArviZ takes them.
        group_by_chain: Whether draws have leading axes of chains and of draws.

    Returns:
        An ``InferenceData`` (ArviZ before 1.0) or a ``DataTree``, with what was spent in ``attrs``.

    Raises:
        ImportError, TypeError, ValueError: Without ArviZ, or if draws or report are not as above.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget
        >>> from numpyro_dp.estimators import aligned
        >>> from numpyro_dp.posterior import posterior_samples
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> guide = AutoDiagonalNormal(model)
        >>> svi = DPSVI(model, guide, optax.adam(0.05), estimator=aligned(), clip_norm=2.0,
        ...             sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5))
        >>> result = svi.run(jax.random.key(0), 200, jax.numpy.ones(1000), progress_bar=False)
        >>> draws = posterior_samples(jax.random.key(2), guide, result.params, 500)
        >>> tree = to_arviz(draws, result.privacy)
        >>> tree["posterior"]["mean"].shape, tree.attrs["delta"], tree.attrs["relation"]
        ((1, 500), 1e-05, 'add_or_remove_one')

    Guarantee:
        Reads draws and report alone, and no record. What it returns may be published if
        ``samples`` and ``posterior_predictive`` may: never with ``sensitive_observed_data``, and
        not with pointwise likelihoods or predictions beside which private rows could be told.
    """
    spent = _attributes(privacy, group_by_chain)
    groups = _groups(samples, posterior_predictive, sensitive_observed_data, group_by_chain)
    tree = _from_dict(groups, coords, dims)
    if "observed_data" in groups:
        spent["sensitive"] = tree["observed_data"].attrs["sensitive"] = _NEVER
    for part in (tree, *(tree[group] for group in groups if group != "observed_data")):
        part.attrs.update(spent)
    return tree


def _groups(
    samples: Any, predictive: Any, records: Any, grouped: bool
) -> dict[str, dict[str, np.ndarray]]:
    groups = {"posterior": _chains(samples, "samples", grouped)}
    if predictive is not None:
        groups["posterior_predictive"] = _chains(predictive, "posterior_predictive", grouped)
    if records is not None:
        groups["observed_data"] = {_name(key): np.asarray(value) for key, value in records.items()}
    return groups


def _chains(samples: dict[str, Any], what: str, grouped: bool) -> dict[str, np.ndarray]:
    """Draws by published name, with axes of chains and draws."""
    found = draws_by_name(samples, what)
    if not grouped:
        return {_name(name): value[None] for name, value in found.items()}
    lengths = {name: value.shape[1:2] for name, value in found.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        raise ValueError(
            f"Expected {what} with two leading axes, of chains and of draws, for "
            f"group_by_chain=True, got the shapes { {n: v.shape for n, v in found.items()} }."
        )
    return {_name(name): value for name, value in found.items()}


def _name(name: str) -> str:
    return name.replace("/", ".")


def _attributes(privacy: PrivacyReport, chains: bool) -> dict[str, Any]:
    """What was spent, as text and numbers that netCDF can hold."""
    if not isinstance(privacy, PrivacyReport):
        raise TypeError(
            f"Expected privacy=result.privacy, got {type(privacy).__name__}. It says what the "
            "draws have spent; for draws of another origin use arviz.from_dict."
        )
    return {
        "draws": "chains of a differentially private sampler" if chains else _INDEPENDENT,
        "epsilon": float(privacy.epsilon),
        "delta": float(privacy.delta),
        "relation": privacy.relation,
        "accountant": privacy.accountant,
        "num_steps": int(privacy.num_steps),
        "privacy": str(privacy),
        "inference_library": "numpyro_dp",
    }


def _from_dict(groups: dict[str, dict[str, np.ndarray]], coords: Any, dims: Any) -> Any:
    dims = dims and {_name(name): axes for name, axes in dims.items()}
    try:
        import arviz
    except ImportError as error:
        raise ImportError(
            "Expected ArviZ to be installed for to_arviz, got no module. Install it with "
            'pip install "numpyro-dp[plot]".'
        ) from error
    if "data" in inspect.signature(arviz.from_dict).parameters:  # 1.0 and later
        return arviz.from_dict(groups, coords=coords, dims=dims)
    return arviz.from_dict(**groups, coords=coords, dims=dims)

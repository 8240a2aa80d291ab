"""Posterior draws as arrays by name, and for ArviZ, with the privacy report as attributes."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from numpyro_dp._validate import check_int
from numpyro_dp.core import PyTree, Values
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.privacy.statement import Statement

_INDEPENDENT = "independent draws of a differentially private posterior"
_NEVER = "observed_data holds private records: never publish it"


def to_arviz(
    samples: Values,
    privacy: PrivacyReport | Statement,
    *,
    posterior_predictive: Values | None = None,
    sensitive_observed_data: Values | None = None,
    coords: Mapping[str, object] | None = None,
    dims: Mapping[str, object] | None = None,
    group_by_chain: bool = False,
) -> Any:
    """Converts posterior draws to the data structure of ArviZ.

    Independent draws become one chain. Its R-hat has no meaning. Site names get dots in place of
    slashes.

    Args:
        samples: Draws by site, from ``posterior_samples``, ``Predictive`` or
            ``DPMCMC.get_samples``.
        privacy: ``result.privacy`` of the run that gave the draws.
        posterior_predictive: Draws of observed sites, for a separate group.
        sensitive_observed_data: The private records by site, without an axis of draws, for plots
            that you do not publish. By default they are left out.
        coords: ``coords`` of ArviZ: labels by dimension.
        dims: ``dims`` of ArviZ: names of dimensions by site.
        group_by_chain: Whether draws have two leading axes, of chains and of draws.

    Returns:
        An ``InferenceData`` (ArviZ before 1.0) or a ``DataTree``. Its ``attrs`` hold the privacy
        report.

    Raises:
        ImportError: If ArviZ is not installed.
        TypeError, ValueError: If draws or report have the wrong type or shape.

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
        Reads only its arguments. The result may be published if ``samples`` and
        ``posterior_predictive`` may. Do not publish it with ``sensitive_observed_data``. Do not
        publish pointwise likelihoods, or predictions that could reveal private rows.
    """
    if not isinstance(privacy, PrivacyReport | Statement):
        raise TypeError(
            f"privacy must be a PrivacyReport, got {type(privacy).__name__}. to_arviz stores it "
            "with the draws. Pass result.privacy of the run. For other draws use arviz.from_dict."
        )
    spent = {
        "draws": "chains of a differentially private sampler" if group_by_chain else _INDEPENDENT,
        "epsilon": float(privacy.epsilon),
        "delta": float(privacy.delta),
        "relation": privacy.relation,
        "accountant": privacy.accountant,
        "num_steps": int(privacy.num_steps),
        "privacy": str(privacy),
        "inference_library": "numpyro_dp",
    }  # text and numbers, which netCDF can store
    groups = {"posterior": _chains(samples, "samples", group_by_chain)}
    if posterior_predictive is not None:
        groups["posterior_predictive"] = _chains(
            posterior_predictive, "posterior_predictive", group_by_chain
        )
    if sensitive_observed_data is not None:
        groups["observed_data"] = {
            _name(site): np.asarray(value) for site, value in sensitive_observed_data.items()
        }
    dims = dims and {_name(site): axes for site, axes in dims.items()}
    try:
        arviz = importlib.import_module("arviz")
    except ImportError as error:
        raise ImportError(
            'to_arviz needs ArviZ, which is not installed. Run pip install "numpyro-dp[plot]".'
        ) from error
    if "data" in inspect.signature(arviz.from_dict).parameters:  # 1.0 and later
        tree = arviz.from_dict(groups, coords=coords, dims=dims)
    else:
        tree = arviz.from_dict(**groups, coords=coords, dims=dims)
    if "observed_data" in groups:
        spent["sensitive"] = tree["observed_data"].attrs["sensitive"] = _NEVER
    for part in (tree, *(tree[group] for group in groups if group != "observed_data")):
        part.attrs.update(spent)
    return tree


def draws_by_name(samples: object, what: str = "samples") -> dict[str, np.ndarray]:
    """Returns the leaves by name, after checking that each has the same leading axis of draws.

    Dots join the names of nested entries.

    Raises:
        TypeError: If ``samples`` is not a dict, or holds no arrays.
        ValueError: If sites have different numbers of draws.
    """
    if not isinstance(samples, dict) or not jax.tree.leaves(samples):
        raise TypeError(
            f"{what} must be a dict of draws by site name and must not be empty, got "
            f"{type(samples).__name__}. Pass the draws of posterior_samples or Predictive."
        )
    draws = named_leaves(samples)
    shapes = {name: value.shape for name, value in draws.items()}
    sizes = {shape[:1] for shape in shapes.values()}
    if len(sizes) > 1 or () in sizes:
        raise ValueError(
            f"Every site in {what} must have the same number of draws along its first axis, got "
            f"shapes {shapes}. Pass the draws of one call of posterior_samples or Predictive."
        )
    check_int(f"number of draws in {what}", sizes.pop()[0], low=1)
    return draws


def named_leaves(values: PyTree) -> dict[str, np.ndarray]:
    """Leaves of a pytree by name. Dots join the names of nested entries."""
    leaves = jax.tree_util.tree_flatten_with_path(values)[0]
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves
    }
    if len(found) < len(leaves):
        raise ValueError(f"Two entries have the same name with dots, among {sorted(found)}.")
    return found


def _chains(samples: Values, what: str, grouped: bool) -> dict[str, np.ndarray]:
    """Draws by their names for ArviZ, with axes of chains and draws."""
    found = draws_by_name(samples, what)
    if not grouped:
        return {_name(name): value[None] for name, value in found.items()}
    lengths = {value.shape[1:2] for value in found.values()}
    if len(lengths) != 1 or () in lengths:
        raise ValueError(
            f"group_by_chain=True needs two leading axes, of chains and of draws, in {what}, got "
            f"shapes { {n: v.shape for n, v in found.items()} }. Omit it for independent draws."
        )
    return {_name(name): value for name, value in found.items()}


def _name(name: str) -> str:
    return name.replace("/", ".")

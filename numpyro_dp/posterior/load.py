"""``load``: a posterior from a file."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from numpyro import handlers

from numpyro_dp.posterior.diagnosis import Finding
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.saved import part_of, read_posterior
from numpyro_dp.privacy.statement import Statement

__all__ = ["load"]


def load(path: Any, model: Callable[..., Any] | None = None) -> Posterior:
    """Reads a posterior that :meth:`Posterior.save` wrote, in any process and without the records.

    ``sample``, ``summary``, ``diagnose`` and ``to_arviz`` work as before. ``privacy`` is the
    :class:`~numpyro_dp.accounting.Statement` of the run. A prior cannot be drawn from.

    Args:
        path: The file.
        model: The model of the run, for ``predict``. Its static keywords are arguments of
            ``predict``.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If the file is damaged, or is not a posterior of this version.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import fit
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> import pathlib, tempfile
        >>> from numpyro_dp import load
        >>> path = pathlib.Path(tempfile.mkdtemp(), "mean.posterior")
        >>> posterior = fit(model, jnp.full(2000, 0.5), epsilon=1.0, rng_key=jax.random.key(0))
        >>> posterior.save(path)
        >>> loaded = load(path, model)
        >>> key = jax.random.key(1)
        >>> bool((loaded.sample(key, 5)["mean"] == posterior.sample(key, 5)["mean"]).all())
        True
    """
    if model is not None and not callable(model):
        raise TypeError(f"Expected model as a function, got {type(model).__name__}.")
    return read_posterior(path, functools.partial(_made, model))


def _made(
    model: Callable[..., Any] | None, draws: Any, about: dict[str, Any], arrays: dict[str, Any]
) -> Posterior:
    """The posterior of a file."""
    params, shares = part_of(arrays, "params"), part_of(arrays, "shares")
    texts = about["method"], *about["notes"]
    if not all(isinstance(text, str) for text in texts) or set(shares) != set(about["latents"]):
        raise ValueError("Texts or shares of the prior are missing.")
    return Posterior(
        model=handlers.substitute(model, data=params) if model and params else model,
        draws=draws, prior=None, unconstrain=None,
        privacy=Statement.from_json(json.dumps(about["privacy"])),
        method=about["method"], notes=tuple(about["notes"]), converged=bool(about["converged"]),
        findings=tuple(Finding(*each) for each in about["findings"]), params=params,
        released=part_of(arrays, "released"), shares=shares,
    )  # fmt: skip

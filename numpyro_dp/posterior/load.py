"""``load``: a posterior from a file."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

from numpyro_dp.model.public import PublicValues
from numpyro_dp.posterior.densities import model_of_run
from numpyro_dp.posterior.diagnosis import Finding
from numpyro_dp.posterior.draws import SiteDraws
from numpyro_dp.posterior.from_model import ModelSource
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.released import Likelihood
from numpyro_dp.posterior.saved import FORMAT, part_of, read_file
from numpyro_dp.privacy.statement import Statement


def load(
    path: str | os.PathLike[str],
    model: Callable[..., object] | None = None,
    **static_kwargs: object,
) -> Posterior:
    """Reads a posterior that :meth:`Posterior.save` wrote, in any process and without the records.

    ``summary`` and ``diagnose`` give the same as before. ``sample`` draws from the 4,000 draws of
    the file, and repeats them if you ask for more. ``privacy`` is the
    :class:`~numpyro_dp.accounting.Statement` of the run. A prior cannot be drawn from.

    Args:
        path: The file.
        model: The model of the run, for ``predict``.
        **static_kwargs: Static keywords of the run's driver.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If the file is damaged, or is not a posterior of this version, or if the model
            has another prior or likelihood than that of the run. Its log densities at invented
            records tell. A warning says so if the file has none, as for arguments of a class of
            your own.

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
        >>> loaded.sample(jax.random.key(1), 5)["mean"].shape
        (5,)
    """
    if model is not None and not callable(model):
        raise TypeError(f"Expected model as a function, got {type(model).__name__}.")
    pathlib.Path(path).stat()  # raises if there is no file
    try:
        about, arrays = read_file(path)
        known = {name: about.get(name) for name in FORMAT}
        found = _made(about, arrays) if known == FORMAT else None
    # A damaged file may break JSON and NumPy in any way.
    except Exception as error:
        raise ValueError(
            f"{path} is not a saved posterior, or the file is damaged: {error} Save the posterior "
            "again, or copy the file again."
        ) from error
    if found is None:
        raise ValueError(
            f"Expected {path} as {FORMAT}, got {known}. Read it with the numpyro_dp that wrote it."
        )
    if model is None:
        return found
    fn, saved = functools.partial(model, **static_kwargs), about["model"]
    if saved is None:
        warnings.warn(
            f"{path} does not tell which model it comes from, so another model would not be "
            "noticed. Make sure that this is the model of the run.", stacklevel=2,
        )  # fmt: skip
    else:
        fn = model_of_run(fn, found._params, saved)
    found._model = fn
    if saved is not None and found._likelihood is not None and saved.get("alone"):
        source = ModelSource.of_file(fn, saved, found._params, found._public)
        supports = source.supports(found._likelihood.sites)
        found._source = source
        found._likelihood = dataclasses.replace(found._likelihood, supports=supports)
    return found


def _made(about: dict[str, Any], arrays: dict[str, Any]) -> Posterior:
    """The posterior of a file."""
    draws, shares, params, released = (
        part_of(arrays, part) for part in ("draws", "shares", "params", "released")
    )
    public = about["public"]
    if public is not None:
        public = PublicValues.from_json(public)
        public.trust(params.values())
    texts = about["method"], *about["notes"]
    shapes = {name: share.shape for name, share in shares.items()}
    if not all(isinstance(text, str) for text in texts) or not shapes:
        raise ValueError("Texts or shares of the prior are missing.")
    same_number = len(set(map(len, draws.values()))) == 1
    if not same_number or shapes != {name: x.shape[1:] for name, x in draws.items()}:
        raise ValueError("Draws do not fit the shares of the prior.")
    likelihood = about.get("likelihood")
    if likelihood is not None:
        likelihood = Likelihood(
            {name: tuple(shape) for name, shape in likelihood["sites"].items()},
            arrays["likelihood/precision"],
            arrays["likelihood/linear"],
            bool(likelihood["approximate"]),
        )
        size = sum(math.prod(shape) for shape in likelihood.sites.values())
        if likelihood.precision.shape != (size, size) or likelihood.linear.shape != (size,):
            raise ValueError("The likelihood does not fit its latents.")
    found = Posterior(
        model=None, draws=SiteDraws(draws), prior=None, unconstrain=None,
        privacy=Statement.from_json(json.dumps(about["privacy"])),
        method=about["method"], notes=tuple(about["notes"]), converged=bool(about["converged"]),
        findings=tuple(Finding(*each) for each in about["findings"]), params=params,
        released=released, public=public, densities=lambda: about["model"],
        likelihood=likelihood,
    )  # fmt: skip
    found.__dict__.update(_fixed_draws=draws, _prior_shares=shares)  # equal summaries
    return found.named(**about.get("coords", {}))

"""Log densities of a model at fixed points, which tell whether two models are the same.

A saved posterior keeps them, so that :func:`~numpyro_dp.load` can refuse another prior or another
likelihood. A hash of the traced program would differ between versions of JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_dp.core import PyTree, Site, Sites
from numpyro_dp.model.held import is_array
from numpyro_dp.model.records import Arguments
from numpyro_dp.model.separation import log_density, one_record
from numpyro_dp.posterior.inference_data import named_leaves

Densities = dict[str, Any]  # the plate, shapes of the arguments, and log densities by site

_POINTS = 6
_TOLERANCE = 2e-5  # of float32 on other processors
_SHAPE, _DTYPE = "shape", "dtype"
_REMEDY = (
    "Load the posterior with the model of the run and its static keywords: "
    "load(path, model, num_groups=5)."
)


def densities_of_model(
    model: Callable[..., object], plate: str, arguments: Arguments
) -> Densities | None:
    """Returns log densities of all sites at invented records, or ``None`` if they cannot be found.

    Args:
        model: The model, with static keywords and parameters filled in.
        plate: Name of the plate over records.
        arguments: Arguments of the model, with a placeholder for the records.
    """
    try:
        shapes = _described(tuple(arguments))
        sites = _densities(model, plate, shapes)
    # Arguments of a class that JSON does not know, or a model that does not run on invented values.
    except Exception:
        return None
    return {"plate": plate, "arguments": shapes, "sites": sites}


def model_of_run(
    model: Callable[..., object], params: dict[str, np.ndarray], saved: Densities
) -> Callable[..., object]:
    """Returns a model with the parameters of a run, after checking that it is the model of the run.

    Args:
        model: The model, with static keywords filled in.
        params: Leaves of its parameters by name, as a file holds them.
        saved: What :func:`densities_of_model` returned for the model of the run.

    Raises:
        ValueError: If it has other parameters, or other log densities.
    """
    plate, shapes, sites = saved["plate"], saved["arguments"], saved["sites"]
    try:
        sites_of_model = _trace(model, plate, shapes, 0).items()
        own = {name: site["value"] for name, site in sites_of_model if site["type"] == "param"}
        names = named_leaves(own)
        if names.keys() == params.keys():
            filled = jax.tree.unflatten(jax.tree.structure(own), [params[name] for name in names])
            model = handlers.substitute(model, data=filled) if filled else model
        found = _densities(model, plate, shapes)
    except Exception as error:
        raise ValueError(
            f"The model does not run on arguments like those of the run, {shapes}: {error} "
            f"{_REMEDY}"
        ) from error
    every = sorted(found.keys() | sites.keys())
    other = other_densities({"sites": found}, {"sites": sites}, every)
    other += sorted(names.keys() ^ params.keys())
    if other:
        raise ValueError(
            f"This is another model than that of the run: {other} are missing, or have other "
            f"densities. Draws would be wrong for it. {_REMEDY}"
        )
    return model


def other_densities(one: Densities, other: Densities, names: Iterable[str]) -> list[str]:
    """Names of those sites that only one has, or whose densities differ."""
    own, found = one["sites"], other["sites"]
    both = own.keys() & found.keys()
    return [name for name in names if name not in both or not _is_close(own[name], found[name])]


def _is_close(*values: list[float | None]) -> bool:
    """Whether log densities are equal. ``None`` becomes NaN, and is equal to itself."""
    one, other = (np.array(each, np.float64) for each in values)
    same = one.shape == other.shape
    return same and np.allclose(one, other, _TOLERANCE, _TOLERANCE, equal_nan=True)


def _described(value: PyTree) -> PyTree:
    """Arguments with a dict in place of each array, as JSON.

    Raises:
        TypeError: If an argument is of another class.
    """
    if is_array(value):
        dtype = jax.dtypes.canonicalize_dtype(value.dtype).name
        return {_SHAPE: list(np.shape(value)), _DTYPE: dtype}
    if isinstance(value, Mapping):
        return {"dict": {str(name): _described(each) for name, each in value.items()}}
    if type(value) in (list, tuple):
        return [_described(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{type(value).__name__} is not known.")


def invented(shapes: PyTree, point: int) -> PyTree:
    """Arguments that :func:`_described` described, with invented values."""
    if isinstance(shapes, list):
        return [invented(each, point) for each in shapes]
    if not isinstance(shapes, dict):
        return shapes
    if "dict" in shapes:
        return {name: invented(each, point) for name, each in shapes["dict"].items()}
    size, dtype = int(np.prod(shapes[_SHAPE])), jnp.dtype(shapes[_DTYPE])
    if jnp.issubdtype(dtype, jnp.floating):
        found = _numbers(size, point) if point else np.ones(size)
    else:  # labels, counts, groups
        found = (np.arange(size) + point + 1) % (2 if jnp.issubdtype(dtype, jnp.bool_) else 4)
    return jnp.asarray(found.reshape(shapes[_SHAPE]), dtype)


def _numbers(size: int, point: int) -> np.ndarray:
    """Fixed numbers between 0.1 and 0.9."""
    return 0.5 + 0.4 * np.sin(1 + 1.7 * np.arange(size) + point)


def _densities(
    model: Callable[..., object], plate: str, shapes: PyTree
) -> dict[str, list[float | None]]:
    """Log densities by site, at each point. ``None`` if one is not finite, for JSON."""
    found: dict[str, list[float | None]] = {}
    with numpyro.validation_enabled(False):  # invented outcomes may be impossible
        for point in range(_POINTS):
            for name, site in _trace(model, plate, shapes, point).items():
                if site["type"] == "sample":
                    value = float(log_density(site))
                    found.setdefault(name, []).append(value if np.isfinite(value) else None)
    return found


def _trace(model: Callable[..., object], plate: str, shapes: PyTree, point: int) -> Sites:
    args, kwargs = invented(shapes, point)
    middle = functools.partial(_middle, point=point)
    fn = handlers.substitute(one_record(model, plate), substitute_fn=middle)
    with jax.default_matmul_precision("highest"):  # the same on all processors
        return handlers.trace(handlers.seed(fn, jax.random.key(0))).get_trace(*args, **kwargs)


def _middle(site: Site, point: int) -> Array | None:
    """A fixed value of a latent site, inside of its support."""
    if site["type"] != "sample" or site["value"] is not None:
        return None
    fn = site["fn"]
    if fn.support.is_discrete:
        values = fn.enumerate_support(expand=True)
        return values[min(point, len(values) - 1)]
    transform = biject_to(fn.support)
    shape = transform.inverse_shape(fn.shape())
    numbers = _numbers(int(np.prod(shape)), point).reshape(shape) - 0.5
    return transform(jnp.asarray(numbers, jnp.result_type(float)))

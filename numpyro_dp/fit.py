"""``fit``: a private posterior from one call."""

from __future__ import annotations

import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable

import jax
import optax
from jax import Array
from numpyro import handlers
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp.core import Args, Kwargs, PyTree
from numpyro_dp.laplace.dplaplace import DPLaplace, share_programs
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.model.frontend import arguments_key
from numpyro_dp.model.held import is_array
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.structure import find_data_plate
from numpyro_dp.model.units import number_of_units, split_unit
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.sampling import FullBatch, Poisson
from numpyro_dp.run.checkpoint import traced
from numpyro_dp.run.settings import Privacy
from numpyro_dp.vi.dpsvi import DPSVI

__all__ = ["fit"]

_STEPS, _BATCH, _CLIP = 2000, 1000, 1.0
# Drivers of the last calls, because compiling their programs takes longer than a run.
_kept: OrderedDict[Hashable, DPLaplace] = OrderedDict()
_MOST_KEPT = 8
# Keywords of other libraries and drivers, which would go to the model.
_SLIPS = {
    "eps": "Pass epsilon=.",
    "target_epsilon": "Pass epsilon=.",
    "seed": "Pass rng_key=jax.random.key(0).",
    "key": "Pass rng_key=jax.random.key(0).",
    "num_steps": "It chooses the number of steps. Use DPSVI to choose yourself.",
    "clip_norm": "It chooses clip norms. Use DPSVI to choose yourself.",
    "privacy": "Pass budget=, public= and max_rows_per_unit=, or use DPLaplace.",
}


def fit(
    model: Callable[..., object],
    *args: PyTree,
    epsilon: float | None = None,
    delta: float | None = None,
    budget: PrivacyBudget | None = None,
    rng_key: Array,
    public: PyTree = (),
    progress_bar: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    max_rows_per_unit: int | None = None,
    robust: bool = False,
    **kwargs: PyTree,
) -> Posterior:
    r"""Fits a NumPyro model with a method that it chooses, and returns a private posterior.

    The driver is :class:`~numpyro_dp.DPLaplace` if it takes the model. Otherwise it is
    :class:`~numpyro_dp.DPSVI` with a mean-field guide. ``print`` of the result shows the method and
    the reason. Choice and settings depend on model and shapes alone. For devices, streaming and
    other settings, use the driver itself.

    The first call with a model compiles its programs. Later calls with the same function and shapes
    use them again, for any budget.

    Args:
        model: A NumPyro model with a plate over records.
        *args: Arguments of the model, with the whole data set: arrays with one row for each record.
        epsilon: Privacy to spend, under adding or removing one record.
        delta: By default :math:`N^{-1.1}`, at most .01, for N records.
        budget: Instead of epsilon and delta, such as ``total.after(...)`` or the budget of a
            :class:`~numpyro_dp.Ledger`.
        rng_key: Key of draws from the posterior, not of noise.
        public: Names of public arguments, or public arrays that the model holds.
        progress_bar: Shows what is being done, releases or steps, and the epsilon spent.
        checkpoint: Folder for the progress, as for :meth:`numpyro_dp.DPSVI.run`.
        max_rows_per_unit: As for :class:`~numpyro_dp.Privacy`: makes a unit of several rows, such
            as a person, one record. Pass ``unit=ids`` too, an array with the id of each row.
        robust: As for :class:`~numpyro_dp.DPLaplace`: intervals for the best fit of a model that
            need not be right, or of units whose rows depend on each other.
        **kwargs: Keyword arguments of the model.

    Raises:
        UnsupportedModelError: If the model cannot be private as it is written, or not with
            ``robust``. The call then spends no budget.
        TypeError, ValueError: Name the value, the range and the remedy.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import fit
        >>> def model(y):
        ...     share = numpyro.sample("share", dist.Beta(1, 1))
        ...     with numpyro.plate("people", len(y)):
        ...         numpyro.sample("y", dist.Bernoulli(share), obs=y)
        >>> y = jax.random.bernoulli(jax.random.key(1), 0.3, (2000,)) * 1
        >>> posterior = fit(model, y, epsilon=1.0, rng_key=jax.random.key(0))
        >>> bool(abs(posterior.sample(jax.random.key(2), 1000)["share"].mean() - 0.3) < 0.1)
        True

    Guarantee:
        The guarantee of the driver, at this epsilon and delta.
    """
    _check_keywords(model, kwargs)
    if (epsilon is None) == (budget is None) or (budget is not None and delta is not None):
        raise TypeError(
            "Expected either epsilon (and delta) or budget, got "
            f"epsilon={epsilon}, delta={delta}, budget={budget}."
        )
    args, kwargs = as_arrays(args, kwargs)
    ids, own = split_unit(kwargs, max_rows_per_unit, model)
    number = find_data_plate(model, args, own)[1]
    if ids is not None:
        number = number_of_units(ids, number)
    if epsilon is not None:
        budget = PrivacyBudget(epsilon, delta)
    privacy = Privacy(public=public, max_rows_per_unit=max_rows_per_unit)
    laplace = DPLaplace(model, budget=budget, privacy=privacy, robust=robust)
    laplace = _with_programs(laplace, args, kwargs)
    try:
        laplace.plan(*args, **kwargs)  # refuses a model before the budget is touched
    except UnsupportedModelError as refusal:
        if robust:
            raise
        reason = str(refusal)
    else:
        return laplace.run(
            rng_key, *args, progress_bar=progress_bar, checkpoint=checkpoint, **kwargs
        )
    rate = _BATCH / number
    svi = DPSVI(
        model, AutoDiagonalNormal(model), optax.adam(5e-3), clip_norm=_CLIP,
        sampler=FullBatch() if rate >= 1 else Poisson(rate), budget=budget,
        privacy=privacy,
    )  # fmt: skip
    result = svi.run(
        rng_key, _STEPS, *args, progress_bar=progress_bar, checkpoint=checkpoint, **kwargs
    )
    found = result.posterior
    note = f"DPLaplace does not take this model: {reason.split('. ')[0]}."
    found.notes = (*found.notes, note)
    return found


def _check_keywords(model: Callable[..., object], kwargs: Kwargs) -> None:
    """Raises TypeError for a keyword that was meant for ``fit``."""
    for slip, remedy in _SLIPS.items():
        if slip in kwargs and slip not in inspect.signature(model).parameters:
            raise TypeError(f"fit has no argument {slip!r}. {remedy}")


def _with_programs(driver: DPLaplace, args: Args, kwargs: Kwargs) -> DPLaplace:
    """Gives a driver the compiled programs of an earlier call with the same model, and keeps it."""
    model, privacy = driver.model, driver.settings.privacy
    rows, public = privacy.max_rows_per_unit, privacy.public
    names = (public,) if isinstance(public, str) else tuple(jax.tree.leaves(public))
    try:
        shapes, computed = arguments_key(args, kwargs, rows), _computed(model, args, kwargs, rows)
        key = model, shapes, computed, rows, names, driver.robust
        earlier = _kept.pop(key, None)
    except Exception:  # an array among the public values, or a model that the driver will refuse
        return driver
    if earlier is not None:
        share_programs(driver, earlier)
    _kept[key] = driver
    while len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    return driver


def _computed(
    model: Callable[..., object], args: Args, kwargs: Kwargs, max_rows: int | None
) -> Hashable:
    """What a model computes for arguments of these shapes.

    A function may read globals that have changed since its last call.
    """
    kwargs = split_unit(kwargs, max_rows)[1]
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
    sites = []

    def densities(key: Array, arrays: list[Array]) -> PyTree:
        given = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            given[place] = array
        args, kwargs = jax.tree.unflatten(treedef, given)
        trace = handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)
        for site in trace.values():
            observed, frames = site.get("is_observed"), site.get("cond_indep_stack")
            sites.append((site["name"], site["type"], type(site["fn"]), observed, str(frames)))
        draws = [site for site in trace.values() if site["type"] == "sample"]
        scaled = [(site["scale"], site["fn"].log_prob(site["value"])) for site in draws]
        return scaled, [site["value"] for site in trace.values()]

    # As JAX takes them: it would warn about 64 bits.
    dtypes = [jax.dtypes.canonicalize_dtype(leaves[place].dtype) for place in places]
    shapes = [jax.ShapeDtypeStruct(leaves[place].shape, kind)
              for place, kind in zip(places, dtypes, strict=True)]  # fmt: skip
    program = traced(densities, (jax.random.key(0), shapes), ())[0]
    return program, tuple(sites)

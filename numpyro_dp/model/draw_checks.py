"""Checks what a model draws, and what it does without outcomes, like its likelihood.

A prior is also drawn from, initial values are draws, and ``predict`` runs the model without
outcomes. Each of these may read other arrays than the likelihood does: the density of a prior, a
sampler that picks records, a branch on ``y is None``, a deterministic site, the first value of a
parameter.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import Predictive

from numpyro_dp._compat import Program, make_program
from numpyro_dp._tree import is_key, on_device
from numpyro_dp.core import Args, Arrays, Kwargs, NumPyroFn, PyTree, Site, Sites, Values
from numpyro_dp.model.density import Model
from numpyro_dp.model.dependence import inputs_of
from numpyro_dp.model.locals import start
from numpyro_dp.model.public import PublicValues
from numpyro_dp.model.records import Arguments, ModelStructure, split_arrays
from numpyro_dp.model.separation import altered, is_factor, traced

_NOT_OF_THE_RUN = (
    "which the run did not have, so the privacy report does not list it as public. Pass it as an "
    "argument of the model, or name it in public=[array] of fit or Privacy before the run. If it "
    "comes from no record, predict with numpyro.infer.Predictive(model, posterior.sample(key, n))."
)


def check_draws(model: NumPyroFn, structure: ModelStructure, shared: Arrays) -> None:
    """Raises if the prior, a draw of latents or outcomes, or a run without outcomes holds records.

    Args:
        model: The model, static keywords filled in.
        structure: Its structure. Arrays that the draws hold are added to its public values.
        shared: Public arrays among the arguments.

    Raises:
        UnsupportedModelError: If such a run reads an array that is not public, or calls the host.
    """
    layout, public = structure.layout, structure.public
    plate = structure.data_plate

    def drawn(fill: Callable[..., Arguments], *arrays: Array) -> PyTree:
        return _values(_drawn(model, plate, fill(arrays)), structure.latents)

    of_rows = functools.partial(drawn, lambda rows: layout.arguments(rows, shared))
    public.check("model, in a draw,", of_rows, *layout.one_row(), once=True)
    public.check("prior", lambda: _prior_and_slopes(model, structure, shared))
    for arguments in _without_outcomes(model, structure, shared):
        arrays, fill = split_arrays(arguments)
        try:
            program = _program(functools.partial(drawn, fill), *arrays)
        except Exception:  # The model does not run without them, and so `predict` does not either.
            continue
        public.check_program("model, without outcomes,", program, once=True)


def predict(
    model: NumPyroFn,
    public: PublicValues,
    rng_key: Array,
    latents: Values,
    args: Args,
    kwargs: Kwargs,
) -> dict[str, Array]:
    """Predicts like ``numpyro.infer.Predictive``, after checking what the model is about to read.

    Args:
        model: The model, static keywords and parameters filled in.
        public: What was accepted as public before the run.
        rng_key: Key of the predictions.
        latents: Draws of the latents, with a leading axis.
        args: Arguments of the model.
        kwargs: Keyword arguments of the model.

    Raises:
        UnsupportedModelError: If the model reads an array that is not public, or calls the host.
        ValueError: If the latents of the model have other shapes with these arguments.
    """
    arrays, fill = split_arrays(Arguments(args, kwargs))
    public = public.copy()

    def predicted(latents: Values, *arrays: Array | np.ndarray) -> PyTree:
        def value(site: Site) -> Array | None:
            found = latents.get(site["name"])
            if found is not None and found.shape != site["fn"].shape():
                raise ValueError(
                    f"The posterior has {site['name']!r} of shape {found.shape}, but with these "
                    f"arguments the model has {site['fn'].shape()}. Predict with as many columns "
                    "as the run had."
                )
            return found

        run = handlers.seed(handlers.substitute(model, substitute_fn=value), jax.random.key(0))
        return _values(fill(arrays).trace(run))

    def all_draws(rng_key: Array, latents: Values, arrays: PyTree) -> PyTree:
        predictive = Predictive(model, posterior_samples=latents)
        return fill(arrays).call(functools.partial(predictive, rng_key))

    one = {name: value[0] for name, value in latents.items()}
    try:
        program, run = _program(predicted, one, *arrays), jax.jit(all_draws)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        # The model reads values of its arguments, which are then constants of the program.
        public.trust(arrays)
        program, run = _program(lambda one: predicted(one, *arrays), one), all_draws
    public.check_program(
        "model, in a prediction,", program, no_new=_NOT_OF_THE_RUN, once=True, plain=True
    )
    # Traced like the program that was checked, so the model cannot tell the two apart.
    return run(rng_key, latents, arrays)


def _prior_and_slopes(model: NumPyroFn, structure: ModelStructure, shared: Arrays) -> PyTree:
    """The log prior and its derivatives up to the second, whose rules may hold other arrays."""
    own = Model(model, structure)
    trace = _drawn(model, structure.data_plate, structure.layout.placeholder(shared))
    params = {name: trace[name]["value"] for name in structure.params}
    sites = {name: trace[name] for name in structure.latents}
    shapes = {
        name: biject_to(site["fn"].support).inverse_shape(jnp.shape(site["value"]))
        for name, site in sites.items()
    }
    latents = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    slope = jax.value_and_grad(lambda latents: own.log_prior(latents, params, shared))
    return jax.jvp(slope, (latents,), (latents,))


def _program(fn: Callable[..., object], *args: PyTree) -> Program:
    return make_program(fn, *args, validated=False)[0]


def _drawn(model: NumPyroFn, plate: str, arguments: Arguments) -> Sites:
    """The trace of a run in which all sites are drawn. Sites without a sampler get some value."""
    return traced(altered(model, _redraw), plate, arguments, start=start)


def _values(trace: Sites, latents: tuple[str, ...] = ()) -> tuple[ArrayLike, ...]:
    """Numbers at all sites, and the latents in unconstrained coordinates."""
    sites = (s for s in trace.values() if s["type"] in ("sample", "deterministic", "param"))
    found = [x for site in sites for x in jax.tree.leaves(site["value"]) if _is_numeric(x)]
    found = [jax.random.key_data(x) if is_key(x) else x for x in found]
    for name in latents:
        with contextlib.suppress(NotImplementedError):
            found.append(biject_to(trace[name]["fn"].support).inv(trace[name]["value"]))
    return tuple(found)


def _is_numeric(value: object) -> bool:
    if is_key(value):
        return True
    try:
        return any(jnp.issubdtype(jnp.result_type(value), k) for k in (jnp.number, jnp.bool_))
    except TypeError:  # a text
        return False


def _redraw(msg: Site) -> None:
    """Draws all sites that have a sampler, also observed ones."""
    if msg["type"] != "sample" or is_factor(msg["fn"]):
        return
    with contextlib.suppress(NotImplementedError):
        key = jax.random.key(0)
        msg["value"], _ = msg["fn"](rng_key=key, sample_shape=(), sample_intermediates=True)
        msg["is_observed"] = False


def _without_outcomes(
    model: NumPyroFn, structure: ModelStructure, shared: Arrays
) -> list[Arguments]:
    """Arguments with ``None`` in place of the arrays that observed values come from.

    First all of them are ``None``, then each alone.
    """
    layout = structure.layout

    def observed(*rows: Array) -> Values:
        trace = traced(model, structure.data_plate, layout.arguments(rows, shared), start=start)
        return {name: trace[name]["value"] for name in structure.likelihood}

    rows = layout.one_row()
    found = set().union(*inputs_of(observed, *rows).values())
    ones = [on_device(np.ones(row.shape, row.dtype)) for row in rows]
    chosen = [found, *([each] for each in found if len(found) > 1)]
    return [
        layout.arguments(tuple(None if n in own else x for n, x in enumerate(ones)), shared)
        for own in chosen
        if own
    ]

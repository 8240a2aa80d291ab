"""All private or unstable names of JAX and NumPyro that this package uses, one function for each.

A release of JAX or NumPyro may change these names without notice. ``tests/test_compat.py`` has one
test for each function here, so a failing test names the change. Functions do not compare version
numbers. They check for the feature itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core
import numpyro
from jax import Array
from jax.extend.core import Primitive as Primitive
from jax.extend.random import define_prng_impl as define_prng_impl
from jax.typing import ArrayLike
from numpyro.distributions import MaskedDistribution
from numpyro.infer.autoguide import AutoGuide
from numpyro.primitives import Messenger

# JAX moved get_opaque_trace_state and its neighbours from jax.core to jax.extend.core.
_core: ModuleType = (
    jax.extend.core if hasattr(jax.extend.core, "get_opaque_trace_state") else jax.core
)

# Names of operations in a traced program. JAX documents none of them.
CALLS = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")  # call a program on their inputs
CALLED = ("jaxpr", "call_jaxpr")  # parameters that hold the program of such a call
RULED = ("checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")  # calls, but for derivatives
LOOPS = ("scan", "while", "cond")  # call programs on values other than their inputs
ITERATE_INSIDE = (  # loop inside, until each entry has converged or was accepted
    "random_gamma", "random_gamma_grad", "igamma", "igammac", "igamma_grad_a",
    "regularized_incomplete_beta", "eigh", "eig", "svd", "schur",
)  # fmt: skip
PLACES = {  # parameters of operations that are numbers of the program, and no shapes
    "slice": ("start_indices", "limit_indices"), "pad": ("padding_config",), "integer_pow": ("y",),
}  # fmt: skip
MOVES = (
    "reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "copy", "copy_p", "slice",
)  # fmt: skip
LOOKUPS = ("gather", "dynamic_slice")
HOST_CALLS = ("callback", "debug_print", "infeed", "outfeed", "ffi_call", "call_exported")
CUSTOM_BATCHING = "custom_vmap_call"


# Classes of JAX that it does not document: a variable or a literal, and an operation of a program.
Variable = Any
Equation = Any
ShapedArray = jax.core.ShapedArray  # shape and dtype of a variable


class Program(NamedTuple):
    """A traced program (a jaxpr), independent of JAX's own class.

    Attributes:
        inputs: Input variables.
        constants: Pairs of a variable and its constant array.
        equations: Operations, each with ``primitive``, ``params``, ``invars`` and ``outvars``.
        outputs: Output variables or literals.
    """

    inputs: Sequence[Variable]
    constants: Sequence[tuple[Variable, ArrayLike]]
    equations: Sequence[Equation]
    outputs: Sequence[Variable]


def as_program(value: object) -> Program | None:
    """Returns a traced program, or ``None`` if the value is not one.

    Until jax 0.10, a ``ClosedJaxpr`` holds the constants of a ``Jaxpr``. Since 0.11, both names are
    one class, and its ``jaxpr`` is the object itself. This function reads the constants of both.
    """
    if isinstance(value, Program):
        return value
    kinds = jax.extend.core.ClosedJaxpr, jax.extend.core.Jaxpr  # pyright: ignore
    if not isinstance(value, kinds):
        return None
    constants = getattr(value, "consts", ())
    jaxpr = getattr(value, "jaxpr", value)
    # If a Jaxpr holds no constants, its caller passes them as inputs.
    pairs = zip(jaxpr.constvars, constants, strict=True) if constants else ()
    return Program(jaxpr.invars, tuple(pairs), jaxpr.eqns, jaxpr.outvars)


def make_program(
    fn: Callable[..., object], *args: object, validated: bool = True
) -> tuple[Program, Any]:
    """Traces a function on arrays or their shapes.

    Args:
        fn: The function.
        *args: Arguments of the function.
        validated: False turns off NumPyro's validation of arguments. Validation adds large
            constants to a program: triangular masks of the size of a covariance matrix.

    Returns:
        The program, and the shapes of what the function returns.
    """
    quiet = contextlib.nullcontext() if validated else numpyro.validation_enabled(False)
    with quiet:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    program = as_program(closed)
    if program is None:
        raise TypeError(f"jax.make_jaxpr returned a {type(closed).__name__}, which is not a jaxpr.")
    return program, shapes


def programs_in(found: object) -> Iterator[Program]:
    """The programs in a parameter of an operation, also inside lists, tuples and mappings."""
    program = as_program(found)
    if program is not None:
        yield program
    elif isinstance(found, Mapping):
        yield from programs_in(list(found.values()))
    elif isinstance(found, list | tuple):
        for each in found:
            yield from programs_in(each)


def literal(atom: Variable) -> tuple[ArrayLike, ...]:
    """Returns ``(value,)`` if an input of an operation is a literal, and ``()`` for a variable."""
    return (atom.val,) if isinstance(atom, jax.extend.core.Literal) else ()


def bind(
    primitive: Primitive, params: Mapping[str, object], values: Sequence[object]
) -> list[Array]:
    """Evaluates an operation and returns the list of its results.

    Until jax 0.8, ``get_bind_params`` returned a list of functions next to the parameters.
    """
    bound = primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    results = primitive.bind(*functions, *values, **params)
    return list(results) if primitive.multiple_results else [results]


def jit_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit`` for a program that runs once, on little data. It compiles in half of the time."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0})


def trace_state() -> object:
    """The current trace state of JAX, for comparison with ``==``. JAX exposes it for Flax."""
    return _core.get_opaque_trace_state(convention="flax")


def has_named_axes() -> bool:
    """Whether the caller runs inside ``pmap``, ``shard_map`` or a ``vmap`` with ``axis_name``."""
    return bool(_core.nonempty_axis_env_DO_NOT_USE())


def trace_of(array: object) -> object:
    """The trace that created a traced array, or ``None`` for an array with values."""
    return getattr(array, "_trace", None)


def traced_by() -> object:
    """The innermost trace of the caller. :func:`trace_of` returns it for the caller's arguments."""
    with _core.take_current_trace() as trace:
        return trace


def is_tracer(value: object) -> bool:
    """Whether a value is traced: it has a shape but no values."""
    return isinstance(value, jax.core.Tracer)


def custom_vmap(fn: Callable[..., object]) -> jax.custom_batching.custom_vmap:
    """A function with a custom rule under ``vmap``, which ``def_vmap`` sets."""
    return jax.custom_batching.custom_vmap(fn)


def wrapped_model(model: object) -> Callable[..., object] | None:
    """The model inside a handler, a partial application or a decorated function, or ``None``."""
    if isinstance(model, Messenger):
        return model.fn
    if isinstance(model, functools.partial) and not model.args:
        return model.func
    return getattr(model, "__wrapped__", None)


def in_control_flow(site: Mapping[str, object]) -> bool:
    """Whether a site of a trace was drawn inside ``numpyro.contrib.control_flow``."""
    return bool(site.get("_control_flow_done"))


def mask_of(masked: MaskedDistribution) -> ArrayLike:
    """The mask of a ``MaskedDistribution``. It is True for entries that count."""
    return masked._mask


def takes_value(optim: object) -> bool:
    """Whether a NumPyro optimiser needs the loss, as ``update(..., value=)``."""
    return bool(getattr(optim, "update_with_value", False))


def unpack_latent(auto: Any, flat: ArrayLike) -> dict[str, Array]:
    """Splits the flat latent of an ``AutoContinuous`` guide by site, without changing entries."""
    return auto._unpack_latent(flat)


def flat_latent(auto: AutoGuide) -> str:
    """The name of the site of an ``AutoContinuous`` guide that holds its flat latent."""
    return f"_{auto.prefix}_latent"


def latent_sites(auto: AutoGuide) -> list[str]:
    """The latent sites of an ``AutoNormal`` or ``AutoDelta`` guide that has been set up."""
    return list(auto._init_locs)


def prototype_sites(auto: Any) -> list[str]:
    """The latent sites of the model that an automatic guide was set up on."""
    sites = auto.prototype_trace.items()
    return [n for n, site in sites if site["type"] == "sample" and not site["is_observed"]]


def forget_prototype(auto: AutoGuide) -> None:
    """Makes an automatic guide repeat its setup at its next call."""
    auto.prototype_trace = None


def setup_of(auto: Any) -> Callable[..., object]:
    """The method that sets up an automatic guide and finds its initial values."""
    return type(auto)._setup_prototype


def guide_functions(auto: object) -> Iterator[object]:
    """Functions that an automatic guide calls, apart from its ``init_loc_fn``."""
    for name in ("_nonlinearity", "create_plates"):
        yield getattr(auto, name, None)


def init_scale(auto: object) -> object:
    """The initial scale of an automatic guide, if it has one."""
    return getattr(auto, "_init_scale", None)


def same_distribution(auto: object, kind: type) -> bool:
    """Whether a guide of a subclass of ``kind`` has the same distribution as ``kind``.

    A subclass may have another distribution if it overrides a method that draws samples.
    """
    draws = {"__call__", "_get_posterior", "_sample_latent", "_unpack_latent", "get_transform"}
    own = type(auto).__mro__[: type(auto).__mro__.index(kind)]
    return not any(draws & set(vars(base)) for base in own)

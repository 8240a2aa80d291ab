"""Checks of a driver's arguments: each error names the value, the range and the remedy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax.sharding import AxisType, Mesh

from numpyro_dp._compat import make_program
from numpyro_dp._tree import shapes_of
from numpyro_dp._validate import check_int, check_real
from numpyro_dp.core import Fold, Mechanism, PyTree, Sampler
from numpyro_dp.privacy.accounting import Accountant
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.plan import BudgetError
from numpyro_dp.run.loss import LossRelease
from numpyro_dp.run.state import RunIdentity, SensitiveState

__all__ = [
    "check_accountant",
    "check_budget",
    "check_callable",
    "check_estimator",
    "check_fold",
    "check_identity",
    "check_independent_noise",
    "check_loss_release",
    "check_mechanism",
    "check_mesh",
    "check_noise",
    "check_not_spent",
    "check_num_steps",
    "check_optim",
    "check_params",
    "check_repetition",
    "check_reverse_mode",
    "check_rng_key",
    "check_rng_keys",
    "check_sampler",
    "check_sizes",
    "check_state",
    "check_steps_fit",
]


def check_callable(name: str, value: Any) -> None:
    """Raises TypeError unless a model or guide can be called."""
    if not callable(value):
        raise TypeError(
            f"Expected {name} to be a function with NumPyro primitives, got "
            f"{type(value).__name__}. Pass arguments in the order DPSVI(model, guide, optim, ...)."
        )


def check_sampler(sampler: Any) -> Sampler:
    """Returns the sampler, or raises TypeError."""
    if isinstance(sampler, type) or not isinstance(sampler, Sampler):
        raise TypeError(
            "Expected sampler to be Poisson(rate), FixedSize(batch_size), "
            "Permutation(batch_size) or FullBatch(), got "
            f"{sampler!r}."
        )
    return sampler


def check_estimator(estimator: Any) -> Callable[..., Any]:
    """Returns the estimator's builder, or raises TypeError."""
    try:
        inspect.signature(estimator).bind(object())
    except (TypeError, ValueError):
        callable_with_problem = False
    else:
        callable_with_problem = not isinstance(estimator, type)
    if not callable_with_problem:
        raise TypeError(
            f"estimator={estimator!r} does not build an estimator. Add the parentheses: aligned(), "
            "aligned_natural() or vanilla()."
        )
    return estimator


def check_accountant(accountant: Any) -> Accountant | None:
    """Returns the accountant, or raises TypeError."""
    if accountant is None:
        return None
    if isinstance(accountant, type) or not isinstance(accountant, Accountant):
        raise TypeError(
            "Expected accountant to be Best(), PLD(), PRV(), RDP() or GDP(), got "
            f"{accountant!r}. Leave it out to use the smallest valid bound."
        )
    return accountant


def check_budget(budget: Any, noise_multiplier: Any, clip_norm: ClipNorm) -> PrivacyBudget | None:
    """Returns the budget, or raises if budget, noise and clip norm do not fit together."""
    if budget is None and noise_multiplier is None:
        raise ValueError(
            "Expected a budget or a noise_multiplier, got neither. Pass "
            "budget=PrivacyBudget(epsilon=1.0, delta=1e-5)."
        )
    unbounded = not clip_norm.bounded
    if budget is None:
        if unbounded and noise_multiplier != 0:
            raise ValueError(
                f"clip_norm={clip_norm} does not limit a record, so noise_multiplier="
                f"{noise_multiplier!r} cannot make the run private. Give a finite clip_norm, or "
                "noise_multiplier=0.0 for a run without privacy."
            )
        return None
    if not isinstance(budget, PrivacyBudget):
        raise TypeError(f"Expected budget=PrivacyBudget(epsilon, delta), got {budget!r}.")
    if unbounded:
        raise BudgetError(
            f"clip_norm={clip_norm} does not limit a record, so no noise can keep to the budget. "
            "Give a finite clip_norm, or noise_multiplier=0.0 without a budget."
        )
    if noise_multiplier == 0:
        raise BudgetError(
            "Expected noise_multiplier > 0 with a budget, got 0.0. A run without noise is not "
            "private. Leave noise_multiplier out and let the budget choose it."
        )
    return budget


def check_mechanism(builder: Any, clip_norm: ClipNorm) -> None:
    """Raises TypeError unless a builder is hashable and makes a mechanism with an event."""
    try:
        hash(builder)
        found = build_mechanism(builder, clip_norm, 1.0)
    except TypeError as error:
        found = error
    if not isinstance(found, Mechanism) or found.event is None:
        raise TypeError(
            f"Expected mechanism to be a hashable value such as GaussianMechanism(), got "
            f"{builder!r} ({found if isinstance(found, TypeError) else type(found).__name__}). A "
            "call of it with clip_norm and noise_multiplier must return a core.Mechanism with an "
            "event."
        )


def check_independent_noise(builder: Any, clip_norm: ClipNorm, reason: str) -> None:
    """Raises ValueError if a driver needs independent noise and the mechanism correlates steps.

    Args:
        builder: Makes the mechanism.
        clip_norm: The clip norm of the run.
        reason: Why the driver needs independent noise. Empty if it does not need it.
    """
    if reason and build_mechanism(builder, clip_norm, 1.0).compose is not None:
        raise ValueError(
            f"mechanism={builder!r} adds noise that depends on the noise of earlier steps. "
            f"{reason}, so the result would be wrong. Use mechanism=GaussianMechanism(), or DPSVI."
        )


def check_noise(noise_multiplier: Any) -> float | None:
    """Returns the noise multiplier, or raises."""
    if noise_multiplier is None:
        return None
    return check_real(
        "noise_multiplier",
        noise_multiplier,
        low=0,
        high=1e30,
        remedy="It is the noise's standard deviation over the sensitivity. 0 is not private.",
    )


def check_repetition(repetition: Any, secret_key: Any) -> bool:
    """Returns whether a run may repeat the noise of an earlier run, or raises."""
    if not isinstance(repetition, bool):
        raise TypeError(f"Expected repetition to be True or False, got {repetition!r}.")
    if repetition and secret_key is None:
        raise ValueError(
            "Expected a secret_key together with repetition=True, got none. A run without one has "
            "new noise. Pass the secret_key of the run to repeat."
        )
    return repetition


def check_mesh(mesh: Any) -> Mesh | None:
    """Returns a mesh of the same devices whose axes the compiler may use, or raises."""
    if mesh is None:
        return None
    if isinstance(mesh, Mesh):
        present = {device.process_index for device in mesh.devices.flat}
        if mesh.is_multi_process and len(present) < jax.process_count():
            raise ValueError(
                f"mesh has devices of the processes {sorted(present)}, but JAX runs "
                f"{jax.process_count()} processes. Use devices of one process, or of all."
            )
        return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    raise TypeError(
        f"Expected mesh=None or a jax.sharding.Mesh, got {type(mesh).__name__}. "
        "For all devices pass jax.make_mesh((jax.device_count(),), ('records',))."
    )


def check_loss_release(release: Any) -> LossRelease | None:
    """Returns the loss release, or raises."""
    if release is None:
        return None
    if not isinstance(release, LossRelease):
        raise TypeError(f"Expected loss_release=LossRelease(clip, share), got {release!r}.")
    check_real(
        "LossRelease.clip",
        release.clip,
        low=0,
        high=math.inf,
        low_open=True,
        high_open=True,
        remedy="It bounds the log likelihood of one record, in nats. Try 10.0 first.",
    )
    check_real(
        "LossRelease.share",
        release.share,
        low=0,
        high=1,
        low_open=True,
        high_open=True,
        remedy="It is the part of the privacy cost that the loss curve uses.",
    )
    return release


def check_optim(optim: Any) -> Any:
    """Returns the optimiser, or raises TypeError if it evaluates or reads the loss."""
    if isinstance(optim, numpyro.optim.Minimize):
        raise TypeError(
            "numpyro.optim.Minimize evaluates the loss many times a step, and the loss is private. "
            "Use numpyro.optim.Adam or optax."
        )
    if isinstance(optim, optax.GradientTransformationExtraArgs) and _reads_loss(optim):
        raise TypeError(
            "optim reads the loss, as reduce_on_plateau, polyak_sgd and lbfgs do. The loss is "
            "private. Use an optimiser that reads gradients only, such as optax.adam with a "
            "schedule."
        )
    return optim


def _reads_loss(optim: optax.GradientTransformationExtraArgs) -> bool:
    """Traces an update, and looks for an operation that reads the loss."""
    params = {"x": jnp.ones(2)}

    def update(value: Any) -> Any:
        return optim.update(params, optim.init(params), params, value=value)

    try:
        program, _ = make_program(update, jnp.ones(()))
    except TypeError:  # it needs more arguments, such as the loss as a function
        return True
    (value,) = program.inputs
    return any(value is atom for eqn in program.equations for atom in eqn.invars)


def check_rng_key(rng_key: Any) -> None:
    """Raises TypeError unless ``rng_key`` is a JAX key, typed or raw."""
    if isinstance(rng_key, jax.Array | np.ndarray):
        typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) and rng_key.shape == ()
        if typed or (rng_key.dtype == np.uint32 and rng_key.ndim == 1):
            return
    raise TypeError(
        f"Expected rng_key to be a JAX key, got {type(rng_key).__name__}. Pass jax.random.key(0)."
    )


def check_rng_keys(rng_keys: Any) -> None:
    """Raises TypeError unless ``rng_keys`` is a vector of JAX keys, typed or raw."""
    if isinstance(rng_keys, jax.Array | np.ndarray) and rng_keys.shape and rng_keys.shape[0]:
        typed = jnp.issubdtype(rng_keys.dtype, jax.dtypes.prng_key)
        if rng_keys.ndim == 1 if typed else rng_keys.dtype == np.uint32 and rng_keys.ndim == 2:
            return
    shown = type(rng_keys).__name__ + str(getattr(rng_keys, "shape", ""))
    raise TypeError(
        f"Expected rng_keys to be a vector of JAX keys, one for each seed, got {shown}. Pass "
        "jax.random.split(jax.random.key(0), number_of_seeds)."
    )


def check_num_steps(num_steps: Any, most: int) -> int:
    """Returns the number of steps. The error does not print an array: it may hold records."""
    if np.ndim(num_steps):
        raise TypeError(
            f"Expected num_steps to be an integer >= 1, got an array of shape "
            f"{np.shape(num_steps)}. Call run(rng_key, num_steps, *args)."
        )
    return check_int("num_steps", num_steps, low=1, high=most)


def check_sizes(**sizes: int | None) -> None:
    """Raises unless each value is None or an integer >= 1."""
    for name, value in sizes.items():
        if value is not None:
            check_int(name, value, low=1)


def check_state(state: Any) -> None:
    """Raises TypeError unless this package created the state."""
    if state is None:
        raise TypeError(
            "Expected a state, got None. A pickled result has no state, because a state is "
            "sensitive. Pickle result.state by itself to continue in another process."
        )
    if not isinstance(state, SensitiveState):
        raise TypeError(
            f"Expected a state of DPSVI.init, DPSVI.update or result.state, got "
            f"{type(state).__name__}. States of numpyro.infer.SVI do not record what was spent."
        )


def check_not_spent(state: SensitiveState) -> None:
    """Raises BudgetError once all steps of the plan have been taken."""
    if int(state.step) >= int(state.max_steps):
        raise BudgetError(
            f"The budget covers {int(state.max_steps)} updates, and all have been taken. Plan for "
            "more with DPSVI(..., num_steps=T)."
        )


def check_steps_fit(state: SensitiveState, num_steps: int) -> None:
    """Raises BudgetError unless the plan covers ``num_steps`` more steps."""
    left = int(state.max_steps) - int(state.step)
    if num_steps > left:
        raise BudgetError(
            f"Expected num_steps <= {left}, got {num_steps}. The budget covers no more after "
            f"{int(state.step)} steps. Plan for all steps with DPSVI(..., num_steps=T)."
        )


def check_fold(fold: Any, params: Callable[[], dict[str, Any]], num_steps: int) -> None:
    """Raises unless a fold is None or fits a loop of ``num_steps`` steps."""
    if fold is None:
        return
    if not isinstance(fold, Fold):
        raise TypeError(
            "Expected fold to be built by a call, such as tail_average(num_steps), or a Fold, got "
            f"{type(fold).__name__}."
        )
    if fold.num_steps not in (None, num_steps):
        raise ValueError(
            f"Expected a fold for the {num_steps} steps of this run, got one for "
            f"{fold.num_steps}. Pass the same num_steps to both: every run starts a new fold."
        )
    start = params()
    before = jax.eval_shape(lambda state: state, fold.init(start))
    after = jax.eval_shape(fold.update, before, start)
    if jax.tree.map(_form, before) != jax.tree.map(_form, after):
        raise TypeError(
            f"Expected fold.update to return the shapes and dtypes of fold.init, "
            f"{jax.tree.map(_form, before)}, got {jax.tree.map(_form, after)}. Keep them constant."
        )


def _form(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def check_reverse_mode(forward_mode_differentiation: bool) -> None:
    """Raises ValueError if forward mode is asked for."""
    if forward_mode_differentiation:
        raise ValueError(
            "Expected forward_mode_differentiation=False, got True. Gradients of single records "
            "use reverse mode. Leave it out."
        )


def check_params(params: PyTree, expected: PyTree) -> None:
    """Raises unless the parameters of a state have the shapes that these records need."""
    found = shapes_of(params)
    if found != expected:
        raise ValueError(
            f"Expected a state with parameters of the shapes {expected} for these records, got "
            f"{found}. Resume with the records of the run, or start again with init."
        )


def check_identity(
    state: SensitiveState, identity: RunIdentity, further: tuple[str, ...] = ()
) -> None:
    """Raises unless the settings are those with which the state's steps were accounted for."""
    fields = "num_examples", "sampler", "clip_norm", "mechanism", "loss_release", "method"
    for field in (*fields, *further):
        before, now = getattr(state.identity, field), getattr(identity, field)
        if before != now:
            raise BudgetError(
                f"The state's steps were taken and accounted for with {field}={before}, but this "
                f"driver has {field}={now}. Resume with the same setting, or start again with init."
            )

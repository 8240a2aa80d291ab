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
            f"{type(value).__name__}. The order is DPSVI(model, guide, optim, ...)."
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
            "Expected estimator to be built by a call, such as aligned(), aligned_natural() or "
            f"vanilla(), got {estimator!r}. Add the parentheses."
        )
    return estimator


def check_accountant(accountant: Any) -> Accountant | None:
    """Returns the accountant, or raises TypeError."""
    if accountant is None:
        return None
    if isinstance(accountant, type) or not isinstance(accountant, Accountant):
        raise TypeError(
            "Expected accountant to be Best(), PLD(), PRV(), RDP() or GDP(), got "
            f"{accountant!r}. Leave it out for the smallest of the valid bounds."
        )
    return accountant


def check_budget(budget: Any, noise_multiplier: Any, clip_norm: ClipNorm) -> PrivacyBudget | None:
    """Returns the budget; raises unless there is one or a noise, and both make sense."""
    if budget is None and noise_multiplier is None:
        raise ValueError(
            "Expected a budget or a noise_multiplier, got neither. Pass "
            "budget=PrivacyBudget(epsilon=1.0, delta=1e-5)."
        )
    unbounded = not clip_norm.bounded
    if budget is None:
        if unbounded and noise_multiplier != 0:
            raise ValueError(
                f"Expected noise_multiplier=0.0 together with clip_norm={clip_norm}, got "
                f"{noise_multiplier!r}: no noise covers an unbounded record. Give a finite "
                "clip_norm."
            )
        return None
    if not isinstance(budget, PrivacyBudget):
        raise TypeError(f"Expected budget=PrivacyBudget(epsilon, delta), got {budget!r}.")
    if unbounded:
        raise BudgetError(
            f"Expected a finite clip_norm together with a budget, got clip_norm={clip_norm}: an "
            "unbounded record has no privacy. Give a finite clip_norm, or noise_multiplier=0.0 "
            "without a budget."
        )
    if noise_multiplier == 0:
        raise BudgetError(
            "Expected noise_multiplier > 0 together with a budget, got 0.0: without noise nothing "
            "is private. Leave noise_multiplier out and let the budget choose it."
        )
    return budget


def check_mechanism(builder: Any, clip_norm: ClipNorm) -> None:
    """Raises TypeError unless a builder is a value that makes a mechanism with an event."""
    try:
        hash(builder)
        found = build_mechanism(builder, clip_norm, 1.0)
    except TypeError as error:
        found = error
    if not isinstance(found, Mechanism) or found.event is None:
        raise TypeError(
            "Expected mechanism to be a hashable value such as GaussianMechanism(), which makes a "
            f"core.Mechanism with an event of clip_norm and noise_multiplier, got {builder!r} "
            f"({found if isinstance(found, TypeError) else type(found).__name__})."
        )


def check_independent_noise(builder: Any, clip_norm: ClipNorm, reason: str) -> None:
    """Raises ValueError if a driver needs independent noise and the mechanism has a memory.

    Args:
        builder: Makes the mechanism.
        clip_norm: Of the run.
        reason: Why the driver needs independent noise; empty if it does not.
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
        remedy="It is the noise's standard deviation over the sensitivity; 0 is not private.",
    )


def check_repetition(repetition: Any, secret_key: Any) -> bool:
    """Returns whether a run may have the noise of an earlier one, or raises."""
    if not isinstance(repetition, bool):
        raise TypeError(f"Expected repetition to be True or False, got {repetition!r}.")
    if repetition and secret_key is None:
        raise ValueError(
            "Expected a secret_key together with repetition=True, got none: without one each run "
            "has new noise. Pass the secret_key of the run that is repeated."
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
                f"Expected devices of one process or of all {jax.process_count()} in mesh, got "
                f"those of {sorted(present)}."
            )
        return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    raise TypeError(
        f"Expected mesh=None or a jax.sharding.Mesh, got {type(mesh).__name__}. "
        "jax.make_mesh((jax.device_count(),), ('records',)) has all devices."
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
        remedy="It bounds the log likelihood of one record, in nats; 10.0 is a start.",
    )
    check_real(
        "LossRelease.share",
        release.share,
        low=0,
        high=1,
        low_open=True,
        high_open=True,
        remedy="It is the part of the privacy cost that the loss curve takes.",
    )
    return release


def check_optim(optim: Any) -> Any:
    """Returns the optimiser; refuses those that evaluate or read the loss."""
    if isinstance(optim, numpyro.optim.Minimize):
        raise TypeError(
            "Expected an optimiser that takes gradient steps, got numpyro.optim.Minimize, which "
            "evaluates the loss many times a step. Use numpyro.optim.Adam or optax."
        )
    if isinstance(optim, optax.GradientTransformationExtraArgs) and _reads_loss(optim):
        raise TypeError(
            "Expected an optimiser that reads gradients alone, got an optax transformation that "
            "reads the loss (such as reduce_on_plateau, polyak_sgd or lbfgs): the loss is private. "
            "Use optax.adam with a schedule."
        )
    return optim


def _reads_loss(optim: optax.GradientTransformationExtraArgs) -> bool:
    params = {"x": jnp.ones(2)}

    def update(value: Any) -> Any:
        return optim.update(params, optim.init(params), params, value=value)

    try:
        program, _ = make_program(update, jnp.ones(()))
    except TypeError:  # further arguments, such as the loss as a function
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
    """Returns the number of steps; an array in its place is not shown, it may be records."""
    if np.ndim(num_steps):
        raise TypeError(
            f"Expected num_steps to be an integer >= 1, got an array of shape "
            f"{np.shape(num_steps)}. The order is run(rng_key, num_steps, *args)."
        )
    return check_int("num_steps", num_steps, low=1, high=most)


def check_sizes(**sizes: int | None) -> None:
    """Raises unless each is left out or an integer >= 1."""
    for name, value in sizes.items():
        if value is not None:
            check_int(name, value, low=1)


def check_state(state: Any) -> None:
    """Raises TypeError unless a state stems from this package."""
    if state is None:
        raise TypeError(
            "Expected a state, got None. A result that was pickled has none: its state is "
            "sensitive. Pickle result.state by itself to go on in another process."
        )
    if not isinstance(state, SensitiveState):
        raise TypeError(
            f"Expected a state of DPSVI.init, DPSVI.update or result.state, got "
            f"{type(state).__name__}. States of numpyro.infer.SVI do not say what was spent."
        )


def check_not_spent(state: SensitiveState) -> None:
    """Raises BudgetError once all steps of the plan have been taken."""
    if int(state.step) >= int(state.max_steps):
        raise BudgetError(
            f"Expected fewer than {int(state.max_steps)} updates, the steps that the budget "
            "covers; all have been taken. Plan for more with DPSVI(..., num_steps=T)."
        )


def check_steps_fit(state: SensitiveState, num_steps: int) -> None:
    """Raises BudgetError unless the plan covers so many steps more."""
    left = int(state.max_steps) - int(state.step)
    if num_steps > left:
        raise BudgetError(
            f"Expected num_steps <= {left}, what the budget still covers after {int(state.step)} "
            f"steps, got {num_steps}. Plan for all steps with DPSVI(..., num_steps=T)."
        )


def check_fold(fold: Any, params: Callable[[], dict[str, Any]], num_steps: int) -> None:
    """Raises unless a fold, if there is one, can be carried through so many steps."""
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
            f"{fold.num_steps}. Pass the same num_steps to both; a fold starts anew with each run."
        )
    start = params()
    before = jax.eval_shape(lambda state: state, fold.init(start))
    after = jax.eval_shape(fold.update, before, start)
    if jax.tree.map(_form, before) != jax.tree.map(_form, after):
        raise TypeError(
            f"Expected fold.update to return a state of the form of fold.init's, "
            f"{jax.tree.map(_form, before)}, got {jax.tree.map(_form, after)}. Keep shapes and "
            "dtypes constant."
        )


def _form(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def check_reverse_mode(forward_mode_differentiation: bool) -> None:
    """Raises ValueError if forward mode is asked for."""
    if forward_mode_differentiation:
        raise ValueError(
            "Expected forward_mode_differentiation=False, got True: gradients of single "
            "records are taken in reverse mode. Leave it out."
        )


def check_params(params: PyTree, expected: PyTree) -> None:
    """Raises unless the parameters of a state have the shapes that these records ask for."""
    found = shapes_of(params)
    if found != expected:
        raise ValueError(
            f"Expected a state with parameters of the shapes {expected}, as these records ask for, "
            f"got {found}. Resume with the records of the run, or start anew with init."
        )


def check_identity(
    state: SensitiveState, identity: RunIdentity, further: tuple[str, ...] = ()
) -> None:
    """Raises unless a state is used with the data size, sampler and clip norm of its run."""
    fields = "num_examples", "sampler", "clip_norm", "mechanism", "loss_release", "method"
    for field in (*fields, *further):
        before, now = getattr(state.identity, field), getattr(identity, field)
        if before != now:
            raise BudgetError(
                f"Expected {field}={before}, with which the state's steps were taken and accounted "
                f"for, got {field}={now}. Resume with the same setting, or start anew with init."
            )

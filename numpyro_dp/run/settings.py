"""The settings that all drivers share, as one frozen value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import AxisType, Mesh

from numpyro_dp._validate import check_int, check_real
from numpyro_dp.core import Estimator, Mechanism, MechanismBuilder, Problem, PyTree, Sampler
from numpyro_dp.privacy.accounting import Accountant
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.keys import as_secret_key
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism, build_mechanism
from numpyro_dp.privacy.plan import BudgetError
from numpyro_dp.run.loss import LossRelease, with_loss_norm

__all__ = ["Method", "RunSettings"]


class Method(NamedTuple):
    """The estimator and optimiser of a driver.

    Attributes:
        estimator: Problem -> estimator.
        optim: An optimiser with NumPyro's ``get_params`` and ``update``.
        values: Settings of the method. A state can be resumed only if these are the same.
        independent_noise: Reason why the noise of steps must be independent. Empty if it may be
            correlated.
        public_loss: ``(problem, params, rng_key) -> float``, the terms of minus the loss that see
            no record. ``None`` for drivers that offer no loss.

    Example:
        >>> import numpyro
        >>> from numpyro_dp.estimators import aligned
        >>> Method(aligned(), numpyro.optim.Adam(1e-2)).independent_noise
        ''
    """

    estimator: Callable[[Any], Estimator]
    optim: Any
    values: tuple[Any, ...] = ()
    independent_noise: str = ""
    public_loss: Callable[[Any, PyTree, Array], Array] | None = None

    def estimator_of(self, problem: Problem) -> Estimator:
        """Builds the estimator, or raises TypeError."""
        found = self.estimator(problem)
        if not isinstance(found, Estimator):
            raise TypeError(
                f"Expected estimator= to build an Estimator, got {type(found).__name__}. Copy the "
                "skeleton in docs/extending.md."
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunSettings:
    """The settings that all drivers share. :class:`~numpyro_dp.DPSVI` describes them.

    A driver passes this value to its parts, and never passes itself.
    """

    clip_norm: Any
    sampler: Sampler
    mechanism: MechanismBuilder = GaussianMechanism()
    budget: PrivacyBudget | None = None
    noise_multiplier: float | None = None
    secret_key: Any = dataclasses.field(default=None, repr=False)
    num_steps: int | None = None
    accountant: Accountant | None = None
    loss_release: LossRelease | None = None
    microbatch_size: int | None = None
    mesh: Mesh | None = None
    public: Any = ()
    repetition: bool = False

    def __post_init__(self) -> None:
        """Checks every field. Each error names the value, the range and the remedy."""
        norm, noise, key = ClipNorm.of(self.clip_norm), self.noise_multiplier, self.secret_key
        found = {
            "clip_norm": norm,
            "noise_multiplier": None if noise is None else _noise(noise),
            "mesh": None if self.mesh is None else _mesh(self.mesh),
            "secret_key": None if key is None else as_secret_key(key),
        }
        if isinstance(self.sampler, type) or not isinstance(self.sampler, Sampler):
            raise TypeError(
                "Expected sampler to be Poisson(rate), FixedSize(batch_size), "
                f"Permutation(batch_size) or FullBatch(), got {self.sampler!r}."
            )
        _check_budget(self.budget, noise, norm)
        accountant = self.accountant
        if isinstance(accountant, type) or not isinstance(accountant, Accountant | None):
            raise TypeError(
                "Expected accountant to be Best(), PLD(), PRV(), RDP() or GDP(), got "
                f"{accountant!r}. Leave it out to use the smallest valid bound."
            )
        if self.loss_release is not None:
            _check_loss_release(self.loss_release)
        if not isinstance(self.repetition, bool):
            raise TypeError(f"Expected repetition to be True or False, got {self.repetition!r}.")
        if self.repetition and key is None:
            raise ValueError(
                "Expected a secret_key together with repetition=True, got none. A run without one "
                "has new noise. Pass the secret_key of the run to repeat."
            )
        if self.num_steps is not None:
            check_int("num_steps", self.num_steps, low=1)
        if self.microbatch_size is not None:
            check_int("microbatch_size", self.microbatch_size, low=1,
                      remedy="None finds a suitable one.")  # fmt: skip
        for name, value in found.items():
            object.__setattr__(self, name, value)
        _check_mechanism(self.mechanism, self.norm_with_loss)

    @property
    def norm_with_loss(self) -> ClipNorm:
        """The clip norm, with a norm for the loss if ``loss_release`` is set."""
        return with_loss_norm(self.clip_norm, self.loss_release)

    @property
    def several_processes(self) -> bool:
        """Whether the processes of a mesh share a run."""
        return self.mesh is not None and self.mesh.is_multi_process

    @property
    def charges(self) -> Any:
        """The ledger that counts the run, and for what, or ``None``."""
        return None if self.budget is None else self.budget.charges

    def changed(self, **fields: Any) -> RunSettings:
        """Returns settings with other values in some fields, and checks them."""
        return dataclasses.replace(self, **fields)


def _check_budget(budget: Any, noise_multiplier: Any, clip_norm: ClipNorm) -> None:
    """Raises if budget, noise and clip norm do not fit together."""
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
        return
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


def _check_mechanism(builder: Any, clip_norm: ClipNorm) -> None:
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


def _mesh(mesh: Any) -> Mesh:
    """Returns a mesh of the same devices whose axes the compiler may use, or raises."""
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


def _noise(noise_multiplier: Any) -> float:
    remedy = "It is the noise's standard deviation over the sensitivity. 0 is not private."
    return check_real("noise_multiplier", noise_multiplier, low=0, high=1e30, remedy=remedy)


def _check_loss_release(release: Any) -> None:
    if not isinstance(release, LossRelease):
        raise TypeError(f"Expected loss_release=LossRelease(clip, share), got {release!r}.")
    for name, high, remedy in (
        ("clip", math.inf, "It bounds the log likelihood of one record, in nats. Try 10.0 first."),
        ("share", 1, "It is the part of the privacy cost that the loss curve uses."),
    ):
        value = getattr(release, name)
        check_real(f"LossRelease.{name}", value, low=0, high=high, low_open=True, high_open=True,
                   remedy=remedy)  # fmt: skip

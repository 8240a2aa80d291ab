"""The settings that all drivers share, as one frozen value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import AxisType, Mesh

from numpyro_dp._validate import check_callable, check_int, check_real
from numpyro_dp.core import (
    Estimator,
    Kwargs,
    Mechanism,
    MechanismBuilder,
    NumPyroFn,
    Problem,
    PyTree,
    Sampler,
)
from numpyro_dp.model.frontend import GivenModel
from numpyro_dp.model.public import declare
from numpyro_dp.privacy.accounting.bounds import Accountant
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.keys import as_secret_key
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism, build_mechanism
from numpyro_dp.privacy.mechanism.loss import LossRelease, with_loss_norm
from numpyro_dp.privacy.plan import BudgetError

# Fields of Privacy that only mean something to a driver that reads a NumPyro model.
OF_MODELS = ("data_plate", "max_rows_per_unit", "public")


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

    estimator: Callable[..., Estimator]
    optim: Any
    values: tuple[object, ...] = ()
    independent_noise: str = ""
    public_loss: Callable[..., Array] | None = None

    def estimator_of(self, problem: Problem) -> Estimator:
        """Builds the estimator, or raises TypeError."""
        found = self.estimator(problem)
        if not isinstance(found, Estimator):
            raise TypeError(
                f"Expected estimator= to build an Estimator, got {type(found).__name__}. Copy the "
                "skeleton in docs/extending.md."
            )
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Privacy:
    """How a run is protected, beside its budget and clip norm. Most runs need none of this.

    All drivers take it as ``privacy=``.

    Args:
        mechanism: Clips and adds noise. By default
            :class:`~numpyro_dp.mechanisms.GaussianMechanism`, or your own builder
            (:class:`numpyro_dp.core.MechanismBuilder`).
        noise_multiplier: Standard deviation of the noise over the sensitivity, instead of a budget.
            With a budget, it is checked against the budget. 0 is not private.
        accountant: Bounds epsilon. By default the smallest of several valid bounds.
        secret_key: 32 bytes, 64 hexadecimal digits, an integer, or a key of
            :func:`~numpyro_dp.secret_key`. It makes noise and batches reproducible, and the report
            says so. By default every ``init`` takes a fresh key from the operating system. A second
            run with the same key raises an error (see ``repetition``).
        repetition: Allows a given ``secret_key`` to repeat the noise of an earlier run, and a state
            to be resumed twice. You promise that records and settings are the same.
        loss_release: Releases a loss curve, for a part of the budget. Only for ``DPSVI``.
        data_plate: Name of the plate over records. Needed if several plates surround the observed
            sites, or an argument has the number of records along two axes.
        max_rows_per_unit: Makes a unit of several rows, such as a person, one record. ``run``,
            ``init`` and ``update`` then take ``unit=ids``, an array with the id of each row.
            Neighbouring data sets differ in all rows of a unit, and samplers draw units. Of a unit
            with more rows than this, the first ones are used.
        public: Names of arguments that hold no record (``["table"]``), whatever their shape, and
            arrays that model, guide or initialisers hold. ``"captured"`` stands for everything that
            model and guide hold. Arrays that you do not list may have 100 entries together, and at
            most a quarter of the number of records. The report lists all of them.

    Raises:
        TypeError, ValueError: Name the value, the range and the remedy.

    Example:
        >>> from numpyro_dp import Privacy
        >>> Privacy(noise_multiplier=2.0, max_rows_per_unit=5).noise_multiplier
        2.0
    """

    mechanism: MechanismBuilder = GaussianMechanism()
    noise_multiplier: float | None = None
    accountant: Accountant | None = None
    secret_key: Any = field(default=None, repr=False)
    repetition: bool = False
    loss_release: LossRelease | None = None
    data_plate: str | None = None
    max_rows_per_unit: int | None = None
    public: PyTree = ()

    def __post_init__(self) -> None:
        """Checks every field. Each error names the value, the range and the remedy."""
        key, noise, accountant = self.secret_key, self.noise_multiplier, self.accountant
        if noise is not None:
            remedy = "It is the noise's standard deviation over the sensitivity. 0 is not private."
            noise = check_real("noise_multiplier", noise, low=0, high=1e30, remedy=remedy)
            object.__setattr__(self, "noise_multiplier", noise)
        if key is not None:
            object.__setattr__(self, "secret_key", as_secret_key(key))
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

    def given_model(self, model: NumPyroFn, static: Kwargs) -> GivenModel:
        """Returns a model with its static keywords, and what of it is public."""
        ours = (own.name for each in (Privacy, Execution, RunSettings) for own in fields(each))
        if misplaced := sorted(set(static) & set(ours)):
            raise TypeError(
                f"Expected keywords of the model, got {misplaced}. Pass them in privacy=Privacy("
                "...) or execution=Execution(...) if they have them. Else this driver has no such "
                "argument."
            )
        check_callable("model", model)
        declared = declare(self.public, static)
        return GivenModel(model, static, self.data_plate, declared, self.max_rows_per_unit)


@dataclass(frozen=True, kw_only=True, eq=False)
class Execution:
    """Where and in which portions a run computes. The result is the same up to rounding.

    All drivers take it as ``execution=``.

    Args:
        mesh: Devices that share the work: each clips and sums its part of a batch. Records are
            spread over the devices if their number is divisible by the number of devices, else
            copied. Arrays that are already spread over them stay, also over several processes.
            ``microbatch_size`` then counts the rows of each device.
        microbatch_size: Records of a batch in memory at a time. Lower it if you run out of memory:
            the result changes by rounding at most. By default about a million values (gradients, or
            factors of the gradients of layers) are in memory. A step also needs about four times
            the memory of the parameters. Each run of a sweep needs this memory.

    Raises:
        TypeError, ValueError: Name the value, the range and the remedy.

    Example:
        >>> import jax
        >>> from numpyro_dp import Execution
        >>> all_devices = jax.make_mesh((jax.device_count(),), ("records",))
        >>> Execution(mesh=all_devices, microbatch_size=1000).microbatch_size
        1000
    """

    mesh: Mesh | None = None
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        """Checks both fields."""
        if self.mesh is not None:
            object.__setattr__(self, "mesh", _mesh(self.mesh))
        if self.microbatch_size is not None:
            check_int("microbatch_size", self.microbatch_size, low=1,
                      remedy="None finds a suitable one.")  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSettings:
    """The settings that all drivers share. :class:`~numpyro_dp.DPSVI` describes them.

    A driver passes this value to its parts, and never passes itself.
    """

    clip_norm: Any
    sampler: Sampler
    budget: PrivacyBudget | None = None
    num_steps: int | None = None
    privacy: Privacy = Privacy()
    execution: Execution = Execution()

    def __post_init__(self) -> None:
        """Checks every field. Each error names the value, the range and the remedy."""
        _check_kinds(self.privacy, self.execution)
        norm = ClipNorm.of(self.clip_norm)
        if isinstance(self.sampler, type) or not isinstance(self.sampler, Sampler):
            raise TypeError(
                "Expected sampler to be Poisson(rate), FixedSize(batch_size), "
                f"Permutation(batch_size) or FullBatch(), got {self.sampler!r}."
            )
        _check_budget(self.budget, self.privacy.noise_multiplier, norm)
        if self.num_steps is not None:
            check_int("num_steps", self.num_steps, low=1)
        object.__setattr__(self, "clip_norm", norm)
        _check_mechanism(self.privacy.mechanism, self.norm_with_loss)

    @property
    def norm_with_loss(self) -> ClipNorm:
        """The clip norm, with a norm for the loss if ``loss_release`` is set."""
        return with_loss_norm(self.clip_norm, self.privacy.loss_release)

    @property
    def several_processes(self) -> bool:
        """Whether the processes of a mesh share a run."""
        mesh = self.execution.mesh
        return mesh is not None and mesh.is_multi_process

    def noise_scale(self, noise_multiplier: float, num_examples: int) -> float:
        """Returns the standard deviation of the noise in an entry of a sum over all records."""
        mechanism = build_mechanism(self.privacy.mechanism, self.norm_with_loss, noise_multiplier)
        return float(mechanism.noise_scale) / self.sampler.inclusion_prob(num_examples)

    @property
    def charges(self) -> Any:
        """The ledger that counts the run, and for what, or ``None``."""
        return None if self.budget is None else self.budget.charges

    def changed(self, **given: Any) -> RunSettings:
        """Returns settings with other values in some fields, also of ``privacy``; checks them."""
        inner = {name: given.pop(name) for name in list(given) if hasattr(self.privacy, name)}
        privacy = replace(self.privacy, **inner)
        return replace(self, **{"privacy": privacy} | given)


def without(privacy: Privacy, driver: str, *names: str) -> Privacy:
    """Returns the same, or raises TypeError if it has fields that a driver cannot use."""
    _check_kinds(privacy, Execution())
    default = Privacy()
    if given := [name for name in names if getattr(privacy, name) is not getattr(default, name)]:
        raise TypeError(
            f"{driver} has no use for {given} in privacy=Privacy(...), which would promise what it "
            "does not do. Leave it out, or use DPSVI."
        )
    return privacy


def _check_kinds(privacy: object, execution: object) -> None:
    if not isinstance(privacy, Privacy):
        raise TypeError(
            f"Expected privacy=Privacy(...), got {privacy!r}. Pass a PrivacyBudget as budget=."
        )
    if not isinstance(execution, Execution):
        raise TypeError(f"Expected execution=Execution(...), got {execution!r}.")


def _check_budget(budget: object, noise_multiplier: float | None, clip_norm: ClipNorm) -> None:
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


def _mesh(mesh: object) -> Mesh:
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


def _check_loss_release(release: object) -> None:
    if not isinstance(release, LossRelease):
        raise TypeError(f"Expected loss_release=LossRelease(clip, share), got {release!r}.")
    for name, high, remedy in (
        ("clip", math.inf, "It bounds the log likelihood of one record, in nats. Try 10.0 first."),
        ("share", 1, "It is the part of the privacy cost that the loss curve uses."),
    ):
        value = getattr(release, name)
        check_real(f"LossRelease.{name}", value, low=0, high=high, low_open=True, high_open=True,
                   remedy=remedy)  # fmt: skip

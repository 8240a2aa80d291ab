"""The settings that all drivers share, as one frozen value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from numpyro_dp._validate import check_int
from numpyro_dp.core import Estimator, MechanismBuilder, Problem, Sampler
from numpyro_dp.privacy.accounting import Accountant
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.keys import as_secret_key
from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism
from numpyro_dp.run import checks
from numpyro_dp.run.loss import LossRelease, with_loss_norm

__all__ = ["Method", "RunSettings"]


class Method(NamedTuple):
    """The estimator and optimiser of a driver.

    Attributes:
        estimator: Problem -> estimator.
        optim: An optimiser with NumPyro's ``get_params`` and ``update``.
        text: Settings of the method. A state can be resumed only if this text is the same.
        independent_noise: Reason why the noise of steps must be independent. Empty if it may be
            correlated.
    """

    estimator: Callable[[Any], Estimator]
    optim: Any
    text: str = ""
    independent_noise: str = ""

    def estimator_of(self, problem: Problem) -> Estimator:
        """Builds the estimator, or raises TypeError."""
        found = self.estimator(problem)
        if not isinstance(found, Estimator):
            raise TypeError(
                f"Expected estimator= to build an Estimator, got {type(found).__name__}. Copy the "
                "skeleton in CONTRIBUTING.md."
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
    allow_sensitive: bool = False
    microbatch_size: int | None = None
    mesh: Mesh | None = None
    public: Any = ()
    repetition: bool = False

    def __post_init__(self) -> None:
        """Checks every field. Each error names the value, the range and the remedy."""
        norm, noise, key = ClipNorm.of(self.clip_norm), self.noise_multiplier, self.secret_key
        found = {
            "clip_norm": norm,
            "sampler": checks.check_sampler(self.sampler),
            "noise_multiplier": checks.check_noise(noise),
            "budget": checks.check_budget(self.budget, noise, norm),
            "accountant": checks.check_accountant(self.accountant),
            "loss_release": checks.check_loss_release(self.loss_release),
            "mesh": checks.check_mesh(self.mesh),
            "secret_key": None if key is None else as_secret_key(key),
            "repetition": checks.check_repetition(self.repetition, key),
        }
        if self.num_steps is not None:
            check_int("num_steps", self.num_steps, low=1)
        if self.microbatch_size is not None:
            check_int("microbatch_size", self.microbatch_size, low=1,
                      remedy="None finds a suitable one.")  # fmt: skip
        for name, value in found.items():
            object.__setattr__(self, name, value)
        checks.check_mechanism(self.mechanism, self.norm_with_loss)

    @property
    def norm_with_loss(self) -> ClipNorm:
        """The clip norm, with a norm for the loss if ``loss_release`` is set."""
        return with_loss_norm(self.clip_norm, self.loss_release)

    @property
    def several_processes(self) -> bool:
        """Whether the processes of a mesh share a run."""
        return self.mesh is not None and self.mesh.is_multi_process

    def changed(self, **fields: Any) -> RunSettings:
        """Returns settings with other values in some fields, and checks them."""
        return dataclasses.replace(self, **fields)

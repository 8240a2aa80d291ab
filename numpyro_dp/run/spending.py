"""What a driver plans to spend, what it has spent, and the noise that follows."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from numpyro_dp.core import Sampler
from numpyro_dp.privacy.accounting import Accountant
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.mechanism import gaussian
from numpyro_dp.privacy.once import begin, renewed, run_id, use
from numpyro_dp.privacy.plan import BudgetError, Plan, PrivacyReport, make_plan
from numpyro_dp.privacy.random import secret_key
from numpyro_dp.run.session import LossRelease, with_loss_norm
from numpyro_dp.run.step import RunSetting, SensitiveState
from numpyro_dp.sums.devices import agreed, copied

__all__ = [
    "begun",
    "noise_fields",
    "plan_for",
    "report_for",
    "secret_of",
    "spent_by",
    "used",
    "with_new_noise",
]


@runtime_checkable
class _Driver(Protocol):
    """What is read of a driver."""

    sampler: Sampler
    budget: PrivacyBudget | None
    noise_multiplier: float | None
    clip_norm: Any
    accountant: Accountant | None
    loss_release: LossRelease | None
    secret_key: Array | None
    mesh: Mesh | None


def secret_of(driver: _Driver) -> Array:
    """Returns the secret key of a run: the caller's, or a new one, the same in all processes."""
    return agreed(driver.mesh, secret_key() if driver.secret_key is None else driver.secret_key)


def plan_for(driver: _Driver, num_examples: int, num_steps: int | None, **changes: Any) -> Plan:
    """Returns the plan of a run; ``changes`` of budget, noise multiplier and clip norm."""
    settings = {"budget": driver.budget, "noise_multiplier": driver.noise_multiplier} | changes
    clip_norm = with_loss_norm(settings.pop("clip_norm", driver.clip_norm), driver.loss_release)
    mechanism = functools.partial(gaussian, clip_norm)
    return make_plan(
        driver.sampler, num_examples, num_steps, mechanism,
        accountant=driver.accountant, **settings,
    )  # fmt: skip


def noise_fields(driver: _Driver, secret: Array, plan: Plan, clip_norm: Any) -> dict[str, Any]:
    """Returns the fields of a state that make its noise and its batches."""
    # Of a child, so that a public rng_key that is the same key has no key in common with it; and
    # of another one after earlier runs, so that noise is never that of one of them.
    spent = repr([each._replace(run="") for each in plan.earlier])
    child = int.from_bytes(hashlib.sha256(spent.encode()).digest()[:4]) if plan.earlier else 0
    noise_key, batch_key = jax.random.split(jax.random.fold_in(secret, child))
    given = driver.secret_key is not None
    several = driver.mesh is not None and driver.mesh.is_multi_process
    fields = {
        "secret_key": noise_key,
        "sampler_state": driver.sampler.init(batch_key, plan.num_examples),
        "mechanism_state": gaussian(clip_norm, plan.noise_multiplier).init(),
        "noise_multiplier": jnp.asarray(_round_up(plan.noise_multiplier)),
        "run_id": run_id(noise_key),
        "nonce": None if given or several else np.zeros(8, np.uint32),
    }
    return copied(driver.mesh, fields)


def begun(driver: Any, *states: SensitiveState) -> contextlib.AbstractContextManager[None]:
    """Registers runs that start; raises where one has the noise of an earlier one."""
    noisy = [state.run_id for state in states if _has_noise(state)]
    return begin(noisy, repetition=driver.repetition)


def used(
    driver: Any, state: SensitiveState, num_steps: int
) -> contextlib.AbstractContextManager[bool]:
    """Uses up the noise of so many steps; gives it back where they fail."""
    if not _has_noise(state):
        return contextlib.nullcontext(True)
    return use(state.run_id, int(state.step), num_steps, repetition=_repeats(driver, state))


def with_new_noise(driver: Any, state: SensitiveState) -> SensitiveState:
    """The state with noise of its own to come, the same in all processes of a mesh."""
    if _repeats(driver, state) or not _has_noise(state):
        return state
    bits = np.asarray(jax.random.key_data(agreed(driver.mesh, secret_key()))).tobytes()
    return copied(driver.mesh, state.with_new_keys(lambda keys: renewed(keys, bits)))


def _has_noise(state: SensitiveState) -> bool:
    return float(state.noise_multiplier) != 0


def _repeats(driver: Any, state: SensitiveState) -> bool:
    """Whether both the run of the state and the driver that goes on are repetitions."""
    return driver.repetition and state.setting.repetition


def spent_by(driver: _Driver, state: SensitiveState, num_steps: int) -> PrivacyReport:
    """Accounts for all steps up to ``num_steps`` with the noise that the state holds."""
    setting = state.setting
    for budget, other in ((setting.budget, driver.budget), (driver.budget, setting.budget)):
        if budget is not None and budget.earlier != getattr(other, "earlier", ()):
            raise BudgetError(
                f"Expected the budget of the state, {setting.budget}, with the "
                f"{len(getattr(setting.budget, 'earlier', ()))} earlier runs that it knows of, got "
                f"{driver.budget}. Resume with the driver that the state is of."
            )
    noise = float(state.noise_multiplier)
    plan = plan_for(driver, setting.num_examples, num_steps, noise_multiplier=noise)
    return report_for(driver, plan, num_steps, setting)


def report_for(driver: _Driver, plan: Plan, num_steps: int, setting: RunSetting) -> PrivacyReport:
    """Returns the report of a plan that has been carried out in a setting."""
    return PrivacyReport(
        plan.spent(num_steps),
        num_steps,
        plan,
        reproducible=setting.reproducible,
        loss_released=driver.loss_release is not None,
        sensitive_allowed=setting.sensitive,
        repetition=setting.repetition,
        data_plate=setting.data_plate,
        public=setting.public,
    )


def _round_up(noise_multiplier: float) -> np.float32:
    """Rounds to float32 so that the noise is never less than what was accounted for."""
    rounded = np.float32(noise_multiplier)
    # As Python numbers: NumPy would compare in float32, where every number is its own rounding.
    return (
        rounded if float(rounded) >= noise_multiplier else np.nextafter(rounded, np.float32(np.inf))
    )

"""Plans and reports of the privacy spent, and the noise of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from numpyro_dp.core import MechanismState
from numpyro_dp.privacy import once
from numpyro_dp.privacy.budget import unit_name
from numpyro_dp.privacy.keys import agreed, keys_of_run, renewed, run_id, secret_key
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.once import begin, use
from numpyro_dp.privacy.plan import BudgetError, Plan, PrivacyReport, make_plan
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.run.state import RunIdentity, SensitiveState
from numpyro_dp.sums.devices import copied, from_first

__all__ = [
    "begun",
    "charge",
    "noise_fields",
    "plan_for",
    "report_for",
    "secret_of",
    "spent_by",
    "taken_only",
    "used",
    "with_new_noise",
]


def secret_of(settings: RunSettings) -> Array:
    """Returns the caller's secret key or a new one. It is the same in all processes."""
    given = settings.privacy.secret_key
    return agreed(settings.execution.mesh, secret_key() if given is None else given)


def plan_for(settings: RunSettings, num_examples: int, num_steps: int | None) -> Plan:
    """Returns the plan of a run."""
    return make_plan(
        settings.sampler, num_examples, num_steps,
        functools.partial(build_mechanism, settings.privacy.mechanism, settings.norm_with_loss),
        budget=settings.budget, noise_multiplier=settings.privacy.noise_multiplier,
        accountant=settings.privacy.accountant,
    )  # fmt: skip


def noise_fields(
    settings: RunSettings, secret: Array, plan: Plan, mechanism_state: MechanismState
) -> dict[str, Any]:
    """Returns the fields of a state that decide its noise and its batches."""
    noise_key, batch_key = keys_of_run(secret, plan.earlier)
    # A given key must reproduce the run, and several processes must agree on the noise.
    without_nonce = settings.privacy.secret_key is not None or settings.several_processes
    fields = {
        "secret_key": noise_key,
        "sampler_state": settings.sampler.init(batch_key, plan.num_examples),
        "mechanism_state": mechanism_state,
        "noise_multiplier": jnp.asarray(_round_up(plan.noise_multiplier)),
        "run_id": run_id(noise_key),
        "nonce": None if without_nonce else np.zeros(8, np.uint32),
    }
    return copied(settings.execution.mesh, fields)


def begun(
    settings: RunSettings, *states: SensitiveState
) -> contextlib.AbstractContextManager[None]:
    """Registers new runs. Raises if a run has the noise of an earlier run."""
    noisy = [state.run_id for state in states if _has_noise(state)]
    return begin(noisy, repetition=settings.privacy.repetition)


def charge(
    settings: RunSettings,
    reports: Callable[[], list[PrivacyReport]],
    runs: list[str] | None = None,
    *,
    again: bool = False,
) -> None:
    """Charges new runs to the ledger of their budget, if there is one, before they read a record.

    Args:
        settings: The settings of the runs.
        reports: Returns reports of all steps that they may take.
        runs: Names of the runs, if the reports have others.
        again: Whether an earlier call may have charged them already.

    Raises:
        LedgerError: If the total of the ledger does not cover all of them. Then none is charged.
    """
    charges = settings.charges
    if charges is None:
        return
    made = reports()
    if runs is not None:
        # Under these names a call that continues from a checkpoint finds its own charge.
        made = [dataclasses.replace(x, run=run) for x, run in zip(made, runs, strict=True)]

    def charged() -> bytes:  # in a mesh the first process does it
        charges.charge(*(each.spending[-1] for each in made), again=again)
        return b""

    from_first(settings.execution.mesh, charged)


def used(
    settings: RunSettings, state: SensitiveState, num_steps: int
) -> contextlib.AbstractContextManager[bool]:
    """Marks the noise of ``num_steps`` steps as used. Takes this back if the steps fail."""
    if not _has_noise(state):
        # Without noise, nothing can be used twice.
        return contextlib.nullcontext(True)
    return use(state.run_id, int(state.step), num_steps, repetition=_repeats(settings, state))


def taken_only(settings: RunSettings, state: SensitiveState) -> None:
    """Says of a run that was stopped that the noise of later steps is not used up."""
    if _has_noise(state):
        once.taken_only(state.run_id, int(state.step))


def with_new_noise(settings: RunSettings, state: SensitiveState) -> SensitiveState:
    """Gives the state fresh keys for its next noise, the same in all processes of a mesh."""
    if _repeats(settings, state) or not _has_noise(state):
        return state
    # The operating system gives each process other bits, and all must add the same noise.
    bits = np.asarray(jax.random.key_data(agreed(settings.execution.mesh, secret_key()))).tobytes()
    opened = state.opened.with_new_keys(lambda keys: renewed(keys, bits))
    return copied(settings.execution.mesh, SensitiveState(opened, state.nonce, state.identity))


def _has_noise(state: SensitiveState) -> bool:
    return float(state.noise_multiplier) != 0


def _repeats(settings: RunSettings, state: SensitiveState) -> bool:
    """Whether the run of the state and the run that continues it are both repetitions."""
    # Both must be. Otherwise a driver with repetition=True could continue a fresh run twice, with
    # the same noise.
    return settings.privacy.repetition and state.identity.repetition


def spent_by(settings: RunSettings, state: SensitiveState, num_steps: int) -> PrivacyReport:
    """Accounts for all steps up to ``num_steps`` with the noise that the state holds."""
    identity, budget = state.identity, settings.budget
    for one, other in ((identity.budget, budget), (budget, identity.budget)):
        if one is not None and one.earlier != getattr(other, "earlier", ()):
            raise BudgetError(
                f"The state has a budget with {len(getattr(identity.budget, 'earlier', ()))} "
                f"earlier runs, {identity.budget}, but the driver has {budget}. Resume this state "
                "with the driver that created it."
            )
    own = unit_name(identity.max_rows)
    if other := {each.unit for each in getattr(budget, "earlier", ())} - {own}:
        raise BudgetError(
            f"A record of this run is a {own}, and a record of an earlier run in its budget is a "
            f"{other.pop()}. One epsilon cannot cover both. Use the same unit for all runs."
        )
    noise, wanted = float(state.noise_multiplier), settings.privacy.noise_multiplier
    if wanted is not None and float(_round_up(wanted)) != noise:
        raise ValueError(
            f"The state has noise_multiplier={noise:.6g}, which a run keeps to its end, but the "
            f"driver has {wanted:.6g}. Build the driver with the noise of the state, or call init."
        )
    # The noise in the state counts, not what the budget would give for this number of steps.
    settings = settings.changed(noise_multiplier=noise)
    return report_for(plan_for(settings, identity.num_examples, num_steps), num_steps, identity)


def report_for(plan: Plan, num_steps: int, identity: RunIdentity) -> PrivacyReport:
    """Returns the report of a run that followed a plan."""
    budget = plan.budget and dataclasses.replace(plan.budget, charges=None)
    return PrivacyReport(
        plan.spent(num_steps),
        num_steps,
        dataclasses.replace(plan, budget=budget),  # a report may be published, a ledger may not
        reproducible=identity.reproducible,
        loss_released=identity.loss_release is not None,
        repetition=identity.repetition,
        data_plate=identity.data_plate,
        public=identity.public,
        max_rows=identity.max_rows,
        timed=identity.timed,
        in_ledger=plan.budget is not None and plan.budget.charges is not None,
    )


def _round_up(noise_multiplier: float) -> np.float32:
    """Rounds to float32 so that the noise is never less than what was accounted for."""
    rounded = np.float32(noise_multiplier)
    # Python floats, because NumPy would round noise_multiplier to float32 before it compares.
    return (
        rounded if float(rounded) >= noise_multiplier else np.nextafter(rounded, np.float32(np.inf))
    )

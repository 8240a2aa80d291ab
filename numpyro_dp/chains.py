"""Several chains of one driver: each has its own noise and batches, and all share the budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp.core import Args, Kwargs, Values
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.privacy.keys import check_rng_key
from numpyro_dp.privacy.once import check_outside_trace
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.checkpoint import check_every, checkpoint_of, started, without_own_run
from numpyro_dp.run.driver import Driver
from numpyro_dp.run.loop import Course, Progress, opened_bar
from numpyro_dp.run.results import Forecast, forecast
from numpyro_dp.run.session import Session
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.run.state import SensitiveState, noise_fields, plan_for, secret_of, spent_by

__all__ = ["Chains", "ChainsResult"]


class ChainsResult(NamedTuple):
    """What chains return. All of it may be published.

    Attributes:
        params: Kept iterates by parameter, with leading axes for chains and draws.
        privacy: The report of all chains together.
        problem: The problem that was fitted. It holds no record.
    """

    params: dict[str, Array]
    privacy: PrivacyReport
    problem: Any


class Chains(NamedTuple):
    """How many chains a driver runs, and how many steps each of them takes.

    Attributes:
        number: Number of chains, which run in one compiled call.
        warmup: Steps of a chain before the first iterate that is kept.
        samples: Steps of a chain after warmup.
        thinning: One of this many iterates is kept. It divides ``samples``.

    Example:
        >>> Chains(number=4, warmup=100, samples=500, thinning=5).num_steps
        600
    """

    number: int
    warmup: int
    samples: int
    thinning: int

    @property
    def num_steps(self) -> int:
        """Steps of one chain."""
        return self.warmup + self.samples

    def plan(self, driver: Driver, args: Args, kwargs: Kwargs) -> Forecast:
        """Returns how far the noise will move the posterior, at best. Reads no record."""
        session = driver._session(*as_arrays(args, kwargs))
        plan = plan_for(driver.settings, session.num_examples, self.number * self.num_steps)
        return forecast(plan, session.num_latents, self.number * self.samples)

    def run(
        self,
        driver: Driver,
        rng_key: Array,
        args: Args,
        kwargs: Kwargs,
        *,
        init_params: Values | None = None,
        checkpoint: Any = None,
        every: int | None = None,
        progress_bar: bool = True,
        check: Callable[[float, int], None] = lambda noise_multiplier, num_examples: None,
    ) -> ChainsResult:
        """Runs the chains.

        Args:
            driver: The driver.
            rng_key: Key of initial values and of further public draws.
            args: Arguments of the model, with the whole data set.
            kwargs: Its keyword arguments.
            init_params: Initial values, the same for all chains.
            checkpoint: Folder for the progress, as for :meth:`Driver.run`.
            every: About how many steps lie between two checkpoints.
            progress_bar: Whether to show what is being done.
            check: ``(noise_multiplier, num_examples) -> None``. It may raise before a record is
                read.

        Guarantee:
            Steps of all chains compose in the report. No two chains share noise or batches.
        """
        check_outside_trace(f"{driver.name}.run")
        check_rng_key(rng_key)
        check_every(every, checkpoint)
        args, kwargs = as_arrays(args, kwargs)
        with opened_bar(progress_bar, self.num_steps) as bar:
            settings = without_own_run(driver.settings, checkpoint)
            driver = driver.with_settings(settings)
            structure, total = driver.structure(args, kwargs), self.number * self.num_steps
            self._check_epochs(settings, structure.layout.num_examples)
            keys = jax.random.split(rng_key, self.number) if self.number > 1 else [rng_key]
            common = total, args, kwargs, init_params, structure
            states = [driver._init(key, *common) for key in keys]
            check(float(states[0].noise_multiplier), structure.layout.num_examples)
            states = self._with_own_noise(settings, states)
            spent = spent_by(settings, states[0], total)
            report = dataclasses.replace(spent, chains=self.number)
            session = driver._session(args, kwargs)
            rows = session.rows(args, kwargs)
            course, progress = self._begin(session, states)
            kept = checkpoint_of(
                checkpoint, every, driver.name, settings, [report], rng_key,
                lambda: session.program(self._begin(session, states[:1]), rows),
                session.records(args, kwargs), sizes=self[1:], chains=self.number,
            )  # fmt: skip

            def left(progress: Progress) -> tuple[list[SensitiveState], int]:
                carry = progress.carry
                opened = (
                    [carry.state]
                    if self.number == 1
                    else [jax.tree.map(lambda x, i=i: x[i], carry) for i in range(self.number)]
                )
                now = [first.closed(each) for first, each in zip(states, opened, strict=True)]
                return now, course.num_steps - int(progress.done)

            run = started(settings, states, progress, [report], kept, left, lambda: [report])
            with run as (progress, (report,)):
                begun = course, progress
                if self.number > 1:
                    if bar is not None:
                        bar.set_description_str(f"compiling and running {self.number} chains")
                    params = session.run_many(rows, begun, kept)[1]
                    if bar is not None:
                        bar.update(bar.total)
                else:
                    found = session.run(states[0], rows, begun, report, bar=bar, kept=kept)
                    if found.stopped:
                        raise KeyboardInterrupt
                    params = jax.tree.map(lambda leaf: leaf[None], found.trace.params)
            return ChainsResult(params, report, session.problem.at(rows.shared))

    def _check_epochs(self, settings: RunSettings, num_examples: int) -> None:
        """The accountant counts epochs of all chains together, but a chain cannot finish another's.

        Reads no record.
        """
        sampler, count = settings.sampler, settings.sampler.compositions
        together = count(num_examples, self.number * self.num_steps)
        if together != self.number * count(num_examples, self.num_steps):
            raise ValueError(
                f"Each of {self.number} chains must run whole epochs, but num_warmup + num_samples="
                f"{self.num_steps} steps of {sampler!r} end inside one. Choose a multiple of an "
                "epoch."
            )

    def _with_own_noise(
        self, settings: RunSettings, starts: list[SensitiveState]
    ) -> list[SensitiveState]:
        """Gives each chain its own noise and batches."""
        if self.number == 1:
            return starts
        # Chains with the same noise would reveal the difference of their clipped sums.
        secret, first = secret_of(settings), starts[0]
        plan = plan_for(settings, first.identity.num_examples, self.number * self.num_steps)
        own = [jax.random.fold_in(secret, chain) for chain in range(self.number)]
        fields = [noise_fields(settings, each, plan, first.mechanism_state) for each in own]
        return [start._replace(**each) for start, each in zip(starts, fields, strict=True)]

    def _begin(self, session: Session, states: list[SensitiveState]) -> tuple[Course, Progress]:
        """Returns the course of the chains, and their progress before the first step."""
        kept = self.samples // self.thinning
        if len(states) == 1:
            return session.begin(states[0], self.samples, kept, warmup=self.warmup)
        opened = (state.opened for state in states)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *opened)
        return session.begin_many(stacked, self.samples, kept, self.warmup)

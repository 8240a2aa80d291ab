"""Several chains of one driver: each has its own noise and batches, and all share the budget."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_dp._validate import check_int
from numpyro_dp.core import Args, Kwargs, Values
from numpyro_dp.model.frames import as_arrays
from numpyro_dp.privacy.keys import check_rng_key
from numpyro_dp.privacy.mechanism.gaussian import build_mechanism
from numpyro_dp.privacy.once import check_outside_trace
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.checkpoint import check_every, checkpoint_of, started, without_own_run
from numpyro_dp.run.driver import Driver
from numpyro_dp.run.loop import Course, Progress, opened_bar
from numpyro_dp.run.results import Forecast, forecast
from numpyro_dp.run.session import Session
from numpyro_dp.run.settings import RunSettings
from numpyro_dp.run.state import SensitiveState, noise_fields, plan_for, secret_of, spent_by


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


@dataclasses.dataclass(frozen=True)
class Chains:
    """How many chains a driver runs, and how many steps each of them takes.

    Attributes:
        num_chains: Number of chains, which run in one compiled call.
        num_warmup: Steps of a chain before the first iterate that is kept.
        num_samples: Steps of a chain after warmup.
        thinning: One of this many iterates is kept. It divides ``num_samples``.

    Raises:
        TypeError, ValueError: If a number is out of range.

    Example:
        >>> Chains(num_chains=4, num_warmup=100, num_samples=500, thinning=5).num_steps
        600
    """

    num_chains: int
    num_warmup: int
    num_samples: int
    thinning: int

    def __post_init__(self) -> None:
        check_int("num_warmup", self.num_warmup, low=0)
        for name in ("num_chains", "thinning", "num_samples"):
            check_int(name, getattr(self, name), low=1)
        if self.num_samples % self.thinning:
            raise ValueError(
                f"Expected num_samples to be a multiple of thinning={self.thinning}, got "
                f"{self.num_samples}. Use {self.num_samples + -self.num_samples % self.thinning}."
            )

    @property
    def num_steps(self) -> int:
        """Steps of one chain."""
        return self.num_warmup + self.num_samples

    def plan(self, driver: Driver, args: Args, kwargs: Kwargs) -> Forecast:
        """Returns how far the noise will move the posterior, at best. Reads no record."""
        self._check_fresh_noise(driver.settings)
        session = driver._session(*as_arrays(args, kwargs))
        plan = plan_for(driver.settings, session.num_examples, self.num_chains * self.num_steps)
        return forecast(plan, session.num_latents, self.num_chains * self.num_samples)

    def run(
        self,
        driver: Driver,
        rng_key: Array,
        args: Args,
        kwargs: Kwargs,
        *,
        init_params: Values | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
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
            self._check_fresh_noise(settings)
            driver = driver.with_settings(settings)
            structure, total = driver.structure(args, kwargs), self.num_chains * self.num_steps
            self._check_epochs(settings, structure.layout.num_examples)
            keys = jax.random.split(rng_key, self.num_chains) if self.num_chains > 1 else [rng_key]
            common = total, args, kwargs, init_params, structure
            states = [driver._init(key, *common) for key in keys]
            check(float(states[0].noise_multiplier), structure.layout.num_examples)
            states = self._with_own_noise(settings, states)
            spent = spent_by(settings, states[0], total)
            report = dataclasses.replace(spent, chains=self.num_chains)
            session = driver._session(args, kwargs)
            rows = session.rows(args, kwargs)
            course, progress = self._begin(session, states)
            kept = checkpoint_of(
                checkpoint, every, driver.name, settings, [report], rng_key,
                lambda: session.program(self._begin(session, states[:1]), rows),
                session.records(args, kwargs), chains=self.num_chains,
                sizes=(self.num_warmup, self.num_samples, self.thinning),
            )  # fmt: skip

            def left(progress: Progress) -> tuple[list[SensitiveState], int]:
                opened = [progress.carry.state]
                if (number := self.num_chains) > 1:
                    opened = [jax.tree.map(lambda x, i=i: x[i], *opened) for i in range(number)]
                now = [first.closed(each) for first, each in zip(states, opened, strict=True)]
                return now, course.num_steps - int(progress.done)

            run = started(settings, states, progress, [report], kept, left, lambda: [report])
            with run as (progress, (report,)):
                begun = course, progress
                if self.num_chains > 1:
                    if bar is not None:
                        bar.set_description_str(f"compiling and running {self.num_chains} chains")
                    params = session.run_many(rows, begun, kept)[1]
                    if bar is not None:
                        bar.update(bar.total)
                else:
                    found = session.run(states[0], rows, begun, report, bar=bar, kept=kept)
                    if found.stopped:
                        raise KeyboardInterrupt
                    params = jax.tree.map(lambda leaf: leaf[None], found.trace.params)
            return ChainsResult(params, report, session.problem.at(rows.shared))

    def _check_fresh_noise(self, settings: RunSettings) -> None:
        """Raises if steps of several chains would not compose.

        ``compose`` of a mechanism gives the event of one run, whose noise depends on earlier noise.
        Several such runs are not one run of all their steps.
        """
        built = build_mechanism(settings.privacy.mechanism, settings.norm_with_loss, 1.0, 1.0)
        if self.num_chains > 1 and built.compose is not None:
            raise ValueError(
                f"{settings.privacy.mechanism!r} adds noise that depends on earlier noise, and "
                "states the event of one run. Several chains would spend more than that. Use one "
                "chain, or GaussianMechanism()."
            )
        if settings.num_steps is not None:
            raise ValueError(
                "The number of steps comes from num_warmup and num_samples, and the settings have "
                f"num_steps={settings.num_steps} too. Leave it out."
            )

    def _check_epochs(self, settings: RunSettings, num_examples: int) -> None:
        """The accountant counts epochs of all chains together, but a chain cannot finish another's.

        Reads no record.
        """
        sampler, count = settings.sampler, settings.sampler.compositions
        together = count(num_examples, self.num_chains * self.num_steps)
        if together != self.num_chains * count(num_examples, self.num_steps):
            raise ValueError(
                f"Each of {self.num_chains} chains must run whole epochs, but num_warmup + "
                f"num_samples={self.num_steps} steps of {sampler!r} end inside one. Choose a "
                "multiple of an epoch."
            )

    def _with_own_noise(
        self, settings: RunSettings, starts: list[SensitiveState]
    ) -> list[SensitiveState]:
        """Gives each chain its own noise and batches."""
        if self.num_chains == 1:
            return starts
        # Chains with the same noise would reveal the difference of their clipped sums.
        secret, first = secret_of(settings), starts[0]
        plan = plan_for(settings, first.identity.num_examples, self.num_chains * self.num_steps)
        own = [jax.random.fold_in(secret, chain) for chain in range(self.num_chains)]
        fields = [noise_fields(settings, each, plan, first.mechanism_state) for each in own]
        return [start._replace(**each) for start, each in zip(starts, fields, strict=True)]

    def _begin(self, session: Session, states: list[SensitiveState]) -> tuple[Course, Progress]:
        """Returns the course of the chains, and their progress before the first step."""
        kept = self.num_samples // self.thinning
        if len(states) == 1:
            return session.begin(states[0], self.num_samples, kept, warmup=self.num_warmup)
        opened = (state.opened for state in states)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *opened)
        return session.begin_many(stacked, self.num_samples, kept, self.num_warmup)

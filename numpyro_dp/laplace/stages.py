"""Makes the releases of a run one after the other, and decodes each before the next."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from numpyro_dp._tree import on_device
from numpyro_dp.core import Args, Kwargs
from numpyro_dp.laplace import curvature, decode, shells
from numpyro_dp.laplace.guess import FirstGuess, sites_of
from numpyro_dp.laplace.pattern import pairs_of
from numpyro_dp.laplace.schedule import (
    ALONG,
    FAR,
    GROWTH,
    LAST,
    LEAST_KAPPA,
    LONG,
    LONGEST,
    LOSS_BOUND,
    MOST_FAR,
    MOST_SHARE_FAR,
    NEAR,
    NOISE_FAR,
    PAIRS,
    PAIRS_INDEPENDENT,
    RESERVE,
    SHARE_FAR,
    WIDE,
    Kind,
    Schedule,
    believed_size,
    bounds,
    next_growth,
)
from numpyro_dp.laplace.signal import (
    LaplaceProblem,
    Request,
    StageOptimizer,
    are_independent,
    staged_scores,
    symmetric,
)
from numpyro_dp.laplace.tail import SIZES, Tail, has_tail
from numpyro_dp.model.frontend import Call, Prepared
from numpyro_dp.model.outcomes import Outcomes
from numpyro_dp.model.records import Rows
from numpyro_dp.model.structure import ModelStructure
from numpyro_dp.posterior.algebra import factor, solve
from numpyro_dp.posterior.likelihood import released_likelihood
from numpyro_dp.posterior.prior import ModelPrior, Near
from numpyro_dp.privacy.mechanism.staged import asking
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.checkpoint import Checkpoint
from numpyro_dp.run.driver import Driver
from numpyro_dp.run.loop import HostRows, LoopCall, with_bar
from numpyro_dp.run.session import Session
from numpyro_dp.run.settings import Method, RunSettings
from numpyro_dp.run.state import RunState, SensitiveState

_BELIEVED = -3.0  # log of the odds from which a direction counts as unseen
_ONE_PART = np.eye(shells.SHELLS + 1)[0]
_MOST_SPREAD = 10.0  # factor on the variance of scores in a wrong model


class Run:
    """The released values of a run so far, and the estimates from them.

    Attributes:
        prior: The prior of the model.
        plan: All releases of the run.
        groups: Sites of group effects, see :func:`~numpyro_dp.laplace.pattern.group_sites`.
        spread: How much the scores vary, relative to the model, and the standard error of that.
        tail: The norms of scores next to what the model says, or ``None`` if not released.
        robust: Whether the last stage releases the variance of scores.
    """

    prior: ModelPrior
    plan: Schedule
    groups: np.ndarray
    pairs: np.ndarray
    whitening: np.ndarray
    template: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray
    kappa: float
    stages: tuple[curvature.Stage, ...]
    growth: float

    def __init__(
        self, prior: ModelPrior, plan: Schedule, guess: FirstGuess, robust: bool = False
    ) -> None:
        self.robust = robust
        self.prior, self._prior, self.plan, self.groups = prior, prior.decoded, plan, guess.groups
        self._planned_at_first = len(plan.kinds)
        self._unseen, self._near = guess.unseen, guess.near
        self._blurred, self._norms = guess.blurred, guess.norms
        self._classes = guess.classes
        # A direction that may be unseen counts so until the records say otherwise. If it is seen,
        # the posterior is too wide for a while. The other error would make it too narrow.
        self._near_scales: Near | None = None
        self._evidence, self._sites = np.zeros(len(guess.unseen)), sites_of(prior)
        size, self.pairs = len(guess.groups), pairs_of(guess.groups)
        self.whitening, self.template = np.diag(guess.whitening), np.eye(size)
        self.mean, self.covariance = prior.decoded.mean, prior.decoded.covariance
        self._draw_around()
        self.kappa, self.stages, self.growth = 1.0, (), GROWTH
        self.spread: tuple[float, float] = 1.0, 0.0
        self.tail: Tail | None = None
        self._clip = 1.0
        self._biases: list[float] = []
        self._has_tail: bool = has_tail(prior.outcomes)
        self.loss: curvature.Loss = curvature.Loss.before(len(guess.groups))
        self.size = size
        self.number: int = prior.outcomes.model.structure.layout.num_examples

    def request(self, release: int) -> Request:
        """Returns the request for a release."""
        root, weights = factor(self._spread * self.covariance), self.plan.weights(release)
        # All of these come from earlier releases, the prior, N and invented records.
        clips, norms = self._bounds(release)
        parts = np.stack([norms, shells.WEIGHTS if norms[0] < norms[-1] else _ONE_PART])
        numbers = self.mean, root, self.whitening, clips, weights, parts
        kind = on_device(self.plan.kinds[release], np.int32)
        return Request(kind, *(on_device(x, np.float32) for x in numbers))

    def read(self, release: int, released: np.ndarray) -> None:
        """Decodes the values of a release."""
        released = np.asarray(released, np.float64)
        entries = int(np.sum(np.triu(self.pairs)))
        tailed = self._has_tail
        ends = np.cumsum([
            self.size, entries, 1, 1, self.size, SIZES * tailed, shells.SHELLS * self.size * tailed,
        ])  # fmt: skip
        # In the order in which `pull_back` of the signal joins them.
        score, triangle, power, excess, loss, tail, further, scatter = np.split(released, ends)
        # The same bounds as in the request, because nothing that they depend on has changed since.
        (clips, norms), weights = self._bounds(release), self.plan.weights(release)
        mu, kind = self.plan.mu_of(release), self.plan.kinds[release]
        if kind is Kind.SIZE:
            log_size = believed_size(power[0] / weights[2], self.number, mu[2])
            self.whitening = self.whitening * np.exp(-log_size)
            return
        if kind is Kind.SCALES:
            row, scales = clips[0] * score / weights[0], clips[1] * triangle[: self.size]
            noise = clips[0] / mu[0], clips[1] / mu[1]
            self._read_scales(scales / weights[1], row, *noise)
            return
        noisy = clips[1] * symmetric(triangle / weights[1], self.pairs)
        self._clip, self._biases = clips[0] / clips[2], []
        noises: np.ndarray | float
        score, noises = clips[0] * score / weights[0], clips[0] / mu[0]
        if self.tail is not None and self.tail.misplaced:
            factors = np.diff(norms, prepend=0) / shells.WEIGHTS
            parts = np.stack([score / clips[0], *further.reshape(-1, self.size) / weights[0]])
            self._biases = [self.tail.bias(c, self.size, self.number) for c in norms / clips[2]]
            score, noises = shells.joined(
                factors[:, None] * parts, factors / mu[0], self._biases, self.tail.of_scale
            )
        stage = curvature.read_stage(
            self.mean, self.covariance, self.whitening, self.template,
            score, noisy, noises, clips[1] / mu[1], self.groups,
            self._without_scores(noisy, clips[1] / mu[1]), self._spread, self._sites, self._classes,
        )  # fmt: skip
        if self.stages:
            # The curvature may have changed along the whole way, or along the last step alone.
            steps = (self.mean - at for at in (self._prior.mean, self.stages[-1].mean))
            stage = curvature.with_steps(stage, *steps)
        self.stages = decode.with_discrepancies((*self.stages, stage))
        noise = clips[0] ** 2 / mu[2]
        noisy = clips[0] ** 2 * power[0] / weights[2]
        stage = self.stages[-1]
        self.kappa = decode.sampling_ratio(stage, noisy, noise)
        begin = self.mean, self.covariance
        kappa, decoded = self.kappa, self._decode(begin)
        if weights[3] or weights[5]:
            # Draws were off by their spread, and their mean by its step.
            step = decoded[0] - stage.mean
            off = stage.spread * stage.covariance + np.outer(step, step)
            doubt = float(np.sum(stage.curvature_floored * off))
        if weights[3]:
            square = clips[2] ** 2
            excess, both = square * excess[0] / weights[3], (noise, square / mu[3])
            self.spread = decode.excess_ratio(noisy, excess, both, clips[2], doubt / self.number)
            # In a wrong model the intervals allow for the part of the variance that is sure.
            if not self.robust:
                self.kappa *= np.clip(self.spread[0] - 2 * self.spread[1], 1.0, _MOST_SPREAD)
        if weights[5]:
            invented = self._norms(self.mean, self.whitening) * math.sqrt(self.size / self.number)
            read = Tail.read(tail / weights[5], 1 / mu[5], self.number, doubt, invented / clips[2])
            self.tail = read.joined(self.tail)
        variance = None
        if weights[6]:
            square = norms[shells.MIDDLE] ** 2
            seen = square * symmetric(scatter / weights[6], self.pairs)
            variance = curvature.variance_of(stage, seen, square / mu[6], self.kappa)
        if variance is not None or self.kappa != kappa:
            decoded = self._decode(begin, variance)
        if self.prior.has_scales:  # the released values may tell the scale of effects
            told = released_likelihood(*decoded, self._prior)
            self._near_scales = self.prior.near(*told, self._near_scales)
            self._prior = self._near_scales.prior
            decoded = self._decode(decoded, variance)
        self.mean, self._decoded = decoded
        self.stages, self.covariance = decode.with_step(self.stages, self.mean, self._decoded)
        # Sizes at the draws of this stage, before `_draw_around` sets those of the next.
        before = self._expected
        self._draw_around()
        ratios = np.ones(self.size)
        if weights[4] and self.kappa > LEAST_KAPPA:
            bound = LOSS_BOUND * clips[1]
            seen = bound * loss / weights[4], bound / mu[4]
            self.loss, ratios = self.loss.read(self.stages[-1], *seen)
        stage = curvature.moved(stage, before, self._expected * ratios)
        self.whitening = curvature.next_whitening(stage, self._prior, self.kappa)
        self.whitening = self.whitening * np.outer(self.loss.factors, self.loss.factors)
        self.template = self.whitening @ stage.curvature_floored @ self.whitening
        self.plan = self._planned(release)
        if len(self.stages) > 1:  # the first whitening is a guess, which clips many records
            self.growth = next_growth(self.growth, self.kappa)

    def _decode(
        self, begin: tuple[np.ndarray, np.ndarray], variance: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and covariance given all stages, or the newest alone if its score is in shells."""
        # All others have the bias of clipping. Many of them would outvote one without it.
        stages = self.stages[-1:] if self._biases else self.stages
        return decode.decode_stages(self._prior, stages, self.kappa, begin, variance)

    def _draw_around(self) -> None:
        """Sets how close the next draws are, and the size of scores that they will have."""
        self._spread, self._expected = self._near(self.mean, self.covariance)

    def _without_scores(self, noisy: np.ndarray, noise_sd: float) -> np.ndarray:
        """Directions (k, d) that no record sees, by all curvatures that were released so far."""
        self._evidence = self._evidence + [
            curvature.evidence_unseen(each, self.whitening, noisy, noise_sd) if len(each) else 0.0
            for each in self._unseen
        ]
        believed = zip(self._unseen, self._evidence >= _BELIEVED, strict=True)
        return np.concatenate([np.zeros((0, len(noisy))), *(u for u, found in believed if found)])

    def steps(self) -> np.ndarray:
        """The newest step of the mean in posterior standard deviations: of each latent, and all."""
        step, error = self.mean - self.stages[-1].mean, self._error
        together = np.sqrt(step @ solve(error, step) / len(step))
        return np.append(np.abs(step) / np.sqrt(np.diag(error)), together)

    @property
    def _error(self) -> np.ndarray:
        """The uncertainty of the last steps (d, d), next to which they are long or short."""
        if not self._biases:
            return self._decoded
        # They corrected a bias, which shows no way still to go. Its direction is any.
        whitening = self._biases[0] * self.stages[-1].whitening
        return self._decoded + whitening @ whitening / self.size

    @property
    def arrived(self) -> bool:
        """Whether the newest step of the mean was short, which it is at the optimum."""
        *alone, together = self.steps()
        longest = LONGEST + np.sqrt(2 * np.log(len(alone)))
        short = bool(max(alone) < longest and together < LONG * (1 + 1 / np.sqrt(len(alone))))
        return short and not self._persists() and not self._on_its_way()

    @property
    def misfit(self) -> tuple[float, float]:
        """Share of records with scores of another size than the model says, and the last bias."""
        if self.tail is None:
            return 0.0, 0.0
        bias = self.tail.bias(self._clip, self.size, self.number)
        return self.tail.misplaced / self.number, bias

    @property
    def unseen(self) -> tuple[float, float]:
        """Share of records that may be far out and pass for noise, and the bias of that."""
        if self.tail is None or self.tail.sure:
            return 0.0, 0.0
        tail = self.tail.unseen
        return tail.far / self.number, tail.bias(self._clip, self.size, self.number)

    def _planned(self, release: int) -> Schedule:
        """The schedule after a release, with one more stage if the mean has not arrived."""
        plan = self.plan
        left, more = len(plan.kinds) - release - 1, len(plan.kinds) - self._planned_at_first
        steps = self.steps()
        far = max(np.max(steps[:-1]), steps[-1] ** 2) > FAR or self._persists()
        stage = self.stages[-1]
        # Short steps in posterior standard deviations, because little is known yet.
        wide = np.sum(self._decoded * stage.curvature_floored) > WIDE**2 * self.size
        far = far or wide or self._spread < NEAR
        # A stage that hides its score in noise would throw the run back.
        length = np.linalg.norm(stage.whitening @ stage.score)
        noise = np.linalg.norm(np.ones(self.size) * stage.score_noise) / max(length, 1e-300)
        # With this share, the noise would be NOISE_FAR of a score like the newest one.
        share = max(SHARE_FAR, plan.shares[release] * (noise / NOISE_FAR) ** 2)
        if not far or share > MOST_SHARE_FAR or not 0 < left <= LAST or more >= MOST_FAR:
            return plan
        if math.fsum(plan.shares[release + 1 :]) - share < RESERVE:
            return plan
        return plan.with_stage(release + 1, share)

    def _persists(self) -> bool:
        """Whether the last two steps point the same way, and are longer than their uncertainty."""
        if len(self.stages) < 2:
            return False
        places = (self.stages[-2].mean, self.stages[-1].mean, self.mean)
        before, now = np.diff(places, axis=0)
        turned = [solve(self._error, each) for each in (before, now)]
        lengths = [np.sqrt(u @ t) for u, t in zip((before, now), turned, strict=True)]
        along = (before @ turned[1]) / max(lengths[0] * lengths[1], 1e-300)
        return bool(along > 0.5 and lengths[1] > np.sqrt(len(now)))

    def _on_its_way(self) -> bool:
        """Whether the last two steps together are long, along the way from the prior's mean.

        On a long way through flat scores each step falls short, in one direction of many.
        """
        way = self.mean - self._prior.mean
        turned = solve(self._error, way)
        return bool(self._last_steps() @ turned > ALONG * np.sqrt(way @ turned))

    def _last_steps(self) -> np.ndarray:
        """The sum of the last two steps of the mean (d,)."""
        return self.mean - self.stages[max(0, len(self.stages) - 2)].mean

    def likelihood(self) -> tuple[np.ndarray, np.ndarray]:
        """Precision and linear term of the released likelihood, for use with another prior.

        Under a normal prior, what is unsure widens the covariance and keeps the mean. In a
        direction that is as wide as the prior, the likelihood then has precision 0 and a linear
        term that is not 0. Another prior, such as that of group effects with an unknown scale,
        would follow it without limit. So other priors get a likelihood that is itself wider.
        """
        blur = self._blur()
        if self.prior.normal is None:
            precision, linear = released_likelihood(self.mean, self._decoded, self._prior)
            told = precision @ blur
            share = 1 + blur @ told
            return precision - np.outer(told, told) / share, linear - told * (blur @ linear) / share
        covariance = self.covariance + np.outer(blur, blur)
        if not self.arrived:  # another step may be as long
            step = self._last_steps()
            covariance = covariance + np.outer(step, step)
        return released_likelihood(self.mean, covariance, self._prior)

    def _blur(self) -> np.ndarray:
        r"""How far errors of all latents may have moved the mean (d,).

        The optimum is away from the mean of the newest draws by its step u and its covariance V,
        and the draws by their own :math:`V_d`. With the ratios :math:`r, r_d` of
        ``FirstGuess.blurred``, the score of a latent is off by

        .. math:: b = r\, \mathrm{tr}(H (V + u u')) + r_d\, \mathrm{tr}(H V_d),

        which moves the log of a scale with curvature h by about :math:`\log(1 + 2 b / h) / 2`.
        """
        stage = self.stages[-1]
        slope, step = stage.curvature_floored, self.mean - stage.mean
        of_truth, of_draws = self._blurred(self.mean, self._decoded)
        bias = of_truth * np.sum(slope * (self._decoded + np.outer(step, step)))
        bias += of_draws * np.sum(slope * stage.spread * stage.covariance)
        own = np.diag(slope)
        return solve(slope, np.sign(bias) * own * np.log1p(2 * np.abs(bias) / own) / 2)

    def _bounds(self, release: int) -> tuple[np.ndarray, np.ndarray]:
        """Bounds of a release (3,), and the clip norms of the parts of its score."""
        mu = float(np.linalg.norm(self.plan.mu_of(release)))
        kind, size = self.plan.kinds[release], self.size
        found = bounds(kind, size, self.number, mu, self.growth)
        if kind is Kind.STAGE and self.tail is not None and self.tail.misplaced:
            noise, first = found[2] / self.plan.mu_of(release)[0], found[0] / found[2]
            norms = found[2] * shells.clip_norms(self.tail, first, size, self.number, noise)
            found[0] = norms[-1]
            return found, norms
        return found, np.full(len(_ONE_PART), found[0])

    def _read_scales(
        self, scales: np.ndarray, row: np.ndarray, row_noise: float, scale_noise: float
    ) -> None:
        whitening = self.whitening
        guess = curvature.start(whitening, scales, scale_noise, (row, row_noise), self.number)
        self.whitening = curvature.first_whitening(self._prior, guess, self.groups)
        self.template = self.whitening @ guess @ self.whitening


class Releases(NamedTuple):
    """The releases of a run so far.

    Attributes:
        state: The state after them.
        values: Their values, with zeros for those to come.
        done: Their number.
    """

    state: RunState
    values: np.ndarray
    done: Array | np.integer

    @classmethod
    def before(cls, state: RunState, number: int) -> Releases:
        """Returns the releases of a run that has made none."""
        empty = np.asarray(state.optim_state[1])
        return cls(state, np.zeros((number, *empty.shape), empty.dtype), np.int32(0))


def most_releases(plan: Schedule) -> int:
    """Most releases of a run with a plan."""
    return len(plan.kinds) + MOST_FAR


class Stages(Driver):
    """The driver of the releases of one schedule."""

    def __init__(
        self, settings: RunSettings, outcomes: Outcomes, groups: np.ndarray, robust: bool = False
    ) -> None:
        pairs = pairs_of(groups)
        number = PAIRS_INDEPENDENT if are_independent(outcomes) else PAIRS
        scores = staged_scores(outcomes, number, pairs, robust)
        optimizer = StageOptimizer(pairs, has_tail(outcomes), robust)
        method = Method(scores, optimizer, ("DPLaplace",))
        super().__init__(method, settings)
        self._outcomes = outcomes

    def start(self, rng_key: Array, run: Run, args: Args, kwargs: Kwargs) -> SensitiveState:
        """Returns the state before the first release."""
        self._first = run.request(0)
        structure = self._outcomes.model.structure
        return self._init(rng_key, most_releases(run.plan), args, kwargs, None, structure)

    def stages(
        self,
        state: SensitiveState,
        run: Run,
        session: Session,
        rows: Rows | HostRows,
        releases: Releases,
        report: PrivacyReport,
        bar: Any,
        kept: Checkpoint | None = None,
    ) -> None:
        """Makes all releases that are left and stores the results in ``run``."""
        values, done = np.array(releases.values), int(releases.done)
        # A resumed run decodes its old releases again. Decoding is not random, so it makes the same
        # requests as before.
        for release in range(done):
            if release < len(run.plan.kinds):  # a run may need fewer releases than it may make
                run.read(release, values[release])

        def calls() -> Iterator[LoopCall]:
            release = done
            while release < len(run.plan.kinds):  # a release may add another
                if bar is not None:
                    bar.total = len(run.plan.kinds)
                yield release, 1, 1
                release += 1

        for release, _, _ in with_bar(bar, calls(), 0, done, len(run.plan.kinds), report):
            _, empty = state.optim_state
            # The mechanism adds up the shares. One that brought the sum above 1 would give NaN.
            memory = asking(state.mechanism_state.memory, run.plan.shares[release])
            state = state._replace(
                optim_state=(run.request(release), empty),
                mechanism_state=state.mechanism_state._replace(memory=memory),
            )
            if isinstance(rows, HostRows):
                state = session.on_all(state, rows)
            else:
                state = session.run(state, rows, session.begin(state, 1, 1), report).state
            values[release] = state.optim_state[1]
            if kept is not None:
                # Saved before it is decoded: it is paid for, whatever happens next.
                kept.save(Releases(state.opened, values, np.int32(release + 1)))
            run.read(release, values[release])
        if kept is not None:  # none are left
            kept.save(Releases(state.opened, values, np.int32(len(values))))

    def _can_start(self, session: Session, prepared: Prepared) -> bool:
        """True: the first guess found finite scores, and every signal is finite."""
        return True

    def structure(self, args: Args, kwargs: Kwargs) -> ModelStructure:
        """Reads shapes alone."""
        return self._outcomes.model.structure

    def prepare(self, structure: ModelStructure, rng_key: Array, call: Call) -> Prepared:
        """Reads no record."""
        problem = LaplaceProblem(self._outcomes)
        return Prepared(problem, self.method.optim.init(self._first), rng_key)

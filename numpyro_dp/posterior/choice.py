"""The choice of settings by rehearsals, which reads no record and costs no budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_dp._validate import check_int
from numpyro_dp.core import Args, Kwargs, PyTree, Values
from numpyro_dp.posterior.rehearsal import Rehearsal, SimulatedRuns, shown
from numpyro_dp.privacy.keys import check_rng_key
from numpyro_dp.run.loop import opened_bar

_FIRST_ROUND = 4  # data sets that every setting sees


class Choice(NamedTuple):
    """The settings with the highest log score in rehearsals. It prints all of them.

    Attributes:
        settings: The chosen settings.
        driver: A driver with these settings, ready to run.
        scores: Pairs of settings and their log scores by simulated data set, best first. All
            settings saw the same data sets, and the better ones saw more.
        prior: Log scores of the prior on the data sets of the chosen settings. Settings that are
            not clearly above the prior tell nothing.

    Example:
        >>> import numpy as np
        >>> print(Choice(  # as choose() returns it, with its driver
        ...     settings={"clip_norm": 1.0}, driver=None, prior=np.array([-1.45, -1.40]),
        ...     scores=(({"clip_norm": 1.0}, np.array([0.30, 0.32])),
        ...             ({"clip_norm": 0.1}, np.array([-1.3, -1.1]))),
        ... ))
        log score  lower than the first by
            0.310                           {'clip_norm': 1.0}
           -1.200  1.51 (0.09)              {'clip_norm': 0.1}
           -1.425  1.73 (0.015)             the prior
    """

    settings: Values
    driver: Any
    scores: tuple[tuple[Values, np.ndarray], ...]
    prior: np.ndarray

    def __str__(self) -> str:
        """One line for each setting, and one for the prior.

        Differences are means with standard errors over the data sets that both saw.
        """
        lines = ["log score  lower than the first by"]
        first = self.scores[0][1]
        for name, values in (*self.scores, ("the prior", self.prior)):
            lower = first[: len(values)] - values
            known = name is not self.scores[0][0] and np.all(np.isfinite(lower))
            loss = shown(lower) if known else ""
            lines.append(f"{np.mean(values):9.3f}  {loss:23}  {name}")
        return "\n".join(lines)

    __repr__ = __str__


def choose(
    build: Callable[..., object],
    grid: Sequence[Mapping[str, Any]],
    rng_key: Array,
    *args: PyTree,
    num_simulations: int = 16,
    num_samples: int = 1000,
    simulated_data_to_args: Callable[..., tuple[Args, Kwargs]] | None = None,
    progress_bar: bool = True,
    **kwargs: PyTree,
) -> Choice:
    """Chooses settings by rehearsals: those with the highest mean log score.

    All settings see the same simulated records, first four data sets. The better half of the
    settings then sees as many again, and so on up to ``num_simulations``. Settings whose score is
    not finite come last.

    Args:
        build: ``(**settings) -> driver``, without a ``secret_key``.
        grid: The settings to try, as dicts. An entry ``num_steps`` goes to ``run`` instead of
            ``build``.
        rng_key: Key of the rehearsals.
        *args: Public or invented arguments, as for :func:`rehearse`.
        num_simulations: Data sets that the best settings see at most, at least 2. The settings
            are chosen when one is left: up to 3 settings see 4 data sets, and up to 7 see 8.
        num_samples: Draws from each posterior.
        simulated_data_to_args: As for :func:`rehearse`.
        progress_bar: Shows how many of all runs are done. :class:`~numpyro_dp.DPMCMC` has a bar of
            its own.
        **kwargs: Keyword arguments of the model.

    Returns:
        The choice. Its driver is new and has made no noise.

    Raises:
        ValueError: If the grid is empty.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> from numpyro_dp import DPSEP, PrivacyBudget
        >>> from numpyro_dp.posterior import choose
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        ...     with numpyro.plate("people", x.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)
        >>> def build(clip_norm):
        ...     return DPSEP(model, clip_norm=clip_norm, sampler=FullBatch(),
        ...                  budget=PrivacyBudget(1.0, 1e-5))
        >>> invented = jax.random.normal(jax.random.key(1), (2000, 2))
        >>> grid = [{"clip_norm": c, "num_steps": 10} for c in (0.01, 2.0)]
        >>> choice = choose(build, grid, jax.random.key(0), invented, None, num_simulations=4,
        ...                 progress_bar=False)
        >>> choice.settings
        {'clip_norm': 2.0, 'num_steps': 10}

    Guarantee:
        Reads only its arguments, which you declare public. So the choice leaks nothing.
    """
    check_rng_key(rng_key)
    check_int("num_simulations", num_simulations, low=2)
    tried = [dict(settings) for settings in grid]
    if not tried:
        raise ValueError("Expected at least one dict of settings in grid, got an empty grid.")

    def driver(settings: Values) -> Any:
        return build(**{name: value for name, value in settings.items() if name != "num_steps"})

    left = []
    for settings in tried:
        rest = (settings.get("num_steps"), num_samples, simulated_data_to_args)
        left.append((settings, SimulatedRuns(driver(settings), args, kwargs, *rest)))
    rounds = _rounds(len(left), num_simulations)
    keys, beaten = jax.random.split(rng_key, num_simulations), []
    with opened_bar(progress_bar, sum(each * new for each, new in rounds), unit="run") as bar:
        for _, new in rounds:
            for _, runs in left:
                runs.run(keys[len(runs.rows) :][:new], bar)
            left.sort(key=lambda pair: -_score(pair[1].found()))
            half = max(1, len(left) // 2)
            left, beaten = left[:half], left[half:] + beaten
    # A survivor may have become infinite.
    ranked = sorted(left + beaten, key=lambda pair: not np.isfinite(_score(pair[1].found())))
    settings, runs = ranked[0]
    scores = tuple((each, runs.found().log_score) for each, runs in ranked)
    return Choice(settings, driver(settings), scores, runs.found().prior_log_score)


def _rounds(number: int, num_simulations: int) -> list[tuple[int, int]]:
    """How many settings see how many further data sets."""
    rounds, seen = [], 0
    while not rounds or (number > 1 and seen < num_simulations):
        new = min(seen or _FIRST_ROUND, num_simulations - seen)
        rounds.append((number, new))
        number, seen = max(1, number // 2), seen + new
    return rounds


def _score(rehearsal: Rehearsal) -> float:
    score = float(np.mean(rehearsal.log_score))
    return score if np.isfinite(score) else -np.inf

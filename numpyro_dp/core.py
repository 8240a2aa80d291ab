"""The contracts that every method of this package fulfils.

One private step is the composition::

    prepare -> signal of one example -> bound -> sum -> privatise -> pull back

Only ``signal`` sees data, and only one example of it. What comes before it depends on public
values; what comes after ``privatise`` is post-processing. The signatures below carry that
argument, so the privacy of a new method is the privacy of these few functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Bool, Int

from numpyro_dp._lazy import dpa

__all__ = [
    "Batch",
    "Blocks",
    "Estimator",
    "FactoredSignal",
    "Fold",
    "Mechanism",
    "MechanismBuilder",
    "MechanismState",
    "Problem",
    "PyTree",
    "Released",
    "Sampler",
]

PyTree = Any
Blocks = tuple[tuple[str, ...], ...]  # groups of entries of a signal that are clipped together


class Batch(NamedTuple):
    """Row numbers of one batch, of fixed shape.

    Attributes:
        indices: int32 row numbers, shape ``(size,)``; ``None`` means every row in order. Entries
            whose mask is false are padding: valid row numbers that must not count.
        mask: bool, shape ``(size,)``; ``None`` means that every entry counts.
    """

    indices: Int[Array, " size"] | None
    mask: Bool[Array, " size"] | None


class FactoredSignal(NamedTuple):
    r"""A signal that is a fixed linear map of the gradient of a scalar.

    ``signal(public, example) == expand(public, core(public, gradient, names), names)`` with
    ``gradient = grad(scalar, 1)(public, point(public), example)``, and for every block of entries

    .. math:: \Vert\mathrm{core}_b(g)\Vert = \Vert s_b\Vert, \qquad
        \sum_i w_i\, s_{i,b} = \mathrm{expand}_b\Big(\sum_i w_i\, \mathrm{core}_b(g_i)\Big),

    so that what is added up may be smaller than the signal.

    Attributes:
        point: ``public -> point``, where the scalar is differentiated.
        scalar: ``(public, point, example) -> float``.
        core: ``(public, gradient, names) -> tree``: coordinates of the named entries of the signal
            with the same norm; linear in the gradient.
        expand: ``(public, tree, names) -> entries``: linear, and each entry is one coordinate
            times a number, so that it is rounded once.
        selects: Whether ``core`` only selects leaves of the gradient.
    """

    point: Callable[[PyTree], PyTree]
    scalar: Callable[[PyTree, PyTree, PyTree], Array]
    core: Callable[[PyTree, PyTree, tuple[str, ...]], PyTree]
    expand: Callable[[PyTree, PyTree, tuple[str, ...]], dict[str, PyTree]]
    selects: bool = False


@runtime_checkable
class Problem(Protocol):
    """What is fitted to records: a model and guide, a family of sites, a mixture, a network."""

    @property
    def records(self) -> Any:
        """How arguments split into records and public values (``model.records.Records``)."""
        ...

    @property
    def shared(self) -> tuple[Array, ...]:
        """Public arrays among the arguments."""
        ...

    @property
    def num_examples(self) -> int:
        """Number of records; public."""
        ...

    @property
    def numbered(self) -> bool:
        """Whether an example ends with a number, by which the record draws for itself."""
        ...

    def at(self, shared: tuple[Array, ...]) -> Problem:
        """Returns the same with these public arrays."""
        ...

    def rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Splits arguments into records and public arrays."""
        ...

    def blank_example(self) -> tuple[Array, ...]:
        """Returns zeros in the place of one record."""
        ...

    def constrain(self, params: PyTree) -> PyTree:
        """Returns the parameters as they are published."""
        ...


class Released(NamedTuple):
    """What a step releases.

    Attributes:
        total: The privatised sum of the signals, divided by the inclusion probability.
        noise_scale: Standard deviation of the noise in each of its numbers; public.
    """

    total: PyTree
    noise_scale: Array | float


class Estimator(NamedTuple):
    """What a step releases of each record, and what it makes of the sum: a row of the method table.

    Attributes:
        prepare: ``(rng_key, params) -> public``. Sees no data.
        signal: ``(public, example) -> signal``. Sees one example.
        pull_back: ``(public, released) -> update``, with :class:`Released`. The update is what the
            optimiser takes: the gradient of the loss in variational inference, a score in Markov
            chain Monte Carlo, a change of natural parameters in message passing. Sees no data.
        factored: The same signal as a :class:`FactoredSignal`, or ``None``.
    """

    prepare: Callable[[Array, PyTree], PyTree]
    signal: Callable[[PyTree, PyTree], PyTree]
    pull_back: Callable[[PyTree, Released], PyTree]
    factored: FactoredSignal | None = None


class MechanismState(NamedTuple):
    """What a mechanism carries from one step to the next.

    Attributes:
        clip_norm: The clip norms of the step to come; public.
        memory: What else it carries, such as earlier noise; secret.
    """

    clip_norm: Any
    memory: PyTree = ()


class Mechanism(NamedTuple):
    """Bounds one record's signal and privatises the sum; states its own sensitivity and event.

    A signal is a dict of entries; entries that are bounded together are a block.

    Attributes:
        init: ``total -> memory``, from the shapes of the sum: the memory of the first step.
        blocks: ``names -> blocks`` of entries of the signal.
        norms: ``names -> clip norm of each block``; ``None`` where nothing is clipped.
        scales: ``(names, squared norm of each block, margin) -> factor of each block``, which
            brings its norm down to at most ``margin`` times the clip norm, and to 0 where any
            block is not finite. Blocks have the norms of one record, or of many along an axis.
        privatise: ``(key, total, state) -> (released, state)`` with :class:`MechanismState`.
        sensitivity: Largest change of ``total`` in Euclidean norm when one record is added or
            removed, in the first step.
        noise_scale: Standard deviation of the noise in each number that this step releases.
        event: The ``dp_accounting`` event of one call of ``privatise`` (add or remove one).
        extras: ``(names, squared norm of each block, margin) -> {entry: (numbers, norm)}``: what
            each record adds to the sum besides its signal, to tune the mechanism itself: one number
            a record and entry, at most ``margin * norm``, and 0 where the signal is not finite.
            ``privatise`` reads and removes these entries. ``None`` where nothing is tuned.
        compose: ``(sampler, num_examples, num_steps) -> event`` of a whole run, for noise that
            depends on that of earlier steps (correlated noise). ``None`` where each call has fresh
            noise: the sampler amplifies the event of a step, and the steps compose. Drivers that
            need independent noise refuse a mechanism with this field (all but ``DPSVI``).
    """

    init: Callable[[PyTree], PyTree]
    blocks: Callable[[tuple[str, ...]], Blocks]
    norms: Callable[[tuple[str, ...]], tuple[Any, ...] | None]
    scales: Callable[[tuple[str, ...], tuple[Array, ...], float], tuple[Array, ...]]
    privatise: Callable[[Array, PyTree, MechanismState], tuple[PyTree, MechanismState]]
    sensitivity: Any
    noise_scale: Any
    event: dpa.DpEvent | None
    extras: (
        Callable[
            [tuple[str, ...], tuple[Array, ...], float], dict[str, tuple[Array, Array | float]]
        ]
        | None
    ) = None
    compose: Callable[[Sampler, int, int], dpa.DpEvent] | None = None


@runtime_checkable
class MechanismBuilder(Protocol):
    """What ``mechanism=`` takes: a value that can be compared, hashed and pickled.

    A frozen dataclass with ``__call__`` is one; see ``examples/extending/automatic_clipping.py``.
    """

    def __call__(self, clip_norm: Any, noise_multiplier: Any) -> Mechanism:
        """Returns the mechanism of a step.

        Args:
            clip_norm: The norms of the step, with ``blocks(names)``, ``of_blocks(names)`` and
                ``sensitivity``. Its numbers may be traced.
            noise_multiplier: Noise standard deviation over sensitivity; may be traced, and then
                ``event`` may be ``None``. Under replace-one the plan passes half of it to find the
                event, because the sensitivity is twice as large.
        """
        ...


@runtime_checkable
class Sampler(Protocol):
    """Chooses the records of each step.

    Fields of an implementation are public; the size of the data set is a call argument. A class
    that inherits from this one need not define ``relation`` and ``compositions``.

    Attributes:
        relation: The neighbouring relation under which a run without a budget is reported.
    """

    relation: ClassVar[str] = "add_or_remove_one"

    def init(self, key: Array, num_examples: int) -> PyTree:
        """Returns the state from which batches are drawn; ``key`` is secret."""
        ...

    def next(self, state: PyTree) -> tuple[Batch, PyTree]:
        """Draws one batch of fixed shape and returns the following state."""
        ...

    def amplify(self, event: dpa.DpEvent, num_examples: int) -> dpa.DpEvent:
        """Turns the event on a batch into the event on the data set."""
        ...

    def compositions(self, num_examples: int, num_steps: int) -> int:
        """Returns how many events the first ``num_steps`` steps are together: one each."""
        return num_steps

    def inclusion_prob(self, num_examples: int) -> float:
        """Returns the public probability that a given record is in a batch."""
        ...

    def failure_prob(self, num_examples: int) -> float:
        """Returns the probability that a batch fails.

        Whether it does must not depend on whether or what any single record is; given that it
        does not, the batch has the distribution of :meth:`total_variation`.
        """
        ...

    def total_variation(self, num_examples: int) -> float:
        """Returns how far one batch's distribution is from the one ``amplify`` accounts for."""
        ...


class Fold(NamedTuple):
    """Post-processing of the stream of private iterates, free of privacy cost.

    ``DPSVI.run(..., fold=...)`` carries the state through its compiled loop. One compilation
    serves all folds with the same function ``update``, so what differs between them, such as a
    number of steps, belongs into the state.

    Attributes:
        init: ``params -> state``, from the constrained parameters that the run starts with.
        update: ``(state, params) -> state`` of the same shapes and dtypes, with the constrained
            parameters after a step. It is compiled.
        result: ``state -> value``.
        num_steps: Number of steps that the fold is made for; ``None`` for any.

    Guarantee:
        The loop hands it the private iterates, and nothing else.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree], PyTree]
    result: Callable[[PyTree], PyTree]
    num_steps: int | None = None

"""The interfaces that every method of this package implements.

One private step is the composition::

    prepare -> signal of one example -> bound -> sum -> privatise -> pull back

Only ``signal`` sees data, and only one example of it. Earlier functions see public values, and
everything after ``privatise`` is post-processing. The signatures below enforce this. To check the
privacy of a new method, check these few functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from numpyro_dp._lazy import dpa

__all__ = [
    "Args",
    "Arrays",
    "Batch",
    "Blocks",
    "Centring",
    "Estimator",
    "FactoredSignal",
    "Fold",
    "Kwargs",
    "Mechanism",
    "MechanismBuilder",
    "MechanismState",
    "NumPyroFn",
    "Number",
    "Observation",
    "Problem",
    "PyTree",
    "Released",
    "Sampler",
    "Values",
    "Whole",
]

#: A tree of arrays, as in JAX.
PyTree = Any
#: Trees of arrays and public constants, as positional arguments of a model.
Args = tuple[PyTree, ...]
#: Keyword arguments of a model, of the same kinds.
Kwargs = dict[str, PyTree]
#: Arrays, or trees of a neural network, by the name of a parameter, a latent or an entry.
Values = dict[str, PyTree]
#: Arrays of records, of one record, or of what is public, in the order of the arguments.
Arrays = tuple[Array, ...]
#: A NumPyro model or guide.
NumPyroFn = Callable[..., object]
#: A number, which may be traced.
Number = float | np.floating | np.ndarray | Array
# A site of a NumPyro trace (its type, name, distribution, value ...), and all sites by name.
Site = dict[str, Any]
Sites = dict[str, Site]
#: Groups of entries of a signal that are clipped together, by their names.
Blocks = tuple[tuple[str, ...], ...]
#: What a neighbour of a data set is: with one record more or less, or another record in its place.
Relation = Literal["add_or_remove_one", "replace_one"]


class Batch(NamedTuple):
    """Row numbers of one batch, of fixed shape.

    Attributes:
        indices: int32 row numbers, shape ``(size,)``. ``None`` means every row in order. Entries
            with mask false are padding: valid row numbers that must not count.
        mask: bool, shape ``(size,)``. ``None`` means that every entry counts.

    Example:
        >>> import jax
        >>> from numpyro_dp.samplers import Poisson
        >>> sampler = Poisson(0.05)
        >>> batch, state = sampler.next(sampler.init(jax.random.key(0), 1000))
        >>> batch.indices.shape == batch.mask.shape  # about 50 records, and padding
        True
    """

    indices: Int[Array, " size"] | None
    mask: Bool[Array, " size"] | None


class FactoredSignal(NamedTuple):
    r"""A signal that is a fixed linear map of the gradient of a scalar.

    ``signal(public, example) == expand(public, core(public, gradient, names), names)`` with
    ``gradient = grad(scalar, 1)(public, point(public), example)``. For every block of entries,

    .. math:: \Vert\mathrm{core}_b(g)\Vert = \Vert s_b\Vert, \qquad
        \sum_i w_i\, s_{i,b} = \mathrm{expand}_b\Big(\sum_i w_i\, \mathrm{core}_b(g_i)\Big),

    So the package can clip and sum the coordinates, which may be much fewer than the signal's
    entries.

    Attributes:
        point: ``public -> point`` at which the scalar is differentiated.
        scalar: ``(public, point, example) -> float``.
        core: ``(public, gradient, names) -> tree``. Returns coordinates of the named entries of
            the signal, with the same norm. It is linear in the gradient.
        expand: ``(public, tree, names) -> entries``. It is linear, and each entry is one
            coordinate times a number. So each entry is rounded once.
        selects: Whether ``core`` only selects leaves of the gradient.

    Example:
        >>> import jax
        >>> factored = FactoredSignal(  # the slope of a record's log density in the mean
        ...     point=lambda public: public["mean"],
        ...     scalar=lambda public, mean, example: -((example[0] - mean) ** 2) / 2,
        ...     core=lambda public, gradient, names: {"mean": gradient},
        ...     expand=lambda public, tree, names: tree,
        ...     selects=True,
        ... )
        >>> float(jax.grad(factored.scalar, 1)({}, 1.0, (3.0,)))
        2.0
    """

    point: Callable[[PyTree], PyTree]
    scalar: Callable[[PyTree, PyTree, PyTree], Array]
    core: Callable[[PyTree, PyTree, tuple[str, ...]], PyTree]
    expand: Callable[[PyTree, PyTree, tuple[str, ...]], dict[str, PyTree]]
    selects: bool = False


@runtime_checkable
class Problem(Protocol):
    """The object to fit to records: a model and guide, a family of sites, a mixture, a network.

    Example:
        >>> import numpy as np
        >>> from numpyro_dp.extend import RecordsProblem, read_records
        >>> records = read_records(lambda x: None, (np.ones((100, 2)),), {}, 100)
        >>> isinstance(RecordsProblem(records), Problem)
        True
    """

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
        """Number of records, which is public."""
        ...

    @property
    def numbered(self) -> bool:
        """Whether the last entry of an example seeds that record's own random draws."""
        ...

    def at(self, shared: tuple[Array, ...]) -> Problem:
        """Returns the same problem with these public arrays."""
        ...

    def rows(self, args: Args, kwargs: Kwargs) -> Any:
        """Splits arguments into records and public arrays."""
        ...

    def blank_example(self) -> tuple[Array, ...]:
        """Returns zeros with the shapes of one record."""
        ...

    def constrain(self, params: PyTree) -> PyTree:
        """Returns the parameters in the form that is published."""
        ...


class Released(NamedTuple):
    """The values that a step releases.

    Attributes:
        total: The noisy sum of the signals, divided by the inclusion probability.
        noise_scale: Standard deviation of the noise in each entry of ``total``. It is public.

    Example:
        >>> import jax.numpy as jnp
        >>> released = Released({"mean": jnp.array(120.0)}, noise_scale=3.0)
        >>> float(released.total["mean"] / 100)  # post-processing: the mean of 100 records
        1.2000000476837158
    """

    total: PyTree
    noise_scale: Array | float


class Observation(NamedTuple):
    """What a step released about the likelihood of all records, as vectors of d latents.

    Attributes:
        point: The public point at which the score was taken, unconstrained (d,).
        shift: A part of ``point`` that was drawn fresh in this step, with mean 0 (d,). It is
            uncorrelated with the rest of ``point``. ``None`` if there is no such part.
        score: The noisy slope of the log likelihood of all records at ``point`` (d,).
        noise_scale: Standard deviation of the noise in each entry of ``score`` (d,).
        curvature: The noisy curvature of all records at ``point``, a matrix (d, d) or its diagonal
            (d,), if it was released too. Then ``shift`` is not needed.
        curvature_noise: Standard deviation of the noise in an entry of its diagonal. Off the
            diagonal it is smaller by the square root of 2.

    Example:
        >>> import jax.numpy as jnp
        >>> seen = Observation(point=jnp.zeros(2), shift=jnp.array([0.1, -0.1]),
        ...                    score=jnp.array([30.0, 4.0]), noise_scale=jnp.full(2, 10.0))
        >>> seen.score / seen.noise_scale  # scores that are small in these units tell little
        Array([3. , 0.4], dtype=float32)
    """

    point: Array
    shift: Array | None
    score: Array
    noise_scale: Number
    curvature: Array | None = None
    curvature_noise: Number | None = None


class Centring(NamedTuple):
    """Rows of a record and of other outcomes that it could have had (``sums/centred_sums.py``).

    Attributes:
        estimator: The estimator of these rows, with the same ``prepare``. Its examples are
            ``(example, *row)``.
        number: K, where K + 1 is the number of rows of a record.
        row: ``(public, example, seed, k) -> row`` of a record, a tuple, for k from 0 to K. If
            outcomes are listed, row 0 has the record's own outcome, and the others one each. Else
            each row has a drawn outcome, and its signal is that of the record minus that with the
            drawn outcome. The last entry is the probability of the outcome. ``seed`` is a secret
            uint32.
        listed: Whether all outcomes are listed that a record could have had.
        scaled: Whether a record's signal is only multiplied by a factor, because other entries than
            scores must keep their ratio to the scores. Outcomes must be listed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def row(log_odds, example, seed, k):  # of a coin: the record, heads and tails
        ...     heads = jax.nn.sigmoid(log_odds)
        ...     probs = jnp.stack([0.0, heads, 1 - heads])
        ...     return jnp.stack([example[0], 1.0, 0.0])[k], probs[k]
        >>> coin = Estimator(lambda key, log_odds: log_odds,
        ...                  lambda log_odds, row: {"w": row[1] - jax.nn.sigmoid(log_odds)},
        ...                  lambda log_odds, released: released.total)
        >>> centring = Centring(coin, number=2, row=row, listed=True)
        >>> example, seed = (jnp.array(1.0),), jnp.uint32(7)
        >>> rows = [centring.row(0.0, example, seed, k) for k in range(3)]
        >>> float(sum(prob * coin.signal(0.0, (example, y))["w"] for y, prob in rows))  # mean 0
        0.0
    """

    estimator: Estimator
    number: int
    row: Callable[[PyTree, PyTree, Array, Any], PyTree]
    listed: bool = False
    scaled: bool = False


class Estimator(NamedTuple):
    """Computes each record's signal, and turns the released sum into an update.

    Attributes:
        prepare: ``(rng_key, params) -> public``. Sees no data.
        signal: ``(public, example) -> signal``. Sees one example.
        pull_back: ``(public, released) -> update``, with :class:`Released`. Sees no data. The
            optimiser receives the update: the gradient of the loss in variational inference, a
            score in MCMC, a change of natural parameters in message passing.
        factored: The same signal as a :class:`FactoredSignal`, or ``None``.
        observe: ``(public, released) -> Observation``, for posteriors that include the noise of
            privacy. Sees no data. ``None`` if the release is no score of the latents.
        centring: How clipped signals are centred, or ``None``. ``signal`` is the plain signal.

    Example:
        The mean of a column, as in ``examples/extending/clipped_mean.py``:

        >>> import jax.numpy as jnp
        >>> mean = Estimator(
        ...     prepare=lambda rng_key, params: params,
        ...     signal=lambda params, example: {"mean": example[0] - params["mean"]},
        ...     pull_back=lambda params, released: {"mean": -released.total["mean"] / 1000},
        ... )
        >>> mean.signal({"mean": 1.0}, (3.0,))
        {'mean': 2.0}
    """

    prepare: Callable[[Array, PyTree], PyTree]
    signal: Callable[[PyTree, PyTree], PyTree]
    pull_back: Callable[[PyTree, Released], PyTree]
    factored: FactoredSignal | None = None
    observe: Callable[[PyTree, Released], Observation] | None = None
    centring: Centring | None = None


class MechanismState(NamedTuple):
    """The state of a mechanism between two steps.

    Attributes:
        clip_norm: The clip norms of the next step. They are public.
        memory: Other state, such as earlier noise. It is secret.

    Example:
        >>> MechanismState(clip_norm=2.0).memory  # independent noise needs none
        ()
    """

    clip_norm: PyTree
    memory: PyTree = ()


class Whole(NamedTuple):
    """A sum of float32 terms in steps of a grid, as ``high * 2**16 + low``.

    Attributes:
        high: int32.
        low: int32. It may exceed 2**16, until :meth:`carried`.
        spacing: The spacing of the grid, once the sum is finished. Until then 0.

    Example:
        >>> import jax.numpy as jnp
        >>> float(Whole(jnp.asarray(-1), jnp.asarray(2**16 - 4), jnp.asarray(0.5)).number())
        -2.0
    """

    high: Array
    low: Array
    spacing: Array

    def add(self, other: Whole) -> Whole:
        """Adds two sums of the same grid."""
        return Whole(self.high + other.high, self.low + other.low, self.spacing).carried()

    def carried(self) -> Whole:
        """The same sum with ``low`` in 0 ... 2**16 - 1."""
        return self._replace(high=self.high + (self.low >> 16), low=self.low & 0xFFFF)

    def number(self) -> Array:
        """The sum as float32, rounded three times."""
        high, low = self.high.astype(jnp.float32), self.low.astype(jnp.float32)
        return (high * 2.0**16 + low) * self.spacing


def is_whole(leaf: object) -> bool:
    """Whether a leaf of a tree is a :class:`Whole`."""
    return isinstance(leaf, Whole)


class Mechanism(NamedTuple):
    """Clips one record's signal and adds noise to the sum, with its own sensitivity and event.

    A signal is a dict of entries. Entries that are clipped together form a block.

    Attributes:
        init: ``total -> memory`` of the first step, from the shapes of the sum.
        blocks: ``names -> blocks`` of entries of the signal.
        norms: ``names -> clip norm of each block``. ``None`` if nothing is clipped.
        scales: ``(names, squared norm of each block, margin) -> factor of each block``. The factor
            brings the norm to at most ``margin`` times the clip norm. If any block is not finite,
            all factors are 0. Norms are of one record, or of many along an axis.
        privatise: ``(key, total, state) -> (released, state)`` with :class:`MechanismState`.
        sensitivity: Largest change of ``total`` in Euclidean norm when one record is added or
            removed, in the first step.
        noise_scale: Standard deviation of the noise in each value that this step releases.
        event: The ``dp_accounting`` event of one call of ``privatise`` (add or remove one).
        extras: ``(names, squared norm of each block, margin) -> {entry: (values, norm)}``, which
            tune the mechanism itself. Each record adds one value for each entry to the sum: at
            most ``margin * norm``, and 0 if its signal is not finite. ``privatise`` reads and
            removes these entries. ``None`` if the mechanism tunes nothing.
        compose: ``(sampler, num_examples, num_steps) -> event`` of a whole run, for noise that
            depends on earlier noise. ``None`` if each call has fresh noise: the sampler then
            amplifies the event of a step, and the steps compose. Drivers whose method needs
            independent noise refuse a mechanism with this field, and so do several chains.
        whole: ``privatise`` itself, if it takes sums of float32 as integers on a grid
            (:class:`Whole`), which are never rounded. A copy with another ``privatise`` gets
            floating point, unless it sets this too. So does a mechanism with ``extras``.
        total_variation: Distance of one call's noise from the noise of ``event``, as a total
            variation. Delta includes the sum over all steps.

    Example:
        >>> from numpyro_dp.mechanisms import GaussianMechanism
        >>> from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
        >>> mechanism = GaussianMechanism()(ClipNorm.of(2.0), 3.0)
        >>> float(mechanism.sensitivity), mechanism.event
        (2.0, GaussianDpEvent(noise_multiplier=3.0))
    """

    init: Callable[[PyTree], PyTree]
    blocks: Callable[[tuple[str, ...]], Blocks]
    norms: Callable[[tuple[str, ...]], tuple[Number, ...] | None]
    scales: Callable[[tuple[str, ...], tuple[Array, ...], float], tuple[Array, ...]]
    privatise: Callable[[Array, PyTree, MechanismState], tuple[PyTree, MechanismState]]
    sensitivity: Number
    noise_scale: Array | float
    event: dpa.DpEvent | None
    extras: (
        Callable[[tuple[str, ...], tuple[Array, ...], float], dict[str, tuple[Array, Number]]]
        | None
    ) = None
    compose: Callable[[Sampler, int, int], dpa.DpEvent] | None = None
    total_variation: float = 0.0
    whole: Callable[..., tuple[PyTree, MechanismState]] | None = None

    @property
    def takes_whole(self) -> bool:
        """Whether sums stay integers until ``privatise``."""
        return self.whole is self.privatise and self.extras is None


@runtime_checkable
class MechanismBuilder(Protocol):
    """The type of ``Privacy(mechanism=)``: a callable that can be compared, hashed and pickled.

    A frozen dataclass with ``__call__`` is enough, as in
    ``examples/extending/automatic_clipping.py``.

    Example:
        >>> from numpyro_dp.mechanisms import GaussianMechanism
        >>> isinstance(GaussianMechanism(), MechanismBuilder)
        True
    """

    def __call__(self, clip_norm: Any, noise_multiplier: Number) -> Mechanism:
        """Returns the mechanism of a step.

        Args:
            clip_norm: The norms of the step, with ``blocks(names)``, ``of_blocks(names)`` and
                ``sensitivity``. Its values may be traced.
            noise_multiplier: Noise standard deviation over sensitivity. If it is traced, ``event``
                may be ``None``. To find the event under replace-one, the plan passes half of it,
                because the sensitivity is twice as large.
        """
        ...


@runtime_checkable
class Sampler(Protocol):
    """Chooses the records of each step.

    Fields of an implementation are public. The size of the data set is an argument of each method.
    A class that inherits from this one need not define ``relation`` and ``compositions``.

    Attributes:
        relation: The neighbouring relation in the report of a run without a budget.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> from numpyro_dp.samplers import Poisson
        >>> isinstance(Poisson(0.01), Sampler), Poisson(0.01).inclusion_prob(1000)
        (True, 0.01)
        >>> Poisson(0.01).amplify(GaussianDpEvent(2.0), 1000).sampling_probability
        0.01
    """

    relation: ClassVar[Relation] = "add_or_remove_one"

    def init(self, key: Array, num_examples: int) -> PyTree:
        """Returns the state that ``next`` draws batches from. ``key`` is secret."""
        ...

    def next(self, state: PyTree) -> tuple[Batch, PyTree]:
        """Draws one batch of fixed shape and returns the following state."""
        ...

    def amplify(self, event: dpa.DpEvent, num_examples: int) -> dpa.DpEvent:
        """Turns the event on a batch into the event on the whole data set."""
        ...

    def compositions(self, num_examples: int, num_steps: int) -> int:
        """Returns the number of events in the first ``num_steps`` steps, by default one each."""
        return num_steps

    def inclusion_prob(self, num_examples: int) -> float:
        """Returns the public probability that a given record is in a batch."""
        ...

    def failure_prob(self, num_examples: int) -> float:
        """Returns the probability that a batch fails.

        A failure must not depend on the presence or the values of any record. Without a failure,
        the batch has the distribution described by :meth:`total_variation`.
        """
        ...

    def total_variation(self, num_examples: int) -> float:
        """Returns the total variation between a batch and the distribution in ``amplify``."""
        ...


class Fold(NamedTuple):
    """Post-processing of the stream of private iterates. It has no privacy cost.

    ``DPSVI.run(..., fold=...)`` carries the state through its compiled loop. Folds with the same
    function ``update`` share one compilation. So keep values that differ between folds in the
    state, for example a number of steps.

    Attributes:
        init: ``params -> state``, from the initial constrained parameters.
        update: ``(state, params) -> state``, from the constrained parameters after a step. The
            state keeps its shapes and dtypes. The function is compiled.
        result: ``state -> value``.
        num_steps: Number of steps of the run that the fold needs, or ``None`` for any.

    Example:
        >>> import functools, jax.numpy as jnp
        >>> largest = Fold(  # the largest value that a parameter had in a run
        ...     init=lambda params: params["w"],
        ...     update=lambda state, params: jnp.maximum(state, params["w"]),
        ...     result=lambda state: state,
        ... )
        >>> iterates = [{"w": jnp.array(value)} for value in (1.0, 3.0, 2.0)]
        >>> state = functools.reduce(largest.update, iterates, largest.init(iterates[0]))
        >>> float(largest.result(state))  # with a driver: run(..., fold=largest).folded
        3.0

    Guarantee:
        The loop passes only private iterates to the fold.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree], PyTree]
    result: Callable[[PyTree], PyTree]
    num_steps: int | None = None

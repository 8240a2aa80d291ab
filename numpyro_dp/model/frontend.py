"""Turns a NumPyro model, a guide and their arguments into a :class:`VariationalProblem`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import numpyro
from jax import Array
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

from numpyro_dp._compat import jit_once
from numpyro_dp._validate import check_sizes
from numpyro_dp.core import Args, Arrays, Kwargs, NumPyroFn, Problem, PyTree, Values
from numpyro_dp.model.density import Model
from numpyro_dp.model.guide import hide_likelihood, prototype_without_records, set_up
from numpyro_dp.model.guide_checks import check_first_values, check_supported, read_guide
from numpyro_dp.model.held import is_array
from numpyro_dp.model.public import Declared, UnsupportedModelError
from numpyro_dp.model.records import check_arrays
from numpyro_dp.model.structure import ModelStructure, read_model
from numpyro_dp.model.units import number_of_units, split_unit
from numpyro_dp.model.variational import VariationalProblem


class Prepared(NamedTuple):
    """A problem together with its initial optimiser state.

    Attributes:
        problem: What is fitted.
        optim_state: Initial state of the optimiser.
        rng_key: The key that ``numpyro.infer.SVI.init`` leaves for the steps.

    Example:
        >>> import jax, numpy as np, numpyro
        >>> from numpyro_dp.extend import RecordsProblem, read_records
        >>> records = read_records(lambda x: None, (np.ones((100, 2)),), {}, 100)
        >>> first = numpyro.optim.SGD(0.1).init({"mean": np.zeros(2)})
        >>> Prepared(RecordsProblem(records), first, jax.random.key(0)).problem.num_examples
        100
    """

    problem: Problem
    optim_state: PyTree
    rng_key: Array


class Call(NamedTuple):
    """What a user passes to ``run`` or ``init`` for the model.

    Attributes:
        args: Arguments, with the whole data set.
        kwargs: Keyword arguments.
        init_params: Initial values of parameters by name, or ``None``.

    Example:
        >>> Call(args=([1.0, 2.0],), kwargs={}, init_params={"mean": 0.0}).init_params
        {'mean': 0.0}
    """

    args: Args
    kwargs: Kwargs
    init_params: Values | None = None


class GivenModel(NamedTuple):
    """A NumPyro model as a driver was given it.

    Attributes:
        model: The NumPyro model.
        static: Static keywords.
        data_plate: Name of the plate over records, or ``None``.
        declared: What the user declared public.
        max_rows: Most rows of a unit, or ``None`` if a row is a record.
    """

    model: NumPyroFn
    static: Kwargs
    data_plate: str | None = None
    declared: Declared = Declared()
    max_rows: int | None = None

    @property
    def fn(self) -> NumPyroFn:
        """The model, static keywords filled in."""
        return self.filled(self.model)

    def filled(self, fn: NumPyroFn) -> NumPyroFn:
        """Returns a model or guide with the static keywords filled in."""
        return functools.partial(fn, **self.static) if self.static else fn

    def structure(self, args: Args, kwargs: Kwargs) -> ModelStructure:
        """Reads the model from shapes alone, by :func:`read_model`, and the number of units."""
        check_sizes(max_rows_per_unit=self.max_rows)
        if twice := sorted(set(kwargs) & set(self.static)):
            raise TypeError(
                f"The keywords {twice} are given twice: to the constructor, and in this call. The "
                "values could differ, so leave one of them out."
            )
        ids, kwargs = split_unit(kwargs, self.max_rows, self.fn)
        number = None if ids is None else number_of_units(ids, np.size(ids))
        found = read_model(self.fn, args, kwargs, self.data_plate, self.declared, number)
        if number is None:
            return found
        number = number_of_units(ids, found.layout.num_examples)  # also checks their number
        if found.local_latents:
            raise UnsupportedModelError(
                f"The latent sites {list(found.local_latents)} belong to single rows, but a record "
                "is a unit of several rows. Integrate them out, or leave out max_rows_per_unit if "
                "each row is a person of its own."
            )
        layout = found.layout._replace(num_examples=number, max_rows=self.max_rows)
        return found._replace(layout=layout)


class Frontend(NamedTuple):
    """The model, guide and optimiser of a driver.

    Attributes:
        given: The model.
        svi: Non-private ``SVI`` of the same model and guide. Handles parameters, on placeholders.

    Example:
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoDelta
        >>> from numpyro_dp import Privacy
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(3, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> svi = SVI(model, AutoDelta(model), numpyro.optim.SGD(0.1), Trace_ELBO())
        >>> frontend, args = Frontend(Privacy().given_model(model, {}), svi), (np.ones(100),)
        >>> structure = frontend.given.structure(args, {})
        >>> prepared = frontend.prepare(structure, jax.random.key(0), Call(args, {}))
        >>> prepared.problem.num_examples
        100
    """

    given: GivenModel
    svi: SVI

    def constrain(self, params: Values) -> Values:
        """Returns parameters in the form that is published, after a call of :meth:`prepare`."""
        if self.svi.constrain_fn is None:
            raise ValueError(
                "get_params needs an earlier call of init or run. Call one of them first."
            )
        return self.svi.constrain_fn(params)

    def prepare(
        self,
        structure: ModelStructure,
        rng_key: Array,
        call: Call,
        first: Callable[[Model, Arrays], Values] = lambda model, shared: {},
    ) -> Prepared:
        """Initialises guide and parameters on a placeholder for the records.

        ``first(model, shared)`` has initial values for what ``call`` gives none. It may not read
        records.

        Guarantee: no record is read. If the guide's initial values do not depend on the data,
        parameters and key are the same as from ``numpyro.infer.SVI.init``.
        """
        layout, given, own = structure.layout, self.given, self.svi.guide
        shared = layout.rows(call.args, call.kwargs).shared
        check_supported(own, structure, shared, given.static)
        check_first_values(own, given.fn, structure, shared)
        model = Model(given.fn, structure)
        values = first(model, shared) | (call.init_params or {}) or None
        plate = structure.data_plate
        # With SGD, whose state is the parameters: the user's optimiser stays out of the program.
        hidden = SVI(
            hide_likelihood(given.model, plate), own, numpyro.optim.SGD(1.0), self.svi.loss,
            **given.static,
        )  # fmt: skip

        def start(rng_key: Array, shared: Arrays, values: PyTree) -> PyTree:
            init = functools.partial(hidden.init, rng_key, init_params=values)
            state = layout.placeholder(shared).call(init)
            return state, hidden.optim.get_params(state.optim_state), hidden.get_params(state)

        with prototype_without_records(own, plate), warnings.catch_warnings():
            # SVI warns of discrete sites, but numpyro_dp raises an error with their name.
            warnings.filterwarnings("ignore", "Currently, SVI with Trace_ELBO loss does not")
            try:
                alone, first_start = layout.placeholder(shared), self.svi.constrain_fn is None
                # The program holds the guide's first values, so each run of a sweep would compile
                # its own. Single operations are compiled once for all of them.
                if first_start and set_up(own, rng_key, alone, structure.params, given.static):
                    with numpyro.validation_enabled(False):  # of values that NumPyro has just made
                        found = jit_once(start)(rng_key, shared, values)
                else:
                    found = start(rng_key, shared, values)
            except UnsupportedModelError:
                raise
            except ValueError as error:
                raise UnsupportedModelError(
                    "The model cannot be initialised on ones in place of the records: "
                    f"{error} Check init_params. If the model computes statistics of the "
                    "records (for example to standardise columns), pass public values instead, as "
                    "static keywords."
                ) from error
        state, unconstrained, params = found
        if state.mutable_state is not None:
            raise UnsupportedModelError(
                f"The mutable state {sorted(state.mutable_state)} cannot be private, because it "
                "mixes records. Use group or layer norm, or freeze the state."
            )
        structure.public.check("optimiser", self.svi.optim.init, unconstrained)
        # One program, and not one for each operation. NumPyro's type is None before init, or a
        # partial after it, but SVI calls any function.
        constrain = jax.jit(cast(functools.partial, hidden.constrain_fn))
        self.svi.constrain_fn = cast(functools.partial, constrain)
        with numpyro.validation_enabled(False):  # init has validated all values
            guide = read_guide(given.filled(own), own, model, params, shared, given.static)
        problem = VariationalProblem(model, guide, constrain, shared, self.svi.loss.num_particles)
        return Prepared(problem, self.svi.optim.init(unconstrained), state.rng_key)


def arguments_key(args: Args, kwargs: Kwargs, max_rows: int | None = None) -> Hashable:
    """Returns a hashable description of arguments: structure, shapes, dtypes and constants.

    If records are units of at most ``max_rows`` rows, it has their number.
    """
    ids, kwargs = split_unit(kwargs, max_rows)
    units = None if ids is None else number_of_units(ids, np.size(ids))
    check_arrays(args, kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    described = tuple(
        (np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))
        if is_array(leaf)
        else (type(leaf), leaf)
        for leaf in leaves
    )
    return treedef, described, units


def check_loss(loss: Any) -> Trace_ELBO | TraceMeanField_ELBO:
    """Returns the evidence lower bound to use.

    Raises:
        TypeError: If the loss is a class.
        UnsupportedModelError: If the loss is not supported.
    """
    if loss is None:
        return Trace_ELBO()
    if isinstance(loss, type):
        raise TypeError(f"Expected loss=Trace_ELBO(), got the class {loss.__name__}. Add the ().")
    plain = type(loss) in (Trace_ELBO, TraceMeanField_ELBO)
    if not plain or getattr(loss, "multi_sample_guide", False) or not loss.sum_sites:
        raise UnsupportedModelError(
            "Expected loss=Trace_ELBO(num_particles=K) or TraceMeanField_ELBO(num_particles=K), "
            f"got {type(loss).__name__}{' of several samples or single sites' if plain else ''}. "
            "Other losses are not a sum over records, so records could not be clipped one by one."
        )
    return loss

"""Each private name of JAX and NumPyro that the package uses still does what the package needs."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, Trace_ELBO, autoguide, init_to_median
from numpyro.optim import optax_to_numpyro

from numpyro_dp import _compat
from numpyro_dp.model.held import held_by_program, numbers_in_program, refused_calls
from numpyro_dp.privacy.random import CHACHA20

TABLE = np.arange(7.0, dtype=np.float32)


def model(x):
    with numpyro.plate("rows", 2):
        a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.LogNormal(0, 1))
    with numpyro.plate("records", x.shape[0]):
        numpyro.sample("x", dist.Normal(a.sum(), b), obs=x)


def ready(kind, **options):
    """An automatic guide that has been set up."""
    guide = kind(model, **options)
    SVI(model, guide, numpyro.optim.Adam(1e-3), Trace_ELBO()).init(jax.random.key(0), jnp.zeros(3))
    return guide


doubled = _compat.custom_vmap(lambda x: x)
doubled.def_vmap(lambda size, batched, x: (2 * x, batched[0]))


def operations(fn, *args):
    """Names of all operations of a program and of those inside it."""

    def names(program):
        for equation in program.equations:
            yield equation.primitive.name
            for inner in _compat.programs_in(list(equation.params.values())):
                yield from names(inner)

    return set(names(_compat.make_program(fn, *args)[0]))


INNER = {
    "jit": lambda x: jax.jit(lambda y: y + jnp.asarray(TABLE).sum())(x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (c + jnp.asarray(TABLE)[0], None), x, None, 2)[0],
    "while": lambda x: jax.lax.while_loop(
        lambda c: c < 9, lambda c: c + 1 + jnp.asarray(TABLE).sum(), x
    ),
    "cond": lambda x: jax.lax.cond(x > 0, lambda: x * jnp.asarray(TABLE).sum(), lambda: x),
    "checkpoint": lambda x: jax.checkpoint(lambda y: y * jnp.asarray(TABLE).sum())(x),
    "derivative": jax.grad(lambda x: jax.jit(lambda y: jnp.sum(y * jnp.asarray(TABLE)))(x)),
    "jit in scan": lambda x: jax.lax.scan(
        lambda c, _: (jax.jit(lambda y: y + jnp.asarray(TABLE).sum())(c), None), x, None, 2
    )[0],
}


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("kind", ["NumPy", "JAX"])
def test_a_captured_array_is_found_in_an_inner_program(name, kind, monkeypatch):
    """Whichever class JAX has for a program, and wherever it keeps constants."""
    monkeypatch.setitem(globals(), "TABLE", TABLE if kind == "NumPy" else jnp.asarray(TABLE))
    program, shapes = _compat.make_program(INNER[name], jnp.ones(()))
    assert shapes.shape == ()
    held = [np.asarray(each) for each in held_by_program(program)]
    assert any(np.array_equal(each, TABLE) for each in held)


def test_programs_have_inputs_constants_equations_literals_and_outputs():
    closed = jax.make_jaxpr(lambda x: (x + jnp.asarray(TABLE), 3.0))(TABLE)
    program = _compat.as_program(closed)
    assert len(program.inputs) == 1
    assert [np.shape(value) for _, value in program.constants] == [(7,)]
    assert program.equations[-1].primitive.name == "add"
    assert len(program.outputs) == 2
    assert _compat.as_program(program) is program
    assert _compat.as_program(TABLE) is None
    assert list(_compat.programs_in({"a": [closed], "b": 3})) == [program]
    doubled_twice = _compat.make_program(lambda x: x * 2.5, 1.0)[0]
    assert [_compat.literal(atom) for atom in doubled_twice.equations[0].invars] == [(), (2.5,)]
    assert numbers_in_program(doubled_twice) == {2.5}
    (equation,) = _compat.make_program(jax.jit(jnp.sin), 1.0)[0].equations
    assert equation.primitive.name in _compat.CALLS
    assert any(_compat.as_program(equation.params.get(name)) for name in _compat.CALLED)


@pytest.mark.parametrize(
    "fn", [lambda x: x * 2, lambda x: jax.jit(jnp.sin)(x), lambda x: jnp.linalg.eigh(x)[0],
           lambda x: jax.lax.scan(lambda c, _: (c + x, None), x, None, 2)[0]],
    ids=["multiply", "jit", "several results", "scan"],
)  # fmt: skip
def test_bind_evaluates_an_operation(fn):
    x = jnp.eye(2) + 1
    program, _ = _compat.make_program(fn, x)
    values = dict(zip(program.inputs, [x], strict=True))
    values |= dict(program.constants)
    for each in program.equations:
        inputs = [_compat.literal(a)[0] if _compat.literal(a) else values[a] for a in each.invars]
        results = _compat.bind(each.primitive, each.params, inputs)
        values |= dict(zip(each.outvars, results, strict=True))
    np.testing.assert_allclose(values[program.outputs[0]], fn(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("names", "fn"),
    [
        (_compat.MOVES[:-3], lambda x: jnp.broadcast_to(
            x.reshape(3, 2).T[None, None].squeeze(0)[..., None], (4, 1, 2, 3, 1))),
        (["slice"], lambda x: x[1:3]),
        (["gather"], lambda x: x[jnp.array([1, 0])]),
        (["dynamic_slice"], lambda x: jax.lax.dynamic_slice(x, (x[0].astype(int),), (2,))),
        (["scan"], lambda x: jax.lax.scan(lambda c, y: (c + y, None), 0.0, x)[0]),
        (["while"], lambda x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: c + 1, x)),
        (["cond"], lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)),
        (["dot_general"], lambda x: x @ x),
        (["convert_element_type"], lambda x: x.astype(jnp.bfloat16)),
    ],
    ids=["moves", "slice", "gather", "dynamic_slice", "scan", "while", "cond", "dot", "convert"],
)  # fmt: skip
def test_names_of_operations(names, fn):
    found = operations(fn, jnp.zeros(6))
    assert set(names) - {"expand_dims"} <= found | {"copy", "copy_p", "slice"}


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), x),
        lambda x: jax.experimental.io_callback(np.sin, jax.ShapeDtypeStruct((), jnp.float32), x),
        lambda x: jax.debug.print("{}", x),
        lambda x: jax.jit(lambda y: jax.debug.callback(print, y))(x),
        lambda x: doubled(x),
    ],
    ids=["pure_callback", "io_callback", "print", "callback in jit", "rule for batches"],
)
def test_calls_of_the_host_and_rules_for_batches_have_the_names_that_are_refused(call):
    assert list(refused_calls(_compat.make_program(call, jnp.ones(()))[0]))


def test_the_trace_and_the_axes_inside_a_transformation_are_known():
    outside, held, inside, found = _compat.trace_state(), jnp.ones(()), [], []

    def note(x):
        inside.append((_compat.trace_state() != outside, _compat.has_named_axes()))
        return x

    def kinds(x):
        found.append((_compat.trace_of(x) is _compat.traced_by(), _compat.is_tracer(x)))
        found.append((_compat.trace_of(held) is _compat.traced_by(), _compat.is_tracer(held)))
        jax.jit(lambda y: found.append((_compat.trace_of(x) is _compat.traced_by(), True)) or y)(x)
        return x

    for transform in (jax.jit, jax.vmap, jax.checkpoint):
        transform(note)(jnp.ones(2))
    jax.grad(note)(1.0)
    jax.vmap(note, axis_name="a")(jnp.ones(2))
    assert inside == [*[(True, False)] * 4, (True, True)]
    assert (_compat.trace_state(), _compat.has_named_axes()) == (outside, False)
    jax.jit(kinds)(1.0)
    assert found == [(True, True), (False, False), (False, True)]


def test_rules_generators_masks_and_optimisers():
    np.testing.assert_array_equal(jax.vmap(doubled)(jnp.ones(3)), 2 * jnp.ones(3))
    assert jax.random.key(0, impl=CHACHA20).shape == ()
    assert _compat.define_prng_impl.__module__.startswith("jax")
    masked = dist.Normal(jnp.zeros(2), 1).mask(jnp.array([True, False]))
    np.testing.assert_array_equal(_compat.mask_of(masked), [True, False])
    assert not _compat.takes_value(numpyro.optim.Adam(1.0))
    assert _compat.takes_value(optax_to_numpyro(optax.contrib.reduce_on_plateau()))


def test_the_model_inside_a_handler_a_partial_application_or_a_decorator():
    @functools.wraps(model)
    def decorated(*args):
        return model(*args)

    masked = handlers.mask(model, mask=True)
    for outer in (masked, functools.partial(model), decorated, handlers.seed(model, 0)):
        assert _compat.wrapped_model(outer) is model
    assert isinstance(masked, _compat.Messenger)
    assert _compat.wrapped_model(model) is None
    assert _compat.wrapped_model(functools.partial(model, 1)) is None


def test_sites_inside_control_flow_are_marked():
    def walk(x):
        numpyro.sample("outside", dist.Normal(0, 1))
        scan(lambda c, _: (numpyro.sample("inside", dist.Normal(c, 1)), None), 0.0, None, 3)

    trace = handlers.trace(handlers.seed(walk, jax.random.key(0))).get_trace(0)
    found = {name: _compat.in_control_flow(site) for name, site in trace.items()}
    assert found["inside"]
    assert not found["outside"]


@pytest.mark.parametrize("kind", [autoguide.AutoDiagonalNormal, autoguide.AutoMultivariateNormal])
def test_the_flat_latent_of_a_guide(kind):
    guide = ready(kind)
    parts = _compat.unpack_latent(guide, jnp.arange(3.0))
    assert {name: part.shape for name, part in parts.items()} == {"a": (2,), "b": ()}
    assert sorted(np.concatenate([np.ravel(part) for part in parts.values()])) == [0, 1, 2]
    params = {"auto_loc": jnp.zeros(3), "auto_scale": jnp.ones(3), "auto_scale_tril": jnp.eye(3)}
    seeded = handlers.substitute(handlers.seed(guide, jax.random.key(0)), data=params)
    assert handlers.trace(seeded).get_trace(jnp.zeros(3))[_compat.flat_latent(guide)]["value"].size


@pytest.mark.parametrize("kind", [autoguide.AutoNormal, autoguide.AutoDelta])
def test_the_sites_of_a_guide_that_was_set_up(kind):
    guide = ready(kind)
    assert sorted(_compat.latent_sites(guide)) == _compat.prototype_sites(guide) == ["a", "b"]
    _compat.forget_prototype(guide)
    calls = []
    guide.model = lambda x: calls.append(1) or model(x)
    handlers.seed(guide, jax.random.key(0))(jnp.zeros(3))
    assert calls


def test_what_a_guide_calls():
    guide = autoguide.AutoNormal(model, init_scale=0.3)
    assert _compat.init_scale(guide) == 0.3
    assert _compat.init_scale(autoguide.AutoDelta(model)) is None
    assert _compat.setup_of(guide).__module__.startswith("numpyro.")
    plates = autoguide.AutoNormal(model, create_plates=lambda x: None)
    assert plates.create_plates in list(_compat.guide_functions(plates))
    flow = autoguide.AutoIAFNormal(model, nonlinearity=init_to_median)
    assert init_to_median in list(_compat.guide_functions(flow))


def test_a_subclass_that_draws_by_itself_has_another_distribution():
    class Renamed(autoguide.AutoNormal):
        scale_constraint = dist.constraints.positive

    class Shifted(autoguide.AutoDiagonalNormal):
        def _get_posterior(self):
            return super()._get_posterior()

    assert _compat.same_distribution(Renamed(model), autoguide.AutoNormal)
    assert not _compat.same_distribution(Shifted(model), autoguide.AutoDiagonalNormal)
    # Each is the name of a method that one of NumPyro's guides draws with.
    for name in ("_get_posterior", "_sample_latent", "_unpack_latent", "get_transform"):
        kinds = autoguide.AutoDiagonalNormal, autoguide.AutoNormal
        assert any(hasattr(ready(kind), name) for kind in kinds)


def test_a_program_that_runs_once_gives_the_same_values():
    def slope(x):
        return jax.grad(lambda z: jnp.sum(jnp.sin(z) * jnp.exp(z)))(x)

    x = jnp.linspace(-1, 1, 7)
    np.testing.assert_allclose(_compat.jit_once(jax.vmap(slope))(x), jax.vmap(slope)(x), rtol=1e-6)


def test_every_name_is_tested():
    here = {
        name
        for name, each in vars(_compat).items()
        if getattr(each, "__module__", "") == _compat.__name__
    }
    own = here - {"Program"} | {"Messenger", "define_prng_impl"}
    text = pathlib.Path(__file__).read_text()
    assert {name for name in own if f"_compat.{name}" not in text} == set()

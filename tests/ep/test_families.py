"""Every family against autodiff, NumPyro and its own draws; the algebra; the refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_dp.methods.ep import families as ep

MEMBERS = 64


def x64(enable=True):
    """Context manager for double precision, on old and new JAX."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enable)
    from jax.experimental import enable_x64

    return enable_x64(enable)


@pytest.fixture
def double():
    with x64():
        yield


def spd(rng, count, dim, decades):
    """Positive definite matrices with eigenvalues over some decades around 1."""
    basis = np.linalg.qr(rng.normal(size=(count, dim, dim)))[0]
    values = log_uniform(rng, (count, 1, dim), 10 ** -(decades / 2), 10 ** (decades / 2))
    return (basis * values) @ np.swapaxes(basis, -1, -2)


def log_uniform(rng, shape, low, high):
    return np.exp(rng.uniform(np.log(low), np.log(high), size=shape))


def normals(rng, count, precision, apply):
    return {"linear": apply(precision, rng.normal(size=(count, 3))), "precision": precision}


def members(name, count=MEMBERS, width=1.0, seed=0):
    """Natural parameters of random members, stacked; ``width`` 1 is the widest range."""
    rng = np.random.default_rng(seed)
    uniform = functools.partial(log_uniform, rng)
    small, large = 10 ** (-2 * width), 10 ** (3 * width)
    if name == "normal":
        precision = spd(rng, count, 3, 4 * width)
        made = normals(rng, count, precision, lambda m, v: np.einsum("nij,nj->ni", m, v))
    elif name == "diagonal_normal":
        made = normals(rng, count, uniform((count, 3), small, large), np.multiply)
    elif name in ("gamma", "gamma_array"):
        shape = (count,) if name == "gamma" else (count, 2)
        made = {"log": uniform(shape, small, large) - 1, "rate": uniform(shape, 1e-3, 1e3)}
    elif name == "beta":
        made = {n: uniform((count, 2), small, large) - 1 for n in ("log", "log_complement")}
    elif name == "dirichlet":
        made = {"log": uniform((count, 4), small, large) - 1}
    else:
        sites = {"w": "diagonal_normal", "s": "beta"}
        parts = {site: members(kind, count, width, seed) for site, kind in sites.items()}
        made = {f"{site}_{n}": v for site, part in parts.items() for n, v in part.items()}
    return {n: jnp.asarray(v) for n, v in made.items()}


def make(name):
    constructors = {
        "normal": lambda: ep.normal(3),
        "diagonal_normal": lambda: ep.diagonal_normal(3),
        "gamma": ep.gamma,
        "gamma_array": lambda: ep.gamma((2,)),
        "beta": lambda: ep.beta((2,)),
        "dirichlet": lambda: ep.dirichlet(4),
        "product": lambda: ep.product(w=ep.diagonal_normal(3), s=ep.beta((2,))),
    }
    return constructors[name]()


APART = ("diagonal_normal", "gamma_array", "beta", "dirichlet", "product")
NAMES = ("normal", *APART)
every_family = pytest.mark.parametrize("name", NAMES)
without_a_matrix = pytest.mark.parametrize("name", APART)


def one(natural, index=0):
    return jax.tree.map(lambda value: value[index], natural)


def vmapped(function):
    return jax.jit(jax.vmap(function))


def close(actual, expected, rtol, atol=0.0):
    assert set(actual) == set(expected)
    for name in expected:
        np.testing.assert_allclose(actual[name], expected[name], rtol, atol, err_msg=name)


def log_prob(family, natural, value):
    """The log density by NumPyro."""
    dists = family.to_dist(natural)
    if isinstance(dists, dict):
        return sum(dists[site].log_prob(value[site]) for site in dists)
    return dists.log_prob(value)


def to_mean(family):
    """Mean parameters: the gradient of A, which is the exponent minus the log density anywhere."""

    def log_partition(natural, value):
        return inner(natural, family.statistics(value)) - log_prob(family, natural, value)

    def mean(natural):
        dists = family.to_dist(natural)
        value = jax.tree.map(lambda d: d.mean, dists, is_leaf=lambda d: hasattr(d, "log_prob"))
        return jax.grad(log_partition)(natural, jax.lax.stop_gradient(value))

    return mean


@pytest.mark.full
@every_family
def test_members_are_valid_and_have_the_shapes_of_the_unit(double, name):
    family, natural = make(name), members(name)
    assert vmapped(family.is_valid)(natural).all()
    assert set(family.unit) == set(natural)
    assert all(family.unit[n].shape == natural[n].shape[1:] for n in natural)
    assert not any(value.any() for value in family.unit.values())


@every_family
def test_the_precision_of_the_inputs_is_kept(double, name):
    family = make(name)
    natural = {n: v.astype(jnp.float32) for n, v in one(members(name, width=0.3)).items()}
    functions = [lambda n: family.from_dist(family.to_dist(n))]
    if name in APART:
        functions.append(lambda n: family.project(n, 0.1))
    for function in functions:
        result = jax.eval_shape(function, natural)
        assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype("float32")}


def inner(natural, statistics):
    """The exponent of a density."""
    return sum(jnp.sum(value * statistics[n]) for n, value in natural.items())


def draws(family, natural, count, seed=0):
    return ep.sample(family, jax.random.key(seed), natural, (count,))


@functools.cache
def drawn(name):
    """A member and 20 000 draws, in double precision."""
    with x64():
        natural = one(members(name, width=0.2), 3)
        return natural, jax.tree.map(np.asarray, draws(make(name), natural, 20_000))


@pytest.mark.full
@every_family
def test_the_exponent_is_that_of_numpyro(double, name):
    family, (natural, z) = make(name), drawn(name)
    z = jax.tree.map(lambda value: value[:20], z)

    def constant(value):
        return inner(natural, family.statistics(value)) - log_prob(family, natural, value)

    found = vmapped(constant)(z)
    np.testing.assert_allclose(found, found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.full
@every_family
def test_means_of_draws(double, name):
    """Within 5 standard errors, and a member of powers 1.5 is seen to be another."""
    family, (natural, z) = make(name), drawn(name)
    statistics = vmapped(family.statistics)(z)

    def worst(mean):
        scores = [
            np.abs(np.mean(s, 0) - mean[n]) / (np.std(s, 0) / np.sqrt(len(s)))
            for n, s in statistics.items()
        ]
        return max(np.max(score) for score in scores)

    mean = to_mean(family)
    assert worst(mean(natural)) < 5
    assert worst(mean(ep.power(natural, 1.5))) > 8


@every_family
def test_the_distribution_comes_back(double, name):
    family, natural = make(name), one(members(name), 2)
    close(family.from_dist(family.to_dist(natural)), natural, rtol=1e-9, atol=1e-12)


@pytest.mark.full
def test_usual_spellings_are_the_same_member():
    loc, scale = jnp.array([1.0, 2.0]), 0.5
    expected = {"linear": jnp.array([4.0, 8.0]), "precision": jnp.array([4.0, 4.0])}
    spellings = [
        dist.Normal(loc, scale),
        dist.Normal(loc, scale).to_event(1),
        dist.Normal(loc, scale).expand([2]).to_event(1),
        dist.Normal(loc, jnp.array([0.5, 0.5])),
    ]
    for spelling in spellings:
        close(ep.diagonal_normal(2).from_dist(spelling), expected, rtol=1e-6)
        full = ep.normal(2).from_dist(spelling)
        close(full, expected | {"precision": jnp.diag(expected["precision"])}, rtol=1e-6)
    whole = dist.MultivariateNormal(jnp.array([1, 2]), jnp.eye(2))
    close(ep.normal(2).from_dist(whole), {"linear": loc, "precision": jnp.eye(2)}, rtol=1e-6)
    zeros = dist.Normal(0.0, 0.5).expand([2]).to_event(1)
    from_floats = ep.diagonal_normal(2).from_dist(zeros)
    assert not from_floats["linear"].any()
    assert not any(value.weak_type for value in from_floats.values())
    covariance = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    for spelling in (
        dist.MultivariateNormal(loc, covariance),
        dist.MultivariateNormal(loc, precision_matrix=jnp.linalg.inv(covariance)),
        dist.MultivariateNormal(loc, scale_tril=jnp.linalg.cholesky(covariance)),
    ):
        natural = ep.normal(2).from_dist(spelling)
        np.testing.assert_allclose(natural["precision"] @ covariance, jnp.eye(2), atol=1e-6)
        np.testing.assert_allclose(covariance @ natural["linear"], loc, rtol=1e-5)
    origin = ep.normal(2).from_dist(dist.MultivariateNormal(0.0, covariance))
    assert origin["linear"].shape == (2,)
    exponential = ep.gamma((2,)).from_dist(dist.Exponential(3.0).expand([2]).to_event(1))
    close(exponential, {"log": jnp.zeros(2), "rate": jnp.full(2, 3.0)}, rtol=1e-6)


@pytest.mark.parametrize(("family", "given", "error", "words"), [
    ("normal", dist.Gamma(1.0, 1.0), TypeError, "MultivariateNormal, Normal.*got Gamma"),
    ("normal", dist.Delta(jnp.zeros(3)), TypeError, "got Delta"),
    ("normal", dist.Normal(0.0, 1.0), ValueError, r"shape \(3,\), got shape \(\)"),
    ("diagonal_normal", dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3)), TypeError, "Normal"),
    ("gamma", dist.LogNormal(0.0, 1.0), TypeError, "Gamma, Exponential.*got LogNormal"),
    ("gamma", dist.Gamma(1.0, 1.0).expand([2]), ValueError, r"shape \(\), got shape \(2,\)"),
    ("beta", dist.Uniform(0.0, 1.0).expand([2]), TypeError, "Beta.*got Uniform"),
    ("dirichlet", dist.Dirichlet(jnp.ones(3)), ValueError, r"shape \(4,\), got shape \(3,\)"),
    ("gamma", 1.0, TypeError, "Gamma.*got float"),
])  # fmt: skip
def test_other_distributions_are_refused(family, given, error, words):
    with pytest.raises(error, match=words):
        make(family).from_dist(given)


@pytest.mark.parametrize(("build", "error", "words"), [
    (lambda: ep.normal(0), ValueError, "dim=0"),
    (lambda: ep.diagonal_normal(2.0), TypeError, "dim=2.0"),
    (lambda: ep.normal(True), TypeError, "dim=True"),
    (lambda: ep.dirichlet(1), ValueError, "size=1"),
    (lambda: ep.gamma(3), TypeError, "shape=3"),
    (lambda: ep.beta((2, 0)), ValueError, "size=0"),
    (ep.product, ValueError, "needs at least one site"),
    (lambda: ep.product(z=ep.normal), TypeError, "Family for site 'z'"),
])  # fmt: skip
def test_constructors_check_their_arguments(build, error, words):
    with pytest.raises(error, match=words):
        build()


@every_family
def test_products_of_densities(double, name):
    """Log densities add up to a constant, and quotients undo products."""
    family = make(name)
    a, b = one(members(name, width=0.3, seed=3)), one(members(name, width=0.3, seed=4))
    together = ep.multiply(a, b)
    z = jax.tree.map(lambda value: value[:8], drawn(name)[1])

    def gap(value):
        both = log_prob(family, a, value) + log_prob(family, b, value)
        return both - inner(together, family.statistics(value))

    gaps = vmapped(gap)(z)
    np.testing.assert_allclose(gaps, gaps[0], rtol=1e-9, atol=1e-9)
    close(ep.divide(together, b), a, rtol=1e-9, atol=1e-12)
    close(ep.multiply(a, family.unit), a, rtol=0)


@without_a_matrix
def test_projection_leaves_members_alone(name):
    family, natural = make(name), members(name, width=0.4)
    for x, y in zip(
        jax.tree.leaves(vmapped(lambda n: family.project(n, 1e-3))(natural)),
        jax.tree.leaves(natural),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


@without_a_matrix
def test_projection_of_anything_is_valid_and_idempotent(name):
    family, rng = make(name), np.random.default_rng(0)
    scales = 10.0 ** rng.uniform(-2, 3, size=MEMBERS)
    natural = {
        n: jnp.asarray(
            scales.reshape(-1, *[1] * v.ndim) * rng.normal(size=(MEMBERS, *v.shape)), "float32"
        )
        for n, v in family.unit.items()
    }
    assert not vmapped(family.is_valid)(natural).all()
    project = jax.jit(jax.vmap(family.project, in_axes=(0, None)))
    for floor in (1e-8, 0.1):
        projected = project(natural, floor)
        assert vmapped(family.is_valid)(projected).all()
        again = project(projected, floor)
        for n, value in projected.items():
            error = np.abs(again[n] - value).reshape(MEMBERS, -1).max(1)
            size = np.abs(value).reshape(MEMBERS, -1).max(1)
            assert (error <= 1e-5 * size).all(), n


def test_projection_raises_what_is_too_low(double):
    diagonal = {"linear": jnp.ones(2), "precision": jnp.array([-3.0, 2.0])}
    expected = diagonal | {"precision": jnp.array([0.5, 2.0])}
    close(ep.diagonal_normal(2).project(diagonal, 0.5), expected, rtol=0)
    low = {"log": jnp.array(-2.0), "rate": jnp.array(-1.0)}
    raised = {"log": jnp.array(-0.9), "rate": jnp.array(0.1)}
    close(ep.gamma().project(low, 0.1), raised, rtol=1e-12)
    close(ep.dirichlet(2).project({"log": jnp.array([-3.0, 1.0])}, 0.1),
          {"log": jnp.array([-0.9, 1.0])}, rtol=1e-12)  # fmt: skip


@every_family
def test_nan_and_infinity_are_not_valid(name):
    family, natural = make(name), one(members(name, width=0.3))
    assert family.is_valid(natural)
    for n in natural:
        for bad in (jnp.nan, jnp.inf):
            broken = natural | {n: natural[n].at[(0,) * natural[n].ndim].set(bad)}
            assert not family.is_valid(broken), (n, bad)


def test_draws_of_sites_are_independent():
    family = ep.product(x=ep.diagonal_normal(1), y=ep.diagonal_normal(1))
    natural = {n: jnp.ones(1) for n in family.unit}
    z = draws(family, natural, 10_000)
    assert abs(np.corrcoef(z["x"][:, 0], z["y"][:, 0])[0, 1]) < 5 / np.sqrt(10_000)

"""Every family against autodiff, NumPyro and its own draws; the algebra; the refusals."""

import functools
import itertools

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


FAMILIES = {
    "normal": ep.normal(3), "diagonal_normal": ep.diagonal_normal(3), "gamma_array": ep.gamma((2,)),
    "beta": ep.beta((2,)), "dirichlet": ep.dirichlet(4),
    "product": ep.product(w=ep.diagonal_normal(3), s=ep.beta((2,))),
}  # fmt: skip
APART = tuple(name for name in FAMILIES if name != "normal")
every_family = pytest.mark.parametrize("name", FAMILIES)
without_a_matrix = pytest.mark.parametrize("name", APART)


def members(name, count=MEMBERS, width=1.0, seed=0):
    """Natural parameters of random members, stacked; ``width`` 1 is the widest range."""
    rng = np.random.default_rng(seed)
    uniform = functools.partial(log_uniform, rng)
    small, large = 10 ** (-2 * width), 10 ** (3 * width)
    if name == "normal":
        precision = spd(rng, count, 3, 4 * width)
        linear = np.einsum("nij,nj->ni", precision, rng.normal(size=(count, 3)))
        made = {"linear": linear, "precision": precision}
    elif name == "diagonal_normal":
        precision = uniform((count, 3), small, large)
        made = {"linear": precision * rng.normal(size=(count, 3)), "precision": precision}
    elif name == "gamma_array":
        made = {
            "log": uniform((count, 2), small, large) - 1,
            "rate": uniform((count, 2), 1e-3, 1e3),
        }
    elif name == "product":
        parts = {"w": members("diagonal_normal", count, width, seed),
                 "s": members("beta", count, width, seed)}  # fmt: skip
        made = {f"{site}_{n}": v for site, part in parts.items() for n, v in part.items()}
    else:
        names, size = (("log", "log_complement"), 2) if name == "beta" else (("log",), 4)
        made = {n: uniform((count, size), small, large) - 1 for n in names}
    return {n: jnp.asarray(v) for n, v in made.items()}


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


def mean_of(family, natural):
    """Mean parameters: the gradient of A, which is the exponent minus the log density anywhere."""
    dists = family.to_dist(natural)
    value = jax.tree.map(lambda d: d.mean, dists, is_leaf=lambda d: hasattr(d, "log_prob"))

    def log_partition(natural):
        return inner(natural, family.statistics(value)) - log_prob(family, natural, value)

    return jax.grad(log_partition)(natural)


@every_family
def test_members_are_valid_of_the_shapes_of_the_unit_and_come_back(double, name):
    family, natural = FAMILIES[name], members(name)
    assert vmapped(family.is_valid)(natural).all()
    assert set(family.unit) == set(natural)
    assert all(family.unit[n].shape == natural[n].shape[1:] for n in natural)
    assert not any(value.any() for value in family.unit.values())
    member = one(natural, 2)
    close(family.from_dist(family.to_dist(member)), member, rtol=1e-9, atol=1e-12)
    for n, bad in itertools.product(member, (jnp.nan, jnp.inf)):
        broken = member | {n: member[n].at[(0,) * member[n].ndim].set(bad)}
        assert not family.is_valid(broken), (n, bad)
    functions = [lambda n: family.from_dist(family.to_dist(n))]
    functions += [lambda n: family.project(n, 0.1)] if name in APART else []
    short = {n: v.astype(jnp.float32) for n, v in member.items()}
    for function in functions:
        result = jax.eval_shape(function, short)
        assert {leaf.dtype for leaf in jax.tree.leaves(result)} == {jnp.dtype("float32")}


def inner(natural, statistics):
    """The exponent of a density."""
    return sum(jnp.sum(value * statistics[n]) for n, value in natural.items())


@every_family
def test_densities_are_those_of_numpyro_and_of_the_draws(double, name):
    """Exponents up to a constant, means within 5 standard errors, and products of densities."""
    family, natural, count = FAMILIES[name], one(members(name, width=0.2), 3), 20_000
    z = ep.sample(family, jax.random.key(0), natural, (count,))
    some = jax.tree.map(lambda value: value[:20], z)
    a, b = one(members(name, width=0.3, seed=3)), one(members(name, width=0.3, seed=4))
    together = ep.multiply(a, b)
    for members_, exponent in (((natural,), natural), ((a, b), together)):

        def gap(value, members_=members_, exponent=exponent):
            density = sum(log_prob(family, each, value) for each in members_)
            return inner(exponent, family.statistics(value)) - density

        gaps = vmapped(gap)(some)
        np.testing.assert_allclose(gaps, gaps[0], rtol=1e-9, atol=1e-9)
    close(ep.divide(together, b), a, rtol=1e-9, atol=1e-12)
    close(ep.multiply(a, family.unit), a, rtol=0)
    statistics = vmapped(family.statistics)(z)

    def worst(mean):
        scores = [
            np.abs(np.mean(s, 0) - mean[n]) / (np.std(s, 0) / np.sqrt(len(s)))
            for n, s in statistics.items()
        ]
        return max(np.max(score) for score in scores)

    assert worst(mean_of(family, natural)) < 5
    assert worst(mean_of(family, ep.power(natural, 1.5))) > 8  # another member
    if name == "product":
        between = np.corrcoef(z["w"], z["s"], rowvar=False)[:3, 3:]
        assert np.abs(between).max() < 5 / np.sqrt(count)


@pytest.mark.full
def test_usual_spellings_are_the_same_member():
    loc, scale = jnp.array([1.0, 2.0]), 0.5
    expected = {"linear": jnp.array([4.0, 8.0]), "precision": jnp.array([4.0, 4.0])}
    for spelling in (
        dist.Normal(loc, scale),
        dist.Normal(loc, scale).expand([2]).to_event(1),
        dist.Normal(loc, jnp.array([0.5, 0.5])),
    ):
        close(ep.diagonal_normal(2).from_dist(spelling), expected, rtol=1e-6)
        full = ep.normal(2).from_dist(spelling)
        close(full, expected | {"precision": jnp.diag(expected["precision"])}, rtol=1e-6)
    whole = dist.MultivariateNormal(jnp.array([1, 2]), jnp.eye(2))
    close(ep.normal(2).from_dist(whole), {"linear": loc, "precision": jnp.eye(2)}, rtol=1e-6)
    from_floats = ep.diagonal_normal(2).from_dist(dist.Normal(0.0, 0.5).expand([2]).to_event(1))
    assert not from_floats["linear"].any()
    assert not any(value.weak_type for value in from_floats.values())
    covariance = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    for where, spelling in (
        (loc, dist.MultivariateNormal(loc, covariance)),
        (loc, dist.MultivariateNormal(loc, precision_matrix=jnp.linalg.inv(covariance))),
        (loc, dist.MultivariateNormal(loc, scale_tril=jnp.linalg.cholesky(covariance))),
        (jnp.zeros(2), dist.MultivariateNormal(0.0, covariance)),
    ):
        natural = ep.normal(2).from_dist(spelling)
        np.testing.assert_allclose(natural["precision"] @ covariance, jnp.eye(2), atol=1e-6)
        np.testing.assert_allclose(covariance @ natural["linear"], where, rtol=1e-5)
    exponential = ep.gamma((2,)).from_dist(dist.Exponential(3.0).expand([2]).to_event(1))
    close(exponential, {"log": jnp.zeros(2), "rate": jnp.full(2, 3.0)}, rtol=1e-6)


@pytest.mark.parametrize(("build", "error", "words"), [
    (lambda: ep.normal(3).from_dist(dist.Gamma(1.0, 1.0)),
     TypeError, "MultivariateNormal, Normal.*got Gamma"),
    (lambda: ep.normal(3).from_dist(dist.Delta(jnp.zeros(3))), TypeError, "got Delta"),
    (lambda: ep.normal(3).from_dist(dist.Normal(0.0, 1.0)),
     ValueError, r"shape \(3,\), got shape \(\)"),
    (lambda: ep.diagonal_normal(3).from_dist(dist.MultivariateNormal(jnp.zeros(3), jnp.eye(3))),

     TypeError, "Normal"),
    (lambda: ep.gamma().from_dist(dist.LogNormal(0.0, 1.0)),
     TypeError, "Gamma, Exponential.*got LogNormal"),
    (lambda: ep.gamma().from_dist(dist.Gamma(1.0, 1.0).expand([2])),
     ValueError, r"\(\), got shape \(2,\)"),
    (lambda: ep.beta((2,)).from_dist(dist.Uniform(0.0, 1.0).expand([2])),
     TypeError, "Beta.*got Uniform"),
    (lambda: ep.dirichlet(4).from_dist(dist.Dirichlet(jnp.ones(3))),
     ValueError, r"\(4,\), got shape \(3,\)"),
    (lambda: ep.gamma().from_dist(1.0), TypeError, "Gamma.*got float"),
    (lambda: ep.normal(0), ValueError, "dim=0"),
    (lambda: ep.diagonal_normal(2.0), TypeError, "dim=2.0"),
    (lambda: ep.normal(True), TypeError, "dim=True"),
    (lambda: ep.dirichlet(1), ValueError, "size=1"),
    (lambda: ep.gamma(3), TypeError, "shape=3"),
    (lambda: ep.beta((2, 0)), ValueError, "size=0"),
    (ep.product, ValueError, "needs at least one site"),
    (lambda: ep.product(z=ep.normal), TypeError, "Family for site 'z'"),
])  # fmt: skip
def test_other_distributions_and_sizes_are_refused(build, error, words):
    with pytest.raises(error, match=words):
        build()


@without_a_matrix
def test_projection_leaves_members_alone_and_is_valid_and_idempotent(name):
    family, rng, natural = FAMILIES[name], np.random.default_rng(0), members(name, width=0.4)
    project = jax.jit(jax.vmap(family.project, in_axes=(0, None)))
    for n, value in project(natural, 1e-3).items():
        np.testing.assert_array_equal(value, natural[n])
    scales = 10.0 ** rng.uniform(-2, 3, size=MEMBERS)[:, None]
    anything = {
        n: jnp.asarray(scales * rng.normal(size=v.shape), "float32") for n, v in natural.items()
    }
    assert not vmapped(family.is_valid)(anything).all()
    for floor in (1e-8, 0.1):
        projected = project(anything, floor)
        assert vmapped(family.is_valid)(projected).all()
        again = project(projected, floor)
        for n, value in projected.items():
            error, size = np.abs(again[n] - value).max(1), np.abs(value).max(1)
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

"""Numbers of a record are found in the branch of a conditional: no reader computes them anew."""

import re

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from compiled import program_of
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_dp import DPSVI, Privacy
from numpyro_dp.estimators import aligned, vanilla
from numpyro_dp.mechanisms import AdaptiveClip
from numpyro_dp.samplers import FullBatch

ROWS = 37
RESIDUAL = rf"f32\[(?:2,)?{ROWS}(?:,1)?\]\S* subtract\("


def model(x, y, u):
    z = numpyro.sample("z", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.factor("near", -jnp.square(y * u - x * z) / 2 + jnp.tanh(b * y))


def one_by_one():
    build = vanilla()
    return lambda problem: build(problem)._replace(factored=None)


def split_program(text):
    """The text of what conditionals run, and the rest of a program."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) .*?\{\n(.*?)^\}", text, re.M | re.S))
    calls = {name: set(re.findall(r"%([\w.\-]+)", body)) & set(bodies)
             for name, body in bodies.items()}  # fmt: skip
    branches = re.findall(r" conditional\(.*?(?:_computations?=.*)$", text, re.M)
    waiting = {name for line in branches for name in re.findall(r"%([\w.\-]+)", line)}
    inside: set[str] = set()
    while waiting := (waiting & set(bodies)) - inside:
        inside |= waiting
        waiting = set().union(*(calls[name] for name in waiting))
    return tuple(
        "".join(bodies[n] for n in bodies if (n in inside) is kept) for kept in (True, False)
    )


KINDS = {
    "by products": (aligned, 1.0, 1),
    "mapped": (vanilla, {"auto_loc": AdaptiveClip(1.0), ...: 0.5}, 2),  # a signal is one more
    "one by one": (one_by_one, AdaptiveClip(1.0), 1),
}


@pytest.mark.full
@pytest.mark.parametrize("form", ["update", "updates", "loop", "sweep"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_records_are_computed_in_a_branch_and_nowhere_else(kind, form):
    estimator, clip, conditionals = KINDS[kind]
    svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), estimator=estimator(),
                clip_norm=clip,
                privacy=Privacy(noise_multiplier=1.0), sampler=FullBatch())  # fmt: skip
    text = program_of(svi, tuple(jnp.ones((3, ROWS))), form)
    assert len(re.findall(r" conditional\(", text)) == conditionals
    branches, rest = split_program(text)
    for sign in (r" tanh\(", RESIDUAL):
        assert re.search(sign, branches)
        assert not re.search(sign, rest)

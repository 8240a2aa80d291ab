"""Optimised programs of a driver, as text, for tests of what compilers make of a step."""

import jax
import jax.numpy as jnp


def program_of(svi, args, form):
    """The program of one way to take steps: update, updates (of lanes), loop, sweep."""
    state, session = svi.init(jax.random.key(0), *args), svi._session(args, {})
    program, called = jax.jit(svi.update), (state, *args)
    if form == "updates":
        states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
        program = jax.jit(jax.vmap(svi.update, in_axes=(0, *[None] * len(args))))
        called = (states, *args)
    elif form != "update":
        start, program = session.begin(state, 6, 2)[1][:2], session._loop_for(None)
        if form == "sweep":
            states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state.opened)
            start, program = session.begin_many(states, 6, 2)[1][:2], session._loop_many
        called = (*start, session.rows(args, {}), *map(jnp.int32, (0, 2, 3)))
    return program.lower(*called).compile().as_text()

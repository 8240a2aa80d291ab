r"""Makes sure that noise is used once: no two runs share it.

If two releases have the same noise, their difference is the exact difference of their private
sums. Four rules prevent this.

1. A secret key is made outside every trace (:func:`check_outside_trace`). JAX traces a function
   once for many calls and lanes, and all of them would share a key made there.
2. Within a process each run has an id, a hash of its first noise key. The process remembers for
   each id how many steps of noise are used up (:func:`register`, :func:`use`). A key that is passed
   twice raises an error, and so does a state that was used before.
3. A state has 256 further bits, its nonce. They are new each time the state enters a function that
   is compiled or transformed (:func:`~.keys.next_nonce`). JAX runs a compiled update without
   Python, so this module cannot raise an error in its second call with the same state. The nonce
   gives that call other keys. There is no nonce if you pass the secret key, or if several
   processes must agree on the noise.
4. A state that continues, in this or another process, gets new keys (:func:`~.keys.renewed`). With
   :math:`k` the state's key and :math:`e` 256 new bits from the operating system,

   .. math:: k' = \mathrm{SHA256}(c, k, e).

   Two continuations have independent e, so their keys are independent and uniform in any process
   (SHA-256 as a random oracle). Nobody who knows only k can compute k'. A counter would not be
   enough: two processes that read the same file would count the same values.

A checkpoint is the exception to rule 4: the call that continues a killed run repeats its noise. It
is refused unless records, program and settings are the same (:mod:`numpyro_dp.run.checkpoint`).

``Privacy(repetition=True)`` switches rules 2 to 4 off. The run is then a function of its secret
key. The caller promises that it repeats a release on the same records with the same settings.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
from jax import Array

from numpyro_dp import _compat


class NoiseReuseError(ValueError):
    """The same noise would be used a second time.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> from numpyro_dp import DPSVI, PrivacyBudget
        >>> from numpyro_dp.samplers import FullBatch
        >>> def model(x):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 1))
        ...     with numpyro.plate("records", x.shape[0]):
        ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), clip_norm=1.0,
        ...             sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5))
        >>> x = jnp.full(1000, 0.5)
        >>> svi = DPSVI(model, AutoDiagonalNormal(model), optax.adam(0.1), clip_norm=1.0,
        ...             sampler=FullBatch(), budget=PrivacyBudget(1.0, 1e-5), num_steps=10)
        >>> state = svi.init(jax.random.key(0), x)
        >>> following, _ = svi.update(state, x)
        >>> try:
        ...     svi.update(state, 2 * x)  # the same noise on other records
        ... except NoiseReuseError:
        ...     print("refused: continue with the state that update returned")
        refused: continue with the state that update returned
    """


# The trace state outside every trace. A new thread has it even if this import is traced.
with concurrent.futures.ThreadPoolExecutor(1) as _thread:
    _OUTSIDE = _thread.submit(_compat.trace_state).result()
_lock = threading.Lock()  # two threads may start runs with one key: check and mark at once
_used: dict[bytes, int] = {}  # run id -> number of steps whose noise is used up


if hasattr(os, "register_at_fork"):
    # A forked child forgets all runs, so each state that continues there gets new keys.
    os.register_at_fork(after_in_child=_used.clear)
# Keys that were seen in a trace, by id. The references are weak, because Python may give the id of
# a deleted key to a new one.
_traced: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()


def in_trace() -> bool:
    """Whether JAX traces the calling function (``jit``, ``vmap``, ``grad``, ``scan`` ...)."""
    return _compat.trace_state() != _OUTSIDE


def check_outside_trace(call: str) -> None:
    """Raises an error if JAX traces a call that makes a secret key."""
    if in_trace():
        raise NoiseReuseError(
            f"{call} was called while JAX traces a function. Its secret key would be made once, "
            f"and every call and every lane would have the same noise. Call {call} outside of jit, "
            "vmap, pmap, shard_map, grad, scan, checkpoint and eval_shape. For many runs in one "
            "compiled call use sweep. For a compiled loop pass the state of init to a compiled "
            "update."
        )


def check_passed_to_trace(call: str, keys: Sequence[Array]) -> None:
    """Raises an error unless a traced call gets its state as an argument and uses it once."""
    if not in_trace():
        return
    if _compat.has_named_axes():
        raise NoiseReuseError(
            f"{call} was called inside pmap, shard_map or a vmap with axis_name: every device "
            "would add the same noise. Pass Execution(mesh=) instead. It spreads the rows of a "
            "batch over the devices, and adds noise once."
        )
    # A key of another trace is a constant of this function, which every call or iteration reuses.
    current = _compat.traced_by()
    for key in keys:
        if _compat.trace_of(key) is not current:
            raise NoiseReuseError(held_by_a_function(call))
        if _traced.get(id(key)) is key:
            raise NoiseReuseError(
                f"A compiled function uses the same state in two calls of {call}: both would have "
                "the same noise. Pass the state that the first call returned to the second."
            )
    for key in keys:
        _traced[id(key)] = key


def held_by_a_function(call: str) -> str:
    """Returns the message of an error about a state that is a constant of a function."""
    return (
        f"The state for {call} is a constant of the function that JAX compiles or transforms. "
        "Each call, lane or iteration would have the same noise. The state has to be an argument "
        "of the function: write jax.jit(lambda state, *data: dp.update(state, *data)), and carry "
        "the state through a scan."
    )


@contextlib.contextmanager
def register(identities: Sequence[Array], *, repetition: bool) -> Iterator[None]:
    """Registers runs that start. Failed runs are removed again, because they released nothing.

    Raises:
        NoiseReuseError: If a run with the same noise was started in this process.
    """
    names = [np.asarray(identity).tobytes() for identity in identities]
    with _lock:
        if not repetition and (len(set(names)) < len(names) or any(n in _used for n in names)):
            raise NoiseReuseError(
                "This secret_key was already used for a run in this process. A second run would "
                "repeat the same noise, and the difference of the two results would reveal "
                "records. Omit secret_key for fresh noise. To reproduce the earlier run on the "
                "same records, pass Privacy(repetition=True)."
            )
        before = {name: _used.get(name) for name in names}
        # Marked before the run, not after it, or a second run could start while this one is under
        # way.
        _used.update(dict.fromkeys(names, 0))
    with _taken_back(before):
        yield


@contextlib.contextmanager
def _taken_back(before: dict[bytes, int | None]) -> Iterator[None]:
    """If the runs fail, the numbers of used steps are again what they were."""
    try:
        yield
    # Also after Ctrl-C: whoever called has got no result, so nothing was released.
    except BaseException:
        with _lock:
            for name, steps in before.items():
                _used.pop(name) if steps is None else _used.update({name: steps})
        raise


@contextlib.contextmanager
def use(identity: Array, step: int, num_steps: int, *, repetition: bool) -> Iterator[bool]:
    """Marks the noise of some steps of a run as used, unless the steps fail.

    Yields:
        Whether the run was started in this process.

    Raises:
        NoiseReuseError: If the noise of that step was used before.
    """
    name = np.asarray(identity).tobytes()
    with _lock:
        before = _used.get(name)
        if before is not None and step < before and not repetition:
            raise NoiseReuseError(
                f"This state is from step {step} of a run whose steps up to {before} have been "
                "taken, so its noise is used up. The same noise on other records, or with another "
                "learning rate, would reveal records. Continue from the last state, or start again "
                "with init. To repeat a run, pass Privacy(repetition=True)."
            )
        # Also for a state from another process, which this process did not start: from now on its
        # earlier steps are used up here.
        _used[name] = step + num_steps
    with _taken_back({name: before}):
        yield before is not None


def taken_only(identity: Array, step: int) -> None:
    """Marks the noise after ``step`` as unused, for a run that was stopped there."""
    with _lock:
        _used[np.asarray(identity).tobytes()] = step

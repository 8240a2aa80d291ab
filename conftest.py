"""Array annotations are checked at run time, and what is drawn repeats from run to run."""

import collections
import contextlib
import hashlib
import itertools
import os
import types

import quick_compilation

quick_compilation.set_up()
_TESTS = os.path.join(os.path.dirname(__file__), "tests")
# Processes that tests start import what the tests import.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_TESTS, os.environ.get("PYTHONPATH"))))

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

_CHECKED = (
    "core", "sums.bounded", "run.step", "run.session", "run.results", "vi.dpsvi", "model",
    "vi.estimators", "privacy.mechanism",
)  # fmt: skip

if "JAXTYPING_DISABLE" not in os.environ:
    install_import_hook([f"numpyro_dp.{name}" for name in _CHECKED], "_typecheck.checked")


_LONGEST_EXAMPLES = {"DPPBP", "Ledger", "audit_run", "choose"}
_LONG_EXAMPLES = {
    "EP", "PBP", "tempering_model", "tempered", "rehearse", "audit", "load", "NoiseAware",
    "NoiseReuseError", "PosteriorSummary", "PosteriorWarning", "PrivacyReport",
    "RunInterrupted", "RunResult", "Statement", "save", "after", "tail_average", "SEP", "to_arviz",
    "noise_aware",
}  # fmt: skip


def pytest_collection_modifyitems(items):
    """Sorts the cases of each test into tiers.

    The first case is in the README's tier and the others are ``extended``. A mark changes that:
    ``every_case`` keeps all in the first tier, ``table`` runs a twentieth of the others in
    ``.ci/run``.
    """
    seen = collections.Counter()
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            name = item.name.rpartition(".")[2]
            if name in _LONG_EXAMPLES | _LONGEST_EXAMPLES:
                item.add_marker("extended" if name in _LONGEST_EXAMPLES else "full")
        if {"slow", "extended", "every_case"} & {mark.name for mark in item.iter_markers()}:
            continue
        name = item.nodeid.partition("[")[0]
        if seen[name]:
            tenth = item.get_closest_marker("table") and seen[name] % 20 == 1
            item.add_marker("full" if tenth else "extended")
        seen[name] += 1


@pytest.fixture
def empty_caches():
    """For tests that count compilations: JAX drops the oldest of 4096 programs of a process."""
    jax.clear_caches()


hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


@contextlib.contextmanager
def _fresh_keys_of(name):
    """Keys of a driver without a secret key: new ones, and the same in every run of the tests.

    Privacy noise that differs from run to run would fail one honest bound of many now and then.
    """
    from numpyro_dp.privacy import keys

    count = itertools.count()
    known = types.SimpleNamespace(
        token_bytes=lambda size: hashlib.shake_256(f"{name} {next(count)}".encode()).digest(size)
    )
    before = keys.secrets
    keys.secrets = known
    try:
        yield
    finally:
        keys.secrets = before


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Tests of one process may be given the same secret key; one test may not use it twice.

    A hook, since fixtures of a module are made before those of a test, and use keys too.
    """
    from numpyro_dp.privacy import keys, once

    once._used.clear()
    keys._nonces.clear()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    number = getattr(request, "param_index", 0)
    with _fresh_keys_of(f"{request.node.nodeid} {fixturedef.argname} {number}"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if item.get_closest_marker("operating_system_keys"):
        return (yield)
    with _fresh_keys_of(item.nodeid):
        return (yield)

"""Imports go downwards, and importing the package does nothing."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

import numpyro_dp

ROOT = pathlib.Path(numpyro_dp.__file__).parent

# A module may import its own group and groups of lower level. A new module needs a line here.
LEVELS = {
    "_validate": 0,
    "_tree": 0,
    "core": 1,
    "datasets": 2,
    "privacy": 2,
    "model": 2,
    "contraction": 2,
    "exact_sum": 2,
    "stretches": 2.2,
    "devices": 2.3,
    "product_sum": 2.4,
    "factored_sum": 2.6,
    "aggregate": 3,
    "ep": 3,
    "estimators": 3,
    "step": 4,
    "results": 5,
    "session_checks": 5,
    "streaming": 5.5,
    "session": 6,
    "_checks": 6.5,
    "ledger": 6.5,
    "sweep_folder": 6.6,
    "sweep": 6.7,
    "driver": 6.9,
    "svi": 7,
    "pbp": 7.2,
    "simulate": 7.5,
    "sep": 7,
    "em": 7,
    "sgld": 7,
    "posterior": 8,
    "evaluate": 8,
    "__init__": 9,
}
NUMPYRO = {
    "model", "ep", "_checks", "svi", "simulate", "sep", "em", "pbp", "sgld", "posterior",
    "evaluate",
}  # fmt: skip
# Not below each other although their levels would let them.
FORBIDDEN = {("estimators", "privacy"), ("aggregate", "privacy")}


def group(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(source, package):
    """Absolute names of the modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def violations(name, source, package):
    """What is wrong with the imports of a file of group ``name``."""
    wrong = []
    for target in sorted(imports(source, package)):
        parts = target.split(".")
        if parts[0] == "numpyro" and name not in NUMPYRO:
            wrong.append(f"{name} imports {target}")
        if parts[0] != "numpyro_dp" or len(parts) < 2:
            continue
        other = parts[1]
        if other not in LEVELS:
            wrong.append(f"{name} imports {target} of no known level")
        elif other != name and (LEVELS[other] >= LEVELS[name] or (name, other) in FORBIDDEN):
            wrong.append(f"{name} imports {target} upwards")
    return wrong


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path):
    assert group(path) in LEVELS, "a new module: give it a level"
    package = ["numpyro_dp", *path.relative_to(ROOT).parts[:-1]]
    assert violations(group(path), path.read_text(), package) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("privacy", "from numpyro_dp.estimators import aligned"),
        ("privacy", "from ..estimators.aligned import aligned"),
        ("privacy", "def f():\n    import numpyro_dp.step"),
        ("privacy", "from numpyro_dp import step"),
        ("estimators", "from numpyro_dp.privacy.mechanism import gaussian"),
        ("model", "from numpyro_dp.privacy.random import secret_key"),
        ("estimators", "from numpyro.infer import SVI"),
        ("core", "import numpyro_dp.privacy.plan"),
        ("session", "from numpyro_dp.new_module import thing"),
    ],
)
def test_the_walk_sees_what_is_forbidden(name, source):
    assert len(violations(name, source, ["numpyro_dp", name])) == 1


def test_import_starts_no_backend_and_makes_no_array():
    script = """
import sys
import jax
before = {name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_platforms")}
import numpyro_dp
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was started"
assert before == {name: getattr(jax.config, name) for name in before}, "the configuration changed"
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("numpyro_dp"):
        arrays = [name for name, value in vars(module).items() if isinstance(value, jax.Array)]
        assert not arrays, (module.__name__, arrays)
assert "tqdm.auto" not in sys.modules or "numpyro" in sys.modules
jax.numpy.zeros(1)
assert xla_bridge._backends, "the check cannot fail"
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_nothing_is_printed_or_logged_by_the_package():
    """``print`` and ``logging`` do not occur, so nothing sensitive can leave by them."""
    for path in FILES:
        if group(path) == "datasets":  # public data; says which source it takes
            continue
        tree = ast.parse(path.read_text())
        called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        silenced = {"logging"} if "accounting" in path.parts else set()  # rdp quietens a library
        assert not called & ({"print", "logging", "breakpoint"} - silenced), path
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not names & {"debug_print", "io_callback", "pure_callback"}, path

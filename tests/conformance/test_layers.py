"""Imports go downwards, and importing the package does nothing."""

import ast
import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

import numpyro_dp

ROOT = pathlib.Path(numpyro_dp.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A module may import its own room and rooms of a lower floor. A new room needs a place here.
FLOORS = (
    "_compat _lazy _validate", "_program _tree core", "model privacy sums", "run",
    "audit chains posterior", "laplace vi",
    "accounting estimators extend fit mechanisms samplers plots", "formulas methods",
    "__init__",
)  # fmt: skip
LEVELS = {room: level for level, floor in enumerate(FLOORS) for room in floor.split()}
# Names of other rooms.
FACES = {"accounting", "estimators", "extend", "mechanisms", "plots", "samplers"}
NUMPYRO = {"_compat", "model", "run", "vi", "methods", "posterior", "laplace", "fit", "formulas"}
# Not below each other although their floors would let them.
FORBIDDEN = {("vi.estimators", "privacy")}


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
    """What is wrong with the imports of a file of room ``name``."""
    wrong = []
    place = ".".join(package[1:])
    for target in sorted(imports(source, package)):
        parts = target.split(".")
        if parts[0] == "numpyro" and name not in NUMPYRO:
            wrong.append(f"{name} imports {target}")
        if parts[0] != "numpyro_dp" or len(parts) < 2:
            continue
        other = parts[1]
        if other not in LEVELS:
            wrong.append(f"{name} imports {target} of no known floor")
        elif other != name and (LEVELS[other] >= LEVELS[name] or (place, other) in FORBIDDEN):
            wrong.append(f"{name} imports {target} upwards")
    return wrong


def not_public(source, place):
    """Modules that a file of ``methods`` imports and that are neither public nor of its method."""
    public = {f"numpyro_dp.{name}" for name in (FACES | {"core", "posterior"})}
    own = "numpyro_dp.methods."
    wrong = []
    for target in sorted(imports(source, ["numpyro_dp", *place])):
        module, name = target.rpartition(".")[::2]
        method = target.removeprefix(own).split(".")[0]
        shared = (ROOT / "methods" / f"{method}.py").exists()
        if target in public or (target.startswith(own) and (shared or method in place)):
            continue
        if target.split(".")[0] == "numpyro_dp" and not (
            module in public and name in importlib.import_module(module).__all__
        ):
            wrong.append(target)
    return wrong


def test_methods_import_public_names_only():
    files = [path for path in FILES if group(path) == "methods"]
    assert len(files) > 20
    for path in files:
        place = path.relative_to(ROOT).parts[:-1]
        assert not_public(path.read_text(), place) == [], path


@pytest.mark.every_case
@pytest.mark.parametrize("source", [
    "from numpyro_dp.run.driver import Driver", "from numpyro_dp._validate import check_int",
    "from numpyro_dp.posterior.diagnosis import Finding",
    "from numpyro_dp.posterior import diagnosis",
    "from numpyro_dp.methods.pbp.dppbp import DPPBP",
    "from numpyro_dp import run", "import numpyro_dp.run.step", "from ...run import step",
])  # fmt: skip
def test_the_walk_sees_what_is_not_public(source):
    assert len(not_public(source, ("methods", "ep"))) == 1


def test_the_house_has_few_rooms_on_few_floors():
    rooms = {group(path) for path in FILES}
    assert rooms == set(LEVELS)
    assert len(rooms - FACES) <= 19
    assert len(FLOORS) <= 9
    assert sum(group(path) == "run" and path.name != "__init__.py" for path in FILES) <= 9


def test_no_two_files_or_classes_share_a_name():
    files = [path for path in FILES if path.name != "__init__.py"]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    for names in ([path.name for path in files], classes):
        assert len(names) > 100
        assert [name for name in names if names.count(name) > 1] == []


def test_imports_go_downwards():
    for path in FILES:
        assert group(path) in LEVELS, f"{path.name} is a new module: give it a level"
        package = ["numpyro_dp", *path.relative_to(ROOT).parts[:-1]]
        assert violations(group(path), path.read_text(), package) == [], path.name


def test_private_names_of_jax_and_numpyro_stand_in_one_file():
    """Those that can be seen in the text: modules, attributes of guides and of arrays."""
    private = re.compile(
        r"jax\.(core|extend|interpreters|_src|custom_batching)\b|from numpyro\.(primitives|optim) |"
        r"\._(unpack_latent|init_locs|setup_prototype|NumPyroOptim|control_flow_done)\b"
    )
    for path in FILES:
        if path.name != "_compat.py":
            found = [line for line in path.read_text().splitlines() if private.search(line)]
            assert [line for line in found if '"' not in line] == [], path.name


@pytest.mark.parametrize(("name", "source"), [
    ("privacy", "from numpyro_dp.vi.estimators import aligned"),
    ("privacy", "from ..vi.estimators.aligned import aligned"),
    ("privacy", "def f():\n    import numpyro_dp.run.step"),
    ("privacy", "from numpyro_dp import run"),
    ("vi.estimators", "from numpyro_dp.privacy.mechanism import gaussian"),
    ("model", "from numpyro_dp.privacy.keys import secret_key"),
    ("sums", "from numpyro.infer import SVI"),
    ("core", "import numpyro_dp.privacy.plan"),
    ("run", "from numpyro_dp.new_module import thing"),
])  # fmt: skip
def test_the_walk_sees_what_is_forbidden(name, source):
    rooms = name.split(".")
    assert len(violations(rooms[0], source, ["numpyro_dp", *rooms])) == 1


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


@pytest.mark.full
def test_nothing_is_printed_or_logged_by_the_package():
    """``print`` and ``logging`` do not occur, so nothing sensitive can leave by them."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        silenced = {"logging"} if "accounting" in path.parts else set()  # rdp quietens a library
        assert not called & ({"print", "logging", "breakpoint"} - silenced), path
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not names & {"debug_print", "io_callback", "pure_callback"}, path

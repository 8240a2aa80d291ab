"""Settings of Sphinx, which builds the site: ``python -m sphinx -W -j auto docs site``.

Pages that begin with ``file_format: mystnb`` are executed. Some of them read data from the folder
NUMPYRO_DP_DATA. Without it, they are shown without results, and the build says so.
"""

import importlib.util
import os
import pathlib
import re
import sys
import tempfile
import types

from docutils import nodes
from sphinx.addnodes import pending_xref

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpyro_dp  # noqa: E402 - needs the path

project = "numpyro_dp"
version = release = numpyro_dp.__version__
copyright = "the authors of numpyro_dp"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # or fields of a NamedTuple would stand there twice
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_execution_in_temp = True  # pages may write files
nb_merge_streams = True
suppress_warnings = ["myst-nb.lexer"]  # of pages that are not executed
# Formulas need no network. The extension that this package is does not support `-j`.
_mathjax = importlib.util.find_spec("sphinx-mathjax-offline")
html_static_path = [str(pathlib.Path(_mathjax.origin).parent / "static")]
mathjax_path = "mathjax/tex-chtml.js"
html_theme = "furo"
html_title = "numpyro_dp"

DATA = os.environ.get("NUMPYRO_DP_DATA")
if DATA:  # pages are executed in folders of their own
    os.environ["NUMPYRO_DP_DATA"] = str(pathlib.Path(DATA).resolve())
else:
    nb_execution_excludepatterns = [
        str(page.relative_to(ROOT / "docs"))
        for page in (ROOT / "docs").rglob("*.md")
        if 'environ["NUMPYRO_DP_DATA"]' in page.read_text()
    ]
    sys.stderr.write(
        f"NUMPYRO_DP_DATA is not set. Without results: {nb_execution_excludepatterns}\n"
    )

_scratch = tempfile.TemporaryDirectory()
os.environ["TQDM_DISABLE"] = "1"  # no progress bars in pages
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _scratch.name)  # pages share programs
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# The kernel that runs the pages: pictures as SVG, with a white ground on dark pages too, and
# warnings without the path of a file.
os.environ["IPYTHONDIR"] = _scratch.name
_settings = pathlib.Path(_scratch.name, "profile_default", "ipython_kernel_config.py")
_settings.parent.mkdir()
_settings.write_text(r"""
c.InlineBackend.figure_formats = {"svg"}
c.InlineBackend.rc = {"figure.facecolor": "white", "font.size": 9, "svg.fonttype": "none"}
c.IPKernelApp.exec_lines = [
    "import warnings",
    "warnings.filterwarnings('ignore', message='IProgress not found')",
    "warnings.formatwarning = lambda text, kind, *rest: f'{kind.__name__}: {text}\\n'",
]
""")

# Pages of the site that stand beside `docs`.
BESIDE = "README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT"


def _page(app, docname, source):
    """Fills the pages that stand beside ``docs``, and turns links to them."""
    text = source[0]
    if docname in BESIDE:
        text = (ROOT / f"{docname}.md").read_text()
        text = re.sub(r"\]\((?=examples/|tests/|numpyro_dp/|benchmarks/)", "](../", text)
        text = text.replace("](docs/", "](")
    for name in BESIDE:
        text = text.replace(f"](../{name}.md", f"]({'../' * docname.count('/')}{name}.md")
    source[0] = text


def _spread(app, env, docnames):
    """Orders the pages so that each process of ``-j`` executes about as many as the others."""
    places = {name: ROOT / "docs" / f"{name}.md" for name in docnames}
    executed = [n for n, path in places.items() if path.read_text().startswith("---\nfile_format")]
    others = [name for name in docnames if name not in executed]
    step = -(-len(docnames) // max(1, len(executed)))
    ordered = []
    while executed or others:
        ordered += [*executed[:1], *others[: step - 1]]
        executed, others = executed[1:], others[step - 1 :]
    docnames[:] = ordered


def _places():
    """Where the API page has each public name: name -> dotted path."""
    faces = [
        name
        for name in numpyro_dp.__all__
        if isinstance(getattr(numpyro_dp, name), types.ModuleType)
    ]
    found = {}
    for face in reversed(["", *faces]):
        module = getattr(numpyro_dp, face) if face else numpyro_dp
        dotted = f"numpyro_dp.{face}".rstrip(".")
        found |= {name: f"{dotted}.{name}" for name in module.__all__ if name not in faces}
    return found


PLACES = _places()


def _link_names(app, doctree):
    """Public names in typewriter font link to the API page, as in `DPSVI` or `choose(...)`."""
    for literal in list(doctree.findall(nodes.literal)):
        said = re.fullmatch(r"([\w.]+)(?:\(.*\))?", literal.astext(), re.S)
        *_, owner, name = ["", *said[1].split(".")] if said else ["", ""]
        place = PLACES.get(name) or (owner in PLACES and f"{PLACES[owner]}.{name}")
        inside = literal.parent
        while inside and not isinstance(inside, nodes.reference | nodes.title | pending_xref):
            inside = inside.parent
        if inside or not place:
            continue
        link = pending_xref(
            "", refdomain="py", reftype="obj", reftarget=place, refwarn=False,
            refdoc=app.env.docname, refexplicit=True,
        )  # fmt: skip
        literal.replace_self(link)
        link += literal


def setup(app):
    """Sphinx calls it."""
    app.connect("doctree-read", _link_names)
    app.connect("source-read", _page)
    app.connect("env-before-read-docs", _spread)

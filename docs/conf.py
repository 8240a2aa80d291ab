"""Settings of Sphinx, which builds the site: ``sphinx-build -W docs site``."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpyro_dp  # noqa: E402 - needs the path

project = "numpyro_dp"
version = release = numpyro_dp.__version__
copyright = "the authors of numpyro_dp"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # or fields of a NamedTuple would stand there twice
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "numpyro_dp"

BESIDE = "README", "CONTRIBUTING", "CHANGELOG"  # pages of the site that stand beside `docs`


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


def setup(app):
    """Sphinx calls it."""
    app.connect("source-read", _page)

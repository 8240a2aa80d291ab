"""How long are the sentences of the pages and docstrings, and how many semicolons do they have?

The bounds are those of CONTRIBUTING.md: a median of at most 18 words, no sentence above 35, at most
three semicolons in 1,000 words. Code, tables, formulas and links' addresses are left out. Exits
with 1 if a bound is broken.

    python benchmarks/prose.py
"""

import argparse
import ast
import pathlib
import re
import statistics
import sys

from markdown_it import MarkdownIt

ROOT = pathlib.Path(__file__).resolve().parents[1]
BESIDE = "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"
MEDIAN, LONGEST, SEMICOLONS = 18, 35, 3
BREAK = re.compile(r"(?<=[.!?:])[\"')*]*\s+(?=[\"'(*`_]*[A-Z0-9`$])")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|et al|cf|vs|Fig|Eq|No|[A-Z])\.")
ENTRY = re.compile(r"^\s*[\w*, `.\\]+: +")


def sentences(paragraph):
    """The sentences of one paragraph; a colon ends one, as a full stop does."""
    text = ABBREVIATIONS.sub(lambda found: found.group().replace(".", ""), paragraph)
    return [s.split() for s in BREAK.split(" ".join(text.split())) if s.strip()]


def of_markdown(text):
    """Paragraphs and entries of lists, without code, tables and formulas."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    text = re.sub(r"\$[^$\n]+\$", "x", text)
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inside = 0
    for before, token in zip([None, *tokens], tokens, strict=False):
        inside += token.type == "table_open"
        inside -= token.type == "table_close"
        if token.type == "inline" and not inside and before.type != "heading_open":
            yield "".join(
                "x" if child.type == "code_inline" else child.content or " "
                for child in token.children
                if child.type != "image"
            )


def of_docstring(text):
    """Paragraphs and entries of a docstring, without examples, formulas and literature."""
    paragraph, skipped = [], False
    for line in [*text.splitlines(), ""]:
        heading = line.strip() in ("Args:", "Returns:", "Raises:", "Attributes:", "Guarantee:")
        skipped = (skipped and not heading) or line.strip() in ("Reference:", "Example:")
        literal = line.strip().startswith(("..", ">>>", "|", ":math")) or "\\" in line
        entry = ENTRY.match(line)
        if not line.strip() or heading or skipped or literal or entry:
            yield " ".join(paragraph)
            paragraph = []
        if line.strip() and not (heading or skipped or literal):
            paragraph.append(line[entry.end() :] if entry else line.strip())


def docstrings(folder):
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            for paragraph in of_docstring(text or ""):
                yield re.sub(r":\w+:`~?([^`]*)`|``([^`]*)``", "x", paragraph)


def sources():
    """Name and paragraphs of each page, and of the docstrings of each folder."""
    below = (p for folder in ("docs", "benchmarks") for p in (ROOT / folder).rglob("*.md"))
    pages = ["README.md", *BESIDE, *sorted(str(p.relative_to(ROOT)) for p in below)]
    for page in pages:
        yield page, of_markdown((ROOT / page).read_text())
    folders = {p.parent for p in (ROOT / "numpyro_dp").glob("*/__init__.py")}
    for folder in sorted(folders):
        yield f"docstrings of {folder.name}", docstrings(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print the sentences that are too long")
    args = parser.parse_args()
    bad = False
    print(f"{'':32s} sentences  median  longest  too long  semicolons in 1,000 words")
    for name, paragraphs in sources():
        found = [s for paragraph in paragraphs for s in sentences(paragraph)]
        if not found:
            continue
        lengths = [len(s) for s in found]
        rate = 1000 * sum(word.count(";") for s in found for word in s) / sum(lengths)
        long = [s for s in found if len(s) > LONGEST]
        median = statistics.median(lengths)
        broken = median > MEDIAN or long or rate > SEMICOLONS
        bad |= bool(broken)
        print(f"{name:32s} {len(found):9d}  {median:6.0f}  {max(lengths):7d}  {len(long):8d}"
              f"  {rate:10.1f}{'  <-' if broken else ''}")  # fmt: skip
        if args.show:
            print(*(f"    {' '.join(s)}" for s in long), sep="\n")
    sys.exit(bad)


if __name__ == "__main__":
    main()

"""How large is the package? Lines of code, all lines and files, by folder.

A line of code has a token that is neither a comment nor part of a docstring.

    python benchmarks/size.py             # by folder
    python benchmarks/size.py --files     # by file, too
"""

import argparse
import ast
import collections
import io
import pathlib
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[1]
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def lines_of(text):
    """Lines of code, and all lines."""
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            code.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(code), len(text.splitlines())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--folders", nargs="*", default=["numpyro_dp", "tests"])
    args = parser.parse_args()
    sums = collections.defaultdict(lambda: [0, 0, 0])
    for folder in args.folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found = (*lines_of(path.read_text()), 1)
            parts = path.relative_to(ROOT).parts
            names = {folder, "/".join(parts[:2]) if len(parts) > 2 else f"{folder}/*.py"}
            names |= {"/".join(parts)} if args.files else set()
            for name in names:
                sums[name] = [a + b for a, b in zip(sums[name], found, strict=True)]
    print(f"{'':44}{'code':>8}{'lines':>8}{'files':>8}")
    for name, (code, lines, files) in sorted(sums.items()):
        print(f"{name:44}{code:8}{lines:8}{files:8}")


if __name__ == "__main__":
    main()

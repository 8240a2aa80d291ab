"""Fills the tables of the README and of the pages from the JSON that the benchmarks wrote.

    python benchmarks/tables.py            # fills all tables
    python benchmarks/tables.py --check    # exit status 1 if a page is not what its JSON says

A page holds a table as a comment and what this script puts after it:

    <!-- table: believe/zoo
    | fit | distance |
    | {fit} | {distance:.2f} ({distance se:.2f}) |
    -->
    ...
    <!-- end of table -->

The second line is `str.format`-ted with each row of `rows` in `results/believe/zoo.json`. Further
lines before the header may narrow or turn the rows:

    rows: Noise                  another list of the file
    where: driver=DPSEP, N!=1000 only these rows
    wide: set, epsilon           one line for these; its cells say `{DPSEP[distance]:.2f}`
    by: driver                   what chooses among the rows of such a line

A cell without values is empty. Below the last table of a file stand command, commit and machine.
"""

import argparse
import json
import pathlib
import re
import string
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/benchmarks/results"
END = "<!-- end of table -->"
BLOCK = re.compile(r"<!-- table: (?P<file>\S+)\n(?P<spec>.*?)-->\n.*?" + re.escape(END), re.S)


class _Cells(string.Formatter):
    """Formats rows; what a row lacks is empty, as is None. Names may hold points and spaces."""

    def get_field(self, name, args, kwargs):
        value = kwargs
        for key in name.replace("]", "").split("["):
            known = isinstance(value, dict) and key in value
            value = value[int(key)] if isinstance(value, list) else value[key] if known else None
        return value, name

    def format_field(self, value, spec):
        if value is None:
            return ""
        return (
            ", ".join(map(str, value))
            if isinstance(value, list)
            else super().format_field(value, spec)
        )


def _line(template, row):
    cells = [cell.strip() for cell in template.strip().strip("|").split("|")]
    made = [_Cells().vformat(cell, (), row).replace(" ()", "").strip() for cell in cells]
    # Brackets, commas and units around values that do not exist.
    return [text if re.search(r"[^\W_]", text) else "" for text in made]


def _narrow(rows, said):
    for part in filter(None, re.split(r",\s*", said)):
        name, unequal, value = re.fullmatch(r"(.*?)(!?)=(.*)", part).groups()
        rows = [row for row in rows if (str(row.get(name)) == value) != bool(unequal)]
    return rows


def _widen(rows, keys, by):
    lines = {}
    for row in rows:
        line = lines.setdefault(tuple(row[key] for key in keys), {key: row[key] for key in keys})
        line[str(row[by])] = row
    return list(lines.values())


def table(found, spec):
    """The Markdown of one table."""
    said = dict(re.findall(r"^(rows|where|wide|by): (.*)$", spec, flags=re.M))
    head, template = (line for line in spec.splitlines() if line.startswith("|"))
    rows = _narrow(found[said.get("rows", "rows")], said.get("where", ""))
    if "wide" in said:
        rows = _widen(rows, re.split(r",\s*", said["wide"]), said["by"])
    if not rows:
        raise ValueError(f"No row for the table that begins with {head!r}")
    columns = [cell.strip() for cell in head.strip().strip("|").split("|")]
    lines = [columns, ["---"] * len(columns), *(_line(template, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def source(found):
    """Which command, code and machine made a file."""
    at, minutes = found["machine"], found["seconds"] / 60
    took = f"{minutes:.0f} min" if minutes >= 1 else f"{found['seconds']:.0f} s"
    device = "" if at["platform"] == "cpu" else f"one {at['device']} and "
    return (
        f"Command: `{found['command']}`.\n"
        f"Commit {found['commit']}, {took} on {device}{at['cores']} cores. "
        f"Python {at['python']}, jax {at['jax']}, numpyro {at['numpyro']}."
    )


def filled(text):
    """A page with its tables as the JSON says. The last table of a file names its source."""
    left = [block["file"] for block in BLOCK.finditer(text)]

    def fill(block):
        if not (RESULTS / f"{block['file']}.json").exists():
            print(f"no results yet: {block['file']}")
            return block[0]
        found = json.loads((RESULTS / f"{block['file']}.json").read_text())
        parts = [f"<!-- table: {block['file']}\n{block['spec']}-->", table(found, block["spec"])]
        left.remove(block["file"])
        if block["file"] not in left:
            parts.append(source(found))
        return "\n\n".join([*parts, END])

    return BLOCK.sub(fill, text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    old = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        new = filled(text)
        if new != text:
            old[page.name] = page
            if not args.check:
                page.write_text(new)
    print(f"{'differ' if args.check else 'filled'}: {', '.join(old) or 'none'}")
    return 1 if old and args.check else 0


if __name__ == "__main__":
    sys.exit(main())

"""What `compare.py` found, as tables of Markdown, and the documents that hold them."""

import pathlib
import re

__all__ = ["markdown", "write_into"]

ENDS = "<!-- /compare -->"
OURS = ("SVI", "aligned", "vanilla")


def markdown(found):
    """Name of a table -> its text, of all that was measured."""
    tables = {}
    if found.get("steps"):
        rows = {f"{r['guide']}; {r['dim']}, {r['batch']}": r["peers"] for r in found["steps"]}
        tables["steps"] = _by_peer("one step: guide; d, B", rows, _time)
        tables["memory"] = _by_peer("memory of a step, MB: guide; d, B", rows, _memory)
        some = {name: row for name, row in rows.items() if name == "mean field; 100, 300"}
        tables["start"] = _by_peer("ready, s; peak of the process, MB", some or rows, _start)
    if found.get("runs"):
        rows = {f"{r['dim']}, {r['batch']}; {r['cores']}": r["peers"] for r in found["runs"]}
        tables["runs"] = _by_peer("end to end: d, qN", rows, _time)
        tables["batches"] = _by_peer("batches", rows, lambda said, _: said["batches"])
    timed = {
        f"{r.get('guide') or 'end to end, ' + r['cores']}; {r['dim']}, {r['batch']}": _others(r)
        for r in [*found.get("steps", []), *found.get("runs", [])]
    }
    if any(timed.values()):
        tables["over"] = _by_peer("time over that of aligned", timed, _over)
    if found.get("noise"):
        rows = {f"{r['rate']}, {r['steps']:,}": r["peers"] for r in found["noise"]}
        tables["noise"] = _by_peer("noise of ε = 1: rate, steps", rows, _noise)
    if found.get("quality"):
        tables["quality"] = _quality(found["quality"])
    return tables


def write_into(paths, tables):
    """Replaces the tables that documents hold between ``<!-- compare: name -->`` and its end."""
    for path in map(pathlib.Path, paths):
        text = path.read_text()
        for name, table in tables.items():
            begin = f"<!-- compare: {name} -->"
            old = re.escape(begin) + ".*?" + re.escape(ENDS)
            new = f"{begin}\n\n{table}\n\n{ENDS}"
            text = re.sub(old, lambda _, new=new: new, text, flags=re.S)
        path.write_text(text)


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _by_peer(title, rows, cell):
    """A row for each case, a column for each peer; what a peer cannot do says so."""
    names = list(dict.fromkeys(name for peers in rows.values() for name in peers))

    def of(peers, name):
        said = peers.get(name)
        if said is None or "error" in said:
            return f"no: {said['error']}" if said else ""
        return cell(said, peers)

    return _table([title, *names], [[c, *(of(p, n) for n in names)] for c, p in rows.items()])


def _time(said, peers):
    text = f"{1e6 * said['seconds']:,.0f}"
    if "over SVI" not in said or said is peers["SVI"]:
        return text
    return f"{text} ({_ratio(said['over SVI'])})"


def _ratio(value):
    return f"{value:.2f}" if value < 9.95 else f"{value:.0f}"


def _others(row):
    """The columns that are not ours, where there is ours to compare with."""
    peers = row["peers"]
    return {n: said for n, said in peers.items() if "aligned" in peers and n not in OURS}


def _over(said, _):
    return _ratio(said["over aligned"])


def _memory(said, _):
    return f"{said['MB']:.2g}"


def _start(said, _):
    return f"{said['prepared']:.1f}; {said['peak MB']:.0f}"


def _noise(said, _):
    return f"{said['noise multiplier']:.4f} in {said['seconds']:.2g} s"


def _quality(found):
    head = ["ε = 1", "held-out log density", "distance of the mean to the optimum's, in its sd",
            "sd over the optimum's", "clip norm; step"]  # fmt: skip

    def row(name, said):
        if "error" in said:
            return [name, said["error"], "", "", ""]
        numbers = [
            f"{said[key]:.{digits}f} ({said[key + ' se']:.{digits}f})" if f"{key} se" in said
            else f"{said[key]:.{digits}f}"
            for key, digits in (("log density", 4), ("distance", 2), ("scale ratio", 2))
            if key in said
        ]  # fmt: skip
        setting = f"{said['clip norm']:g}; {said['step size']:g}" if "clip norm" in said else ""
        return [name, *numbers, *[""] * (3 - len(numbers)), setting]

    return _table(head, [row(name, said) for name, said in found.items()])

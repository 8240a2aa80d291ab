"""numpyro_dp, d3p, jax-privacy and Opacus on the same work, each in an environment of its own.

Logistic regression, prior N(0, 1), Adam, add or remove one record. Every peer is a process (see
``peers/``); they are timed in turn, and wait in between. The floor is `numpyro.infer.SVI` without
privacy on the same JAX as ours. A peer that is not installed has no column; what it cannot do,
cells that say why.

    benchmarks/peers/environments.sh peers
    python benchmarks/compare.py --environments peers --json compare.json \
        --write docs/benchmarks/other-libraries.md
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
from common import average_row, experiment_parser, save
from dpvim.adult import mean_field_optimum
from peers.tables import markdown, write_into
from peers.worker import logistic_records

HERE = pathlib.Path(__file__).resolve().parent / "peers"

STEPS = [
    ("mean field", 16, 128),
    ("mean field", 100, 300),
    ("mean field", 100, 3000),
    ("mean field", 1000, 1000),
    ("full rank", 100, 100),
    ("full rank", 200, 100),
]
RUNS = [(16, 128), (100, 300), (100, 3000), (1000, 1000)]
NUMBER = 30_000
WAYS = ["drawn and gathered on the host", "drawn on the host", "drawn in the loop"]
NOISE = [(0.01, 1_000), (0.01, 100_000)]
GRID = [(clip_norm, size) for size in (0.01, 0.003) for clip_norm in (2.0, 4.0, 1.0)]


class PeerError(RuntimeError):
    """What a peer could not do."""


class Peer:
    """A process that does tasks; ``seconds`` raises what it could not do."""

    def __init__(self, python, script, *arguments, one_core=False):
        pinned = functools.partial(os.sched_setaffinity, 0, {0}) if one_core else None
        self.process = subprocess.Popen(
            [str(python), str(HERE / script), *arguments], preexec_fn=pinned,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | ({"OMP_NUM_THREADS": "1"} if "d3p" in script else {}),  # it spins
        )  # fmt: skip

    def send(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            return {"error": f"ended with {self.process.wait()}"}
        return json.loads(answer)

    def seconds(self, count):
        """What so many repetitions of the last task take."""
        answer = self.send(repeat=count)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["seconds"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def start(environments, names):
    """Name -> process, for those that are there."""
    ours = sys.executable, "of_numpyro_dp.py"
    own = {name: (*ours, name) for name in ("SVI", "aligned", "vanilla")}
    others = {
        name: (environments / folder / "bin" / "python", f"of_{folder}.py")
        for name, folder in (("d3p", "d3p"), ("jax-privacy", "jax_privacy"), ("Opacus", "opacus"))
    }
    found = {}
    for name, command in (own | others).items():
        if (name in names or name == "SVI") and pathlib.Path(command[0]).exists():
            found[name] = command
    return found


def in_turn(peers, task, rounds, target, arguments):
    """What each peer says of the task, with the median seconds of one of its repetitions.

    Seconds of one are those of many less those of few, so that what a run does once is left out;
    of a single step, those of many. Ratios are medians of those within a round, in which the
    machine's other load is the same.
    """
    said, counts = {}, {}
    for name, peer in peers.items():
        said[name] = peer.send(task=task, arguments=arguments[name])
        if "error" not in said[name]:
            try:
                counts[name] = enough(peer, target)
            except PeerError as error:
                said[name] = {"error": str(error)}
    samples = {name: [] for name in counts}
    for _ in range(rounds):
        for name, count in counts.items():
            if "error" in said[name]:
                continue
            try:
                seconds = peers[name].seconds(count)
                if task == "step":
                    samples[name].append(seconds / count)
                else:
                    few = few_of(count)
                    samples[name].append((seconds - peers[name].seconds(few)) / (count - few))
            except PeerError as error:
                said[name] = {"error": str(error)}
    whole = {name: np.array(each) for name, each in samples.items() if "error" not in said[name]}
    for name, each in whole.items():
        said[name] |= {"seconds": float(np.median(each)), "repetitions": counts[name]}
        for base in ("SVI", "aligned"):
            if base in whole:
                said[name][f"over {base}"] = float(np.median(each / whole[base]))
    return said


def enough(peer, target):
    """Repetitions that take this many seconds, and longer than what any number of them takes.

    The first time of any number does not count: a run may be compiled for it.
    """

    def seconds(count):
        peer.seconds(count)
        return peer.seconds(count)

    once, count = seconds(1), 8
    while (more := seconds(count) - once) < max(target / 4, once):
        count *= 4
    count = max(8, round(count * max(target, 2 * once) / more))
    seconds(count)
    seconds(few_of(count))
    return count


def few_of(count):
    return max(1, count // 8)


def processes(commands, one_core=False):
    return {name: Peer(*command, one_core=one_core) for name, command in commands.items()}


def timed(commands, task, cases, rounds, target):
    """A row for each case, a column for each peer; new processes, so that memory is their own."""
    rows = []
    for case in cases:
        arguments = {name: value for name, value in case.items() if name != "cores"}
        own = dict.fromkeys(commands, arguments)
        started = dict(commands)
        if task == "run" and "jax-privacy" in commands:
            for way in WAYS:
                own[f"jax-privacy, {way}"] = arguments | {"batches": way}
                started[f"jax-privacy, {way}"] = commands["jax-privacy"]
            del started["jax-privacy"]
        peers = processes(started, case.get("cores") == "one core")
        found = in_turn(peers, task, rounds, target, own)
        for peer in peers.values():
            peer.close()
        print_row(case, found)
        rows.append(case | {"peers": {name: fastest(found, name) for name in commands}})
    return rows


def fastest(found, name):
    """What was said of a peer, or of the fastest of its ways."""
    ways = [said for other, said in found.items() if other.split(", ")[0] == name]
    return min(ways, key=lambda said: said.get("seconds", np.inf))


def print_row(case, found):
    print(", ".join(f"{name} {value}" for name, value in case.items()), flush=True)
    for name, said in found.items():
        if "seconds" not in said:
            print(f"  {name:12} {said.get('error')}")
            continue
        ratio = f" {said['over SVI']:8.2f} times SVI" if "over SVI" in said else ""
        memory = f" {said['MB']:9.3f} MB" if "MB" in said else ""
        noise = f"  noise {said['noise multiplier']:.4f}" if "noise multiplier" in said else ""
        print(
            f"  {name:12} {1e6 * said['seconds']:12.1f} us{ratio}{memory}{noise}"
            f"  prepared in {said['prepared']:.1f} s, peak {said['peak MB']:.0f} MB"
            f"  {said.get('batches', '')}",
            flush=True,
        )


def noises(commands, cases):
    """Time to find the noise of a budget, each in a new process."""
    rows = []
    for rate, steps in cases:
        case = {"rate": rate, "steps": steps, "epsilon": 1.0, "delta": 1 / 30_162}
        found = {}
        for name, command in commands.items():
            if name in ("SVI", "vanilla"):
                continue
            peer = Peer(*command)
            found[name] = peer.send(task="calibrate", arguments=case)
            peer.close()
        rows.append(case | {"peers": found})
        print_row(case, found)
    return rows


def log_density(fitted, features, label):
    """Mean log predictive density of records, by 200 draws."""
    rng = np.random.default_rng(0)
    loc, scale = np.array(fitted["loc"]), np.array(fitted["scale"])
    logits = features @ (loc[:, None] + scale[:, None] * rng.normal(size=(len(loc), 200)))
    each = -np.logaddexp(0, np.where(label[:, None], -logits, logits))
    return float(np.mean(np.logaddexp.reduce(each, axis=1) - np.log(each.shape[1])))


def quality(commands, seeds, steps, grid):
    """Held-out log density, and distance to the posterior without privacy, at epsilon = 1.

    Clip norm and step size of each peer are those with the best log density of a validation part
    of other records, over two seeds. The posterior without privacy is the mean-field optimum, by
    quadrature; log density of who knows nothing is -log 2.
    """
    number, dim = 30_000, 10
    common = {"batch": 300, "steps": steps, "epsilon": 1.0, "delta": 1e-5}
    peers, found = processes(commands), {"one half for all": {"log density": -np.log(2)}}

    def fit(name, records, seed, clip_norm, size):
        x, y = records
        extra = {"records": [x.tolist(), y.tolist()], "clip_norm": clip_norm, "size": size}
        return peers[name].send(task="fit", arguments=common | extra | {"seed": seed})

    def data(seed):
        x, y = logistic_records(number + 5_000, dim, 1_000 + seed)
        return (x[:number], y[:number]), (x[number:], y[number:])

    optimum = functools.cache(lambda seed: mean_field_optimum(*data(seed)[0]))

    for name in peers:

        def score(setting, name=name):
            total = 0.0
            for seed in (90, 91):
                train, valid = data(seed)
                total += log_density(fit(name, train, seed, *setting), *valid)
            return total

        first = fit(name, data(90)[0], 90, *grid[0])
        if "error" in first:
            found[name] = first
            continue
        setting = grid[0] if name == "SVI" else max(grid, key=score)
        rows = []
        for seed in range(seeds):
            train, test = data(seed)
            own, best = fit(name, train, seed, *setting), optimum(seed)
            off = (np.array(own["loc"]) - best["auto_loc"]) / best["auto_scale"]
            rows.append({
                "log density": log_density(own, *test),
                "distance": float(np.sqrt(np.mean(off**2))),
                "scale ratio": float(np.mean(np.array(own["scale"]) / best["auto_scale"])),
            })  # fmt: skip
        clip_norm = float("inf") if name == "SVI" else setting[0]
        found[name] = average_row(rows) | {"clip norm": clip_norm, "step size": setting[1]}
        print(f"  {name:12} {found[name]}", flush=True)
    for peer in peers.values():
        peer.close()
    return found


def main():
    parser = experiment_parser(__doc__, "fewer cases, rounds and steps")
    parser.add_argument("--environments", type=pathlib.Path, default=pathlib.Path("peers"))
    names = ["SVI", "aligned", "vanilla", "d3p", "jax-privacy", "Opacus"]
    parser.add_argument("--peers", nargs="+", default=names, choices=names)
    tables = ["steps", "runs", "noise", "quality"]
    parser.add_argument("--tables", nargs="+", default=tables, choices=tables)
    parser.add_argument("--write", nargs="*", default=[], help="documents with the tables")
    args = parser.parse_args()
    for path in args.write:
        if not pathlib.Path(path).is_file():
            parser.error(f"--write: expected documents that exist, got {path}")
    args.environments = args.environments.absolute()
    commands = start(args.environments, args.peers)
    for name in args.peers:
        if name not in commands:
            print(f"{name}: no environment in {args.environments}")
    rounds, target = (9, 0.1) if args.quick else (15, 0.3)
    keys = ("guide", "dim", "batch")
    steps = [dict(zip(keys, case, strict=True)) for case in STEPS]
    # Small models are faster on one core than with threads that wait for each other.
    cores = ("all cores", "one core") if hasattr(os, "sched_setaffinity") else ("all cores",)
    runs = [
        {"dim": dim, "batch": batch, "number": NUMBER, "cores": each}
        for dim, batch in (RUNS[1:2] if args.quick else RUNS)
        for each in cores
    ]
    found = {}
    if "steps" in args.tables:
        found["steps"] = timed(commands, "step", steps, rounds, target)
    if "runs" in args.tables:
        found["runs"] = timed(commands, "run", runs, 5 if args.quick else 9, 3 * target)
    if "noise" in args.tables:
        found["noise"] = noises(commands, NOISE[:1] if args.quick else NOISE)
    if "quality" in args.tables:
        found["quality"] = quality(commands, 5, 2000, GRID[:2] if args.quick else GRID)
    save(args, **found)
    tables = markdown(found)
    print("\n\n".join(tables.values()))
    write_into(args.write, tables)


if __name__ == "__main__":
    main()

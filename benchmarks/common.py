"""What the benchmarks share: data, models, interleaved timing, machine, output."""

import argparse
import contextlib
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

HERE, STARTED = pathlib.Path(__file__).parent, time.monotonic()


def _commit():
    """Of the code that runs. A plus says that it has changes."""

    def git(*words):
        command = ["git", "-C", str(HERE), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + "+" * bool(
            git("status", "--porcelain", "-uno")
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown, because this is not a git repository"


COMMIT = _commit()


def make_parser(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    return parser


def parse_args(description):
    return make_parser(description).parse_args()


_PATHS = "--json", "--figure", "--each"  # where a benchmark writes


def experiment_parser(doc, quick):
    """What every experiment takes; ``quick`` says what --quick leaves of it."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", help="write settings and results to this file")
    parser.add_argument("--figure", help="draw to this file")
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def save(args, **results):
    """The results as JSON, where asked, with the command, commit and machine that made them."""
    if args.json:
        report = {
            "command": _command(), "commit": COMMIT, "machine": machine(),
            "seconds": round(time.monotonic() - STARTED), **results,
        }  # fmt: skip
        path = pathlib.Path(args.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


def _command():
    """As typed, without where it writes."""
    words, skip = ["python", os.path.relpath(sys.argv[0], HERE.parent)], False
    for word in sys.argv[1:]:
        if not skip and word not in _PATHS:
            words.append(word)
        skip = word in _PATHS
    return shlex.join(words)


def average_row(found):
    """Mean and standard error of numbers by name, over repetitions."""
    row = {"repetitions": len(found)}
    for name in found[0]:
        values = np.array([each[name] for each in found])
        row[name] = float(values.mean())
        error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
        row[f"{name} se"] = None if error is None else float(error)
    return row


# A palette for readers who cannot distinguish red from green (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@contextlib.contextmanager
def panels(path, columns=1, rows=1, size=(4.8, 3.6), **how):
    """Axes (rows, columns) of a figure, saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "axes.prop_cycle": plt.cycler(color=COLOURS), "axes.spines.top": False,
        "axes.spines.right": False, "font.size": 9, "axes.titlesize": 10, "legend.frameon": False,
    }  # fmt: skip
    with plt.rc_context(style):
        layout = {"squeeze": False, "layout": "constrained"}
        figure, axes = plt.subplots(rows, columns, figsize=size, **layout, **how)
        yield axes
        figure.savefig(path, dpi=200)
        plt.close(figure)


def legend_below(axis, ncols):
    """The legend of one axis below all panels, where it hides nothing."""
    handles = axis.get_legend_handles_labels()
    axis.figure.legend(*handles, loc="outside lower center", ncols=ncols)


def log_ticks(axis, values):
    """A logarithmic x axis with these ticks, written as plain numbers."""
    axis.set_xscale("log")
    axis.set_xticks(values, [f"{value:g}" for value in values])
    axis.minorticks_off()


def logistic_model(features, label):
    weights = numpyro.sample("w", dist.Normal(0, 1).expand([features.shape[1]]).to_event(1))
    with numpyro.plate("records", features.shape[0]):
        numpyro.sample("label", dist.Bernoulli(logits=features @ weights), obs=label)


def logistic_data(num_examples, dim, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(num_examples, dim)).astype(np.float32)
    odds = features @ (rng.normal(size=dim) / np.sqrt(dim))
    label = (rng.random(num_examples) < 1 / (1 + np.exp(-odds))).astype(np.int32)
    return jnp.asarray(features), jnp.asarray(label)


def chained(step, state, data):
    """A step from where the last one ended: calls that do not wait for each other may overlap."""

    def call():
        nonlocal state
        state, loss = step(state, *data)
        return state, loss

    return call


def interleaved(calls, rounds, target_seconds=0.02):
    """Median seconds per call of each function, taken in turn, after warm-up."""
    seconds = interleaved_rounds(calls, rounds, target_seconds)
    return {name: statistics.median(values) for name, values in seconds.items()}


def interleaved_rounds(calls, rounds, target_seconds=0.02):
    """The same for each round: function -> list of seconds per call."""
    counts = {}
    for name, call in calls.items():
        for _ in range(2):
            start = time.perf_counter()
            jax.block_until_ready(call())
            once = time.perf_counter() - start
        counts[name] = max(1, int(target_seconds / max(once, 1e-6)))
    samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                result = call()
            jax.block_until_ready(result)
            samples[name].append((time.perf_counter() - start) / counts[name])
    return samples


def machine():
    """What the numbers were measured on."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpyro": numpyro.__version__,
    }


def write(args, tables):
    """Prints tables (name -> rows) and saves them."""
    for title, rows in tables.items():
        print(f"\n{title}")
        keys = list(rows[0])
        widths = [max(len(key), *(len(_cell(row[key])) for row in rows)) for key in keys]
        print("  ".join(key.rjust(width) for key, width in zip(keys, widths, strict=True)))
        for row in rows:
            print("  ".join(_cell(row[k]).rjust(w) for k, w in zip(keys, widths, strict=True)))
    save(args, **tables)


def _cell(value):
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"

"""What every peer's process shares: the data, and one JSON request a line, one answer a line.

A request names a task and its arguments; the answer is what the task says of itself (a dict), with
the seconds that preparing it took, compilation included. A task may leave a function behind,
``repeat(count)``, which does its work so many times and returns when it is done: the request
``{"repeat": count}`` times it. Waiting for a request costs nothing, so processes can be timed in
turn. Needs NumPy alone.
"""

import json
import os
import resource
import sys
import time
import traceback

import numpy as np

__all__ = ["logistic_records", "peak_mb", "serve"]


def logistic_records(number, dim, seed=0):
    """Features (number, dim) and labels (number,) of a logistic regression."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(number, dim)).astype(np.float32)
    odds = features @ (rng.normal(size=dim) / np.sqrt(dim))
    return features, (rng.random(number) < 1 / (1 + np.exp(-odds))).astype(np.int32)


def peak_mb():
    """Peak memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def serve(tasks):
    """Answers requests until the input ends. What libraries print goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    repeat = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            start = time.perf_counter()
            if "repeat" in request:
                repeat(request["repeat"])
                answer = {"seconds": time.perf_counter() - start}
            else:
                repeat = None  # frees what the last task held
                said, repeat = tasks[request["task"]](**request["arguments"])
                answer = said | {"prepared": time.perf_counter() - start, "peak MB": peak_mb()}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")

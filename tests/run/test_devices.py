"""Many devices give what one gives: eight in one process, and two processes with two each."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

WORKER = pathlib.Path(__file__).parent / "device_worker.py"


def environment(devices):
    others = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    flags = " ".join([*others, f"--xla_force_host_platform_device_count={devices}"])
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def start(devices, *arguments):
    return subprocess.Popen(
        [sys.executable, str(WORKER), *map(str, arguments)],
        env=environment(devices), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def answer(process):
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


def answers(processes):
    with ThreadPoolExecutor() as pool:  # none may wait for another to be read
        return list(pool.map(answer, processes))


def two_processes(cases, *more):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [start(2, cases, f"127.0.0.1:{port}", rank, *more) for rank in (0, 1)]


def assert_same(one, other):
    """To rounding; noise, batches and what was spent are the same."""
    assert one.keys() == other.keys()
    for case in one:
        assert one[case]["epsilon"] == other[case]["epsilon"]
        assert one[case]["secret"] == other[case]["secret"]
        params = one[case]["params"], other[case]["params"]
        largest = max(1.0, np.abs(params[0]).max())
        np.testing.assert_allclose(*params, rtol=2e-5, atol=2e-6 * largest, err_msg=case)


CASES = [
    pytest.param("Poisson,as products,streamed", marks=pytest.mark.slow),
    pytest.param(
        "message passing,latents,vanilla,fixed size,permutation,full batch,microbatches,"
        "not divisible,by hand,several draws,dropout,public argument,adaptive,updates,chains,swept",
        marks=[pytest.mark.slow, pytest.mark.extended],
    ),
]


@pytest.mark.extended
@pytest.mark.parametrize("cases", CASES)
def test_devices_and_processes_give_what_one_device_gives(cases):
    """Eight devices in a process, and two processes that hold half of the records each."""
    alone, eight = answers([start(1, cases), start(8, cases)])
    assert_same(alone, eight)
    assert all(case["devices"] == 8 for case in eight.values())
    if "streamed" in alone:
        assert_same({"": alone.pop("streamed")}, {"": alone["Poisson"]})
        eight.pop("streamed")
    for name, case in eight.items():
        whole = alone[name].get("rows")
        if whole is not None and whole % 8 == 0:  # each device holds its part of the records
            assert case["rows"] == whole // 8, name
    one, other = answers(two_processes(cases + ",fresh keys"))
    assert_same(one, other)  # without a secret key they agree on one
    fresh = one.pop("fresh keys")
    assert fresh["secret"] != alone.get("Poisson", fresh | {"secret": ""})["secret"]
    assert_same(alone, one)
    assert all(case["devices"] == 4 for case in one.values())


@pytest.mark.slow
@pytest.mark.extended
def test_states_and_records_may_come_from_other_devices():
    found = answer(start(8, "elsewhere"))
    where = slice(0, len(found["on four"]["params"]))
    for name in ("on four", "on a square", "on one"):
        expected = found["run"]["params"][where]
        np.testing.assert_allclose(found[name]["params"], expected, rtol=2e-5, err_msg=name)
    np.testing.assert_allclose(found["foreign"]["params"], found["run"]["params"], rtol=2e-5)
    assert "inside jax.set_mesh" in found["explicit"]


@pytest.mark.slow
@pytest.mark.extended
def test_processes_with_different_records_are_told():
    for each in answers(two_processes("disagreeing")):
        assert "same in all processes" in each["disagreeing"]


@pytest.mark.extended
def test_two_processes_share_a_ledger_and_a_checkpoint(tmp_path):
    killed = two_processes("killed", tmp_path)
    for process in killed:
        process.communicate(timeout=500)
        assert process.returncode
    assert (tmp_path / "run" / "SENSITIVE_checkpoint").exists()
    one, other = answers(two_processes("kept", tmp_path))
    for name in ("continued", "whole", "swept", "swept again"):
        assert one[name] == other[name]
    assert one["swept"] == one["swept again"]
    assert one["continued"][0] == one["whole"][0]  # to the last bit
    for found, kinds in ((one, ("ValueError", "LedgerError")), (other, ("ValueError",) * 2)):
        assert found["other records"].startswith(f"{kinds[0]}: ")
        assert "holds a run on other records" in found["other records"]
        assert found["too much"].startswith(f"{kinds[1]}: ")
        assert "would spend epsilon" in found["too much"]
    for found in (one, other):
        assert found["rest"][0] == found["rest"][1] == one["rest"][0]
        assert "full disk" in found["full disk"]
        assert "all that is left" in found["refused sweep"]
    assert one["entries"] == ["run", "whole", "sweep", "sweep", "rest"]
    # The first process reads and writes for both.
    assert other["entries"] == []
    assert [name for name in other["files"] if "other" in name] == ["ledger of the other"]

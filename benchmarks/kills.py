"""Kills runs at random moments, and checks that the same call gives what one run gives.

    python benchmarks/kills.py --kills 200

Each case is a process of its own. It is killed (SIGKILL) after a random time, several times, and
then runs to its end. The folder is copied when it first has a checkpoint, and another process runs
the copy to its end without a kill. Both results must be equal bit for bit. The ledger must have one
entry for each run.
"""

import argparse
import itertools
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

CASES = ("DPSVI", "streamed", "DPSEP", "DPPBP", "DPEM", "DPMCMC", "chains", "DPLaplace", "sweep")
RUNS = {"sweep": 6}


def worker(case, folder, pause):
    """Runs a case, and writes its numbers."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    import optax
    from numpyro.infer.autoguide import AutoDiagonalNormal

    import numpyro_dp as dp
    from numpyro_dp.core import Fold
    from numpyro_dp.run.checkpoint import Checkpoint
    from numpyro_dp.samplers import FullBatch, Poisson

    save = Checkpoint.save

    def slower(self, progress):  # so that a kill comes at any moment of the run
        time.sleep(pause / 2)
        save(self, progress)
        time.sleep(pause / 2)

    Checkpoint.save = slower

    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event())
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    y = (rng.random(400) < 0.5).astype(np.int32)
    key = jax.random.key(5)
    ledger = dp.Ledger(folder / "ledger", dp.PrivacyBudget(2.0, 1e-5))
    own = {"budget": ledger.budget(0.3 if case == "sweep" else 1.0, purpose="all")}
    kept = {"checkpoint": folder / "kept", "every": 10}
    if case in ("DPSVI", "streamed", "sweep"):
        svi = dp.DPSVI(model, AutoDiagonalNormal(model), optax.adam(1e-2), clip_norm=1.0,
                       sampler=Poisson(0.1), **own)  # fmt: skip
        if case == "sweep":
            found = svi.sweep(jax.random.split(key, RUNS[case]), 30, x, y, chunk_size=1,
                              checkpoint=folder / "kept")  # fmt: skip
            return [found.params, found.trace]
        total = Fold(
            lambda first: jnp.zeros_like(first["auto_loc"]),
            lambda old, new: old + new["auto_loc"], lambda found: found,
        )  # fmt: skip
        found = svi.run(key, 103, x, y, progress_bar=False, stream=case == "streamed", fold=total,
                        trace_size=20, **kept)  # fmt: skip
        state = found.state.opened
        secrets = jax.random.key_data(state.secret_key)
        return [found.params, found.trace, found.folded, found.scores, secrets,
                found.posterior.sample(key, 5)]  # fmt: skip
    if case == "DPSEP":
        sep = dp.DPSEP(model, clip_norm=1.0, sampler=FullBatch(), **own)
        found = sep.run(key, 25, x, y, progress_bar=False, **kept)
        return [found.params, found.trace, found.scores]
    if case == "DPPBP":
        network = dp.RegressionNetwork(hidden=(4,))
        pbp = dp.DPPBP(network, clip_norm=1.0, sampler=FullBatch(), **own)
        found = pbp.run(key, 25, x, x[:, 0], progress_bar=False, **kept)
        return [found.params, found.trace]
    if case == "DPEM":
        em = dp.DPEM(2, clip_norm=3.0, sampler=FullBatch(), **own)
        found = em.run(key, 25, x, progress_bar=False, **kept)
        return [found.params, found.trace]
    if case in ("DPMCMC", "chains"):
        chains = dp.DPMCMC(dp.SGLD(model), num_warmup=30, num_samples=40, thinning=4, clip_norm=1.0,
                           sampler=Poisson(0.1), num_chains=1 + (case == "chains"),
                           progress_bar=False, **own)  # fmt: skip
        chains.run(key, x, y, **kept)
        return [chains.get_samples()]
    posterior = dp.DPLaplace(model, **own).run(key, x, y, checkpoint=folder / "kept")
    return [posterior.sample(key, 5)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", nargs=2)
    options = parser.parse_args()
    if options.work:
        folder = pathlib.Path(options.work[1])
        import jax

        found = worker(options.work[0], folder, 0.1)
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
        np.savez(folder / "result.npz", *leaves)
        return
    kill_all(options.cases, options.kills, options.seed)


def start(case, folder):
    folder.mkdir(exist_ok=True)
    with open(folder / "log", "ab") as log:
        command = [sys.executable, __file__, "--work", case, str(folder)]
        return subprocess.Popen(command, stdout=log, stderr=log)


def kill_all(cases, kills, seed):
    rng = np.random.default_rng(seed)
    killed = dict.fromkeys(cases, 0)
    with tempfile.TemporaryDirectory() as root:
        took = {}
        for number in itertools.count():
            case = cases[number % len(cases)]
            folder = pathlib.Path(root) / f"{case}_{number}"
            copy, tries = folder.with_suffix(".copy"), 0
            if case not in took:
                begun = time.monotonic()
                assert start(case, folder.with_suffix(".first")).wait() == 0
                took[case] = time.monotonic() - begun
            while tries < 6 or not copy.exists():
                process = start(case, folder)
                # Most of the time goes into imports and compilation: kills come after them, too.
                time.sleep(took[case] * rng.uniform(0.4, 1.1))
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                    killed[case] += 1
                process.wait()
                tries += 1
                if not copy.exists() and any(folder.glob("kept/SENSITIVE_*")):
                    shutil.copytree(folder, copy)
            for each in (folder, copy):
                assert start(case, each).wait() == 0, (each / "log").read_text()[-3000:]
            for one, other in zip(result(folder), result(copy), strict=True):
                np.testing.assert_array_equal(one, other, err_msg=case)
            lines = [(each / "ledger").read_text().splitlines() for each in (folder, copy)]
            assert [len(found) for found in lines] == [1 + RUNS.get(case, 1)] * 2, lines
            print(f"{sum(killed.values())} kills, {case} is right", flush=True)
            if sum(killed.values()) >= kills and number + 1 >= len(cases):
                break
    print("\n".join(f"| {case} | {count} |" for case, count in killed.items()))


def result(folder):
    with np.load(folder / "result.npz") as stored:
        return [stored[name] for name in stored.files]


if __name__ == "__main__":
    main()

"""The tasks of `compare.py` by Opacus on torch for the CPU, in the environment of `opacus.txt`.

Location and raw scale, or Cholesky factor, are parameters of a module, one draw for the whole
batch; gradients of records by its functional mode. The gradient of prior and entropy, which sees no
record, is added after the noise.
"""

import json
import math
import pathlib
import tempfile
import time
import warnings

import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from torch.profiler import ProfilerActivity, profile
from worker import logistic_records, serve

warnings.filterwarnings("ignore")

START = math.log(math.expm1(0.1))


class Normal(torch.nn.Module):
    """Logits by one draw from a mean-field normal distribution."""

    draw = None  # of the class: the functional mode works on a copy of the instance

    def __init__(self, dim):
        super().__init__()
        # As NumPyro's guides start.
        self.loc = torch.nn.Parameter(torch.empty(dim).uniform_(-2, 2))
        self.raw = torch.nn.Parameter(self.start(dim))

    def start(self, dim):
        return torch.full((dim,), START)

    def diagonal(self):
        return softplus(self.raw)

    def weights(self):
        return self.loc + self.diagonal() * self.draw

    def forward(self, features):
        return features @ self.weights()


class Cholesky(Normal):
    """The same of a normal distribution with any covariance."""

    def start(self, dim):
        return START * torch.eye(dim)

    def diagonal(self):
        return softplus(self.raw.diagonal())

    def weights(self):
        below = torch.tril(self.raw, -1) @ self.draw
        return self.loc + below + self.diagonal() * self.draw


class Private:
    """Module, optimiser and loader that Opacus has made private."""

    def __init__(self, records, batch, clip_norm, noise, size=1e-3, poisson=True, guide=Normal):
        data = torch.utils.data.TensorDataset(
            torch.as_tensor(records[0], dtype=torch.float32),
            torch.as_tensor(records[1], dtype=torch.float32),
        )
        module = guide(data.tensors[0].shape[1])
        self.module, self.optim, self.loader = PrivacyEngine(accountant="rdp").make_private(
            module=module, optimizer=torch.optim.Adam(module.parameters(), lr=size),
            data_loader=torch.utils.data.DataLoader(data, batch_size=batch),
            noise_multiplier=noise, max_grad_norm=clip_norm, poisson_sampling=poisson,
            loss_reduction="sum", grad_sample_mode="functorch",
        )  # fmt: skip
        self.share = batch / len(data)

    def step(self, features, label):
        inner = self.module._module
        type(inner).draw = torch.randn_like(inner.loc)
        self.optim.zero_grad(set_to_none=True)
        logits = self.module(features)
        binary_cross_entropy_with_logits(logits, label, reduction="sum").backward()
        if not self.optim.pre_step():
            return
        with torch.enable_grad():
            rest = (inner.weights() ** 2).sum() / 2 - inner.diagonal().log().sum()
            others = torch.autograd.grad(rest, (inner.loc, inner.raw))
        for parameter, other in zip((inner.loc, inner.raw), others, strict=True):
            parameter.grad = parameter.grad / self.share + other
        self.optim.original_optimizer.step()

    def run(self, count):
        done = 0
        while done < count:
            for batch in self.loader:
                self.step(*batch)
                done += 1
                if done == count:
                    break


def step(guide, dim, batch):
    records = logistic_records(batch, dim)
    guide = {"mean field": Normal, "full rank": Cholesky}[guide]
    private = Private(records, batch, 1.0, 1.0, poisson=False, guide=guide)
    data = private.loader.dataset.tensors

    def repeat(count):
        for _ in range(count):
            private.step(*data)

    repeat(2)
    return {"MB": peak_of(lambda: repeat(1))}, repeat


def peak_of(call):
    """Most memory that torch holds at a time during a call beyond what it held before, in MB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        found.export_chrome_trace(file.name)
        events = json.loads(pathlib.Path(file.name).read_text())["traceEvents"]
    held = [e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]"]
    return (max(held) - held[0]) / 1e6


def run(dim, batch, number):
    return {"batches": "Poisson"}, Private(logistic_records(number, dim), batch, 1.0, 10.0).run


def calibrate(rate, steps, epsilon, delta):
    start = time.perf_counter()
    noise = get_noise_multiplier(
        target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps,
        accountant="prv", epsilon_tolerance=0.01,
    )  # fmt: skip
    return {"noise multiplier": float(noise), "seconds": time.perf_counter() - start}, None


def fit(records, batch, steps, epsilon, delta, clip_norm, size, seed):
    torch.manual_seed(seed)
    noise = calibrate(batch / len(records[0]), steps, epsilon, delta)[0]["noise multiplier"]
    private = Private(records, batch, clip_norm, noise, size)
    private.run(steps)
    inner = private.module._module
    return {
        "loc": inner.loc.tolist(),
        "scale": softplus(inner.raw).tolist(),
        "epsilon": None,
    }, None


if __name__ == "__main__":
    serve({"step": step, "run": run, "calibrate": calibrate, "fit": fit})

"""Settings of a driver as one flat dict, as tests combine them."""

from __future__ import annotations

import dataclasses
from typing import Any

from numpyro_dp import DPMCMC, DPSEP, DPSVI, Execution, Privacy
from numpyro_dp.estimators import aligned
from numpyro_dp.samplers import FullBatch

_GROUPS = {"privacy": Privacy, "execution": Execution}


def grouped(**flat: Any) -> dict[str, Any]:
    """Returns the same as a driver takes them: with ``Privacy`` and ``Execution``."""
    for name, group in _GROUPS.items():
        own = {field.name for field in dataclasses.fields(group)} & set(flat)
        if own:
            flat[name] = group(**{key: flat.pop(key) for key in own})
    return flat


def _settings(**flat: Any) -> dict[str, Any]:
    """Full batches, clip norm 1 and, without a budget, noise 1 unless given."""
    noise = {} if {"budget", "noise_multiplier"} & set(flat) else {"noise_multiplier": 1.0}
    return grouped(**{"clip_norm": 1.0, "sampler": FullBatch()} | noise | flat)


def dpsvi(model: Any, guide: Any, *args: Any, **flat: Any) -> DPSVI:
    """``DPSVI`` of aligned gradients unless given, with a guide or the class of one."""
    guide = guide(model) if isinstance(guide, type) else guide
    return DPSVI(model, guide, *args, **_settings(**{"estimator": aligned()} | flat))


def dpsep(model: Any, *args: Any, **flat: Any) -> DPSEP:
    """``DPSEP`` with the same settings."""
    return DPSEP(model, *args, **_settings(**flat))


def dpmcmc(kernel: Any = None, **flat: Any) -> DPMCMC:
    """``DPMCMC`` with the same settings and no progress bar."""
    kernel = {} if kernel is None else {"kernel": kernel}
    return DPMCMC(**kernel, **_settings(**{"progress_bar": False} | flat))

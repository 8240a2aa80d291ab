"""Settings of a driver as one flat dict, as tests combine them."""

from __future__ import annotations

import dataclasses
from typing import Any

from numpyro_dp import Execution, Privacy

_GROUPS = {"privacy": Privacy, "execution": Execution}


def grouped(**flat: Any) -> dict[str, Any]:
    """Returns the same as a driver takes them: with ``Privacy`` and ``Execution``."""
    for name, group in _GROUPS.items():
        own = {field.name for field in dataclasses.fields(group)} & set(flat)
        if own:
            flat[name] = group(**{key: flat.pop(key) for key in own})
    return flat

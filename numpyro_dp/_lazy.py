"""Modules that are imported when something of them is first used.

``dp_accounting`` and ``scipy.stats`` take half a second to import. Models are written, and
posteriors are drawn from, without them.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Lazy", "dpa", "stats"]


class Lazy:
    """Stands for a module.

    Args:
        name: Of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Imports the module, and returns an attribute of it."""
        return getattr(importlib.import_module(self._name), attribute)


dpa: Any = Lazy("dp_accounting")
stats: Any = Lazy("scipy.stats")

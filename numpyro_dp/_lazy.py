"""Modules that are imported at their first use.

``dp_accounting`` and ``scipy.stats`` take half a second to import. Much of the package works
without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class Lazy:
    """A placeholder that imports a module at the first access to an attribute.

    Args:
        name: Name of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Imports the module and returns one of its attributes."""
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import dp_accounting as dpa
    from scipy import stats
else:
    dpa = Lazy("dp_accounting")
    stats = Lazy("scipy.stats")

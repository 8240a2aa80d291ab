"""Formats the values and columns of the tables that posteriors print."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["shown", "table_lines"]


def shown(value: float, sd: float) -> str:
    """Returns a value as text, with enough decimals to show three digits of ``sd``."""
    if not 1e-6 < sd < 1e6:
        return f"{value:.4g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(sd)))}f}"


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns one line for each row, with the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]

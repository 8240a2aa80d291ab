"""Health and survey tables whose plates (districts, persons) make hierarchical models.

Values keep the units of the source: 0/1 for two-valued features, no standardisation. Levels and
groups are numbered by the constants below or by the order of their public labels.
"""

from __future__ import annotations

import numpy as np

from numpyro_dp._validate import check_in
from numpyro_dp.datasets._sources import SOURCES
from numpyro_dp.datasets._store import load_columns
from numpyro_dp.datasets._types import ColumnTable, TabularData

__all__ = ["load_acs_na2019", "load_contraception", "load_doctor_visits", "load_rwm5yr"]

_YES = {"no": 0.0, "yes": 1.0, "male": 0.0, "female": 1.0, "N": 0.0, "Y": 1.0}
_DOCTOR_FEATURES = (
    "gender",
    "age",
    "income",
    "illness",
    "reduced",
    "health",
    "private",
    "freepoor",
    "freerepat",
    "nchronic",
    "lchronic",
)
# edlevel and edlevel1 are left out: edlevel2..4 are its 0/1 columns.
_RWM5YR_FEATURES = (
    "year",
    "age",
    "outwork",
    "female",
    "married",
    "kids",
    "hhninc",
    "educ",
    "self",
    "edlevel2",
    "edlevel3",
    "edlevel4",
)


def load_contraception(*, download: bool = False) -> TabularData:
    """Returns contraceptive use of 1,934 women in 60 districts (Bangladesh 1988), logistic.

    The districts are numbered 1..61 with 54 missing; ``group`` counts them from 0 to 59.

    Args:
        download: Whether to fetch the data if the data folder lacks it.

    Returns:
        ``X``: age (years, centred), urban, and 0/1 columns for 1, 2 and 3+ living children;
        ``y``: 1 where contraception is used (759 of 1,934); ``group``: the district.

    Raises:
        DatasetNotFoundError: If the file is absent and ``download`` is false.
        DatasetIntegrityError: If the file is damaged or not the published data.
        DatasetDownloadError: If a download was asked for and failed.

    Example:
        >>> load_contraception().X.shape  # doctest: +SKIP
        (1934, 5)
    """
    source = SOURCES["contraception"]
    columns, where = load_columns(source, download=download)
    children = np.array(columns["livch"])
    features = {
        "age": _numbers(columns["age"]),
        "urban": _numbers(columns["urban"]),
        **{f"livch={level}": children == level for level in ("1", "2", "3+")},
    }
    group, labels = _groups(columns["district"])
    return TabularData(
        X=np.stack(list(features.values()), axis=1).astype(np.float32),
        y=_numbers(columns["use"]).astype(np.int32),
        feature_names=tuple(features),
        target_name="use",
        source=where,
        licence=source.licence,
        group=group,
        group_labels=labels,
        group_name="district",
    )


def load_doctor_visits(*, download: bool = False) -> TabularData:
    """Returns doctor visits within two weeks of 5,190 persons (Australia 1977-78), a count.

    Args:
        download: Whether to fetch the data if the data folder lacks it.

    Returns:
        ``X``: 11 features (gender 1 = female, age in years / 100, income in 10,000 dollars, yes =
        1); ``y``: visits, 0..9, mean 0.302. No groups.

    Raises:
        DatasetNotFoundError, DatasetIntegrityError, DatasetDownloadError: As
            :func:`load_contraception`.

    Example:
        >>> load_doctor_visits().X.shape  # doctest: +SKIP
        (5190, 11)
    """
    source = SOURCES["doctor_visits"]
    columns, where = load_columns(source, download=download)
    return TabularData(
        X=_matrix(columns, _DOCTOR_FEATURES),
        y=_numbers(columns["visits"]).astype(np.int32),
        feature_names=_DOCTOR_FEATURES,
        target_name="visits",
        source=where,
        licence=source.licence,
    )


def load_rwm5yr(*, target: str = "docvis", download: bool = False) -> TabularData:
    """Returns the German health registry 1984-88: 19,609 person-years of 6,127 persons, a count.

    **One person has up to 5 rows.** A guarantee for one row is not a guarantee for one person;
    person-level privacy must bound what all rows of a ``group`` contribute together.

    Args:
        target: ``"docvis"`` (doctor visits a year) or ``"hospvis"`` (days in hospital a year).
        download: Whether to fetch the data if the data folder lacks it.

    Returns:
        ``X``: 12 features, unscaled (year is 1984..1988, hhninc presumably thousands of marks);
        ``y``: the count; ``group``: the person.

    Raises:
        ValueError: If ``target`` is unknown.
        DatasetNotFoundError, DatasetIntegrityError, DatasetDownloadError: As
            :func:`load_contraception`.

    Example:
        >>> int(load_rwm5yr().group.max())  # doctest: +SKIP
        6126
    """
    check_in("target", target, ("docvis", "hospvis"))
    source = SOURCES["rwm5yr"]
    columns, where = load_columns(source, download=download)
    group, labels = _groups(columns["id"])
    return TabularData(
        X=_matrix(columns, _RWM5YR_FEATURES),
        y=_numbers(columns[target]).astype(np.int32),
        feature_names=_RWM5YR_FEATURES,
        target_name=target,
        source=where,
        licence=source.licence,
        group=group,
        group_labels=labels,
        group_name="person",
    )


def load_acs_na2019(*, download: bool = False) -> ColumnTable:
    """Returns 1,000 rows of the American Community Survey 2019 (NIST excerpt), 24 columns.

    There is no fixed target: DVET (veteran's disability rating), PINCP_DECILE (income decile) and
    DREM (cognitive difficulty) are usual choices; the 20 values of PUMA can be plates. ``"N"``
    means not applicable, not unknown.

    Args:
        download: Whether to fetch the data if the data folder lacks it.

    Returns:
        The columns by name: int64, float64, or text where ``"N"`` or a code like ``"28-01100"``
        occurs.

    Raises:
        DatasetNotFoundError, DatasetIntegrityError, DatasetDownloadError: As
            :func:`load_contraception`.

    Example:
        >>> load_acs_na2019().columns["AGEP"].dtype  # doctest: +SKIP
        dtype('int64')
    """
    source = SOURCES["acs_na2019_1000"]
    columns, where = load_columns(source, download=download)
    typed = {name: _narrowest(column) for name, column in columns.items()}
    return ColumnTable(columns=typed, source=where, licence=source.licence)


def _numbers(column: list[str]) -> np.ndarray:
    return np.array([_YES[cell] if cell in _YES else float(cell) for cell in column])


def _matrix(columns: dict[str, list[str]], names: tuple[str, ...]) -> np.ndarray:
    return np.stack([_numbers(columns[name]) for name in names], axis=1).astype(np.float32)


def _groups(column: list[str]) -> tuple[np.ndarray, np.ndarray]:
    labels, index = np.unique(np.array(column, dtype=np.int64), return_inverse=True)
    return index.astype(np.int32), labels


def _narrowest(column: list[str]) -> np.ndarray:
    for dtype in (np.int64, np.float64):
        try:
            return np.array(column, dtype=dtype)
        except ValueError:
            continue
    return np.array(column)

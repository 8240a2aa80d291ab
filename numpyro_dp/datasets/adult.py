r"""UCI Adult as a design matrix for Bayesian logistic regression.

``P(y = 1 | x) = sigmoid(x . w)``, ``w ~ N(0, I)``; ``y`` says whether income exceeds $50k. Records
with a missing value are left out: 30,162 training and 15,060 test records remain.

``design="public"`` (the default) computes nothing from the records: the category lists are the
attribute lists that UCI publishes, the reference levels and the numeric scales are constants
written below. So the preprocessing costs no privacy, and a row's norm has a public bound:

    age             (clip(age, 17, 90) - 40) / 20
    hours_per_week  (clip(hours, 1, 99) - 40) / 20
    capital_gain    clip(gain, 0, 20000) / 10000
    capital_loss    clip(loss, 0, 4400) / 2000

The cap on gains matters for clipping. A z-scored gain gives rows of norm up to 14 beside a median
of 2.7, and a clip norm that suits the median then cuts exactly the records that say most; with
the cap, norms are 2.3 at the median and 4.4 at most, and of six forms of the two capital columns
(capped, uncapped, logarithm, square root, indicator) the capped one had the best log-likelihood on
a tenth of the training records held out for the choice. ``fnlwgt`` (a survey weight) and
``education_num`` (a recoding of ``education``) are left out. The authors of this library chose
these constants knowing this public data set; with sensitive data of your own, take them from a
codebook or from prior knowledge.

``design="paper"`` is the matrix of Jalko et al. (2024), and its preprocessing is **not private**:
levels, reference levels, means and standard deviations are computed from the training records, and
no privacy statement about a model fitted to it covers them. It keeps ``fnlwgt``. The one
difference: the authors' code z-scores the test records by the test records' own mean and standard
deviation; here they get the training set's, as a prediction needs.

Reference:
    Jalko, Prediger, Honkela, Kaski (2024), "DPVIm: Differentially Private Variational Inference
    Improved", TMLR, section 4.3 and appendices F, G.2.
"""

from __future__ import annotations

import math

import numpy as np

from numpyro_dp._validate import check_in
from numpyro_dp.datasets._sources import ADULT_COLUMNS, SOURCES
from numpyro_dp.datasets._store import DatasetNotFoundError, load_columns
from numpyro_dp.datasets._types import SplitData
from numpyro_dp.datasets.bundled import load_breast_cancer

__all__ = ["load_adult", "load_adult_or_bundled"]

# UCI's published attribute lists (adult.names), each in alphabetical order.
_PUBLISHED_LEVELS = {
    "workclass": (
        "Federal-gov Local-gov Never-worked Private Self-emp-inc Self-emp-not-inc State-gov "
        "Without-pay"
    ),
    "education": (
        "10th 11th 12th 1st-4th 5th-6th 7th-8th 9th Assoc-acdm Assoc-voc Bachelors Doctorate "
        "HS-grad Masters Preschool Prof-school Some-college"
    ),
    "marital_status": (
        "Divorced Married-AF-spouse Married-civ-spouse Married-spouse-absent Never-married "
        "Separated Widowed"
    ),
    "occupation": (
        "Adm-clerical Armed-Forces Craft-repair Exec-managerial Farming-fishing Handlers-cleaners "
        "Machine-op-inspct Other-service Priv-house-serv Prof-specialty Protective-serv Sales "
        "Tech-support Transport-moving"
    ),
    "relationship": "Husband Not-in-family Other-relative Own-child Unmarried Wife",
    "race": "Amer-Indian-Eskimo Asian-Pac-Islander Black Other White",
    "sex": "Female Male",
    "native_country": (
        "Cambodia Canada China Columbia Cuba Dominican-Republic Ecuador El-Salvador England "
        "France Germany Greece Guatemala Haiti Holand-Netherlands Honduras Hong Hungary India "
        "Iran Ireland Italy Jamaica Japan Laos Mexico Nicaragua Outlying-US(Guam-USVI-etc) Peru "
        "Philippines Poland Portugal Puerto-Rico Scotland South Taiwan Thailand Trinadad&Tobago "
        "United-States Vietnam Yugoslavia"
    ),
}
_LEVELS = {name: tuple(levels.split()) for name, levels in _PUBLISHED_LEVELS.items()}
# The level without a column of its own. Constants of this library, not computed from records.
_REFERENCE = {
    "workclass": "Private",
    "education": "HS-grad",
    "marital_status": "Married-civ-spouse",
    "occupation": "Prof-specialty",
    "relationship": "Husband",
    "race": "White",
    "sex": "Male",
    "native_country": "United-States",
}
# name: (low, high, centre, scale) in value -> (clip(value, low, high) - centre) / scale.
_NUMERIC = {
    "age": (17.0, 90.0, 40.0, 20.0),
    "capital_gain": (0.0, 20_000.0, 0.0, 10_000.0),
    "capital_loss": (0.0, 4_400.0, 0.0, 2_000.0),
    "hours_per_week": (1.0, 99.0, 40.0, 20.0),
}
_LEFT_OUT = {"public": ("education_num", "fnlwgt"), "paper": ("education_num",)}


def load_adult(*, design: str = "public", download: bool = False) -> SplitData:
    """Returns UCI Adult's complete records as a design matrix with an intercept as last column.

    Columns stand in the order of the file; a categorical feature becomes 0/1 columns for its
    levels in alphabetical order, without the reference level. Both designs happen to have 96.

    Args:
        design: ``"public"``: public constants only, no fnlwgt; ``"paper"``: Jalko et al. (2024),
            computed from the training records, **not private**. See the module's docstring.
        download: Whether to fetch the data from UCI if the data folder lacks it.

    Returns:
        The data: ``X`` float32, ``y`` int32 (1: income > $50k), 30,162 and 15,060 records, and
        the public ``row_norm_bound`` of the public design (None for the paper's).

    Raises:
        ValueError: If ``design`` is unknown.
        DatasetNotFoundError: If the file is absent and ``download`` is false.
        DatasetIntegrityError: If the file is damaged or not the published data.
        DatasetDownloadError: If a download was asked for and failed.

    Example:
        >>> data = load_adult()  # doctest: +SKIP
        >>> data.X_train.shape, data.feature_names[-1]  # doctest: +SKIP
        ((30162, 96), 'intercept')
    """
    check_in("design", design, tuple(_LEFT_OUT))
    columns, where = load_columns(SOURCES["adult"], download=download)
    table = {name: np.array(column) for name, column in columns.items()}
    complete = np.all([table[name] != "?" for name in ADULT_COLUMNS], axis=0)
    table = {name: column[complete] for name, column in table.items()}
    train = table["split"] == "train"
    if design == "public":
        X, names = _assemble(table, design, _LEVELS, _REFERENCE, _public_scale)
        how = "public category lists and scales"
    else:
        levels, reference = _training_levels(table, train)
        X, names = _assemble(
            table, design, levels, reference, lambda _, values: _z_score(values, train)
        )
        how = "levels, means and standard deviations of the training records (NOT private)"
    y = (table["income"] == ">50K").astype(np.int32)
    return SplitData(
        X_train=X[train],
        y_train=y[train],
        X_test=X[~train],
        y_test=y[~train],
        feature_names=names,
        target_name="income>50K",
        source=f"{where} Complete records; design: {how}.",
        licence=SOURCES["adult"].licence,
        row_norm_bound=_public_row_norm_bound() if design == "public" else None,
    )


def load_adult_or_bundled(*, download: bool = False) -> SplitData:
    """Returns Adult (public design), or scikit-learn's breast cancer set where Adult is absent.

    For examples that must run anywhere. Only an absent file leads to the stand-in: a damaged file
    or a failed download stays an error. ``is_fallback`` and ``source`` say which set it is.

    Args:
        download: Whether to fetch Adult if the data folder lacks it.

    Returns:
        A logistic-regression design with an intercept as last column and a ``row_norm_bound``.

    Raises:
        DatasetIntegrityError: If Adult's file is damaged or not the published data.
        DatasetDownloadError: If a download was asked for and failed.
        ImportError: If Adult is absent and scikit-learn is not installed.

    Example:
        >>> data = load_adult_or_bundled()
        >>> data.feature_names[-1]
        'intercept'
    """
    try:
        return load_adult(download=download)
    except DatasetNotFoundError as error:
        bundled = load_breast_cancer()
        return bundled._replace(
            source=f"FALLBACK, not Adult: {bundled.source} Reason: {error}", is_fallback=True
        )


def _assemble(table, design, levels, reference, scale) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the float32 matrix and its column names, in the order of the file."""
    blocks, names = [], []
    for name in ADULT_COLUMNS:
        if name == "income" or name in _LEFT_OUT[design]:
            continue
        if name in levels:
            kept = [level for level in levels[name] if level != reference[name]]
            blocks.append(table[name][:, None] == np.array(kept))
            names.extend(f"{name}={level}" for level in kept)
        else:
            blocks.append(scale(name, table[name].astype(np.float64))[:, None])
            names.append(name)
    blocks.append(np.ones((len(table["income"]), 1)))
    return np.concatenate(blocks, axis=1).astype(np.float32), (*names, "intercept")


def _public_scale(name: str, values: np.ndarray) -> np.ndarray:
    low, high, centre, scale = _NUMERIC[name]
    return (np.clip(values, low, high) - centre) / scale


def _public_row_norm_bound() -> float:
    """Returns a bound from the constants alone: intercept, one level each, extremes of the rest."""
    numeric = sum(
        (max(centre - low, high - centre) / scale) ** 2
        for low, high, centre, scale in _NUMERIC.values()
    )
    return math.sqrt(1.0 + len(_LEVELS) + numeric)


def _training_levels(table, train) -> tuple[dict, dict]:
    """Returns the levels seen in training, and the most frequent: they depend on the records."""
    levels, reference = {}, {}
    for name in _LEVELS:
        seen, counts = np.unique(table[name][train], return_counts=True)
        levels[name] = tuple(seen.tolist())
        reference[name] = levels[name][int(np.argmax(counts))]
    return levels, reference


def _z_score(values: np.ndarray, train: np.ndarray) -> np.ndarray:
    return (values - values[train].mean()) / values[train].std()

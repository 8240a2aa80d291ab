"""Loaders of public data sets for examples, benchmarks and tests.

Each loader reads one file in one folder: the one that the environment variable
``NUMPYRO_DP_DATA`` names, else the per-user cache ``$XDG_CACHE_HOME/numpyro_dp``
(``~/.cache/numpyro_dp``). Nothing is ever downloaded unless ``download=True`` is passed; the file
then goes into that same folder, so the next call needs no network. An absent file raises
``DatasetNotFoundError``, which names the remedies. The content is held against a known SHA-256 on
every load. No dependency beyond NumPy; the bundled sets need scikit-learn.

Example:
    >>> data = load_breast_cancer()
    >>> data.y_train.dtype
    dtype('int32')
"""

from numpyro_dp.datasets._store import (
    DatasetDownloadError,
    DatasetIntegrityError,
    DatasetNotFoundError,
    data_home,
)
from numpyro_dp.datasets._types import ColumnTable, SplitData, TabularData
from numpyro_dp.datasets.adult import load_adult, load_adult_or_bundled
from numpyro_dp.datasets.arrays import (
    load_kin8nm,
    load_mnist,
    load_power_plant,
    load_protein,
    standard_split,
)
from numpyro_dp.datasets.bundled import load_breast_cancer, load_digits, train_validation_split
from numpyro_dp.datasets.tables import (
    load_acs_na2019,
    load_contraception,
    load_doctor_visits,
    load_rwm5yr,
)

__all__ = [
    "ColumnTable",
    "DatasetDownloadError",
    "DatasetIntegrityError",
    "DatasetNotFoundError",
    "SplitData",
    "TabularData",
    "data_home",
    "load_acs_na2019",
    "load_adult",
    "load_adult_or_bundled",
    "load_breast_cancer",
    "load_contraception",
    "load_digits",
    "load_doctor_visits",
    "load_kin8nm",
    "load_mnist",
    "load_power_plant",
    "load_protein",
    "load_rwm5yr",
    "standard_split",
    "train_validation_split",
]

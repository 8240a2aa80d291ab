"""What a driver of your own is built from; ``examples/extending/clipped_mean.py`` is one.

A driver says which arguments hold records (``structure``), what is fitted and from where it starts
(``prepare``), and what of a state may be published (``get_params``). :class:`Driver` adds batches,
clipping, noise, accounting, ``run``, ``update``, streaming and sweeps. Contracts of estimators,
samplers and mechanisms: :mod:`numpyro_dp.core`. :func:`check_mechanism` tries a mechanism.
"""

from numpyro_dp.model.frontend import Call, Prepared
from numpyro_dp.model.records import Records, RecordsProblem, read_records
from numpyro_dp.privacy.mechanism.trial import check_mechanism
from numpyro_dp.run.driver import Driver
from numpyro_dp.run.settings import Method, RunSettings

__all__ = [
    "Call",
    "Driver",
    "Method",
    "Prepared",
    "Records",
    "RecordsProblem",
    "RunSettings",
    "check_mechanism",
    "read_records",
]

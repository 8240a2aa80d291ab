"""What a driver of your own is built from; ``examples/extending/clipped_mean.py`` is one.

A driver says which arguments hold records (``structure``), and what is fitted and from where it
starts (``prepare``). :class:`Driver` adds batches, clipping, noise, accounting, ``run``,
``update``, streaming and sweeps. Contracts of estimators, samplers and mechanisms:
:mod:`numpyro_dp.core`. :func:`check_mechanism` tries a mechanism. The drivers in
``numpyro_dp/methods`` import nothing but public names.
"""

from numpyro_dp._validate import check_int, check_real
from numpyro_dp.chains import Chains
from numpyro_dp.model.density import Model
from numpyro_dp.model.frontend import Call, Frontend, Prepared
from numpyro_dp.model.outcomes import read_outcomes
from numpyro_dp.model.partners import OutcomeModel, centring
from numpyro_dp.model.public import UnsupportedModelError, own_constants
from numpyro_dp.model.records import ModelStructure, Records, RecordsProblem, read_records
from numpyro_dp.model.variational import VariationalProblem
from numpyro_dp.posterior.diagnosis import findings_of_run
from numpyro_dp.posterior.from_model import ModelSource, findings_of_drift
from numpyro_dp.posterior.prior import prior_of
from numpyro_dp.posterior.scores import posterior_of_scores
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.keys import check_rng_key
from numpyro_dp.privacy.mechanism.trial import check_mechanism
from numpyro_dp.privacy.plan import PrivacyReport
from numpyro_dp.run.driver import Driver
from numpyro_dp.run.results import Forecast, RunResult
from numpyro_dp.run.settings import Execution, Method, Privacy, RunSettings
from numpyro_dp.run.state import SensitiveState
from numpyro_dp.sums.contraction import split_scalar
from numpyro_dp.vi.estimators.centred import centred_if_possible

__all__ = [  # noqa: RUF022 (by purpose)
    # Read arguments and a NumPyro model.
    "Call",
    "Frontend",
    "Model",
    "ModelStructure",
    "OutcomeModel",
    "Prepared",
    "Records",
    "RecordsProblem",
    "VariationalProblem",
    "UnsupportedModelError",
    "centring",
    "check_int",
    "check_real",
    "check_rng_key",
    "own_constants",
    "read_outcomes",
    "read_records",
    "split_scalar",
    # Say what a driver does.
    "Chains",
    "Driver",
    "Execution",
    "Forecast",
    "Method",
    "Privacy",
    "PrivacyBudget",
    "PrivacyReport",
    "RunResult",
    "RunSettings",
    "SensitiveState",
    "centred_if_possible",
    "check_mechanism",
    # Make a posterior.
    "ModelSource",
    "findings_of_drift",
    "findings_of_run",
    "posterior_of_scores",
    "prior_of",
]

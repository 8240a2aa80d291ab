"""Differentially private Bayesian inference for NumPyro."""

from numpyro_dp import accounting, core, estimators, extend, mechanisms, plots, posterior, samplers
from numpyro_dp.audit import audit, audit_run
from numpyro_dp.fit import fit
from numpyro_dp.formulas.columns import summarize_columns
from numpyro_dp.formulas.regression import Regression, regression
from numpyro_dp.laplace.check import check
from numpyro_dp.laplace.dplaplace import DPLaplace
from numpyro_dp.laplace.select import select
from numpyro_dp.methods.em.dpem import DPEM
from numpyro_dp.methods.ep.dpsep import DPSEP, SEP
from numpyro_dp.methods.ep.per_record import EP
from numpyro_dp.methods.langevin.dpmcmc import DPMCMC
from numpyro_dp.methods.langevin.kernels import SGHMC, SGLD, PreconditionedSGLD
from numpyro_dp.methods.pbp.dppbp import DPPBP
from numpyro_dp.methods.pbp.model import RegressionNetwork
from numpyro_dp.methods.pbp.reference import PBP
from numpyro_dp.model.frames import design
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.model.record_check import check_records
from numpyro_dp.posterior import Posterior
from numpyro_dp.posterior.load import load
from numpyro_dp.posterior.privatised import Privatised
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.keys import secret_key
from numpyro_dp.privacy.ledger import Ledger, LedgerError
from numpyro_dp.privacy.once import NoiseReuseError
from numpyro_dp.privacy.plan import BudgetError, PrivacyReport
from numpyro_dp.run.results import RunInterrupted, RunResult
from numpyro_dp.run.settings import Execution, Privacy
from numpyro_dp.vi.dpsvi import DPSVI

__version__ = "0.1.0"

__all__ = [
    "DPEM",
    "DPMCMC",
    "DPPBP",
    "DPSEP",
    "DPSVI",
    "EP",
    "PBP",
    "SEP",
    "SGHMC",
    "SGLD",
    "BudgetError",
    "DPLaplace",
    "Execution",
    "Ledger",
    "LedgerError",
    "NoiseReuseError",
    "Posterior",
    "PreconditionedSGLD",
    "Privacy",
    "PrivacyBudget",
    "PrivacyReport",
    "Privatised",
    "Regression",
    "RegressionNetwork",
    "RunInterrupted",
    "RunResult",
    "UnsupportedModelError",
    "accounting",
    "audit",
    "audit_run",
    "check",
    "check_records",
    "core",
    "design",
    "estimators",
    "extend",
    "fit",
    "load",
    "mechanisms",
    "plots",
    "posterior",
    "regression",
    "samplers",
    "secret_key",
    "select",
    "summarize_columns",
]

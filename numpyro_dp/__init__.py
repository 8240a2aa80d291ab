"""Differentially private Bayesian inference for NumPyro."""

from numpyro_dp.em.driver import DPEM
from numpyro_dp.ep.driver import DPSEP, EP, SEP
from numpyro_dp.fit import fit
from numpyro_dp.laplace.driver import DPLaplace
from numpyro_dp.mcmc import DPMCMC, SGHMC, SGLD, PreconditionedSGLD
from numpyro_dp.model.public import UnsupportedModelError
from numpyro_dp.pbp import RegressionNetwork
from numpyro_dp.pbp.driver import DPPBP, PBP
from numpyro_dp.posterior import (
    Posterior,
    average,
    drift_check,
    noise_aware,
    posterior_samples,
    tail_average,
    to_arviz,
)
from numpyro_dp.privacy.accounting import GDP, PLD, PRV, RDP, Best, UnsupportedEventError
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.calibration import CalibrationError
from numpyro_dp.privacy.comparison import compare_accountants
from numpyro_dp.privacy.mechanism.adaptive import AdaptiveClip
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism
from numpyro_dp.privacy.once import NoiseReuseError
from numpyro_dp.privacy.permutation import Permutation
from numpyro_dp.privacy.plan import BudgetError, PrivacyReport
from numpyro_dp.privacy.random import secret_key
from numpyro_dp.privacy.sampling import FixedSize, FullBatch, Poisson
from numpyro_dp.run.loss import LossRelease
from numpyro_dp.run.results import RunResult, SensitiveValueError
from numpyro_dp.vi.estimators import (
    aligned,
    aligned_natural,
    natural,
    preconditioned,
    vanilla,
)
from numpyro_dp.vi.simulate import simulated_clip_norm
from numpyro_dp.vi.svi import DPSVI

__version__ = "0.1.0"

__all__ = [
    "DPEM",
    "DPMCMC",
    "DPPBP",
    "DPSEP",
    "DPSVI",
    "EP",
    "GDP",
    "PBP",
    "PLD",
    "PRV",
    "RDP",
    "SEP",
    "SGHMC",
    "SGLD",
    "AdaptiveClip",
    "Best",
    "BudgetError",
    "CalibrationError",
    "DPLaplace",
    "FixedSize",
    "FullBatch",
    "GaussianMechanism",
    "LossRelease",
    "NoiseReuseError",
    "Permutation",
    "Poisson",
    "Posterior",
    "PreconditionedSGLD",
    "PrivacyBudget",
    "PrivacyReport",
    "RegressionNetwork",
    "RunResult",
    "SensitiveValueError",
    "UnsupportedEventError",
    "UnsupportedModelError",
    "aligned",
    "aligned_natural",
    "average",
    "compare_accountants",
    "drift_check",
    "fit",
    "natural",
    "noise_aware",
    "posterior_samples",
    "preconditioned",
    "secret_key",
    "simulated_clip_norm",
    "tail_average",
    "to_arviz",
    "vanilla",
]

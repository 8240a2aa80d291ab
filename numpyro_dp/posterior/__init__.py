"""Post-processing of private iterates. It has no privacy cost."""

from numpyro_dp.posterior.averaging import Average, average, drift_check
from numpyro_dp.posterior.choice import Choice, choose
from numpyro_dp.posterior.combining import Combined, combine
from numpyro_dp.posterior.diagnosis import Diagnosis, Finding, PosteriorWarning
from numpyro_dp.posterior.evidence import Evidence
from numpyro_dp.posterior.folds import TailAverage, tail_average
from numpyro_dp.posterior.inference_data import to_arviz
from numpyro_dp.posterior.noise_aware import NoiseAware, noise_aware
from numpyro_dp.posterior.pooling import pool
from numpyro_dp.posterior.posterior import Posterior
from numpyro_dp.posterior.rehearsal import Rehearsal, rehearse
from numpyro_dp.posterior.released import Likelihood
from numpyro_dp.posterior.samples import posterior_samples
from numpyro_dp.posterior.summary import PosteriorSummary

__all__ = [
    "Average",
    "Choice",
    "Combined",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Likelihood",
    "NoiseAware",
    "Posterior",
    "PosteriorSummary",
    "PosteriorWarning",
    "Rehearsal",
    "TailAverage",
    "average",
    "choose",
    "combine",
    "drift_check",
    "noise_aware",
    "pool",
    "posterior_samples",
    "rehearse",
    "tail_average",
    "to_arviz",
]

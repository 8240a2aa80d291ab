"""Events of runs, as tests account for them."""

import dp_accounting as dpa

from numpyro_dp.privacy.budget import SENSITIVITY

ADD, REPLACE = "add_or_remove_one", "replace_one"


def gaussian_event(noise_multiplier, relation=ADD):
    """One noisy sum."""
    return dpa.GaussianDpEvent(noise_multiplier / SENSITIVITY[relation])


def poisson(rate, noise, steps):
    """Poisson-sampled Gaussian steps."""
    step = dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(noise))
    return dpa.SelfComposedDpEvent(step, steps)


def without_replacement(size, total, noise, steps=1):
    """Steps on samples of a fixed size."""
    step = dpa.SampledWithoutReplacementDpEvent(total, size, dpa.GaussianDpEvent(noise))
    return dpa.SelfComposedDpEvent(step, steps)

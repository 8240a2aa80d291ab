"""The Gaussian mechanism, what one record moves of a sum, and moments of normal distributions."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.privacy.mechanism.clip_norm import ClipNorm
from numpyro_dp.privacy.mechanism.gaussian import GaussianMechanism, build_mechanism


def gaussian(clip_norm, noise_multiplier, batch_size=None):
    """With a clip norm as a user writes it, or of traced numbers."""
    norms = clip_norm if isinstance(clip_norm, dict) else {...: clip_norm}
    if any(isinstance(norm, jax.Array) for norm in norms.values()):  # nothing to check
        norm = ClipNorm(tuple(norms), tuple(norms.values()))
    else:
        norm = ClipNorm.of(clip_norm)
    return build_mechanism(GaussianMechanism(), norm, noise_multiplier, batch_size)


def largest_move(total, x):
    """How far a record moves ``total(rows, mask)`` at most, with extreme numbers among x."""
    heavy = [0.0, 1.0, -1e3, 1e6, 3e19, 1e30, math.nan, math.inf, -math.inf]
    rng, full, moved = np.random.default_rng(2), jnp.ones(len(x), bool), []
    for _ in range(25):
        rows = jnp.where(rng.random(x.shape) < 0.3, rng.choice(heavy, x.shape), x).astype(x.dtype)
        everything = total(rows, full)
        for out in (0, 7):
            rest = total(rows, full.at[out].set(False))
            change = [np.asarray(everything[n], float) - np.asarray(rest[n], float) for n in rest]
            assert all(np.isfinite(part).all() for part in change)
            moved.append(math.sqrt(sum((part**2).sum() for part in change)))
    return max(moved)


def moments(params):
    """Mean and covariance of a normal approximation from its natural parameters."""
    precision = np.asarray(params["auto_precision"], np.float64)
    covariance = np.linalg.inv(precision if precision.ndim == 2 else np.diag(precision))
    return covariance @ np.asarray(params["auto_linear"], np.float64), covariance

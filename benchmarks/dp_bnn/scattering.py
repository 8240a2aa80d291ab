r"""Scattering of images by Morlet wavelets: features that no record has a part in.

With :math:`\psi_{j,\theta}` of scale :math:`2^j` and direction :math:`\theta`, and
:math:`\phi` a Gaussian of the largest scale,

.. math:: x * \phi, \quad |x * \psi_1| * \phi, \quad ||x * \psi_1| * \psi_2| * \phi
    \quad (j_2 > j_1),

at every fourth pixel; each image's features are normalised within groups of channels.

Reference:
    Bruna, Mallat (2013), Invariant scattering convolution networks; Oyallon, Mallat (2015), for the
    constants; Tramèr, Boneh (2021), Differentially private learning needs better features.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["scattering"]

SIDE, SCALES, DIRECTIONS, GROUPS = 32, 2, 8, 27


def _gaussian(scale, angle, slant):
    """A Gaussian window that is longer along its waves by 1 / slant, and positions, wrapped."""
    offsets = np.arange(-2, 3) * SIDE
    at = np.arange(SIDE)[:, None] + offsets
    y, x = at[:, :, None, None], at[None, None]
    along = x * np.cos(angle) + y * np.sin(angle)
    across = -x * np.sin(angle) + y * np.cos(angle)
    return np.exp(-(along**2 + (slant * across) ** 2) / (2 * scale**2)), along


def _wrapped(values):
    return np.fft.fft2(values.sum((1, 3)))


@functools.cache
def _filters():
    """Fourier transforms of the window, and of wavelets by scale and direction."""
    slant = 4 / DIRECTIONS
    window = _wrapped(_gaussian(0.8 * 2 ** (SCALES - 1), 0.0, 1.0)[0])
    waves = []
    for scale, direction in itertools.product(range(SCALES), range(DIRECTIONS)):
        bell, along = _gaussian(0.8 * 2**scale, np.pi * direction / DIRECTIONS, slant)
        wave = bell * np.exp(0.75j * np.pi / 2**scale * along)
        even, odd = _wrapped(bell), _wrapped(wave)
        waves.append((odd - odd[0, 0] / even[0, 0] * even) / even[0, 0].real)
    shape = SCALES, DIRECTIONS, SIDE, SIDE
    return (
        (window / window[0, 0].real).astype(np.complex64),
        np.reshape(waves, shape).astype(np.complex64),
    )


@jax.jit
def _part(images):
    """(images, 28, 28) -> (images, 81, 7, 7)."""
    window, waves = _filters()
    pad = (SIDE - images.shape[-1]) // 2
    images = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")

    def smooth(values):  # (images, channels, SIDE, SIDE)
        blurred = jnp.fft.ifft2(jnp.fft.fft2(values) * window).real
        inside = slice(pad, SIDE - pad, 2**SCALES)
        return blurred[..., inside, inside]

    def modulus(values, filters):  # every channel by every filter
        spectra = jnp.fft.fft2(values)[:, :, None] * filters.reshape(-1, SIDE, SIDE)
        found = jnp.abs(jnp.fft.ifft2(spectra))
        return found.reshape(len(values), -1, SIDE, SIDE)

    first = [modulus(images[:, None], waves[scale]) for scale in range(SCALES)]
    second = [modulus(first[scale], waves[scale + 1 :]) for scale in range(SCALES - 1)]
    found = smooth(jnp.concatenate([images[:, None], *first, *second], axis=1))
    groups = found.reshape(len(found), GROUPS, -1)
    centred = groups - groups.mean(-1, keepdims=True)
    return (centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)).reshape(len(found), -1)


def scattering(images, batch=500):
    """Features of shape (images, 3969) of images of shape (images, 784)."""
    images = np.asarray(images, np.float32).reshape(-1, 28, 28)
    parts = [_part(images[at : at + batch]) for at in range(0, len(images), batch)]
    return np.concatenate([np.asarray(part) for part in parts])

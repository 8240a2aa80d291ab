"""``DPEM``: differentially private expectation maximisation of a mixture of normals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_dp import extend
from numpyro_dp.core import Args, Kwargs, Sampler, Values
from numpyro_dp.methods.em.statistics import MStep, expected_statistics
from numpyro_dp.methods.shared import check_probs, checked_start

_INDEPENDENT = "DPEM adds up the variances of independent noise to find the smallest count"


class DPEM(extend.Driver):
    r"""Fits a mixture of normals by expectation maximisation on noisy sums.

    ``run(rng_key, num_steps, x)`` takes x of shape (N, d). ``result.params`` is a point estimate
    with ``probs`` (k,), ``means`` (k, d) and ``covariances`` (k, d, d). For a posterior of the
    means, use ``DPSEP(..., site=normal_mixture(...))``. ``init``, ``update`` and ``sweep`` work as
    in :class:`~numpyro_dp.DPSVI`.

    Args:
        num_components: Number of components k.
        clip_norm: Largest norm of one record's statistics. Pass one number for their joint norm, or
            a dict with a norm for each entry. ``counts`` has norm at most 1, ``sums`` at most the
            norm of x, and ``squares`` at most its square. Scale x by public constants first. Then
            all records are in a ball of known radius.
        sampler, budget, num_steps, privacy, execution: As for :class:`~numpyro_dp.DPSVI`.
        damping: Fraction of the statistics that a step replaces, in (0, 1], or a function of the
            step number. 1 is the algorithm of the paper. Smaller values average the noise over
            steps.
        scale: Known standard deviation of every component in every direction. By default ``DPEM``
            estimates covariances.
        probs: Known weights. By default ``DPEM`` estimates them.
        init_scale: Standard deviation of the initial means, which are drawn around 0. The initial
            covariances are its square times the identity.
        smallest_variance: Floor of the eigenvalues of an estimated covariance.

    Raises:
        TypeError, ValueError: If an argument is out of range.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_dp import DPEM, PrivacyBudget
        >>> from numpyro_dp.samplers import FullBatch
        >>> key, noise = jax.random.split(jax.random.key(0))
        >>> x = jnp.where(jnp.arange(4000)[:, None] % 4 == 0, 2.0, -2.0)
        >>> x = x + 0.3 * jax.random.normal(noise, (4000, 1))
        >>> em = DPEM(2, clip_norm=4.0, sampler=FullBatch(), budget=PrivacyBudget(2.0, 1e-5),
        ...           scale=0.3, init_scale=2.0)
        >>> result = em.run(key, 5, x, progress_bar=False)
        >>> bool(jnp.abs(jnp.sort(result.params["means"].ravel()) - jnp.array([-2, 2])).max() < 0.5)
        True

    Guarantee:
        ``result.params``, ``result.trace`` and ``result.privacy`` are (epsilon, delta)-
        differentially private under the budget's relation. Each step is the Gaussian mechanism on
        a sum of clipped statistics. Each term depends on one record and on released values only.
        The M step, its floors and the initial parameters read no record. N is public.

    Reference:
        Park, Foulds, Chaudhuri, Welling (2017), DP-EM: Differentially private expectation
        maximization, AISTATS.
    """

    reads_model = False

    def __init__(
        self,
        num_components: int,
        *,
        clip_norm: Any,
        sampler: Sampler,
        damping: float | Callable[[Array], Array] = 1.0,
        scale: float | None = None,
        probs: ArrayLike | None = None,
        init_scale: float = 1.0,
        smallest_variance: float = 1e-3,
        budget: extend.PrivacyBudget | None = None,
        num_steps: int | None = None,
        privacy: extend.Privacy = extend.Privacy(),
        execution: extend.Execution = extend.Execution(),
    ) -> None:
        self.num_components: int = extend.check_int("num_components", num_components, low=1)
        self.init_scale: float = extend.check_real("init_scale", init_scale, low=0, low_open=True)
        extend.check_real("smallest_variance", smallest_variance, low=0, low_open=True)
        if scale is not None:
            extend.check_real("scale", scale, low=0, low_open=True)
        known = None if probs is None else check_probs(probs, num_components)
        given = {"covariances": scale, "probs": probs}
        self._known = {name for name, value in given.items() if value is not None}
        fixed = None if known is None else tuple(known.tolist())
        values = num_components, scale, fixed, smallest_variance
        step = MStep(damping, scale, known, smallest_variance)
        method = extend.Method(expected_statistics(scale is None), step, values, _INDEPENDENT)
        settings = extend.RunSettings(
            clip_norm=clip_norm, sampler=sampler, budget=budget, num_steps=num_steps,
            privacy=privacy, execution=execution,
        )  # fmt: skip
        super().__init__(method, settings)

    def structure(self, args: Args, kwargs: Kwargs) -> extend.Records:
        """Reads only the shapes of the arguments."""
        given = [*args, *kwargs.values()]
        if len(given) != 1 or not isinstance(given[0], np.ndarray | jax.Array):
            kinds = ", ".join(type(each).__name__ for each in given)
            raise TypeError(f"Expected one array with all records, x, got ({kinds}).")
        (x,) = given
        if set(kwargs) - {"x"} or x.ndim != 2 or 0 in x.shape or np.iscomplexobj(x):
            raise ValueError(
                f"Expected one real array x of shape (records, d), got {[*kwargs, x.shape]} of "
                f"type {x.dtype}. If each record is one number, pass x[:, None]."
            )
        return extend.read_records(lambda x: None, args, kwargs, len(x))

    def prepare(
        self, structure: extend.Records, rng_key: Array, call: extend.Call
    ) -> extend.Prepared:
        """Reads no record."""
        (size,), _ = structure.layout.shapes[0]
        number, each = self.num_components, self.init_scale**2 * jnp.eye(size)
        params = {
            "probs": jnp.full(number, 1 / number),
            "means": self.init_scale * jax.random.normal(rng_key, (number, size)),
            "covariances": jnp.tile(each, (number, 1, 1)),
        }
        if call.init_params is not None:
            params = params | _check_init(call.init_params, params, self._known)
        problem = extend.RecordsProblem(structure)
        return extend.Prepared(problem, self.method.optim.init(params), rng_key)


def _check_init(init_params: Values, like: dict[str, Array], known: set[str]) -> dict[str, Array]:
    if both := sorted(known & set(init_params)):
        raise ValueError(
            f"init_params has the entries {both}, but DPEM was built with known values for them "
            "(scale or probs). Remove these entries."
        )
    found = checked_start(init_params, like, some=True)
    if "probs" in found:
        check_probs(found["probs"])
    for name, value in found.items():
        if not np.isfinite(value).all():
            raise ValueError(f"init_params[{name!r}] must be finite, but has inf or nan entries.")
    for number, covariance in enumerate(found.get("covariances", ())):
        where = f"init_params['covariances'][{number}]"
        smallest = np.linalg.eigvalsh(covariance).min()
        if not (np.allclose(covariance, covariance.T, rtol=1e-5) and smallest > 0):
            raise ValueError(
                f"{where} is not symmetric, or not positive definite (smallest eigenvalue "
                f"{smallest:.3g}). Pass (c + c.T) / 2, with a multiple of the identity added."
            )
    return {name: jnp.asarray(value, like[name].dtype) for name, value in found.items()}

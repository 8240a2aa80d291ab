"""Sites per second: one `update` of DP-SEP and of DP-SEP for networks, on full batches.

GLM: logistic regression, d = 31, quadrature sites, N = 30,000. Network: 8 inputs, 50 ReLU units,
N = 8,192; its factored slopes against `vmap(grad)` of the same log evidence with respect to the
means and variances of all weights, inside the same step and alone ("our units" keeps the closed
form of a unit's slopes). Memory is what XLA plans for temporaries of SEP (batches of 1,024 of N
records) and of one sweep of EP, and the sites that EP keeps beside it.

    python benchmarks/ep_speed.py --json ep_speed.json
"""

import jax
import jax.numpy as jnp
import numpy as np
from common import interleaved, logistic_data, logistic_model, parse_args, write
from jax.scipy.stats import norm

from numpyro_dp import DPPBP, DPSEP, Privacy, RegressionNetwork
from numpyro_dp.methods.ep.families import diagonal_normal, normal
from numpyro_dp.methods.pbp import network_moments, reference
from numpyro_dp.methods.pbp import network_sites as network_estimator
from numpyro_dp.samplers import FullBatch, Poisson

KEY = jax.random.key(0)
NETWORK = RegressionNetwork((50,))


def compiled(driver, data):
    state = driver.init(KEY, *data)
    step = jax.jit(driver.update).lower(state, *data).compile()
    return step, lambda: step(state, *data)


def glm_calls(number):
    data = logistic_data(number, 31)
    plain = {
        "clip_norm": 1.0, "sampler": FullBatch(), "privacy": Privacy(noise_multiplier=1.0)
    }  # fmt: skip
    options = plain | {"unbiased_clipping": False}
    return {
        "GLM, precision matrix": compiled(DPSEP(logistic_model, normal, **options), data)[1],
        "GLM, matrix, one precision released": compiled(
            DPSEP(logistic_model, normal, shared_precision=True, **options), data
        )[1],
        "GLM, diagonal": compiled(DPSEP(logistic_model, diagonal_normal, **options), data)[1],
        "GLM, precision matrix, unbiased clipping": compiled(
            DPSEP(logistic_model, normal, **plain), data
        )[1],
    }


def network_data(number):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(number, 8)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(np.sin(x.sum(1)).astype(np.float32))


def by_automatic_differentiation(layout, mean, variance, noise, x, y):
    """What `record_slopes` returns, by one gradient with respect to all weights."""

    def log_evidence(mean, variance):
        output, spread = network_moments.output_moments(layout, mean, variance, x)
        total = spread + noise
        return -((y - output) ** 2 / total + jnp.log(total)) / 2, (output, spread)

    (in_mean, in_variance), seen = jax.grad(log_evidence, (0, 1), has_aux=True)(mean, variance)
    return network_moments.Slopes(in_mean, in_variance, *seen)


def plain_unit(a, v):
    """Moments of max(0, t) by the library's normal distribution, differentiated by JAX."""
    sd = jnp.sqrt(v)
    ratio = a / sd
    above, below, density = norm.cdf(ratio), norm.cdf(-ratio), norm.pdf(ratio)
    share = above + ratio**2 * above * below + ratio * density * (below - above) - density**2
    return a * above + sd * density, v * jnp.maximum(share, 1e-10)


def network_calls(number):
    data = network_data(number)
    found = {}
    unit = network_moments._rectified
    for name, slopes, of_unit in (
        ("network, factored", network_moments.record_slopes, unit),
        ("network, vmap(grad), our units", by_automatic_differentiation, unit),
        ("network, vmap(grad)", by_automatic_differentiation, plain_unit),
    ):
        network_estimator.record_slopes, network_moments._rectified = slopes, of_unit
        driver = DPPBP(
            NETWORK, clip_norm=1.0, sampler=FullBatch(), privacy=Privacy(noise_multiplier=1.0)
        )
        found[name] = compiled(driver, data)[1]
    network_estimator.record_slopes, network_moments._rectified = (
        network_moments.record_slopes,
        unit,
    )
    state = driver.get_params(driver.init(KEY, *data))
    layout = NETWORK.layout(8)
    mean = state["weights_linear"] / state["weights_precision"]
    variance = 1 / state["weights_precision"]
    for name, slopes in (
        ("slopes alone, factored", network_moments.record_slopes),
        ("slopes alone, vmap(grad), our units", by_automatic_differentiation),
    ):
        alone = jax.jit(jax.vmap(
            lambda x, y, slopes=slopes: slopes(layout, mean, variance, jnp.array(0.1), x, y)
        ))  # fmt: skip
        found[name] = lambda alone=alone: alone(*data)
    return found


def memory(numbers):
    rows = []
    for number in numbers:
        data = network_data(number)
        driver = DPPBP(
            NETWORK,
            clip_norm=1.0,
            sampler=Poisson(1024 / number),
            privacy=Privacy(noise_multiplier=1.0),
        )
        step, _ = compiled(driver, data)
        params = driver.get_params(driver.init(KEY, *data))
        sites = reference.start_network_sites(NETWORK, params, number)
        sweep = jax.jit(lambda s, x, y: reference.ep_sweep(NETWORK, s, x, y, 0.1))
        plan = sweep.lower(sites, *data).compile().memory_analysis()
        kept = sum(leaf.nbytes for leaf in jax.tree.leaves(sites.sites))
        rows.append({
            "N": number,
            "SEP, MB": step.memory_analysis().temp_size_in_bytes / 1e6,
            "EP sweep, MB": plan.temp_size_in_bytes / 1e6,
            "EP sites kept, MB": kept / 1e6,
        })  # fmt: skip
    return rows


def main():
    args = parse_args(__doc__.splitlines()[0])
    rounds, number = (3, 2_000) if args.quick else (15, 30_000)
    rows = []
    for calls, records in (
        (glm_calls(number), number),
        (network_calls(number if args.quick else 8_192), number if args.quick else 8_192),
    ):
        seconds = interleaved(calls, rounds=rounds, target_seconds=0.1)
        for name, each in seconds.items():
            rows.append(
                {"sites": name, "N": records, "ms": 1e3 * each, "k/s": records / each / 1e3}
            )
    write(args, {"Throughput": rows, "Memory": memory((2_048, 8_192, 32_768))})


if __name__ == "__main__":
    main()

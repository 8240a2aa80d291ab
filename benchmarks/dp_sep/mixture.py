"""A mixture of four normals: EP, SEP, clipped SEP, DP-SEP and DP-EM against NUTS.

The experiment of Table 1 and Figure 1 of Vinaroz & Park (2022): N = 1000, J = 4 components in 4
dimensions with known scale 0.5 and equal weights, means from N(0, I), their posterior approximated
by a normal one. Five data sets; in the last one two means are only two scales apart. The F-norm is
the Euclidean distance of the parameters of two posteriors, means (16 numbers) and covariances of
each component (4 x 16 numbers), components matched by their means. Truth: 20,000 draws of NUTS that
starts at the true means. Start "near": the true means + N(0, 0.1^2); "independent": 0.3 times draws
of the prior, which no record has a part in. Clip norms, damping and steps were chosen on data sets
100 and higher, which are not reported. Full batches, add or remove one, delta = 1e-5.

    python benchmarks/dp_sep/mixture.py --json mixture.json --figure docs/mixture.png
"""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_value
from scipy.optimize import linear_sum_assignment

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import experiment_parser, panels, save

from numpyro_dp import DPEM, DPSEP, EP, SEP, PrivacyBudget
from numpyro_dp.methods.ep.families import diagonal_normal
from numpyro_dp.methods.ep.sites import normal_mixture
from numpyro_dp.samplers import FullBatch

NUMBER, COMPONENTS, DIM, SCALE = 1000, 4, 4, 0.5
EPSILONS = (50.0, 5.0, 1.0)
SITE = normal_mixture(lambda x: x[0], SCALE)
# Epsilon -> clip norm, damping, steps.
SEP_SETTINGS = {
    "near": dict.fromkeys(EPSILONS, (5.0, 0.5, 8)),
    "independent": {50.0: (8.0, 0.1, 100), 5.0: (8.0, 0.1, 100), 1.0: (5.0, 0.1, 50)},
}
EM_SETTINGS = {
    "near": {50.0: (5.0, 0.5, 8), 5.0: (3.0, 0.2, 20), 1.0: (1.5, 1.0, 1)},
    "independent": {50.0: (3.0, 0.2, 60), 5.0: (3.0, 0.2, 60), 1.0: (3.0, 0.1, 50)},
}


def model(x):
    means = numpyro.sample("means", dist.Normal(0, 1).expand([COMPONENTS, DIM]).to_event(2))
    weights = dist.Categorical(jnp.full(COMPONENTS, 1 / COMPONENTS))
    with numpyro.plate("records", x.shape[0]):
        each = dist.Normal(means, SCALE).to_event(1)
        numpyro.sample("x", dist.MixtureSameFamily(weights, each), obs=x)


def simulate(seed, close):
    """Records and true means."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(COMPONENTS, DIM))
    if close:
        away = means[1] - means[0]
        means[1] = means[0] + 2 * SCALE * away / np.linalg.norm(away)
    labels = rng.integers(COMPONENTS, size=NUMBER)
    x = means[labels] + SCALE * rng.normal(size=(NUMBER, DIM))
    return x.astype(np.float32), means


def moments(params):
    """Means (J, d) and covariance of each component (J, d, d)."""
    precision = np.asarray(params["auto_precision"], np.float64)
    covariance = np.linalg.inv(precision if precision.ndim == 2 else np.diag(precision))
    means = (covariance @ np.asarray(params["auto_linear"], np.float64)).reshape(COMPONENTS, DIM)
    return means, blocks(covariance)


def blocks(covariance):
    each = covariance.reshape(COMPONENTS, DIM, COMPONENTS, DIM)
    return np.stack([each[j, :, j] for j in range(COMPONENTS)])


def truth(x, means, draws):
    """Moments of the posterior by NUTS."""
    kernel = NUTS(model, init_strategy=init_to_value(values={"means": jnp.asarray(means)}))
    mcmc = MCMC(kernel, num_warmup=500, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(1), x)
    found = np.asarray(mcmc.get_samples()["means"], np.float64).reshape(draws, -1)
    return found.mean(0).reshape(COMPONENTS, DIM), blocks(np.cov(found.T))


def distances(found, expected):
    """F-norms of means, of covariances, and their average."""
    apart = ((found[0][:, None] - expected[0][None]) ** 2).sum(-1)
    mine, others = linear_sum_assignment(apart)
    in_means = np.sqrt(apart[mine, others].sum())
    in_covariances = np.linalg.norm(found[1][mine] - expected[1][others])
    return np.array([in_means, in_covariances, (in_means + in_covariances) / 2])


def start(kind, means, seed):
    """The first means, and their precision."""
    rng = np.random.default_rng([seed, 1])
    if kind == "near":
        return means + 0.1 * rng.normal(size=means.shape), 100.0
    return 0.3 * rng.normal(size=means.shape), 1.0


def natural(first, precision, full):
    each = np.full(COMPONENTS * DIM, precision)
    return {
        "auto_linear": jnp.asarray(precision * first.ravel(), jnp.float32),
        "auto_precision": jnp.asarray(np.diag(each) if full else each, jnp.float32),
    }


def private_sep(kind, epsilon):
    clip_norm, damping, num_steps = SEP_SETTINGS[kind][epsilon]
    driver = DPSEP(
        model,
        diagonal_normal,
        site=SITE,
        clip_norm=clip_norm,
        damping=damping,
        precision_weight=0.3,
        shared_precision=COMPONENTS,
        sampler=FullBatch(),
        budget=PrivacyBudget(epsilon, 1e-5),
    )

    def run(x, first, precision, seed):
        begin = natural(first, precision, False)
        result = driver.run(
            jax.random.key(seed), num_steps, x, init_params=begin, progress_bar=False
        )
        return moments(result.params)

    return run


def private_em(kind, epsilon):
    """DP-EM, with the covariance that a mean has given the released counts."""
    clip_norm, damping, num_steps = EM_SETTINGS[kind][epsilon]
    driver = DPEM(
        COMPONENTS,
        clip_norm=clip_norm,
        damping=damping,
        scale=SCALE,
        probs=np.full(COMPONENTS, 1 / COMPONENTS),
        sampler=FullBatch(),
        budget=PrivacyBudget(epsilon, 1e-5),
    )

    def run(x, first, _, seed):
        result = driver.run(
            jax.random.key(seed), num_steps, x, init_params={"means": first}, progress_bar=False
        )
        counts = np.maximum(np.asarray(result.state.optim_state.sums["counts"]), 1.0)
        variance = 1 / (1 + counts / SCALE**2)
        return np.asarray(result.params["means"]), variance[:, None, None] * np.eye(DIM)

    return run


def plain(kind, clip_norm, steps):
    """EP (no clip norm), or SEP."""
    driver = (
        EP(model, site=SITE, damping=0.5)
        if clip_norm is None
        else SEP(model, site=SITE, clip_norm=clip_norm, damping=0.5 if kind == "near" else 0.1)
    )

    def run(x, first, precision, seed):
        begin = natural(first, precision, True)
        options = {} if clip_norm is None else {"progress_bar": False}
        result = driver.run(jax.random.key(seed), steps, x, init_params=begin, **options)
        return moments(result.params)

    return run


def methods(quick):
    """Name, start -> run, and repetitions for each data set."""
    steps = {"near": 20 if quick else 40, "independent": 60 if quick else 150}
    yield "EP", "near", plain("near", None, 20), 1
    for kind in ("near", "independent"):
        yield "SEP", kind, plain(kind, np.inf, steps[kind]), 1
    for clip_norm in (20.0, 10.0, 1.0):
        yield f"SEP clipped, C = {clip_norm:g}", "near", plain("near", clip_norm, 40), 1
    for kind in ("near", "independent"):
        for epsilon in EPSILONS:
            number = 1 if quick else 4
            yield f"DP-SEP, epsilon = {epsilon:g}", kind, private_sep(kind, epsilon), number
            yield f"DP-EM, epsilon = {epsilon:g}", kind, private_em(kind, epsilon), number


def main():
    parser = experiment_parser(__doc__, "one data set, one repetition, few draws")
    parser.add_argument("--data-sets", type=int, default=5)
    args = parser.parse_args()
    number = 1 if args.quick else args.data_sets
    draws = 2000 if args.quick else 20_000
    begin = time.perf_counter()
    cases = []
    for seed in range(number):
        x, means = simulate(seed, close=seed == 4)
        cases.append((x, means, truth(x, means, draws)))
    print(f"NUTS: {time.perf_counter() - begin:.0f} s for {number} data sets")
    rows, pictures = [], {}
    for name, kind, run, repetitions in methods(args.quick):
        begin, found = time.perf_counter(), []
        for seed, (x, means, expected) in enumerate(cases):
            for repetition in range(repetitions):
                own = 100 * seed + repetition
                first, precision = start(kind, means, own)
                posterior = run(x, first, precision, own)
                found.append(distances(posterior, expected))
                if seed == repetition == 0:
                    pictures[name, kind] = posterior
        found = np.array(found)
        row = {"method": name, "start": kind, "runs": len(found)}
        for column, values in zip(("means", "covariances", "average"), found.T, strict=True):
            row[column] = float(values.mean())
            row[f"{column} se"] = (
                float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
            )
            row[f"{column} worst"] = float(values.max())
        row["median in means"] = float(np.median(found[:, 0]))
        row["part of runs below 0.5 in means"] = float((found[:, 0] < 0.5).mean())
        row["seconds"] = time.perf_counter() - begin
        rows.append(row)
        print(
            f"{name:24} {kind:12} {len(found):3} runs  means {row['means']:.4f}  covariances "
            f"{row['covariances']:.4f}  average {row['average']:.4f} (worst "
            f"{row['average worst']:.4f})  below 0.5: "
            f"{row['part of runs below 0.5 in means']:.0%}",
            flush=True,
        )
    if args.figure:
        draw(args.figure, cases[0], pictures)
    save(args, rows=rows)


def draw(path, case, pictures):
    """Two coordinates of the first data set, with 98 % ellipses of the means."""
    x, _, expected = case
    shown = [("NUTS", None), ("SEP", "near")]
    shown += [("DP-SEP, epsilon = 50", "near"), ("DP-SEP, epsilon = 1", "near")]
    shown += [("DP-SEP, epsilon = 1", "independent"), ("DP-EM, epsilon = 1", "near")]
    with panels(path, 3, 2, (10, 6.4), sharex=True, sharey=True) as axes:
        turn = np.linspace(0, 2 * np.pi, 60)
        circle = np.sqrt(-2 * np.log(0.02)) * np.stack([np.cos(turn), np.sin(turn)])
        for axis, (name, kind) in zip(axes.ravel(), shown, strict=True):
            means, covariances = expected if kind is None else pictures[name, kind]
            axis.plot(x[:, 0], x[:, 1], ".", ms=2, color="0.75", zorder=0)
            for mean, covariance in zip(means, covariances, strict=True):
                ring = mean[:2, None] + np.linalg.cholesky(covariance[:2, :2]) @ circle
                axis.plot(*ring, color="C1", lw=1.2)
                axis.plot(*mean[:2], "k+", ms=7)
            axis.set_title(
                name if kind is None else f"{name}\nstart: {kind}",
            )
        for axis in axes[1]:
            axis.set_xlabel("first coordinate")
        for axis in axes[:, 0]:
            axis.set_ylabel("second coordinate")


if __name__ == "__main__":
    main()

"""Who goes to the doctor often? A private mixture of two Poisson regressions.

Each person belongs to one of two groups, which is a discrete latent inside the data plate: it is
summed out of the likelihood, person by person, and never stored. Written as one would for
NumPyro's MCMC; compared with the same model without the groups by held-out log likelihood.

    python examples/mixture.py               # Australian Health Survey if NUMPYRO_DP_DATA has it
    python examples/mixture.py --quick       # fewer steps

Without that survey, invented visits stand in, and the script says so.
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDiagonalNormal

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))

from datasets import DatasetNotFoundError, load_doctor_visits

from numpyro_dp import DPSVI, PrivacyBudget
from numpyro_dp.estimators import aligned
from numpyro_dp.samplers import Poisson


def model(features, visits=None, groups=2):
    """Poisson regression with rates of their own for each group."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.full(groups, 2.0)))
    level = numpyro.sample("level", dist.Normal(jnp.linspace(-2, 1, groups), 1).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0, 0.5).expand([features.shape[1]]).to_event(1))
    with numpyro.plate("people", features.shape[0]):
        group = numpyro.sample("group", dist.Categorical(share))
        rate = jnp.exp(level[group] + features @ slope)
        numpyro.sample("visits", dist.Poisson(rate), obs=visits)


def load():
    """Features with public scales, and visits."""
    try:
        data = load_doctor_visits()
    except DatasetNotFoundError:
        rng = np.random.default_rng(0)
        features = rng.uniform(-1, 1, (5000, 4))
        often = rng.random(5000) < 0.2
        visits = rng.poisson(np.exp(-2 + 2.5 * often + features @ [0.5, -0.3, 0.0, 0.2]))
        print("Invented visits of 5,000 people (set NUMPYRO_DP_DATA for the health survey).")
        return features.astype(np.float32), visits
    print(f"{data.source}: visits of {len(data.y)} people within two weeks")
    most = {"illness": 5, "health": 12}  # by the survey's questions, not by its answers
    scale = np.array([most.get(name, 1) for name in data.feature_names])
    return (data.X / scale).astype(np.float32), data.y


def held_out(draws, features, visits):
    """Mean log predictive density of held-out visits, over draws of the posterior."""
    level, slope = draws["level"][:, None], draws["slope"]
    rate = jnp.exp(level + (slope @ features.T)[..., None])
    each = jnp.log(draws["share"])[:, None] + dist.Poisson(rate).log_prob(visits[:, None])
    return float((jax.nn.logsumexp(each, (0, 2)) - jnp.log(len(rate))).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true", help="500 steps instead of 4,000")
    args = parser.parse_args()
    features, visits = load()
    held = np.random.default_rng(0).random(len(visits)) < 0.2
    train, test = (features[~held], visits[~held]), (features[held], visits[held])
    for groups in (1, 2):
        guide = AutoDiagonalNormal(model, init_scale=0.1)
        svi = DPSVI(
            model,
            guide,
            optax.adam(1e-2),
            estimator=aligned(),
            clip_norm=2.0,
            sampler=Poisson(0.05),
            budget=PrivacyBudget(epsilon=args.epsilon, delta=1e-5),
            groups=groups,
        )
        result = svi.run(jax.random.key(0), 500 if args.quick else 4000, *train)
        draws = Predictive(guide, params=result.params, num_samples=300)(jax.random.key(1))
        print(f"{groups} group(s): {held_out(draws, *test):.4f} nats a held-out person")
    print(result.privacy)
    print("share of each group ", np.round(draws["share"].mean(0), 3))
    print("visits of each group", np.round(jnp.exp(draws["level"]).mean(0), 3))


if __name__ == "__main__":
    main()

"""How near can clipped scores come to a mode that the model does not fit?

For kinds of `wild.py` whose outcomes the model does not fit, one release of scores is judged with
all that only the records tell: it starts at the mode, whitens by the exact covariance, takes the
best clip norm of a list, and stretches the direction of the largest bias by the best factor. Its
error is then the bias of clipping and the noise, as a root mean square over latents in standard
deviations of the posterior without privacy. A share of the budget is a share of mu squared of the
Gaussian mechanism. "distance" is the best error, averaged over sets. For outliers, "noise" is that
of a count of records, next to the records that are far out.

    python benchmarks/believe/limit.py --json limit.json
"""

import itertools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from common import experiment_parser, save
from scipy.optimize import brentq
from wild import Kind

from numpyro_dp.privacy.accounting.gdp import gaussian_epsilon
from numpyro_dp.privacy.budget import default_delta

KINDS = "wrong: counts that vary more", "wrong: Student-t noise"
OUTLIERS = "wrong: 1 % outliers"
CLIPS = 1, 1.5, 2, 3, 4, 6, 8, 12
STRETCHES = 1, 2, 3, 4, 6


def noise_of(epsilon, number):
    """Standard deviation of the noise of one release with the whole budget, at sensitivity 1."""
    delta = default_delta(number)
    return 1 / brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, 1e-3, 20)


def whitened_scores(kind, args, truth):
    """Scores of the records at the mode, shape (N, d), with unit covariance in a right model."""
    mode, hessian = kind.mode(args, truth)
    number = len(args[-1])

    @jax.jit
    @jax.vmap
    def of_one(*record):
        return -kind.gradient(mode, tuple(x[None] for x in record))

    # Each of them has the prior's gradient too, which is what they have more than the whole.
    scores = np.asarray(of_one(*args), np.float64)
    total = -np.asarray(kind.gradient(mode, args), np.float64)
    scores -= (scores.sum(0) - total) / (number - 1)
    return scores @ np.linalg.cholesky(np.linalg.inv(hessian)) * np.sqrt(number)


def error_of(scores, noise, clip, stretch):
    """Error of the mode in its standard deviations, from clipped scores and noise."""
    number, size = scores.shape

    def clipped(rows):
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows * np.minimum(1, clip * np.sqrt(size) / norms)

    along = (scores - clipped(scores)).sum(0)
    along = np.outer(along, along) / (along @ along)
    shorter = np.eye(size) + (1 / stretch - 1) * along
    longer = np.linalg.inv(shorter)
    bias = (scores @ shorter - clipped(scores @ shorter)).sum(0) @ longer / np.sqrt(number)
    spread = noise * clip * np.sqrt(size / number) * np.sqrt(np.sum(longer**2) / size)
    return np.sqrt(np.mean(bias**2) + spread**2)


def main():
    parser = experiment_parser(__doc__, "1 set")
    parser.add_argument("--sets", type=int, default=12)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--shares", type=float, nargs="*", default=[1.0, 0.39])
    args = parser.parse_args()
    seeds, rows, counts = range(1 if args.quick else args.sets), [], []
    for name in KINDS:
        kind = Kind(name, seeds)
        sets = [whitened_scores(kind, *kind.sets[seed][1:]) for seed in seeds]
        for share in args.shares:
            noise = noise_of(args.epsilon, len(sets[0])) / np.sqrt(share)
            found = {
                each: [error_of(scores, noise, *each) for scores in sets]
                for each in itertools.product(CLIPS, STRETCHES)
            }
            best = min(found, key=lambda each: np.mean(found[each]))
            rows.append({
                "kind": name, "epsilon": args.epsilon, "share": share, "clip": best[0],
                "stretch": best[1], "distance": float(np.mean(found[best])),
                "distance se": float(np.std(found[best]) / np.sqrt(len(seeds))),
            })  # fmt: skip
    kind = Kind(OUTLIERS, seeds)
    far = []
    for seed in seeds:
        outcome = np.asarray(kind.sets[seed][1][-1])
        far.append(int(np.sum(np.abs(outcome - np.median(outcome)) > 5)))
    for share in args.shares:
        noise = noise_of(args.epsilon, len(outcome)) / np.sqrt(share)
        counts.append({"kind": OUTLIERS, "epsilon": args.epsilon, "share": share,
                       "far out": float(np.mean(far)), "noise": float(noise)})  # fmt: skip
    print(*rows, *counts, sep="\n")
    save(args, rows=rows, counts=counts)


if __name__ == "__main__":
    main()

"""What do the size of a batch and the step size do to accuracy and privacy? MNIST, the MLP.

Figure 2 of Zhang et al. (2021), which has a CNN. DP-SGD has no prior, clip norm 1 and noise of
one multiplier, 1, whatever its step: there epsilon moves with the size of the batch alone. DP-SGLD
has a normal prior and clip norm 2; its noise is that of its step, at temperature 0.3: a smaller
step, or a larger batch, spends less. Five epochs; delta = 1e-5, add or remove one image, by PLD.
Accuracy is that on the last 10,000 training images, which have no part in training here.

    NUMPYRO_DP_DATA=... python benchmarks/dp_bnn/batch_and_step.py --json x.json --figure x.png
"""

import math
import pathlib
import sys

import jax
import optax
from numpyro.infer.autoguide import AutoDelta
from numpyro.infer.initialization import init_to_sample

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import average_row, experiment_parser, legend_below, log_ticks, panels, save
from evaluate import accuracy, log_score
from images import MLP, model_of
from mnist import DELTA, HELD, load, predict

from numpyro_dp import DPMCMC, DPSVI, SGLD, Privacy, secret_key
from numpyro_dp.estimators import aligned
from numpyro_dp.posterior import posterior_samples
from numpyro_dp.samplers import Poisson

EPOCHS, KEPT = 5, 20
CLIP, TEMPERATURE = 2.0, 0.3  # of DP-SGLD
BATCHES = (256, 1024, 4096)
STEPS = {"DP-SGD": (0.03, 0.1, 0.3, 1.0, 3.0), "DP-SGLD": (0.3, 1.0, 3.0, 10.0)}  # times 1 / N


def gradient_descent(batch, size, seed, train):
    model, number = model_of(MLP, "flat"), len(train[0])
    guide = AutoDelta(model, init_loc_fn=init_to_sample)
    svi = DPSVI(
        model, guide, optax.sgd(size / number), estimator=aligned(), clip_norm=1.0,
        sampler=Poisson(batch / number),
        privacy=Privacy(noise_multiplier=1.0, secret_key=secret_key(seed), repetition=True),
    )  # fmt: skip
    steps = EPOCHS * number // batch
    result = svi.run(jax.random.key(seed), steps, *train, progress_bar=False)
    return posterior_samples(jax.random.key(1), guide, result.params, 1), result.privacy


def langevin(batch, size, seed, train):
    number = len(train[0])
    steps = EPOCHS * number // batch
    apart = max(1, steps // 3 // KEPT)
    kept = apart * min(KEPT, steps // 3)
    # Privacy noise is all the noise: step size times (noise multiplier * C)^2 = 2 T q^2.
    noise = batch * math.sqrt(2 * TEMPERATURE / (size * number)) / CLIP
    mcmc = DPMCMC(
        SGLD(model_of(MLP, "normal"), size / number, TEMPERATURE, init_strategy=init_to_sample),
        num_warmup=steps - kept, num_samples=kept, thinning=apart, clip_norm=CLIP,
        privacy=Privacy(noise_multiplier=noise, secret_key=secret_key(seed), repetition=True),
        sampler=Poisson(batch / number),
        progress_bar=False,
    )  # fmt: skip
    mcmc.run(jax.random.key(seed), *train)
    return mcmc.get_samples(), mcmc.privacy


FITS = {"DP-SGD": (gradient_descent, "flat"), "DP-SGLD": (langevin, "normal")}


def main():
    parser = experiment_parser(__doc__, "one batch size, two steps, one seed")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    (images, labels), _ = load("MLP")
    train, held = (images[:-HELD], labels[:-HELD]), (images[-HELD:], labels[-HELD:])
    rows = []
    for name, (fit, prior) in FITS.items():
        for batch in BATCHES[1:2] if args.quick else BATCHES:
            for size in STEPS[name][: 2 if args.quick else None]:
                found = []
                for seed in range(1 if args.quick else args.seeds):
                    draws, privacy = fit(batch, size, seed, train)
                    p = predict(model_of(MLP, prior), draws, held[0])
                    found.append(
                        {"accuracy": accuracy(p, held[1]), "log score": log_score(p, held[1])}
                    )
                epsilon = privacy.at(DELTA).epsilon
                row = {"method": name, "batch": batch, "step": size, "epsilon": epsilon}
                rows.append(row | average_row(found))
                print(
                    f"{name:8} {batch:5} {size:5} epsilon {epsilon:8.2f} "
                    f"accuracy {rows[-1]['accuracy']:.4f}",
                    flush=True,
                )
                save(args, rows=rows)
    if args.figure:
        draw(args.figure, rows)


def draw(path, rows):
    """Accuracy above, epsilon below, against the step; a column for each method."""
    with panels(path, len(FITS), 2, (9.6, 6.4), sharex="col", sharey="row") as axes:
        for column, name in enumerate(FITS):
            for batch in dict.fromkeys(row["batch"] for row in rows):
                part = [r for r in rows if (r["method"], r["batch"]) == (name, batch)]
                sizes = [r["step"] for r in part]
                errors = [r["accuracy se"] or 0 for r in part]
                label = f"{batch:,} images a step"
                top, bottom = axes[0][column], axes[1][column]
                top.errorbar(sizes, [r["accuracy"] for r in part], errors, marker=".", label=label)
                bottom.plot(sizes, [r["epsilon"] for r in part], marker=".", label=label)
            top.set(title=name, ylim=(0, 1))
            bottom.set(yscale="log", xlabel="step size times N")
            log_ticks(bottom, sizes)
        axes[0, 0].set_ylabel("accuracy, held-out images")
        axes[1, 0].set_ylabel("epsilon")
        legend_below(axes[0, 0], 3)


if __name__ == "__main__":
    main()

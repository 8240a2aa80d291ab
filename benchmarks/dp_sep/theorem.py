r"""Theorem 4.1 of DP-SEP: what clipping and noise cost a Gaussian posterior.

q is the posterior and p the same after one clipped or noisy release, both normal. "Forward" is
KL(q || p), "reverse" KL(p || q), in nats. The printed proof treats as certain that eigenvalues of a
Gaussian matrix stay between two constants, which is likely at best. So the theorem is proved anew
here, and simulated releases are held against the bound and each step of the proof.

**Lemmas.** B is positive definite, P = B^-1, W = P^(1/2). E is symmetric, its upper triangle
independent N(0, s^2). S = W E W has the eigenvalues l_i; |.| is the spectral norm.

1. V = E S^2 = s^2 W (tr(P) I + P - diag(P)) W. With v = |V|, Tropp's Theorem 4.6.1 for S and -S
   says Pr(|S| >= t) <= f(t) = 2 d exp(-t^2 / 2 v).
2. phi(l) = log(1 + l) + 1 / (1 + l) - 1 and psi(l) = l - log(1 + l), over l^2, are the integrals
   over u in (0, 1) of u (1 + u l)^-2 and u (1 + u l)^-1. So they fall as l grows, and where
   |S| <= t < 1 their sums are at most c(t) |S|_F^2, with c(t) = phi(-t) / t^2 or psi(-t) / t^2.
3. A form Q = sum w_i g_i^2 with 0 <= w_i <= w and sum w_i = m has
   log E exp(u Q) <= -m / (2 w) log(1 - 2 u w), since -log(1 - 2 u x) / x increases. So
   Pr(Q >= m + 2 sqrt(m w L) + 2 w L) <= exp(-L), and by Markov Pr(Q >= a) <= m / a.
   |S|_F^2 has m = tr V, w = 2 s^2 |P|^2 (half of it for d = 1); |S x|^2 has m = x' V x,
   w = 2 s^2 |P| |W x|^2.

**Theorem.** q has the natural parameters eta, B, and p has eta + e, B + E + F. Entries of e are
independent N(0, sd1^2), and F raises the least eigenvalue to a floor k0. KL is averaged over e, the
probability is over E. Put x = W eta. With probability 1 - f(t), for every t:

- E KL <= (d max(psi(l - 1), psi(r)) + (sd1^2 tr P + r^2 |x|^2) / l) / 2 forward, and with phi and
  1 / l^2 reverse. Here l = max(1 - t, k0 / |B|), r = t + k |P|, k = max(0, k0 - (1 - t) b), and b
  is the smallest eigenvalue of B for t < 1 and else the largest.
- If t < 1 and k = 0, E KL <= (h sd1^2 tr P + c(t) |S|_F^2 + h |S x|^2) / 2, with c of psi and
  h = 1 / (1 - t) forward, c of phi and h = 1 / (1 - t)^2 reverse.

Proof: R = S + W F W has the eigenvalues r_i. 2 E KL(q || p) = sum psi(r_i) + sd1^2
tr(W (I + R)^-1 W) + x' R (I + R)^-1 R x; the reverse has phi and (I + R)^-2. Where |S| < t,
0 <= F <= k I, so |R| <= r, and I + R >= l I. Both functions fall before 0 and rise after it. Where
k = 0, R = S, and lemma 2 applies. Of F the proof uses 0 <= F <= k I and the floor alone.

**Clipping** multiplies what the sites add to a prior (eta0, L0) by a and b. In the eigenvectors u_i
of W L0 W, with r_i = b + (1 - b) times its eigenvalue and g_i = u_i' W (eta_C - L_C P eta),
KL(q || q_C) = sum (r_i - 1 - log r_i + g_i^2 / r_i) / 2 and KL(q_C || q) = sum (1 / r_i - 1 +
log r_i + g_i^2 / r_i^2) / 2.

    python benchmarks/dp_sep/theorem.py --json theorem.json --figure theorem.png

Vinaroz, Park (2022), TMLR, Theorem 4.1 and appendix A. Tropp (2015), An introduction to matrix
concentration inequalities. Laurent, Massart (2000), Lemma 1, for the tail of lemma 3.
"""

import itertools
import math
import pathlib
import sys

import numpy as np
from scipy import integrate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common import experiment_parser, write

# dim, noise on the linear parameter, noise on the precision
NOISES = [(1, 0.1, 0.05), (2, 0.3, 0.1), (5, 0.1, 0.02), (5, 0, 0.06), (5, 0.2, 0), (10, 0.1, 0.03)]
REPAIRS = [(0.5, 0.2), (1.0, 0.5), (3.0, 0.1), (0.05, 3.0)]  # noise on the precision, floor
WAYS, LEVELS, SIGMAS = ("forward", "reverse"), (0.5, 0.9, 0.99), 4.0
FLOOR = 0.01
COLUMNS = ["direction", "dim", "linear", "precision", "level", "bound", "quantile", "above"]


class Noise:
    """Lemmas 1 and 3 for the matrix ``base`` and the standard deviation ``scale``."""

    def __init__(self, base, scale):
        values, vectors = np.linalg.eigh(base)
        self.base, self.dim, self.values = base, len(base), values
        self.inverse, self.root = ((vectors * values**-p) @ vectors.T for p in (1, 0.5))
        inner = np.trace(self.inverse) * np.eye(self.dim) + self.inverse
        inner -= np.diag(np.diag(self.inverse))
        self.second = scale**2 * self.root @ inner @ self.root
        self.variance, self.norm = np.linalg.norm(self.second, 2), 1 / values[0]
        self.top = scale**2 * self.norm**2 * (1 if self.dim == 1 else 2)

    def radii(self, failure):
        """Shares of ``failure``, rising to 1, and the t at which f(t) is that share of it."""
        share = np.logspace(-4, 0, 81)
        return share, np.sqrt(2 * self.variance * np.log(2 * self.dim / (failure * share)))


def curvature(radius, function):
    """c(t); a series from above where the closed form would lose its digits."""
    near, t = np.minimum(radius, 1e-3), np.maximum(radius, 1e-3)
    if function == "phi":
        series = 1 / 2 + near * (2 / 3 + near * (3 / 4 + near))
        return np.where(radius < 1e-3, series, (np.log1p(-t) + t / (1 - t)) / t**2)
    series = 1 / 2 + near * (1 / 3 + near * (1 / 4 + near))
    return np.where(radius < 1e-3, series, -(np.log1p(-t) + t) / t**2)


def bounding_form(t, noise, eta, sd1, way):
    """Constant, mean and top weight of the second bound, a form."""
    curve = curvature(t, "psi" if way == "forward" else "phi")
    grow = (1 - t) ** (-1.0 if way == "forward" else -2.0)
    x, mean = noise.root @ eta, noise.inverse @ eta
    return (
        grow * sd1**2 * np.trace(noise.inverse) / 2,
        (curve * np.trace(noise.second) + grow * (x @ noise.second @ x)) / 2,
        noise.top * (curve + grow * (mean @ mean) / noise.norm) / 2,
    )


def repaired(t, noise, eta, sd1, floor, way):
    """The first bound."""
    shift = max(0, floor - (1 - t) * noise.values[0 if t < 1 else -1])
    r, least = t + shift / noise.values[0], max(1 - t, floor / noise.values[-1])
    ends, power = np.array([least - 1, r]), 1 if way == "forward" else 2
    logs = np.log1p(ends)
    worst = (ends - logs if way == "forward" else logs - ends / (1 + ends)).max()
    moved = sd1**2 * np.trace(noise.inverse) + r**2 * (eta @ noise.inverse @ eta)
    return (noise.dim * worst + moved / least**power) / 2


def form_quantile(failure, form):
    """What the form stays below with probability ``1 - failure``."""
    (constant, mean, top), log = form, np.log(1 / failure)
    bernstein = mean + 2 * np.sqrt(mean * top * log) + 2 * top * log
    return constant + np.minimum(mean / failure, bernstein)


def theorem_bound(base, eta, sd1, sd2, level, way="forward", floor=FLOOR):
    """What E KL stays below with probability ``level``."""
    noise = Noise(base, sd2)
    share, t = noise.radii(1 - level)
    inside = (t < 1) & (share < 1) & (floor <= (1 - t) * noise.values[0])
    form = bounding_form(t[inside], noise, eta, sd1, way)
    found = form_quantile((1 - level) * (1 - share[inside]), form)
    return found.min(initial=repaired(t[-1], noise, eta, sd1, floor, way))


def clipped_divergence(base, eta, a, b, eta0, prior):
    """Forward and reverse KL of a posterior whose sites were scaled by a and b."""
    root = Noise(base, 0).root
    share, basis = np.linalg.eigh(root @ prior @ root)
    r = b + (1 - b) * share
    moved = a * eta + (1 - a) * eta0 - (b * base + (1 - b) * prior) @ root @ root @ eta
    g = np.square(basis.T @ root @ moved)
    return ((r - 1 - np.log(r) + g / r) / 2).sum(), ((1 / r - 1 + np.log(r) + g / r**2) / 2).sum()


# Simulated releases


def definite(dim, rng):
    factor = rng.normal(size=(dim, dim))
    return np.eye(dim) + factor @ factor.T / dim


def symmetric(rng, draws, dim, scale):
    entries = scale * rng.normal(size=(draws, dim, dim))
    return np.triu(entries) + np.swapaxes(np.triu(entries, 1), 1, 2)


def divergences(q, p, way):
    """KL of many pairs of mean and covariance, by definition; infinite where there is none."""
    pair = (q, p) if way == "forward" else (p, q)
    (mean, cov), (other, wide) = pair
    shift, (cov, wide) = other - mean, np.broadcast_arrays(cov, wide)
    shift = np.broadcast_to(shift, cov.shape[:2])
    fine = np.minimum(np.linalg.eigvalsh(cov)[:, 0], np.linalg.eigvalsh(wide)[:, 0]) > 0
    cov, wide, shift = cov[fine], wide[fine], shift[fine]
    inverse = np.linalg.inv(wide)
    logs = np.linalg.slogdet(wide)[1] - np.linalg.slogdet(cov)[1]
    square = np.einsum("ni,nij,nj->n", shift, inverse, shift)
    found = np.full(len(fine), math.inf)
    found[fine] = (logs + np.einsum("nij,nji->n", inverse, cov) - cov.shape[-1] + square) / 2
    return found


def repair(noisy, floor, each):
    """Raises each eigenvalue below the floor to it, or all eigenvalues by one number."""
    values, vectors = np.linalg.eigh(noisy)
    raised = np.maximum(values, floor) if each else values + np.maximum(0, floor - values[:, :1])
    return np.einsum("nij,nj,nkj->nik", vectors, raised, vectors)


def simulated(base, eta, sd1, sd2, way, rng, draws, floor=FLOOR, each=False):
    """KL averaged over e, exactly (of e it holds a square alone), for many E."""
    noisy = repair(base + symmetric(rng, draws, len(base), sd2), floor, each)
    cov, wide = np.linalg.inv(base)[None], np.linalg.inv(noisy)
    spread = wide if way == "forward" else np.einsum("nij,jk,nkl->nil", wide, base, wide)
    found = divergences((cov @ eta, cov), (wide @ eta, wide), way)
    return found + sd1**2 * np.einsum("nii->n", spread) / 2


def held(values, bound, level):
    """No more values lie above than are allowed, but for some standard errors."""
    error = math.sqrt(level * (1 - level) / len(values))
    return np.mean(values > bound * (1 + 1e-9)) <= 1 - level + SIGMAS * error


# Checks: what is checked, and whether it is so


def divergence(mean, covariance, other_mean, other_covariance):
    """KL(N(mean, covariance) || N(other_mean, other_covariance)), in nats."""
    inverse, off = np.linalg.inv(other_covariance), other_mean - mean
    logs = np.linalg.slogdet(other_covariance)[1] - np.linalg.slogdet(covariance)[1]
    return (np.trace(inverse @ covariance) + off @ inverse @ off - len(off) + logs) / 2


def check_clipping():
    rng, dim = np.random.default_rng(3), 4
    for prior in (np.zeros((dim, dim)), np.diag([0, 0.5, 1, 2])):
        for a, b in ((0.3, 0.3), (0.3, 0.8), (1, 0.01), (1e-3, 1)):
            eta0 = rng.normal(size=dim) * prior.any()
            eta, base = eta0 + rng.normal(size=dim), prior + definite(dim, rng) - 0.1 * np.eye(dim)
            clipped = np.linalg.inv(b * base + (1 - b) * prior)
            q = np.linalg.solve(base, eta), np.linalg.inv(base)
            p = clipped @ (a * eta + (1 - a) * eta0), clipped
            expected = divergence(*q, *p), divergence(*p, *q)
            found = clipped_divergence(base, eta, a, b, eta0, prior)
            yield "clipping: closed form is the divergence", np.allclose(found, expected, 1e-8)
            if a == b and not prior.any():
                same = dim / 2 * (b - 1 - math.log(b)), dim / 2 * (1 / b - 1 + math.log(b))
                yield "clipping by one factor: whatever the posterior", np.allclose(found, same)


def check_lemmas(draws):
    rng = np.random.default_rng(5)
    for dim in (1, 2, 5):
        noise, unit = Noise(definite(dim, rng), 0.3), np.eye(dim)
        basis = [np.outer(i, j) for n, i in enumerate(unit) for j in unit[n:]]
        series = np.array([0.3 * noise.root @ np.maximum(h, h.T) @ noise.root for h in basis])
        second = np.einsum("nij,njk->ik", series, series)
        yield "lemma 1: V is that of the series", np.allclose(noise.second, second, 1e-10)
        weights = np.linalg.eigvalsh(np.einsum("nij,mij->nm", series, series))
        least = weights.max() <= noise.top * (1 + 1e-12) <= 4 * weights.max()
        same = np.isclose(weights.sum(), np.trace(noise.second))
        yield "lemma 3: m and w are those of the series", least and same
    for name, power in (("phi", 2), ("psi", 1)):
        for t in (0, 1e-6, 9e-4, 2e-3, 0.1, 0.9, 0.999):
            exact = integrate.quad(lambda u, t=t, p=power: u * (1 - u * t) ** -p, 0, 1)[0]
            yield "lemma 2: c(t) is its integral", np.isclose(curvature(t, name), exact, 1e-8)
    weights = np.array([1, 0.5, 0.5, 0.1, 0.1])
    values, form = rng.normal(size=(50 * draws, 5)) ** 2 @ weights, (0.0, weights.sum(), 1.0)
    for failure in (0.5, 0.1, 0.01):
        bound = form_quantile(failure, form)
        yield "lemma 3: tail of a form holds", held(values, bound, 1 - failure)
        yield "lemma 3: within 3 times", bound < 3 * np.quantile(values, 1 - failure)


def check_proof(way, draws):
    rng, t = np.random.default_rng(19), np.array([0.4])
    base, eta = definite(3, rng), rng.normal(size=3)
    values = simulated(base, eta, 2e-3, 2e-3, way, rng, draws)
    constant, mean, _ = bounding_form(0 * t, Noise(base, 2e-3), eta, 2e-3, way)
    error = values.std() / draws**0.5
    near = abs(values.mean() - constant[0] - mean[0]) < SIGMAS * error
    yield "little noise: the form has the mean of KL", near and error < 0.02 * values.mean()
    # E = -t B has |S| = t, and is the worst case of the proof.
    still, moving, small = Noise(base, 0), Noise(base, 0.1), np.linalg.inv((1 - t[0]) * base)
    q, p = (still.inverse @ eta, still.inverse[None]), (small @ eta, small[None])
    exact, first = divergences(q, p, way), repaired(t[0], still, eta, 0, 1e-3, way)
    constant, mean, _ = bounding_form(t, moving, 0 * eta, 1, way)
    curve, grow = mean / np.trace(moving.second), constant / np.trace(still.inverse)
    second = curve * 3 * t**2 + grow * t**2 * (eta @ still.inverse @ eta)
    yield "both bounds are reached at |S| = t", np.allclose([first, second[0]], exact)
    power = 1 if way == "forward" else 2
    yield "what e adds at |S| = t", np.isclose(grow[0], 0.5 / (1 - t[0]) ** power)


def check_average(way, draws):
    rng = np.random.default_rng(13)
    base, eta = definite(2, rng), rng.normal(size=2)
    exact = simulated(base, eta, 0.5, 0.3, way, np.random.default_rng(14), 1, 0.1)[0]
    noisy = repair(base + symmetric(np.random.default_rng(14), 1, 2, 0.3), 0.1, False)
    cov, wide = np.linalg.inv(base)[None], np.linalg.inv(noisy)
    means = (eta + 0.5 * rng.normal(size=(10 * draws, 2))) @ wide[0]
    values = divergences((cov @ eta, cov), (means, np.repeat(wide, len(means), 0)), way)
    error = values.std() / len(values) ** 0.5
    yield "average over e is its closed form", abs(values.mean() - exact) < SIGMAS * error


def check_bound(way, draws, rows):
    for dim, sd1, sd2 in NOISES:
        rng = np.random.default_rng([15, dim])
        base, eta = definite(dim, rng), rng.normal(size=dim)
        values = simulated(base, eta, sd1, sd2, way, rng, draws)
        for level in LEVELS:
            bound = theorem_bound(base, eta, sd1, sd2, level, way)
            quantile = np.quantile(values, level)
            above = np.mean(values > bound * (1 + 1e-9))
            numbers = way, dim, sd1, sd2, level, float(bound), float(quantile), float(above)
            rows.append(dict(zip(COLUMNS, numbers, strict=True)))
            yield "theorem: the bound holds", held(values, bound, level)
            yield "theorem: within 8 times of the quantile", bound < 8 * quantile
            yield "theorem: a tenth of the bound fails", not held(values, bound / 10, level)


def check_repairs(way, draws):
    for (sd2, floor), each in itertools.product(REPAIRS, (False, True)):
        rng = np.random.default_rng(16)
        base, eta = definite(3, rng), rng.normal(size=3)
        values = simulated(base, eta, 0.1, sd2, way, rng, draws, floor, each)
        noisy = base + symmetric(np.random.default_rng(17), draws, 3, sd2)
        often = np.mean(np.linalg.eigvalsh(noisy)[:, 0] < floor) > 0.03
        for level in (0.05, 0.5, 0.99):
            bound = theorem_bound(base, eta, 0.1, sd2, level, way, floor)
            fine = often and math.isfinite(bound) and held(values, bound, level)
            yield "theorem: holds where the precision is repaired", fine


def check_vanishing(way):
    base, eta = definite(4, np.random.default_rng(18)), np.ones(4)
    scales = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0)
    bounds = [theorem_bound(base, eta, scale, scale, 0.95, way) for scale in scales]
    yield (
        "theorem: the bound vanishes with the noise",
        bounds[-1] == 0 and (np.diff(bounds) < 0).all(),
    )
    yield "theorem: as its square", 50 < bounds[2] / bounds[4] < 200


def main():
    args = experiment_parser(__doc__, "400 draws").parse_args()
    draws, rows, found = 400 if args.quick else 4000, [], {}
    checks = [check_clipping(), check_lemmas(draws)]
    for way in WAYS:
        checks += [check_proof(way, draws), check_average(way, draws), check_vanishing(way)]
        checks += [check_bound(way, draws, rows), check_repairs(way, draws)]
    for name, fine in itertools.chain(*checks):
        found.setdefault(name, []).append(bool(fine))
    for name, fine in found.items():
        print(f"{'yes' if all(fine) else 'NO':3} {sum(fine):3} of {len(fine):3}  {name}")
    write(args, {"rows": rows})
    if not all(map(all, found.values())):
        raise SystemExit("A check failed.")


if __name__ == "__main__":
    main()

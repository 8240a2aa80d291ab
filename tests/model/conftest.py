"""What several files of this folder need."""

import pytest

from numpyro_dp.run.session import Session


@pytest.fixture
def no_run(monkeypatch):
    """Refusals come before a run begins."""

    def fail(*_, **__):
        pytest.fail("a run has begun")

    monkeypatch.setattr(Session, "run", fail)

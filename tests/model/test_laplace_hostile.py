"""DPLaplace refuses the models of the hostile table, for the same reasons as DPSVI."""

from __future__ import annotations

from typing import Any

import pytest
from flat import grouped
from hostile import HOSTILE, KEY

from numpyro_dp import DPSVI, DPLaplace
from numpyro_dp.run.session import Session

# One row for each way of a record around its argument that does not need a guide or an optimiser.
NAMES = (
    "a_default_argument", "a_jitted_helper_standardises", "the_body_of_a_scan",
    "a_branch_of_cond", "the_rule_of_a_custom_derivative", "a_rule_for_batches_that_mixes_records",
    "a_partial_model", "records_by_condition", "many_small_captured_arrays",
    "a_column_of_two_values_as_many_arrays", "a_pure_callback_in_the_model", "a_list_of_rows",
    "a_table_of_patients", "a_gram_matrix", "a_panel_with_time_first",
    "records_written_out_by_a_loop_over_a_list",
)  # fmt: skip
NOT_OF_LAPLACE = ("guide", "optim", "estimator", "clip_norm", "sampler", "num_steps")
ROWS = {row.name: row for row in HOSTILE}


@pytest.mark.table
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_model_is_refused_by_laplace_too(name: str, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("a run has begun")

    monkeypatch.setattr(Session, "run", fail)
    row = ROWS[name]
    call = row.build()
    assert call.driver is DPSVI
    kept = {name: value for name, value in call.options.items() if name not in NOT_OF_LAPLACE}
    with pytest.raises((ValueError, TypeError)) as error:
        DPLaplace(**grouped(**kept)).run(KEY, *call.args, **call.kwargs)
    for part in row.parts or ():
        assert part in str(error.value)

"""The budget of a comparison."""

from dataclasses import replace
from pathlib import Path

import pytest

from diffusion_mp_experiments.compare.plan import (
    EPOCHS,
    SPLITS,
    TRIALS,
    Cost,
    Plan,
    grown,
    plan,
)
from diffusion_mp_experiments.packaged import configs_folder
from diffusion_mp_experiments.reproduce.table import Table, load_table


def table(tuning: int | str = 1) -> Table:
    made = load_table(configs_folder() / "compare" / "nodes")
    rows = made.named(["constant", "gcn", "transformer"])
    return replace(made, rows=rows, baselines=[], tuning=tuning)


COSTS = {"constant": Cost(0.1), "gcn": Cost(0.1, 0.02), "transformer": Cost(0.1, 0.1)}


def seconds(planned: Plan, tuning: int | str = 1) -> float:
    """Return what a plan takes by its own costs."""
    total = 0.0
    for name, cost in COSTS.items():
        if name not in planned.left_out:
            searched = 0 if name == "constant" else planned.trials
            runs = (
                searched * (planned.splits if tuning == "nested" else 1)
                + planned.splits
            )
            total += runs * cost.of(planned.epochs)
    return total


@pytest.mark.parametrize("tuning", [1, "nested"])
@pytest.mark.parametrize("minutes", [1, 5, 60])
def test_a_plan_fits_into_its_time_and_uses_it(minutes: int, tuning: int | str) -> None:
    planned = plan(table(tuning), COSTS, 60 * minutes, 10)
    assert not planned.left_out
    assert seconds(planned, tuning) <= 0.85 * 60 * minutes
    largest = (planned.splits, planned.trials, planned.epochs) == (
        10,
        TRIALS[-1],
        EPOCHS[-1],
    )
    assert largest or seconds(planned, tuning) > 0.2 * 60 * minutes


def test_more_time_never_leads_to_less() -> None:
    budgets = [plan(table(), COSTS, time, 10) for time in (60, 120, 600, 6000)]
    worth = [b.splits * b.trials * b.epochs**2 for b in budgets]
    assert worth == sorted(worth)


def test_the_slowest_row_is_left_out_first_and_the_reason_is_given() -> None:
    costs = {**COSTS, "transformer": Cost(0.1, 30.0)}
    planned = plan(table(), costs, 60, 10)
    assert list(planned.left_out) == ["transformer"]
    assert "seconds of computing time" in planned.left_out["transformer"]
    assert [row.name for row in planned.applied(table()).rows] == ["constant", "gcn"]


def test_a_row_that_takes_most_of_the_time_is_left_out_where_the_others_lack_epochs() -> (
    None
):
    made = load_table(configs_folder() / "compare" / "nodes")
    rows = replace(made, baselines=[], tuning="nested")
    costs = {row.name: Cost(0.1, 0.01) for row in rows.rows}
    costs["sfi"] = Cost(0.1, 2.0)
    planned = plan(rows, costs, 300, 10)
    assert list(planned.left_out) == ["sfi"]
    assert "% of all, and leave too little" in planned.left_out["sfi"]
    assert planned.waiting == {"sfi": costs["sfi"].of(planned.epochs)}
    assert planned.epochs >= 100
    # With time enough for all it stays, as where no other row would gain.
    assert not plan(rows, costs, 20_000, 10).left_out
    alike = {row.name: Cost(0.1, 1.0) for row in rows.rows}
    assert plan(rows, alike, 4000, 3).epochs < 100
    assert not plan(rows, alike, 4000, 3).left_out


def test_an_epoch_of_many_steps_leaves_fewer_rows_out() -> None:
    costs = {"constant": Cost(1.0), "gcn": Cost(5.0, 10.0)}
    assert "gcn" in plan(table(), costs, 200, 1).left_out
    planned = plan(table(), costs, 200, 1, (2, *EPOCHS))
    assert not planned.left_out
    assert planned.epochs == 2


def test_there_are_no_more_splits_than_the_data_have() -> None:
    assert plan(table(), COSTS, 1e6, 1).splits == 1
    assert plan(table(), COSTS, 1e6, 4).splits == 4


def test_no_row_fits() -> None:
    with pytest.raises(ValueError, match="minutes must be enough for a row"):
        plan(table(), {"gcn": Cost(1e6, 1e6)}, 60, 10)


LEFT = Plan(
    3, 2, 100, {"transformer": "too slow", "sfi": "all pairs"}, {"transformer": 4.0}
)
TIMES = {"constant": 0.1, "gcn": 1.0}


def test_a_finished_plan_takes_rows_back_before_it_grows() -> None:
    # Of two trials on three splits the row trains nine times.
    almost = grown(LEFT, table("nested"), TIMES, 9 * 4.0, 10)
    assert "transformer" in almost.left_out
    back = grown(LEFT, table("nested"), TIMES, 9 * 4.0 / 0.85 + 0.1, 10)
    assert back == replace(LEFT, left_out={"sfi": "all pairs"}, waiting={})
    # A row that was not measured yet costs as much as was planned.
    more = grown(LEFT, table("nested"), TIMES, 300, 10)
    assert more.splits * more.trials > 6
    assert more.left_out == {"sfi": "all pairs"}


def test_a_finished_plan_grows_by_what_fits_and_keeps_its_epochs() -> None:
    planned = replace(LEFT, left_out={}, waiting={})
    times = {**TIMES, "transformer": 4.0}
    for seconds in (0, 10, 40, 100, 400, 1e4):
        larger = grown(planned, table("nested"), times, seconds, 10)
        before, after = planned.splits * planned.trials, larger.splits * larger.trials
        assert (seconds >= 40) == (after > before)
        assert larger.epochs == 100
        assert larger.splits >= 3
        assert larger.trials >= 2
        # Settings of every split, and again the best ones of the splits that were there.
        again = 3 if larger.trials > 2 else 0
        runs = larger.splits * (larger.trials + 1) - 9 + again
        constant = larger.splits - 3
        assert 5.0 * runs + 0.1 * constant <= 0.85 * seconds + 1e-9 or larger == planned
    assert grown(planned, table("nested"), times, 1e4, 3).splits == 3


def test_a_plan_is_kept(tmp_path: Path) -> None:
    planned = Plan(SPLITS[0], TRIALS[0], EPOCHS[0], {"gcn": "too slow"})
    planned.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == planned
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no plan"):
        Plan.load(tmp_path / "plan.json")

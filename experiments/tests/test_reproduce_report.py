"""Means, paired differences and the page from lines that are known, and the table that `diffusion-mp` makes."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from diffusion_mp_experiments.packaged import configs_folder
from diffusion_mp_experiments.reproduce import command, figures
from diffusion_mp_experiments.reproduce.report import (
    card,
    lines,
    markdown,
    section,
    summary,
)
from diffusion_mp_experiments.reproduce.table import (
    Sweep,
    load_table,
    parsed,
    write_records,
)
from reproduce_tables import write_table
from subrun import run_program


def run(row, split, test, seed=0, **more):
    actual = {
        "kind": "run",
        "row": row,
        "split": split,
        "seed": seed,
        "test": test,
        "validation": 0.5,
        "seconds": 30.0,
    }
    return {**actual, "ablated": {}, **more}


def search(row, trials=3):
    tried = [
        {"settings": {"lr": k / 3, "model.conv": "gcn"}, "value": k / 4 if k else None}
        for k in range(trials)
    ]
    return {
        "kind": "search",
        "row": row,
        "split": None,
        "trials": tried,
        "seconds": 60.0,
    }


# In another order than the table's, and than each other's.
RECORDS = [
    run("difformer", 1, 0.8, ablated={"identity": 0.25, "uniform": None}),
    run("difformer", 0, 0.6, ablated={"identity": 0.75, "uniform": None}),
    search("difformer"),
    run("gcn", 0, 0.4, seed=1),
    run("gcn", 0, 0.6),
    run("gcn", 1, 0.4),
    run("gcn", 1, None, seed=1),
    search("gcn"),
]


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def table(tmp_path):
    return load_table(write_table(tmp_path / "configs"))


def test_rows_are_means_over_splits_and_differences_are_taken_split_by_split(table):
    gcn, difformer = lines(table, RECORDS)
    assert (gcn.row, difformer.row) == ("gcn", "difformer")
    # Splits of the GCN: (60 + 40) / 2 and (40 + 0) / 2, for what diverged counts as nothing right.
    assert gcn.score == pytest.approx((35, 15 * math.sqrt(2)))
    assert difformer.score == pytest.approx((70, 10 * math.sqrt(2)))
    assert difformer.differences == {"gcn": pytest.approx((35, 25))}
    assert not gcn.differences
    assert difformer.ablated == {"identity": 50.0}
    assert (gcn.splits, gcn.trials, gcn.seconds, gcn.validation) == (2, 3, 180.0, 50.0)
    text = markdown(table, [gcn, difformer])
    assert (
        "|  | accuracy in % | ahead of GCN | identity | validation | trials |" in text
    )
    assert "| GCN | 35.0 ± 21.2 |  |  | 50.0 | 3 |" in text
    assert "| DIFFormer-s | 70.0 ± 14.1 | +35.0 ± 25.0 | 50.0 | 50.0 | 3 |" in text
    text = section(table, lines(table, RECORDS), "Some notes.")
    assert text.startswith("# Digits\n\nSome notes.\n")
    assert "2 splits, tuned on 1 other split.\nAt most 6 epochs" in text
    assert "time: 0.1 core hours.\nNot computed yet: constant; labels.\n" in text


def test_the_overview_has_the_rows_that_are_best_on_validation(table, tmp_path):
    def line_of(table, **validation):
        rows = lines(
            table, [run(row, 0, 0.5, validation=v) for row, v in validation.items()]
        )
        return summary([(table, rows)], "results", best=2).splitlines()[-1]

    link = "| [Digits](results/digits.md) | accuracy in % | 50.0 |"
    ranked = "DIFFormer-s: 50.0 | GCN: 50.0 |"
    assert line_of(table, gcn=0.7, difformer=0.8) == f"{link} {ranked}"
    assert line_of(table, gcn=0.7) == f"{link} GCN: 50.0 |  |"
    metric = {"name": "mse", "mode": "min", "title": "MSE", "scale": 1.0}
    errors = load_table(write_table(tmp_path / "errors", metric=metric))
    assert line_of(errors, gcn=0.8, difformer=0.7).endswith(
        "| MSE | 0.500 | DIFFormer-s: 0.500 | GCN: 0.500 |"
    )
    assert line_of(errors, difformer=0.7).endswith("| MSE |  | DIFFormer-s: 0.500 |  |")
    several = replace(table, sweep=Sweep("data.name", ["iris", "wine"], "set"))
    rows = lines(table, [run("gcn", 0, 0.5, validation=0.5)])
    text = summary([(several, rows)], "results", best=2)
    assert text.endswith("| 2 sets of data, see the page |  |")


def test_less_may_be_better_and_seeds_are_compared_where_there_is_one_split(tmp_path):
    metric = {"name": "mse", "mode": "min", "title": "MSE", "scale": 1.0}
    table = load_table(write_table(tmp_path, metric=metric))
    gcn, difformer = lines(table, [run("gcn", 0, 0.75), run("difformer", 0, 0.5)])
    text = markdown(table, [gcn, difformer])
    assert "| DIFFormer-s | 0.500 | +0.250 | 0.500 | 0 |" in text
    table = load_table(write_table(tmp_path, splits=1, seeds=2))
    tests = {
        ("gcn", 0): 0.5,
        ("gcn", 1): 0.25,
        ("difformer", 0): 0.5,
        ("difformer", 1): 0.75,
    }
    gcn, difformer = lines(
        table, [run(row, 0, test, seed) for (row, seed), test in tests.items()]
    )
    assert gcn.score == pytest.approx((37.5, 12.5 * math.sqrt(2)))
    assert difformer.differences == {"gcn": pytest.approx((25, 25))}
    assert "1 split, 2 seeds on it" in section(table, [gcn, difformer])


@pytest.mark.usefixtures("table")
def test_the_page_takes_over_what_was_made_and_is_written_again_from_it(
    tmp_path, typed, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    built = Path("made")
    line = "results --configs configs"
    Path("docs").mkdir()
    assert "There are no results in" in typed(line, code=2)
    for name in ("digits", "digits-quick"):  # what was made quickly is no result
        (built / name).mkdir(parents=True)
        write_records(RECORDS, built / name / "results.jsonl")
    typed(f"{line} --made made")
    overview = Path("docs/results.md")
    page = Path("docs/results/digits.md")
    results = Path("results/digits.jsonl")
    assert [*Path("results").iterdir()] == [results]
    for picture in ("results", "results-digits"):
        assert is_picture(Path(f"docs/images/{picture}.png"))
    written = overview.read_text()
    assert written.startswith(
        "# Results\n\n![Difference from the tuned GCN for every kind of model"
    )
    assert "| [Digits](results/digits.md) | accuracy in % | 35.0 ± 21.2 |" in written
    before = page.read_text()
    assert before.startswith("# Digits\n\n[How to read this page](../results.md#")
    assert "| DIFFormer-s | 70.0 ± 14.1 |" in before
    assert "](../images/results-digits.png)" in before
    assert "](../images/results-digits-search.png)" in before
    assert "- GCN: lr 0.667, model.conv gcn" in before
    for path in (overview, page):
        path.unlink()
    # Where text is ASCII by default.
    settings = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = (
        "from diffusion_mp_experiments.train.cli import main; raise SystemExit(main())"
    )
    run_program("-c", program, *line.split(), **settings)
    assert page.read_text("utf-8") == before
    assert overview.read_text("utf-8") == written
    said = typed(f"{line} --made none", code=2)
    assert "No folder below none has results.jsonl" in said
    for content, sentence in {
        '{"row": "gcn"}\n': "line 1 holds no result with kind row seconds",
        "": "digits.jsonl has no run of a row of the table 'digits'",
    }.items():
        results.write_text(content)
        assert sentence in typed(line, code=2)


@pytest.mark.usefixtures("table")
def test_the_page_says_with_how_much_of_everything_its_results_were_made(
    tmp_path, typed, monkeypatch
):
    """`--epochs 2` and its like are options of the results, which table.yaml does not know."""
    monkeypatch.chdir(tmp_path)
    options = "--splits=1 --trials=1 --epochs=2 --jobs=1 --only gcn labels"
    typed(f"reproduce digits --configs configs --out made {options}")
    said = "1 split, with fixed settings.\nAt most 2 epochs, stopped after 4"
    assert said in Path("made/digits/report.md").read_text()
    line = "results --configs configs --results kept --docs pages"
    for options in ("--made made", ""):  # then from the file in kept alone
        typed(f"{line} {options}")
        assert said in Path("pages/results/digits.md").read_text()
    path = Path("kept/digits.jsonl")
    path.write_text(path.read_text().replace('"epochs": 2, "pat', '"epochs": 0, "pat'))
    sentence = "digits.jsonl: epochs must be at least 1; got 0"
    assert sentence in typed(line, code=2)


def test_an_error_that_diverged_has_a_place_in_the_table_and_in_the_pictures(tmp_path):
    metric = {"name": "mse", "mode": "min", "title": "MSE", "scale": 1.0}
    write_table(tmp_path / "configs", metric=metric)
    (tmp_path / "results").mkdir()
    write_records(RECORDS, tmp_path / "results" / "digits.jsonl")
    page = command.write_page(
        *(tmp_path / name for name in ("configs", "results", "docs"))
    )
    assert page == tmp_path / "docs" / "results.md"
    of_table = tmp_path / "docs" / "results" / "digits.md"
    assert "| GCN | inf |" in of_table.read_text("utf-8")


def test_a_model_that_never_had_a_score_has_a_card(table):
    record = run(
        "gcn",
        0,
        None,
        validation=None,
        epoch=0,
        settings={},
        config="c0ffee",
        data="da7a",
        versions={},
    )
    text = card(table, record, "--save zoo --quick")
    assert "| accuracy in %, test | none |" in text
    assert "| accuracy in %, validation | none, in epoch 0 |" in text
    assert "`diffusion-mp reproduce digits --only gcn --save zoo --quick`" in text


def test_every_model_is_of_a_kind_that_the_picture_of_all_tables_shows():
    tables = [load_table(path.parent) for path in configs_folder().glob("*/table.yaml")]
    titles = {
        row.title for table in tables if table.sweep is None for row in table.rows
    }
    begins = tuple(begin for all_ in figures._KINDS.values() for begin in all_)
    others = {title for title in titles if not f"{title},".startswith(begins)}
    forecasts = {
        "zero",
        "last value",
        "own mean",
        "mean of the lags",
        "mean of the lags and common departure",
    }
    assert others == {"constant", "AR ridge"} | forecasts


ROWS = [
    "certified",
    "certified_identity",
    "difformer_s",
    "label_propagation_pixels",
    "logistic_regression",
]


@pytest.mark.parametrize("options", [[], ["--splits=3"]])
def test_without_a_subcommand_it_is_the_table_of_the_digits(
    options, monkeypatch, typed
):
    asked = []
    monkeypatch.setattr(command, "run_reproduce", asked.append)
    typed("", *options)
    assert asked == [["digits", *options]]


@pytest.mark.unwatched
def test_the_report_has_differences_and_pictures(tmp_path, typed):
    said = typed(f"--quick --epochs=2 --jobs=1 --out {tmp_path} --only", *ROWS)
    folder = tmp_path / "digits-quick"
    report = (folder / "report.md").read_text()
    for text in (said, report):
        assert "| certified, attention |" in text
        assert "ahead of certified, attention | identity | uniform |" in text
    assert (
        "*attention := identity*: the same networks" in report
    )  # notes.md of that table
    for ending in ("", "-energies", "-search"):
        assert f"](images/results-digits{ending}.png)" in report
        assert is_picture(folder / "images" / f"results-digits{ending}.png")
    path = folder / "results.jsonl"
    lines = parsed(path.read_bytes(), path)
    actual = {line["row"]: line for line in lines if line["kind"] == "run"}
    assert set(actual) == set(ROWS)
    energies = actual["certified"]["states"]["F"]
    assert len(energies) == 31
    assert all(after < before for before, after in pairwise(energies))
    assert set(actual["difformer_s"]["ablated"]) == {"identity", "uniform"}
    assert not any(actual[row]["ablated"] for row in ROWS if row != "difformer_s")

"""Tables and configurations are found by their names from any folder; a user's own come first."""

from pathlib import Path

import pytest
import yaml

from diffusion_mp_experiments.packaged import configs_folder
from diffusion_mp_experiments.reproduce.table import find_table, load_table
from reproduce_tables import ROWS, write_table


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_command_runs_in_an_empty_folder_and_writes_there(tmp_path, typed):
    said = typed("--quick --only label_propagation --jobs=1")
    assert "runs/reproduce/digits-quick/report.md" in said
    assert f"in the folder {tmp_path}" in said
    assert str(configs_folder() / "digits") in said
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_clone_has_the_same_files_at_its_top():
    clone = Path(__file__).resolve().parents[2] / "configs"
    assert clone.resolve() == configs_folder().resolve()


def test_own_tables_come_first_and_may_be_like_those_of_the_package(tmp_path):
    write_table(tmp_path, title="Mine")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "table.yaml").write_text(
        "like: zoo_digits\ntitle: More\nsplits: 3\n"
    )
    assert load_table(find_table("digits", tmp_path)).title == "Mine"
    assert find_table("cora", tmp_path) == configs_folder() / "cora"
    more = load_table(find_table("more", tmp_path))
    assert (more.title, more.splits) == ("More", 3)
    assert [row.name for row in more.rows] == ["digits"]


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("", ""),
        ("--configs=none", "in none are [] and "),
        ("--configs=.", "in . are ['mine'] and "),
    ],
)
def test_a_table_that_is_nowhere_is_a_sentence_with_those_that_are(
    option, names, tmp_path, typed
):
    write_table(tmp_path, "mine")
    said = typed(f"reproduce letters {option}", code=2)
    others = f"tables {names}in {configs_folder()} are ['actor', "
    assert f"There is no table 'letters': {others}" in said


def test_a_configuration_is_a_file_or_a_name(typed):
    content = (configs_folder() / "digits_certified.yaml").read_text()
    Path("own.yaml").write_text(content)
    for config in ("digits_certified", "own.yaml"):
        printed = yaml.safe_load(typed(f"fit --config {config} --print_config"))
        assert printed["name"] == "digits_certified"
    for config, way_out in {
        "configs/digits_certified.yaml": "Give --config digits_certified.",
        "nothing": "Give the path of a file, or one of citeseer_certified, ",
    }.items():
        must = "--config must be a YAML file, or the name of a configuration"
        said = typed(f"fit --config {config}", code=2)
        assert f"{must}; got {config}. {way_out}" in said


def test_a_table_of_users_own_models_is_made_and_taken_over(tmp_path, typed):
    """Models without in_channels, and of (x, edge_index); --save refuses what is no model of the library."""
    folder = write_table(
        tmp_path / "own",
        "mine",
        rows=list(ROWS),
        splits=1,
        trials=1,
        epochs=1,
        search={},
        baselines=[],
    )
    mine = {
        "class_path": "own_parts.OtherNames",
        "init_args": {"features": 64, "classes": 10},
    }
    (folder / "gcn.yaml").write_text(yaml.safe_dump({"title": "Own", "model": mine}))
    line = "reproduce mine --configs own --jobs=1 --only gcn"
    said = typed(f"{line} --save saved", code=2)
    assert "--save writes models of diffusion_mp; got OtherNames." in said
    command = "results --made runs/reproduce --configs own"
    assert f": diffusion-mp {command}\n" in typed(line)
    typed(command)
    assert "| Own |" in (tmp_path / "docs" / "results" / "mine.md").read_text()

"""Tables and configurations are found by their names from any folder; a user's own come first."""

from pathlib import Path

import pytest
import yaml

from diffusion_mp_experiments.packaged import configs_folder
from diffusion_mp_experiments.reproduce.table import find_table, load_table
from diffusion_mp_experiments.train.cli import main
from reproduce_tables import ROWS, write_table


def test_the_command_runs_in_an_empty_folder_and_writes_there(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["--quick", "--only", "label_propagation", "--jobs=1"]) == 0
    said = capsys.readouterr().out
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
    assert (more.title, more.splits, [row.name for row in more.rows]) == (
        "More",
        3,
        ["digits"],
    )


@pytest.mark.parametrize("options", [[], ["--configs=none"], ["--configs=."]])
def test_a_table_that_is_nowhere_is_a_sentence_with_those_that_are(
    options, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path, "mine")
    assert main(["reproduce", "letters", *options]) == 2
    said = capsys.readouterr().err
    assert "There is no table 'letters'" in said
    assert "are ['actor', " in said
    assert ("in . are ['mine']" in said) == (options == ["--configs=."])
    assert ("in none are []" in said) == (options == ["--configs=none"])


@pytest.mark.parametrize(
    "given",
    ["digits_certified", "configs/digits_certified.yaml", "nothing", "own.yaml"],
)
def test_a_configuration_is_a_file_or_a_name(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(
        (configs_folder() / "digits_certified.yaml").read_text()
    )
    if given in ("digits_certified", "own.yaml"):
        with pytest.raises(SystemExit, match="0"):
            main(["fit", "--config", given, "--print_config"])
        assert yaml.safe_load(capsys.readouterr().out)["name"] == "digits_certified"
        return
    assert main(["fit", "--config", given]) == 2
    said = capsys.readouterr().err
    assert (
        f"--config must be a YAML file, or the name of a configuration; got {given}. Give "
        in said
    )
    assert (
        "Give --config digits_certified." in said
        or "or one of citeseer_certified, " in said
    )


def test_a_table_of_users_own_models_is_made_and_taken_over(
    tmp_path, monkeypatch, capsys
):
    """Models without in_channels, and of (x, edge_index); --save refuses what is no model of the library."""
    monkeypatch.chdir(tmp_path)
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
    own = {
        "class_path": "own_models.Features",
        "init_args": {"features": 64, "classes": 10},
    }
    (folder / "gcn.yaml").write_text(yaml.safe_dump({"title": "Own", "model": own}))
    words = ["reproduce", "mine", "--configs", "own", "--jobs=1", "--only", "gcn"]
    assert main([*words, "--save", "saved"]) == 2
    assert (
        "--save writes models of diffusion_mp; got Features." in capsys.readouterr().err
    )
    assert main(words) == 0
    command = capsys.readouterr().out.splitlines()[-1].rpartition(": diffusion-mp ")[2]
    assert command == "results --made runs/reproduce --configs own"
    assert main(command.split()) == 0
    assert "| Own |" in (tmp_path / "docs" / "results.md").read_text()

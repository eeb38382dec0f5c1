"""The Cora example, as a user starts it."""

import pytest

pytestmark = pytest.mark.unwatched


def test_wrong_root_says_what_to_do(cora, tmp_path, capsys):
    assert cora.main(["--root", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    for part in ("missing ind.cora.x", str(tmp_path / "Cora" / "raw"), "--download", "github.com/kimiyoung/planetoid"):
        assert part in message


@pytest.mark.data
@pytest.mark.parametrize("dataset", ["Cora", "CiteSeer"])
def test_two_models_on_two_splits(cora, data_root, dataset, capsys):
    options = ["--root", str(data_root / "Planetoid"), "--dataset", dataset, "--splits", "2", "--epochs", "2"]
    assert cora.main([*options, "--model", "difformer-s", "mlp"]) == 0
    printed = capsys.readouterr().out
    assert "over 2 different random splits (20 per class)" in printed
    assert printed.count(" ± ") == 3


@pytest.mark.data
@pytest.mark.parametrize("model", [pytest.param("nodeformer", marks=pytest.mark.exhaustive), "sgformer"])
def test_the_global_models_learn(cora, data_root, model, capsys):
    options = ["--root", str(data_root / "Planetoid"), "--splits", "1", "--epochs", "25"]
    assert cora.main([*options, "--model", model]) == 0
    accuracy = float(capsys.readouterr().out.splitlines()[-1].split()[1])
    assert accuracy > 55  # the majority class has 30 %


@pytest.mark.data
def test_public_split_says_that_only_weights_differ(cora, data_root, capsys):
    options = ["--root", str(data_root / "Planetoid"), "--split", "public", "--splits", "2", "--epochs", "1"]
    assert cora.main([*options, "--model", "mlp"]) == 0
    assert "over 2 initialisations on the public split" in capsys.readouterr().out

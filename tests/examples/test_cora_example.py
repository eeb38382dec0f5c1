"""The Cora example, as a user starts it."""

import pytest

pytestmark = pytest.mark.unwatched


@pytest.mark.data
@pytest.mark.parametrize(
    ("options", "said", "deviations"),
    [
        (
            "--dataset Cora --model difformer-s mlp",
            "over 2 different random splits (20 per class)",
            3,
        ),
        (
            "--dataset CiteSeer --model difformer-s mlp",
            "over 2 different random splits (20 per class)",
            3,
        ),
        ("--split public --model mlp", "over 2 initialisations on the public split", 2),
    ],
)
def test_what_two_runs_are_over(cora, data_root, options, said, deviations, capsys):
    root = str(data_root / "Planetoid")
    run = f"{options} --splits 2 --epochs 2 --root".split()
    assert cora.main([*run, root]) == 0
    printed = capsys.readouterr().out
    assert said in printed
    assert printed.count(" ± ") == deviations
    assert "Undertrained, not a comparison: 2 of 300 epochs" in printed


@pytest.mark.data
@pytest.mark.parametrize(
    "model", [pytest.param("nodeformer", marks=pytest.mark.exhaustive), "sgformer"]
)
def test_the_global_models_learn(cora, data_root, model, capsys):
    root = str(data_root / "Planetoid")
    run = f"--model {model} --splits 1 --epochs 25 --root".split()
    assert cora.main([*run, root]) == 0
    accuracy = float(capsys.readouterr().out.splitlines()[-1].split()[1])
    assert accuracy > 55  # the majority class has 30 %

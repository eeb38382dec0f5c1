"""`examples/inside.py` in its quick form."""

import pytest
import torch

pytestmark = pytest.mark.unwatched


@pytest.mark.slow
def test_the_picture_and_the_share_of_pairs_of_one_class(inside, tmp_path, capsys):
    assert inside.main(["--quick", "--pairs", "50", "--out", str(tmp_path / "inside.png")]) == 0
    said = capsys.readouterr().out
    assert "certified: test" in said
    assert "(random pairs: 10.0%)" in said
    assert (tmp_path / "inside.png").stat().st_size > 50_000


def test_states_energies_and_pairs_of_a_model(inside):
    data = inside.load_digits(5).subgraph(torch.arange(60))
    data.test_mask = torch.arange(60) > 30
    for name, make in inside.MODELS.items():
        found = inside.look_inside(make(64, 10), data, 20)
        assert len(found.states) == len(found.energies) == 9, name
        source, target = found.pairs
        assert (source < target).all()
        edges = set(map(tuple, data.edge_index.t().tolist()))
        assert not edges & set(map(tuple, found.pairs.t().tolist())), name
    assert all(before >= after for before, after in zip(found.energies, found.energies[1:], strict=False))

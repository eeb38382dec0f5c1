"""`cite` names each paper behind a model once, and every key that a class names exists."""

import re

import pytest
from torch import nn

from diffusion_mp import (
    DIFFormer,
    GATConv,
    GCNConv,
    cite,
    diffusivities,
    layers,
    models,
)
from diffusion_mp.cite import REFERENCES


def test_a_model_of_several_papers_and_every_reference(capsys):
    text = cite(nn.Sequential(GCNConv(3, 4), GATConv(4, 4), GCNConv(4, 2)))
    assert re.findall(r"@inproceedings\{(\w+),", text) == [
        "kipf2017gcn",
        "velickovic2018gat",
    ]
    assert text in capsys.readouterr().out
    assert "Transformers from Diffusion" in cite(DIFFormer(3, 4, 2))
    public = (
        getattr(package, name)
        for package in (diffusivities, layers, models)
        for name in package.__all__
    )
    named = {key for kind in public for key in getattr(kind, "references", ())}
    assert named == set(REFERENCES)


def test_a_module_of_ones_own_has_its_entry_beside_ours(capsys):
    layer = GCNConv(3, 4)
    layer.references = ("@misc{mine}", *layer.references)
    assert cite(layer).startswith("@misc{mine}\n\n@inproceedings{kipf2017gcn,")
    layer.references = ("kipf2016gcn",)
    with pytest.raises(
        ValueError,
        match=r"references must be .*such as 'bresson2017gatedgcn'; got \['kipf2016gcn'\]",
    ):
        cite(layer)

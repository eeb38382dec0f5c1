"""The ways out that messages name for lists and arrays: they lead to a tensor."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from diffusion_mp import DIFFormer, GCNConv, Graph, LabelPropagation
from diffusion_mp.data import label_mask, random_split
from diffusion_mp.layers import GINConv

EDGES = torch.tensor([[0, 1, 2], [1, 2, 0]])
X = torch.rand(3, 4)
LISTS: dict[str, Any] = {
    "words": ["a", "b", "a"],
    "an array of words": np.array(["a", "b", "a"]),
    "an array of objects": np.array(["a", "b", "a"], dtype=object),
    "a tuple of words": ("a", "b", "a"),
    "numbers": [0, 1, 0],
    "an array": np.array([0, 1, 0]),
    "tensors": [torch.tensor([0, 1]), torch.tensor([1, 0])],
    "tensors of other shapes": [torch.tensor([0, 1]), torch.tensor([1])],
}
#: Calls in which the value is named so.
CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "y": ("y", LabelPropagation(2)),
    "x": ("x", lambda value: GCNConv(4, 2)(value, EDGES)),
    "edge_index": ("edge_index", lambda value: GCNConv(4, 2)(X, value)),
    "Graph": ("edge_index", lambda value: Graph(3, value)),
    "edge_weight": ("edge_weight", lambda value: GCNConv(4, 2)(X, EDGES, value)),
    "batch": ("batch", lambda value: DIFFormer(4, 4, 2)(X, EDGES, batch=value)),
    "label_mask": ("y", label_mask),
    "random_split": ("y", lambda value: random_split(value, 0.5, 0.2, torch.Generator())),
    "a pair": ("edge_index", lambda value: GINConv(4, torch.nn.Linear(4, 2))((X, X), value)),
}


@pytest.mark.usefixtures("no_typecheck")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", LISTS)
def test_a_named_way_leads_to_a_tensor(call: str, kind: str) -> None:
    name, function = CALLS[call]
    value = LISTS[kind]
    try:
        function(value)
    except (TypeError, ValueError) as error:
        message = str(error)
        assert name in message
        for way in re.findall(r"torch\.(?:as_tensor|stack|cat|from_numpy)\(.*\)", message):
            if "x_src" in way:
                continue  # what the sentence says of the pair that this list may be
            made = eval(way, {"torch": torch, "np": np, name: value})
            assert isinstance(made, torch.Tensor)
        if "words" in kind:
            assert "as_tensor" not in message


def test_words_are_numbered_as_said() -> None:
    y = np.array(["b", "a", "b"])
    numbers = torch.from_numpy(np.unique(y, return_inverse=True)[1])
    assert numbers.tolist() == [1, 0, 1]
    assert LabelPropagation(2)(numbers, EDGES).shape == (3, 2)


def test_the_number_of_graphs_is_that_of_the_batch() -> None:
    with pytest.raises(TypeError, match=r"takes no batch_size\..*Graph\.from_data\(batch\)"):
        DIFFormer(4, 4, 2)(X, EDGES, batch=torch.zeros(3, dtype=torch.long), batch_size=2)

"""DistributedDataParallel trains every model, with edges and without: each parameter has the mean of the gradients."""

import copy

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from model_cases import MODELS, Case, Inputs

#: What does not stand by itself.
OF_EDGES = ("edge_index", "edge_weight", "edge_attr")

#: Message passing alone says so in a sentence.
NEED_EDGES = ("gatedgcn", "gcn", "sgc", "gin", "gat", "appnp", "gcnii", "sfi-former-options")


def gradients(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    model.zero_grad()
    model(**inputs).square().mean().backward()
    named = model.named_parameters()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def compare(case: Case, edges: bool) -> None:
    every = [case.inputs(size) for size in (12, 23)]
    every = [{name: part for name, part in inputs.items() if edges or name not in OF_EDGES} for inputs in every]
    together = DistributedDataParallel(case.model().double())
    for _ in range(2):
        alone = [gradients(copy.deepcopy(together.module), inputs) for inputs in map(doubled, every)]
        got = gradients(together, doubled(every[get_rank()]))
        for name, grad in got.items():
            mean = torch.stack([grads[name.removeprefix("module.")] for grads in alone]).mean(0)
            torch.testing.assert_close(grad, mean, rtol=1e-9, atol=1e-12)


def doubled(inputs: Inputs) -> Inputs:
    return tree_map(lambda part: part.double() if part.is_floating_point() else part, inputs)


def train_all() -> None:
    failed = {}
    for name, case in MODELS.items():
        if not any(True for _ in case.model().parameters()):
            continue
        without = {"x", "edge_index"} <= set(case.names) and name not in NEED_EDGES
        for edges in (True, False) if without else (True,):
            try:
                compare(case, edges)
            except Exception as error:
                failed[name, "with edges" if edges else "without"] = str(error)[:300]
    assert not failed, failed


@pytest.mark.exhaustive
def test_all_models_train_in_two_processes(tmp_path) -> None:
    on_ranks(train_all, 2, tmp_path, seconds=120)

"""``in_plain_torch``: an exported program without operations of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from diffusion_mp.errors import check_kind
from diffusion_mp.export import formulas
from diffusion_mp.graph import ops as graph_ops
from diffusion_mp.kernels import (
    linear_attention,
    log_linear_attention,
    neumann,
    pairwise,
    sparse_flow,
    spmm,
)
from diffusion_mp.kernels.neumann import stencil
from diffusion_mp.kernels.operation import Operation
from diffusion_mp.kernels.sparse_flow import reference

#: Every operation of a forward pass and its formula; ``None`` is its reference, where that looks at no values.
FORMULAS: dict[Operation[Any], Callable[..., Any] | None] = {
    spmm._spmm: None,
    spmm._sddmm: None,
    spmm._row_sums: None,
    spmm._at_rows: None,
    spmm._softmax: None,
    linear_attention._product: formulas.linear_product,
    linear_attention._attention: formulas.linear_attention,
    log_linear_attention._attention: formulas.log_linear_attention,
    log_linear_attention._entries: None,
    pairwise._attention: formulas.pairwise_attention,
    pairwise._logsumexp: formulas.pairwise_logsumexp,
    pairwise._product: formulas.pairwise_product,
    sparse_flow._potentials: formulas.sparse_flow_potentials,
    sparse_flow._product: formulas.sparse_flow_product,
    reference._support: formulas.sparse_flow_support,
    neumann._product: None,
    neumann._inner: None,
    stencil._transform: formulas.neumann_transform,
    stencil._modes: stencil._modes_of_rows,
}


def in_plain_torch(program: ExportedProgram) -> ExportedProgram:
    """The program with every operation of this library written out in operations of torch.

    It runs where the library is not installed, for graphs of all sizes, and torch makes ONNX of it:

        program = torch.export.export(model.eval(), (x, edge_index), dynamic_shapes=sizes)
        torch.onnx.export(in_plain_torch(program), f="model.onnx")

    What is written out takes more memory than the kernels: attention over pairs holds all pairs of a graph, a batch is
    filled up to its largest graph, and walks of several hops are found in the matrix of all pairs.

    Args:
        program: what ``torch.export.export`` makes of a model in evaluation mode.

    Returns:
        Another program; that which was given stays as it is.

    Raises:
        TypeError: it is no exported program.

    Examples:
        >>> model = DIFFormerConv(4, 3).eval()
        >>> plain = in_plain_torch(torch.export.export(model, (x, edge_index)))
        >>> any("diffusion_mp" in str(node.target) for node in plain.graph.nodes)
        False
        >>> torch.allclose(plain.module()(x, edge_index), model(x, edge_index), atol=1e-5)
        True
    """
    check_kind(program, "program", ExportedProgram, "what torch.export.export returns")
    table: dict[Any, Callable[..., Any]] = {
        torch.ops.aten.repeat_interleave.Tensor: formulas.numbers,
        torch.ops.aten.repeat_interleave.self_Tensor: formulas.repeat_interleave,
        graph_ops.batch_pointers._opoverload: formulas.batch_pointers,
        graph_ops._compress._opoverload: formulas.compress,
        graph_ops.walk_pairs._opoverload: formulas.walk_pairs,
        **dict(operation.written_out(formula) for operation, formula in FORMULAS.items()),
    }
    return program.run_decompositions(table)

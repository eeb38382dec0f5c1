"""The verdict on a program: right, refused in a sentence of the library's own, or bad and why."""

import dataclasses
import dis
import re
import resource
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

import diffusion_mp
import diffusion_mp_experiments
from diffusion_mp.distributed import RankLostError
from diffusion_mp.errors import BackendError, ConvergenceError

from .program import PRELUDE

OWN = tuple(
    f"{Path(package.__path__[0])}/"
    for package in (diffusion_mp, diffusion_mp_experiments)
)
#: What a call may raise.
DOCUMENTED = (TypeError, ValueError, ConvergenceError, BackendError, RankLostError)
#: A file, an entry or an extra that is not there: refusals too, if the library says so itself.
ABSENT = (OSError, IndexError, ImportError)
#: What else a sentence may call an argument.
ROLES = {
    "x": ["state", "features", "node", "nodes", "num_nodes"],
    "v": ["values"],
    "y": ["labels", "labelled", "num_nodes"],
    "edge_index": ["edges", "edge", "graph", "adjacency", "nodes", "node", "num_nodes"],
    "data": ["edge_index", "x", "y", "masks", "nodes"],
    "graph": [
        "data",
        "edge_index",
        "edges",
        "edge_weight",
        "adjacency",
        "nodes",
        "node",
    ],
    "num_nodes": ["nodes"],
    "batch": ["graph", "graphs", "sequence", "sequences"],
    "coupling": ["couplings", "entries", "symmetric", "row", "column"],
    "other": ["coupling", "diffusivity", "terms", "other_mask"],
    "policy": ["self_loops"],
    "subject": ["coupling", "diffusivity", "layer", "layer_or_update", "update"],
    "penalty": ["Penalty"],
    "attention": ["alpha"],
    "in_channels": ["channels"],
    "out_channels": ["channels"],
    "channels": ["in_channels"],
    "min_length": ["lengths"],
    "max_length": ["lengths"],
    "log_query": ["query"],
    "log_key": ["key"],
    "matrix": ["coupling", "terms"],
}
#: Memory that one call of a few dozen nodes may add to the most the process ever held.
GROWTH = 512 << 20


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """Run a program line by line; what comes back has a ``verdict``, and if it is bad a ``kind`` and ``where``."""
    space: dict[str, Any] = {}
    exec(_PRELUDE, space)
    expected: bool | None = True
    names: list[str] = []
    wrong: list[str] = []
    before = _memory()
    for number, step in enumerate(request["steps"]):
        # What may be wrong may also make another argument right.
        if expected is not None:
            expected = False if False in (expected, step["valid"]) else step["valid"]
        names += step["names"]
        # A wrong argument of an earlier call may be found out now.
        wrong += step["wrong"]
        try:
            exec(compile(step["line"], "<program>", "exec"), space)
        except Exception as error:
            blamed = wrong if step["wrong"] else names
            return _judge_error(error, expected, blamed) | {"step": number}
        growth = _memory() - before
        result = space[step["line"].split(" = ", 1)[0]]
        if growth > GROWTH:
            return _bad("memory", f"{growth >> 20} MiB more") | {"step": number}
        if step["finite"] and expected is True and not is_finite(result):
            text = "NaN or infinity from finite input"
            return _bad("not finite", text) | {"step": number}
    if expected is False:
        return _bad("accepted", "a wrong argument was accepted without a word")
    return {"verdict": "right"}


def _judge_error(
    error: Exception, expected: bool | None, names: list[str]
) -> dict[str, Any]:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    where = _place(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return _bad("memory", text, where)
    if not _raised_by_us(error) or not isinstance(error, DOCUMENTED + ABSENT):
        return _bad(type(error).__name__, text, where)
    words = {word for name in names for word in (name, *ROLES.get(name, []))}
    silent = isinstance(error, (OSError, ConvergenceError))
    if words and not silent and not words & {*re.findall(r"\w+", str(error))}:
        return _bad("no argument named", text, where)
    if expected is True:
        return _bad("valid call refused", text, where)
    return {"verdict": "refused", "text": text}


def _bad(kind: str, text: str, where: str = "") -> dict[str, Any]:
    return {"verdict": "bad", "kind": kind, "text": text, "where": where}


def _raised_by_us(error: Exception) -> bool:
    innermost = error.__traceback__
    assert innermost is not None
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    code = innermost.tb_frame.f_code
    if not code.co_filename.startswith(OWN):
        return False
    return dis.opname[code.co_code[innermost.tb_lasti]] == "RAISE_VARARGS"


def _place(error: Exception) -> str:
    """The innermost line of the library, and where beyond it the error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(OWN)]
    if not ours:
        return f"{Path(frames[-1].filename).name}:{frames[-1].name}"
    root = next(root for root in OWN if ours[-1].filename.startswith(root))
    line = f"{Path(ours[-1].filename).relative_to(root)}:{ours[-1].name}"
    if frames[-1] is ours[-1]:
        return line
    return f"{line} > {Path(frames[-1].filename).name}:{frames[-1].name}"


def is_finite(value: Any) -> bool:
    """Whether all numbers within a result are finite; a meta tensor has none."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (float, complex)):
        return bool(np.isfinite(value))
    if isinstance(value, torch.Tensor):
        return not value.is_meta and bool(value.detach().to_dense().isfinite().all())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        return all(map(is_finite, value))
    return True


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


_PRELUDE = compile(PRELUDE, "<prelude>", "exec")

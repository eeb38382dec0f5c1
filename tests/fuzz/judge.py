"""The verdict on a program: right, refused in a sentence of the library's own, or bad and why."""

import builtins
import dataclasses
import dis
import re
import resource
import traceback
from pathlib import Path
from types import TracebackType
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
    names = list[str]()
    wrong = list[str]()
    documented = (
        *DOCUMENTED,
        *(getattr(builtins, error) for error in request.get("errors", [])),
    )
    before = _memory()
    for number, step in enumerate(request["steps"]):
        if (
            expected is not None
        ):  # what may be wrong may also make another argument right
            expected = False if False in (expected, step["valid"]) else step["valid"]
        names += step["names"]
        wrong += step.get(
            "wrong", []
        )  # a wrong argument of an earlier call may be found out now
        try:
            exec(compile(step["line"], "<program>", "exec"), space)
        except Exception as error:
            return {
                "step": number,
                **_judge_error(
                    error, expected, wrong if step.get("wrong") else names, documented
                ),
            }
        if _memory() - before > GROWTH:
            return _bad(number, "memory", f"{(_memory() - before) >> 20} MiB more", "")
        result = space[step["line"].split(" = ", 1)[0]]
        if step["finite"] and expected is True and not is_finite(result):
            return _bad(number, "not finite", "NaN or infinity from finite input", "")
    if expected is False:
        return _bad(
            len(request["steps"]) - 1,
            "accepted",
            "a wrong argument was accepted without a word",
            "",
        )
    return {"verdict": "right", "step": len(request["steps"]) - 1}


def _judge_error(
    error: Exception,
    expected: bool | None,
    names: list[str],
    documented: tuple[type[Exception], ...],
) -> dict[str, Any]:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return _bad(None, "memory", text, _place(error))
    if not _raised_by_us(error) or not isinstance(error, (*documented, *ABSENT)):
        return _bad(None, type(error).__name__, text, _place(error))
    words = {word for name in names for word in (name, *ROLES.get(name, []))}
    if (
        names
        and not isinstance(error, (OSError, ConvergenceError))
        and not any(
            re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(error)) for word in words
        )
    ):
        return _bad(None, "no argument named", text, _place(error))
    if expected is True:
        return _bad(None, "valid call refused", text, _place(error))
    return {"verdict": "refused", "text": text}


def _bad(step: int | None, kind: str, text: str, where: str) -> dict[str, Any]:
    answer = {"verdict": "bad", "kind": kind, "text": text, "where": where}
    return answer if step is None else answer | {"step": step}


def _innermost(error: BaseException) -> TracebackType | None:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame


def _raised_by_us(error: Exception) -> bool:
    frame = _innermost(error)
    if frame is None or not frame.tb_frame.f_code.co_filename.startswith(OWN):
        return False
    return dis.opname[frame.tb_frame.f_code.co_code[frame.tb_lasti]] == "RAISE_VARARGS"


def _place(error: Exception) -> str:
    """The innermost line of the library, and where beyond it the error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(OWN)]
    if not own:
        return f"{Path(frames[-1].filename).name}:{frames[-1].name}"
    root = next(root for root in OWN if own[-1].filename.startswith(root))
    place = f"{Path(own[-1].filename).relative_to(root)}:{own[-1].name}"
    if frames[-1] is own[-1]:
        return place
    return f"{place} > {Path(frames[-1].filename).name}:{frames[-1].name}"


def is_finite(value: Any) -> bool:
    """Whether all numbers within a result are finite; a meta tensor has none."""
    if (
        isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.number)
    ) or isinstance(value, (float, complex)):
        return bool(np.isfinite(value).all())
    if isinstance(value, torch.Tensor):
        return not value.is_meta and bool(
            torch.isfinite(value.detach().to_dense()).all()
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, part.name) for part in dataclasses.fields(value)]
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        parts = []
    return all(is_finite(part) for part in parts)


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


_PRELUDE = compile(PRELUDE, "<prelude>", "exec")

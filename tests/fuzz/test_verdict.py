"""The verdict finds what it looks for: one program of every sort, judged by a real worker."""

from collections.abc import Iterator
from typing import Any

import pytest

from .program import Arg, Call, Program
from .search import Kind, search, shorten
from .worker import Worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(timeout=30.0)
    yield worker
    worker.close()


def program(*lines: str, valid: bool | None = True, finite: bool = True) -> Any:
    """A request whose last line takes the argument x."""
    first = {"valid": True, "finite": False, "names": [], "wrong": []}
    steps = [{"line": line} | first for line in lines]
    steps[-1] |= {"valid": valid, "finite": finite, "names": ["x"]}
    return {"steps": steps}


def of_the_library(body: str) -> str:
    """A line that defines ``f(x)`` with this body as if it stood in a file of the library."""
    source = f"def f(x):\n    {body}"
    return f"defined = exec(compile({source!r}, mp.__file__, 'exec'), globals())"


def outcome(worker: Worker, request: Any) -> str:
    """The verdict, or the kind of what is bad; and the next program is judged."""
    answer = worker.judge(request)
    assert worker.judge(program("out = 1")) == {"verdict": "right"}
    return answer.get("kind", answer["verdict"])


#: What a function of the library does with its argument, whether that is right, and the verdict.
CALLS = [
    ("raise ValueError('x must be three')", False, "refused"),
    ("raise ValueError('x must be three')", None, "refused"),
    ("raise ValueError('x must be three')", True, "valid call refused"),
    ("raise mp.SingularSystemError('x has no answer')", False, "refused"),
    ("return 4", None, "right"),
    ("return 4", False, "accepted"),
    ("raise ValueError('that is wrong')", False, "no argument named"),
    ("raise KeyError('x')", False, "KeyError"),
    ("assert x == 3, 'x'", False, "AssertionError"),
    ("return len(x)", False, "TypeError"),
    ("return torch.ones(2, 3) @ torch.ones(2, 3)", False, "RuntimeError"),
    ("return x.dim()", False, "AttributeError"),
]


@pytest.mark.parametrize(("body", "valid", "verdict"), CALLS)
def test_refusals(worker: Worker, body: str, valid: bool | None, verdict: str) -> None:
    request = program(
        of_the_library(body),
        "out = f(4)",
        valid=valid,
    )
    assert outcome(worker, request) == verdict


RESULTS = {
    "torch.ones(3) + 1": "right",
    "torch.tensor([1.0, math.nan])": "not finite",
    "{'a': [1.0, (math.inf,)]}": "not finite",
    "torch.ones(3, device='meta')": "not finite",
    "__import__('os').abort()": "crash",
    "__import__('os')._exit(0)": "crash",
    "torch.zeros(50 << 30, dtype=torch.uint8)": "memory",
    "len(bytearray(50 << 30))": "memory",
    "torch.ones(600 << 20, dtype=torch.uint8)": "memory",
}


@pytest.mark.parametrize("source", RESULTS)
def test_results(worker: Worker, source: str) -> None:
    assert outcome(worker, program(f"out = {source}")) == RESULTS[source]


def test_nan_that_was_announced_is_right(worker: Worker) -> None:
    request = program("out = torch.tensor([math.nan])", finite=False)
    assert outcome(worker, request) == "right"


@pytest.mark.parametrize(
    "line", ["out = __import__('time').sleep(60)", "while True: pass"]
)
def test_what_never_ends_is_given_up(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(worker, "timeout", 1.0)
    assert outcome(worker, program(line)) == "time-out"


def test_the_place_is_a_line_of_the_library(worker: Worker) -> None:
    request = program(of_the_library("return len(x)"), "out = f(4)")
    answer = worker.judge(request)
    assert (answer["where"], answer["step"]) == ("__init__.py:f", 1)


def test_a_bad_program_becomes_short(worker: Worker) -> None:
    """What is optional and not needed goes, what is wrong stays."""
    args = {
        "x": Arg("'abc'", valid=False, what="a string"),
        "a": Arg("1", optional=True),
        "b": Arg("[2]", optional=True),
    }
    first = Call("f", "lambda x, a=0, b=0: torch.ones(x)", {})
    long = Program("f", (first, Call("out", "f({args})", args)), ((1, "x"),))
    short, verdict = shorten(long, worker.judge(long.as_request()), worker)
    assert short.lines() == [first.line(), "out = f(x='abc')"]
    assert verdict["kind"] == "TypeError"


def test_the_search_groups_by_kind_and_prints_what_can_be_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = {
        "verdict": "bad",
        "kind": "TypeError",
        "text": "",
        "where": "here",
        "step": 0,
    }

    def judge(self: Worker, request: Any) -> dict[str, Any]:
        wrong = [name for step in request["steps"] for name in step["wrong"]]
        return bad if wrong == ["bias"] else {"verdict": "right"}

    monkeypatch.setattr(Worker, "judge", judge)
    result = search(0, 400, "MLPConv")
    (fault,) = result.kinds
    assert fault.kind == Kind("MLPConv", "bias", "TypeError", "here")
    assert fault.count == result.verdicts["bad"] > 1
    with pytest.raises(TypeError, match="bias must be"):
        exec(fault.reproducer(), {})

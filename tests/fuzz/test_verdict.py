"""The verdict finds what it looks for: one program of every sort, judged by a real worker."""

from collections.abc import Iterator
from typing import Any

import pytest

from .pool import Worker
from .program import Arg, Call, Program
from .search import Kind, search, shorten
from .table import STRATEGIES, drawn

#: Functions as if they stood in a file of the library.
OWN = "exec(compile({source!r}, mp.__file__, 'exec'), globals())"


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker(timeout=5.0)
    yield worker
    worker.close()


def own(body: str) -> str:
    """A line that defines ``f(x)`` with this body in the library's own source."""
    return f"defined = {OWN.format(source=f'def f(x):{chr(10)}    {body}')}"


def program(
    *lines: str, valid: bool | None = True, finite: bool = True
) -> dict[str, Any]:
    """A request whose last line takes the argument x."""
    steps = [
        {"line": line, "valid": True, "finite": False, "names": []} for line in lines
    ]
    steps[-1] |= {"valid": valid, "finite": finite, "names": ["x"]}
    return {"name": "f", "steps": steps}


# what it is → (the program, its verdict, the kind of what is bad)
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "right": (program("out = torch.ones(3) + 1"), "right", ""),
    "a wrong argument, refused": (
        program(own("raise ValueError('x must be three')"), "out = f(4)", valid=False),
        "refused",
        "",
    ),
    "an unknown argument, refused": (
        program(own("raise TypeError('x must be three')"), "out = f(4)", valid=None),
        "refused",
        "",
    ),
    "an unknown argument, taken": (program("out = 4", valid=None), "right", ""),
    "what the library's errors say": (
        program(
            own("raise mp.SingularSystemError('x has no answer')"),
            "out = f(4)",
            valid=False,
        ),
        "refused",
        "",
    ),
    "a right argument, refused": (
        program(own("raise ValueError('x must be three')"), "out = f(4)"),
        "bad",
        "valid call refused",
    ),
    "a wrong argument, taken": (program("out = 4", valid=False), "bad", "accepted"),
    "a sentence about nothing": (
        program(own("raise ValueError('that is wrong')"), "out = f(4)", valid=False),
        "bad",
        "no argument named",
    ),
    "an undocumented error": (
        program(own("raise KeyError('x')"), "out = f(4)", valid=False),
        "bad",
        "KeyError",
    ),
    "an assertion": (
        program(own("assert x == 3, 'x'"), "out = f(4)", valid=False),
        "bad",
        "AssertionError",
    ),
    "an error of Python's own": (
        program(own("return len(x)"), "out = f(4)", valid=False),
        "bad",
        "TypeError",
    ),
    "an error of torch's own": (
        program("out = torch.ones(2, 3) @ torch.ones(2, 3)", valid=False),
        "bad",
        "RuntimeError",
    ),
    "an attribute that is not there": (
        program("out = (4).dim()", valid=False),
        "bad",
        "AttributeError",
    ),
    "NaN": (program("out = torch.tensor([1.0, math.nan])"), "bad", "not finite"),
    "NaN in a dictionary": (
        program("out = {'a': [1.0, (math.inf,)]}"),
        "bad",
        "not finite",
    ),
    "NaN that was announced": (
        program("out = torch.tensor([math.nan])", finite=False),
        "right",
        "",
    ),
    "a meta tensor": (
        program("out = torch.ones(3, device='meta')"),
        "bad",
        "not finite",
    ),
    "an end of the process": (
        program("out = __import__('os').abort()"),
        "bad",
        "crash",
    ),
    "a quiet end of the process": (
        program("out = __import__('os')._exit(0)"),
        "bad",
        "crash",
    ),
    "fifty gigabytes": (
        program("out = torch.zeros(50 << 30, dtype=torch.uint8)"),
        "bad",
        "memory",
    ),
    "fifty gigabytes of Python's": (
        program("out = len(bytearray(50 << 30))"),
        "bad",
        "memory",
    ),
    "one gigabyte": (
        program("out = torch.ones(1 << 30, dtype=torch.uint8).sum()"),
        "bad",
        "memory",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict(worker: Worker, case: str) -> None:
    request, verdict, kind = CASES[case]
    answer = worker.judge(request)
    assert (answer["verdict"], answer.get("kind", "")) == (verdict, kind), answer
    assert (
        worker.judge(program("out = 1"))["verdict"] == "right"
    )  # and the next program is judged


@pytest.mark.parametrize(
    "line", ["out = __import__('time').sleep(60)", "while True: pass"]
)
def test_what_never_ends_is_given_up(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    # The next program waits for a new worker, which may take longer.
    with monkeypatch.context() as patch:
        patch.setattr(worker, "timeout", 1.0)
        answer = worker.judge(program(line))
    assert (answer["verdict"], answer["kind"]) == ("bad", "time-out")
    assert worker.judge(program("out = 1"))["verdict"] == "right"


def test_the_place_is_a_line_of_the_library(worker: Worker) -> None:
    answer = worker.judge(program(own("return len(x)"), "out = f(4)"))
    assert answer["where"] == "__init__.py:f"
    assert answer["step"] == 1


def test_a_bad_program_becomes_short(worker: Worker) -> None:
    """What is optional and not needed goes, what is wrong stays."""
    options = {
        name: Arg(source, optional=True)
        for name, source in {"a": "1", "b": "[2]", "c": "3"}.items()
    }
    wrong = {"x": Arg("'abc'", valid=False, what="a string")}
    calls = (
        Call("f", "lambda x, a=0, b=0, c=0: torch.ones(x)", {}),
        Call("out", "f({args})", wrong | options),
    )
    long = Program("f", calls, ((1, "x"),))
    verdict = worker.judge(long.as_request())
    short, again = shorten(long, verdict, worker)
    assert short.lines() == [calls[0].line(), "out = f(x='abc')"]
    assert again["kind"] == verdict["kind"] == "TypeError"


@pytest.mark.exhaustive
def test_the_search_groups_by_kind_and_prints_what_can_be_run(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "MLPConv"
    bad = {
        "verdict": "bad",
        "kind": "ValueError",
        "text": "",
        "where": "checks.py:check_counts",
        "step": 0,
    }

    def all_bad(
        self: Worker, seed: int, first: int, last: int, name: str
    ) -> Iterator[dict[str, Any]]:
        return (
            {"index": k, **bad}
            for k in range(first, last)
            if drawn(seed, k, name).wrong == ((0, "bias"),)
        )

    monkeypatch.setattr(Worker, "judge_drawn", all_bad)
    result = search(0, 400, name)
    assert result.verdicts["bad"] > 1
    assert {found.kind for found in result.kinds} == {
        Kind(name, "bias", "ValueError", "checks.py:check_counts")
    }
    text = result.kinds[0].reproducer()
    assert worker.judge(program(f"out = exec({text!r}, {{}})"))["verdict"] in (
        "refused",
        "right",
        "bad",
    )
    assert "import diffusion_mp as mp" in text
    assert name in STRATEGIES

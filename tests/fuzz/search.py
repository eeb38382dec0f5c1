"""A search for bad programs: many are judged, the bad ones made short and grouped by kind."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tqdm import tqdm

from .program import PRELUDE, Program, Wrong, plain_program, put_wrong
from .table import STRATEGIES, drawn
from .worker import Worker

Verdict = dict[str, Any]


class Kind(NamedTuple):
    """What makes two bad programs the same: the name, the argument that was wrong, what happened, and where."""

    name: str
    argument: str
    what: str
    where: str


def kind_of(program: Program, verdict: Verdict) -> Kind:
    argument = " and ".join(argument for _, argument in program.wrong)
    return Kind(
        program.name, argument or "nothing wrong", verdict["kind"], verdict["where"]
    )


@dataclass
class Found:
    """All bad programs of one kind, by the first of them, made short."""

    kind: Kind
    program: Program
    text: str
    count: int = 0

    def reproducer(self) -> str:
        wrong = [
            f"# {argument}: {self.program.calls[call].args[argument].what}"
            for call, argument in self.program.wrong
        ]
        return "\n".join([*wrong, PRELUDE, *self.program.lines()])


@dataclass
class Result:
    """Counts by verdict, and the kinds of what was bad, most frequent first."""

    verdicts: Counter[str]
    kinds: list[Found]

    def summary(self) -> str:
        counts = ", ".join(
            f"{self.verdicts[verdict]} {verdict}"
            for verdict in ("right", "refused", "bad")
        )
        return f"{self.verdicts.total()} calls: {counts} ({len(self.kinds)} kinds)"

    def as_markdown(self) -> str:
        parts = [f"{self.summary()}\n"]
        for fault in self.kinds:
            name, argument, what, where = fault.kind
            head = f"## {name}, {argument}: {what} in {where or 'no place'} ({fault.count}×)"
            code = f"```python\n{fault.reproducer()}\n```\n"
            parts += [f"{head}\n\n{fault.text}\n", code]
        return "\n".join(parts)


def search(
    seed: int,
    calls: int,
    name: str | None = None,
    timeout: float = 10.0,
    progress: bool = False,
) -> Result:
    verdicts: Counter[str] = Counter()
    kinds: dict[Kind, Found] = {}
    # The kind of a bad program as it was drawn, and what it is when it is short.
    shortened: dict[Kind, Kind] = {}
    with closing(Worker(timeout)) as worker:
        for index in tqdm(range(calls), unit="call", disable=not progress):
            program = drawn(seed, index, name)
            verdict = worker.judge(program.as_request())
            verdicts[verdict["verdict"]] += 1
            if verdict["verdict"] != "bad":
                continue
            rough = kind_of(program, verdict)
            if rough not in shortened:
                program, verdict = shorten(program, verdict, worker)
                kind = kind_of(program, verdict)
                kinds.setdefault(kind, Found(kind, program, verdict["text"]))
                shortened[rough] = kind
            kinds[shortened[rough]].count += 1
    ordered = sorted(kinds.values(), key=lambda fault: (-fault.count, fault.kind))
    return Result(verdicts, ordered)


def shorten(
    program: Program, verdict: Verdict, worker: Worker
) -> tuple[Program, Verdict]:
    """Return the shortest program found that is bad in the same way, and its verdict."""
    if verdict["kind"] != "accepted":
        program = _until(program, verdict.get("step", len(program.calls)))
    shrinking = True
    while shrinking:
        shrinking = False
        for candidate in _shorter(program):
            if len(str(candidate.lines())) >= len(str(program.lines())):
                continue
            again = worker.judge(candidate.as_request())
            if all(
                again.get(part) == verdict[part]
                for part in ("verdict", "kind", "where")
            ):
                program = candidate
                verdict = again
                shrinking = True
                break
    return program, verdict


def _until(program: Program, last: int) -> Program:
    wrong = tuple(position for position in program.wrong if position[0] <= last)
    return replace(program, calls=program.calls[: last + 1], wrong=wrong)


def _shorter(program: Program) -> Iterator[Program]:
    """Programs with less in them: the plainest of the strategy with what is wrong here, and this without an option."""
    if program.name in STRATEGIES:
        plain = plain_program(program.name, STRATEGIES[program.name])
        plain = _until(plain, len(program.calls) - 1)
        for places in (program.wrong, *([position] for position in program.wrong)):
            candidate = plain
            for call, argument in places:
                if call < len(plain.calls) and argument in plain.calls[call].args:
                    arg = program.calls[call].args[argument]
                    wrong = Wrong(str(arg.right), arg.what, arg.valid)
                    candidate = put_wrong(candidate, (call, argument), wrong)
            if candidate.wrong:
                yield candidate
    for number, call in enumerate(program.calls):
        for argument, arg in call.args.items():
            wrong = tuple(each for each in program.wrong if each != (number, argument))
            # One that is wrong has to stay.
            if arg.optional and arg.right is not None and (wrong or not program.wrong):
                left_out = replace(arg, right=None, valid=True)
                shorter = program.with_arg((number, argument), left_out)
                yield replace(shorter, wrong=wrong)

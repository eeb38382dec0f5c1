"""A search for bad programs: many are judged, the bad ones made short and grouped by kind."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tqdm import tqdm

from .pool import Worker
from .program import PRELUDE, Program, Wrong, plain_program, put_wrong
from .table import STRATEGIES, drawn


class Kind(NamedTuple):
    """What makes two bad programs the same: the name, the argument that was wrong, what happened, and where."""

    name: str
    argument: str
    what: str
    where: str


@dataclass
class Found:
    """All bad programs of one kind, by the shortest of them."""

    kind: Kind
    program: Program
    text: str
    count: int = 1

    def reproducer(self) -> str:
        wrong = [
            f"{argument}: {self.program.calls[call].args[argument].what}"
            for call, argument in self.program.wrong
        ]
        return "\n".join(
            [*(f"# {line}" for line in wrong), PRELUDE, *self.program.lines()]
        )


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
        return (
            f"{sum(self.verdicts.values())} calls: {counts} ({len(self.kinds)} kinds)"
        )

    def as_markdown(self) -> str:
        parts = [f"{self.summary()}\n"]
        for found in self.kinds:
            name, argument, what, where = found.kind
            parts.append(
                f"## {name}, {argument}: {what} in {where or 'no place'} ({found.count}×)\n\n{found.text}\n"
            )
            parts.append(f"```python\n{found.reproducer()}\n```\n")
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
    known: dict[tuple[Any, ...], Kind] = {}
    with closing(Worker(timeout)) as judging, closing(Worker(timeout)) as worker:
        judged = judging.judge_drawn(seed, 0, calls, name)
        for verdict in tqdm(judged, total=calls, unit="call", disable=not progress):
            verdicts[verdict["verdict"]] += 1
            if verdict["verdict"] != "bad":
                continue
            program = drawn(seed, verdict["index"], name)
            rough = (
                program.name,
                _arguments(program),
                verdict["kind"],
                verdict["where"],
            )
            if rough not in known:
                known[rough], found = _shortened(program, verdict, worker)
                kept = kinds.setdefault(known[rough], found)
                if len(found.reproducer()) < len(kept.reproducer()):
                    kept.program = found.program
                    kept.text = found.text
                kept.count += kept is not found
            else:
                kinds[known[rough]].count += 1
    return Result(
        verdicts, sorted(kinds.values(), key=lambda found: (-found.count, found.kind))
    )


def shorten(
    program: Program, verdict: dict[str, Any], worker: Worker
) -> tuple[Program, dict[str, Any]]:
    """The shortest program found that is bad in the same way, and its verdict."""

    def same(candidate: Program) -> dict[str, Any] | None:
        again = worker.judge(candidate.as_request())
        alike = all(
            again.get(part) == verdict.get(part)
            for part in ("verdict", "kind", "where")
        )
        return again if alike else None

    shrinking = True
    while shrinking:
        shrinking = False
        for candidate in _shorter(program):
            if (
                len(str(candidate.lines())) < len(str(program.lines()))
                and (again := same(candidate)) is not None
            ):
                program = candidate
                verdict = again
                shrinking = True
                break
    return program, verdict


def _shortened(
    program: Program, verdict: dict[str, Any], worker: Worker
) -> tuple[Kind, Found]:
    if verdict["kind"] != "accepted":
        program = _until(program, verdict.get("step", len(program.calls)))
    program, verdict = shorten(program, verdict, worker)
    kind = Kind(program.name, _arguments(program), verdict["kind"], verdict["where"])
    return kind, Found(kind, program, verdict["text"])


def _until(program: Program, last: int) -> Program:
    wrong = tuple(place for place in program.wrong if place[0] <= last)
    return replace(program, calls=program.calls[: last + 1], wrong=wrong)


def _arguments(program: Program) -> str:
    return " and ".join(argument for _, argument in program.wrong) or "nothing wrong"


def _shorter(program: Program) -> Iterator[Program]:
    """Programs with less in them: the plainest of its strategy, fewer wrong arguments, calls and options."""
    if program.name in STRATEGIES:
        plain = plain_program(program.name, STRATEGIES[program.name])
    else:
        plain = program
    alike = [call.target for call in plain.calls[: len(program.calls)]] == [
        call.target for call in program.calls
    ]
    for places in [
        program.wrong,
        *([place] for place in program.wrong[: 2 * (len(program.wrong) > 1)]),
    ]:
        candidate = _until(plain, len(program.calls) - 1)
        for place in places:
            if (
                place[0] < len(candidate.calls)
                and place[1] in candidate.calls[place[0]].args
            ):
                arg = program.calls[place[0]].args[place[1]]
                candidate = put_wrong(
                    candidate, place, Wrong(str(arg.right), arg.what, arg.valid)
                )
        if candidate.wrong:
            yield candidate
    for number, call in enumerate(program.calls):
        for argument, arg in call.args.items():
            place = (number, argument)
            if arg.right is None:
                continue
            if place in program.wrong and len(program.wrong) == 1:
                continue
            if arg.optional:
                wrong = tuple(other for other in program.wrong if other != place)
                yield replace(
                    program.with_arg(place, replace(arg, right=None, valid=True)),
                    wrong=wrong,
                )
            elif alike and place not in program.wrong:
                # The simplest program may do without it.
                simplest = plain.calls[number].args.get(argument)
                if simplest is not None and simplest.right != arg.right:
                    yield program.with_arg(place, simplest)

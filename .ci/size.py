#!/usr/bin/env python3
"""Size and density of Python code.

    python .ci/size.py [DIR ...]                 by default those of the repository
    python .ci/size.py --densest 20 [DIR ...]    the 20 functions with the most tokens a line

Tokens and code lines leave out docstrings, comments, blank lines and imports. For comparison, by the same count:
diffrax 6.0 tokens per code line, equinox 6.5, scikit-learn's linear_model 7.2, PyG's nn/conv 7.8, linear_operator 8.2;
ternaries per 1000 code lines 2 to 10, parallel assignments `a, b = x, y` 0.3 to 6.
"""

import ast
import io
import pathlib
import sys
import textwrap
import tokenize


def measure(source: str) -> dict[str, int]:
    tree = ast.parse(source)
    skipped: set[int] = set()
    keys = [
        "lines",
        "code",
        "tokens",
        "doc",
        "comments",
        "ternaries",
        "parallel",
        "functions",
        "wide",
        "skips",
    ]
    count = dict.fromkeys(keys, 0)
    count["lines"] = source.count("\n")
    for node in ast.walk(tree):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                skipped.update(range(first.lineno, first.end_lineno + 1))
                count["doc"] += first.end_lineno - first.lineno + 1
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            count["functions"] += 1
            arguments = node.args
            count["wide"] += (
                len(arguments.posonlyargs)
                + len(arguments.args)
                + len(arguments.kwonlyargs)
                > 9
            )
        count["ternaries"] += isinstance(node, ast.IfExp)
        count["parallel"] += (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        )
    lines: set[int] = set()
    silent = (
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            count["comments"] += 1
            count["skips"] += "fmt: skip" in token.string
        elif token.type not in silent and token.start[0] not in skipped:
            count["tokens"] += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    count["code"] = len(lines)
    return count


def densest(folders: list[str], number: int) -> None:
    found = []
    for folder in folders:
        for file in pathlib.Path(folder).rglob("*.py"):
            source = file.read_text()
            rows = source.splitlines()
            for node in ast.walk(ast.parse(source)):
                if (
                    isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                    and node.body
                ):
                    part = (
                        textwrap.dedent(
                            "\n".join(rows[node.lineno - 1 : node.end_lineno])
                        )
                        + "\n"
                    )
                    count = measure(part)
                    if count["code"] >= 8:
                        found.append(
                            (
                                count["tokens"] / count["code"],
                                count["code"],
                                f"{file}:{node.lineno} {node.name}",
                            )
                        )
    for density, code, place in sorted(found, reverse=True)[:number]:
        print(f"{density:6.1f} tokens a line, {code:3} lines  {place}")


def main(folders: list[str]) -> None:
    titles = ["files", "lines", "code", "tokens", "per-line", "comments"]
    titles += ["ternaries", "parallel", "fmt:skip", ">9-args"]
    print(" " * 20 + "".join(f"{title:>10}" for title in titles))
    for folder in folders:
        counts = [
            measure(file.read_text())
            for file in sorted(pathlib.Path(folder).rglob("*.py"))
        ]
        if not counts:
            continue
        total = {key: sum(count[key] for count in counts) for key in counts[0]}
        code = max(total["code"], 1)
        row = [len(counts), total["lines"], total["code"], total["tokens"]]
        row.append(f"{total['tokens'] / code:.2f}")
        row += [
            f"{1000 * total[key] / code:.1f}"
            for key in ("comments", "ternaries", "parallel")
        ]
        row += [total["skips"], total["wide"]]
        print(f"{folder:20}" + "".join(f"{value:>10}" for value in row))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    standard = [
        folder
        for folder in ("src", "experiments/src", "tests", "experiments/tests")
        if pathlib.Path(folder).is_dir()
    ]
    if arguments[:1] == ["--densest"]:
        densest(arguments[2:] or standard[:1], int(arguments[1]))
    else:
        main(arguments or standard)

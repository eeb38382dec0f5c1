"""The report of a comparison in Markdown, with three pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffusion_mp_experiments.compare import findings
from diffusion_mp_experiments.reproduce import figures
from diffusion_mp_experiments.reproduce.report import grid, signed, spread

if TYPE_CHECKING:
    from diffusion_mp_experiments.compare.comparison import Comparison


def markdown(comparison: Comparison) -> str:
    """Return the report, and draw its pictures next to it."""
    table = comparison.table
    parts = [
        f"# {table.title}: {table.metric.title}",
        verdict(comparison),
        scores(comparison),
        *[f"- {sentence}" for sentence in findings.warnings(comparison.problem, table)],
        improving(comparison),
        hurried(comparison),
        how(comparison),
        left_out(comparison),
        *pictures(comparison),
        code(comparison),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def verdict(comparison: Comparison) -> str:
    """Return which row is best, which are no worse, and which of them is cheapest."""
    table = comparison.table
    best = comparison.lines[0]
    text = f"**{best.title}** has the best validation score, and {spread(best.score, table.metric.digits)} on test."
    if comparison.hardly_trained:
        text += (
            f" **Networks were trained for at most {table.epochs} epochs, which is little**: with more minutes they "
            f"may come out better."
        )
    if len(comparison.lines) == 1:
        return f"{text} There is no other row."
    if not comparison.judged:
        text += " A single split has no standard error, so which rows are no worse is not known."
        higher = [
            f"{line.title} ({spread(line.score, table.metric.digits)})"
            for line in comparison.lines[1:]
            if line.score[0] > best.score[0]
        ]
        if higher:
            text += f" **Higher on its test rows**: {'; '.join(higher)}."
        return text
    ahead = [
        f"{line.title} ({signed(comparison.behind(line), table.metric.digits)})"
        for line in comparison.lines[1:]
        if comparison.ahead(line)
    ]
    if ahead:
        text += (
            f" **Ahead of it on test** by more than two standard errors: {'; '.join(ahead)}. One of many rows may be "
            "ahead by chance, but these are worth a second look."
        )
    others = [name for name in comparison.same if name != best.row]
    if not others:
        return (
            f"{text} It is ahead of every other row by more than two standard errors."
        )
    titles = {line.row: line.title for line in comparison.lines}
    text += (
        f" **No worse on test**, which is no more than two standard errors behind, are {len(others)} of "
        f"{len(titles) - 1} other rows: {'; '.join(titles[name] for name in others)}."
    )
    cheapest = comparison.same[0]
    if cheapest != best.row:
        text += f" The cheapest of these is **{titles[cheapest]}**."
    if "constant" in others:
        text += " **A constant is among them**: with these data no model is known to be better than a constant."
    return text


def scores(comparison: Comparison) -> str:
    digits = comparison.table.metric.digits
    most = len(comparison.splits)
    rows = []
    for line in comparison.lines:
        title = line.title
        if line.splits < most:
            title += f" ({line.splits} of {most} splits, stopped by the time)"
        rows.append(
            [
                title,
                f"{line.validation:.{digits}f}",
                spread(line.score, digits),
                signed(comparison.behind(line), digits),
                f"{line.seconds:.0f}",
            ]
        )
    head = [
        "",
        "validation",
        f"{comparison.table.metric.title}, test",
        "against the winner",
        "seconds in all",
    ]
    return grid(head, rows)


def how(comparison: Comparison) -> str:
    table = comparison.table
    splits = (
        "that came with the data" if comparison.problem.split else "drawn at random"
    )
    if table.nested:
        tuned = "by validation rows of each split that chose no epoch"
    else:
        tuned = "on 30 % of the labels, which no reported score uses"
    number = len(comparison.splits)
    if number > 1:
        means = f"Scores are means over {number} splits {splits}, ± is the standard deviation over splits."
        difference = "The difference from the winner is taken split by split, ± is its standard error."
    else:
        means = f"Scores are of one split {splits}, which says nothing about other splits and initial weights."
        difference = ""
        if comparison.judged:
            difference = "± of the difference from the winner is its standard error by the number of test rows."
    if number < table.splits:
        means += f" The time ended before all rows were tested on all {table.splits} splits of the plan."
    sentences = [
        means,
        sizes(comparison),
        f"A row with settings to choose chose among {table.trials} of them {tuned}; networks trained for at most "
        f"{table.epochs} epochs.",
        "Rows are sorted by the validation score, with which settings and the winner were chosen.",
        difference,
        "Test labels chose nothing.",
        "What every row is, docs/compare.md says.",
        "Whether another search, more time or other features would change the order, this table does not say.",
    ]
    return " ".join(filter(None, sentences))


def sizes(comparison: Comparison) -> str:
    """Return how many labels train, choose and test."""
    if comparison.problem.task == "link":
        return ""
    split = findings.reported_split(comparison.problem, comparison.table)
    train, validation, test = (f"{int(mask.sum()):,}" for mask in split)
    return f"In the first split {train} labels train, {validation} are for validation, and {test} test."


def improving(comparison: Comparison) -> str:
    if not comparison.improving:
        return ""
    titles = "; ".join(comparison.improving)
    return (
        f"- Best in the last tenth of the epochs, and so still improving when training ended: {titles}. With more "
        f"minutes these may come out better."
    )


def hurried(comparison: Comparison) -> str:
    titles = "; ".join(comparison.hurried_searches)
    if not titles:
        return ""
    return f"- The time was over before all settings were tried: {titles}. The same command with more minutes goes on."


def left_out(comparison: Comparison) -> str:
    reasons = comparison.planned.left_out
    if not reasons:
        return ""
    titles = {row.name: row.title for row in comparison.rows}
    sentences = [f"- {titles.get(name, name)}: {why}." for name, why in reasons.items()]
    return "\n".join(["Not compared:\n", *sentences])


def pictures(comparison: Comparison) -> list[str]:
    folder = comparison.folder / "images"
    folder.mkdir(exist_ok=True)
    figures.draw_scores(folder / "scores.png", comparison.table, comparison.lines)
    found = ["![test scores of all rows](images/scores.png)"]
    curves = comparison.curves()
    if curves:
        figures.draw_learning(folder / "learning.png", curves)
        found.append("![validation scores by epoch](images/learning.png)")
    energies = comparison.energies()
    if energies:
        figures.draw_steps(folder / "energy.png", energies)
        title = comparison.lines[0].title
        found.append(f"![energy of the {title} at every step](images/energy.png)")
    return found


def code(comparison: Comparison) -> str:
    """Return the lines of Python that load the kept model and predict."""
    folder = comparison.folder
    trained = "fitted on all labels"
    if comparison.is_network:
        trained = "trained on all labels but a fifth, which chose its epoch"
    if comparison.hurried:
        trained += "; the time ended its training, and more minutes may make it better"
    return f"""The kept model was {trained}:

```python
from diffusion_mp_experiments.compare import Comparison

comparison = Comparison.load("{folder}")
print(comparison.best)                 # {comparison.best}
print(comparison.frame)                # the table above
predicted = comparison.predict()       # a prediction for every row of the data
model = comparison.module().model      # the model itself, a torch module
```

`predictions.csv` has the predictions of all rows without a label, or of all rows where none lacks one; the latter have
trained the model, so they are no test. New rows: `comparison.predict("new.csv")`."""

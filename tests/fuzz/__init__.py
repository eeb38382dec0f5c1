"""Random calls of everything public: each is right, or refused in a sentence; anything else is a fault.

One table (`table.py`) has a strategy for every public name. A strategy draws a *program* from a seeded generator: a
few lines of Python that construct the thing and use it, some of their arguments wrong on purpose (`program.py`,
`arguments.py`). Workers in processes of their own run programs and judge them (`judge.py`, `worker.py`),
with limits on time and memory; what is bad is made as short as it stays bad, and grouped by kind (`search.py`).

    python -m tests.fuzz --calls 20000 --seed 0 [--name DIFFormer] [--report fuzz.md]
"""

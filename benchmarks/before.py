"""Compare the speed of this tree with that of an older commit.

    python benchmarks/before.py 43089a2
    python benchmarks/before.py HEAD~1 --model 25m --dtype bf16 --output FILE --note TEXT

The older commit is checked out in a temporary worktree. Each tree runs its own benchmarks/rank.py:
its flags and its report are the interface, so the trees may differ inside. Runs are one process,
and two processes with each sharding strategy. The trees run in turn; ratios are of runs close in
time, medians over rounds.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from throughput import HERE, Contender, Job, nanotrain_command, run, sharding, table

ABOUT = """# {after} beside {before}

{note}; torch {torch}. `python benchmarks/before.py {before}`, {model} shape, {dtype}, median of {rounds} rounds of
{steps} steps. Ratios above 1: faster than before, by the clock and by the CPU time of all ranks.

{body}
"""
ROOT = HERE.parent
# Data workers would start in the working directory and import the nanotrain there.
INLINE = "--num-workers=0"
KINDS = ("one process", "no_shard", "optim", "optim_grads")


def git(*arguments: str) -> str:
    """The output of a git command in this tree."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Check out the commit in a temporary worktree."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def contender(kind: str, tree: Path, *, name: str, rivals: tuple[str, ...] = ()) -> Contender:
    """One kind of run in one tree."""
    folder, environment = tree / "benchmarks", {"PYTHONPATH": str(tree)}
    if kind == "one process":
        return Contender(name, 1, nanotrain_command(INLINE, benchmarks=folder), rivals, environment)
    return Contender(name, 2, sharding(kind, INLINE, benchmarks=folder), rivals, environment)


def pairs(kinds: list[str], before: Path) -> list[Contender]:
    """Each kind of run in both trees, the older one first."""
    contenders = []
    for kind in kinds:
        old = contender(kind, before, name=f"before, {kind}")
        contenders += [old, contender(kind, ROOT, name=f"after, {kind}", rivals=(old.name,))]
    return contenders


def main() -> None:
    """Run both trees and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the older commit")
    parser.add_argument("--model", choices=("smoke", "10m", "25m", "110m"), default="10m")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--note", default="", help="date and machine, for the file")
    args = parser.parse_args()

    before, after = git("rev-parse", "--short", args.commit), git("rev-parse", "--short", "HEAD")
    with checked_out(before) as tree:
        contenders = pairs(args.only, tree)
        measured = run(
            Job(args.model, args.dtype, args.warmup, args.steps),
            [[c] for c in contenders],
            args.rounds,
        )
    body = table(contenders, measured)
    print(body)
    if args.output:
        text = ABOUT.format(
            **vars(args)
            | {"before": before, "after": after, "torch": torch.__version__, "body": body}
        )
        args.output.write_text(text)


if __name__ == "__main__":
    main()

"""This tree beside an older commit, in turn, in one run: has something become slower?

    python benchmarks/before.py 43089a2
    python benchmarks/before.py HEAD~1 --model 25m --dtype bf16 --output FILE --note TEXT

The older commit is checked out beside the tree for as long as it takes. Both are driven by this tree's rank.py, one
process and two with each sharding strategy; ratios are of neighbours in time, medians over rounds.
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
# Data workers would start in the present folder and find the nanotrain that lies there.
ALONE = "--num-workers=0"
KINDS = {
    "one process": (1, nanotrain_command(ALONE)),
    **{strategy: (2, sharding(strategy, ALONE)) for strategy in ("no_shard", "optim", "optim_grads")},
}


def git(*words: str) -> str:
    """What git answers in this tree."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A tree of the commit, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def pairs(kinds: list[str], before: Path) -> list[Contender]:
    """Each kind of run in both trees, the older one first."""
    contenders = []
    for kind in kinds:
        num_processes, command = KINDS[kind]
        old = Contender(f"before, {kind}", num_processes, command, environment={"PYTHONPATH": str(before)})
        new = Contender(f"after, {kind}", num_processes, command, (old.name,), {"PYTHONPATH": str(ROOT)})
        contenders += [old, new]
    return contenders


def main() -> None:
    """Run both trees and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the older one")
    parser.add_argument("--model", choices=("smoke", "10m", "25m", "110m"), default="10m")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--output", type=Path, help="write the table to this file too")
    parser.add_argument("--note", default="", help="date and machine, for the file")
    args = parser.parse_args()

    before, after = git("rev-parse", "--short", args.commit), git("rev-parse", "--short", "HEAD")
    with checked_out(before) as tree:
        contenders = pairs(args.only, tree)
        measured = run(Job(args.model, args.dtype, args.warmup, args.steps), [[c] for c in contenders], args.rounds)
    body = table(contenders, measured)
    print(body)
    if args.output:
        text = ABOUT.format(**vars(args) | {"before": before, "after": after, "torch": torch.__version__, "body": body})
        args.output.write_text(text)


if __name__ == "__main__":
    main()

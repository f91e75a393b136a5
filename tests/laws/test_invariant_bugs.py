"""Silent bugs of docs/known_bugs.md that `--invariant` shows: a layout with the bug, beside one rank
without it, has other bits.

`make layouts` plants them. The rows are the column "caught by bits" of that page.
"""

import gc
from typing import Any

import pytest

from nanotrain.comm.collectives import barrier
from nanotrain.comm.parallel_context import ParallelContext
from tests.harness import run_ranks
from tests.laws import test_invariant_experts as experts
from tests.laws.invariant import RankResult, bits_of, first_difference, invariant, run_here
from tests.laws.more_layouts import with_mark
from tests.laws.test_invariant import LLAMA, layout
from tests.laws.worlds import GLOBAL_BATCH, Case
from tests.scripts import load_script

MODELS = {"llama": LLAMA | {"num_layers": 1}, **experts.MODELS}
# the model and the layout that shows the bug of tests/mutants
BUGS = {
    "spec/norms-not-summed": ("llama", layout(2, 3, tp=2, sp=True)),
    "spec/head-norm-not-summed": ("llama", layout(2, 3, tp=2)),
    "spec/router-weight-not-summed": ("sigmoid", layout(2, 3, tp=2, etp=1)),
    "spec/experts-not-in-the-norm": ("softmax", layout(2, 3, tp=2, ep=2, etp=1)),
    "train/tied-embedding-not-summed": ("softmax", layout(2, 3, pp=2)),
    "train/loss-of-own-targets": ("llama", layout(2, 2, strategy="optim")),
    "optim/replicas-in-the-norm": ("llama", layout(2, 3, tp=2)),
    "parallel_cp/positions-of-the-first-rank": ("llama", layout(2, 3, cp=2)),
    "parallel_dp/later-microbatches-replace": ("llama", layout(2, 2, strategy="optim_grads")),
}


def case_of(name: str, sections: dict[str, Any]) -> Case:
    """Two steps of a model."""
    return invariant(2, model=MODELS[BUGS[name][0]]).but(**sections)


def run_with_bug(ctx: ParallelContext, name: str, case: Case) -> RankResult:
    """Train with a bug, which the ranks of this world share, as they are threads."""
    if ctx.rank == 0:
        gc.unfreeze()  # functions that were imported before the fork are planted too
        script = load_script("prove")
        script.plant(script.mutants()[name])
    barrier(ctx.control)
    return run_here(ctx, case)


@pytest.mark.parametrize("name", with_mark(BUGS))
def test_the_bits_of_a_layout_with_a_bug_differ(name: str) -> None:
    num_ranks, sections = BUGS[name][1]
    one = case_of(name, {"train": {"micro_batch_size": GLOBAL_BATCH}})
    reference = bits_of(run_ranks(1, run_here, one, shares=True))
    case = case_of(name, sections)
    results = run_ranks(num_ranks, run_with_bug, name, case, **sections["parallel"])
    try:
        bits = bits_of(results)
    except AssertionError:  # replicas differ
        return
    assert first_difference(bits, reference), f"{name} was not found"

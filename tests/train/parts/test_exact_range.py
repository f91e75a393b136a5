"""With `--invariant` a step whose sums are not exact changes no weight, and its reason is said."""

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.train.parts.exact_range import REASON
from tests.harness import run_ranks
from tests.laws.invariant import invariant
from tests.laws.worlds import build_here, train_steps

OUT_OF_RANGE = 30.0  # its first losses and gradients are finite, its gradients above 256


def steps_of(
    ctx: ParallelContext, init_method_std: float
) -> tuple[list[bool], list[str | None], bool]:
    """Whether two steps were skipped, their reasons, and whether a weight changed."""
    run = build_here(ctx, invariant(2, model={"init_method_std": init_method_std}))
    tensors = run.optimizer.tensors_to_save(only="model").values()
    before = [tensor.clone() for tensor in tensors]
    outputs = train_steps(run, 2)
    assert all(torch.tensor(output.loss).isfinite() for output in outputs)
    is_changed = any(not torch.equal(*pair) for pair in zip(before, tensors, strict=True))
    reasons = [output.metrics.get("skip_reason") for output in outputs]
    return [output.skipped for output in outputs], reasons, is_changed


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_out_of_range_is_skipped_on_every_rank(num_ranks: int) -> None:
    results = run_ranks(num_ranks, steps_of, OUT_OF_RANGE, shares=True)
    assert results == [([True, True], [REASON, REASON], False)] * num_ranks


def test_a_step_in_range_is_not() -> None:
    assert run_ranks(1, steps_of, 0.02, shares=True) == [([False, False], [None, None], True)]

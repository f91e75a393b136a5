"""Split sizes are sums of token counts, and tokens are sorted by expert for the experts alone."""

import torch

from nanotrain.parallel.ep.splits import Splits, run_in_expert_order
from tests.harness import ranks

COUNTS = torch.tensor(
    [
        [1, 2, 3, 4],  # sent by this rank to the experts 0..3
        [1, 0, 2, 5],  # received by etp rank 0: experts 0 and 1, from each rank of ep
        [3, 1, 0, 1],  # received by etp rank 1
    ],
    dtype=torch.int32,
)


@ranks(4, ep=2, etp=2)
def test_exact_splits_are_the_sums_of_the_counts_of_each_rank(ctx):
    etp = ctx.group("etp")
    splits = Splits.exact(COUNTS.flatten().tolist(), COUNTS, ep=ctx.group("ep"), etp=etp)
    assert splits.ep_inputs == [3, 7]
    assert splits.ep_outputs == ([1, 7], [4, 1])[etp.index]
    assert splits.etp == [8, 5]
    assert splits.tokens_per_expert.tolist() == [[1, 0], [2, 5], [3, 1], [0, 1]]
    assert splits.num_experts == 2


@ranks(4, ep=2, etp=2)
def test_padded_splits_are_equal_and_count_the_padding_of_each_source(ctx):
    splits = Splits.padded(COUNTS, 8, ep=ctx.group("ep"), etp=ctx.group("etp"))
    assert splits.ep_inputs == splits.ep_outputs == [8, 8]
    assert splits.etp == [16, 16]
    assert splits.tokens_per_expert.tolist() == [[1, 0, 7], [2, 5, 1], [3, 1, 4], [0, 1, 7]]
    assert splits.num_experts == 2


def test_experts_get_their_tokens_together_and_outputs_return_in_the_order_of_the_sources():
    counts = torch.tensor([[2, 1, 1], [0, 3, 1]], dtype=torch.int32)  # the last column is padding
    splits = Splits([], [], [8], tokens_per_expert=counts, num_experts=2)
    experts = torch.tensor([0.0, 0, 1, 2, 1, 1, 1, 2])[:, None]
    given = []

    def run_experts(rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        given.append((rows.flatten().tolist(), offs.tolist()))
        return 10 * rows

    outputs = run_in_expert_order(experts, splits, run_experts=run_experts)
    assert given == [([0, 0, 1, 1, 1, 1, 2, 2], [2, 6])]
    assert torch.equal(outputs, 10 * experts)

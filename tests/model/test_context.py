"""The context of a microbatch has the positions of a cp rank's tokens."""

import torch

from nanotrain.comm.group import Group
from nanotrain.model.context import BatchContext
from nanotrain.parallel.cp.split import split_batch
from tests.harness import ranks
from tests.model.building import random_batch


def test_without_context_parallelism_positions_are_left_out() -> None:
    context = BatchContext.of(random_batch(), cp=Group.single_rank("cp"), aux_loss_scale=0.5)
    assert (context.sequence_positions, context.aux_loss_scale) == (None, 0.5)


@ranks(2, cp=2)
def test_positions_select_the_tokens_of_the_rank(ctx) -> None:
    full = random_batch()
    context = BatchContext.of(split_batch(full, ctx.group("cp")), cp=ctx.group("cp"))
    assert torch.equal(context.batch.tokens, full.tokens[:, context.sequence_positions])

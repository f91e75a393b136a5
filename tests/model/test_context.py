"""The context of a microbatch has the positions of a cp rank's tokens."""

import torch

from nanotrain.comm.group import Group
from nanotrain.kernels.dropout import sample_words
from nanotrain.model.context import BatchContext, DropoutContext, DropoutPlace, HiddenDropout
from nanotrain.parallel.cp.split import split_batch
from nanotrain.parallel.tp.layers import TensorParallel
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


def test_layers_and_places_drop_different_elements() -> None:
    context = DropoutContext(sample_words(1, torch.arange(3)), torch.arange(8))
    words = [context.words_of(layer, place) for layer in range(5) for place in DropoutPlace]
    assert len(set(torch.cat(words).tolist())) == 3 * 5 * len(DropoutPlace)


def test_the_words_of_one_layer_are_those_of_all() -> None:
    context = DropoutContext(sample_words(1, torch.arange(3)), torch.arange(8))
    for place in DropoutPlace:
        assert torch.equal(context.for_layer(4).words_of(4, place), context.words_of(4, place))


def test_tokens_are_dropped_by_their_position_and_evaluation_drops_nothing() -> None:
    drop, x = (
        HiddenDropout(0.5, 2, DropoutPlace.mlp, TensorParallel.single_rank()),
        torch.ones(2, 8, 6),
    )
    full = drop(x, DropoutContext(sample_words(0, torch.tensor([7, 9])), torch.arange(8)))
    part = drop(
        x[1:, :3], DropoutContext(sample_words(0, torch.tensor([9])), torch.tensor([6, 1, 4]))
    )
    assert torch.equal(part, full[1:, [6, 1, 4]])
    assert drop(x, None) is x

"""Words of dropout: other ones for each layer and place, and those of a rank's slice are a slice of all."""

import torch

from nanotrain.kernels.dropout import sample_words
from nanotrain.model.dropout import DropoutContext, DropoutPlace, HiddenDropout
from nanotrain.parallel.tp.tensor_parallel import TensorParallel


def test_layers_and_places_drop_different_elements() -> None:
    context = DropoutContext.of(1, torch.arange(3), positions=torch.arange(8))
    assert torch.equal(context.words, sample_words(1, torch.arange(3)))
    words = [context.words_of(layer, place) for layer in range(5) for place in DropoutPlace]
    assert len(set(torch.cat(words).tolist())) == 3 * 5 * len(DropoutPlace)


def test_the_words_of_one_layer_are_those_of_all() -> None:
    context = DropoutContext.of(1, torch.arange(3), positions=torch.arange(8))
    for place in DropoutPlace:
        assert torch.equal(context.of_layer(4).words_of(4, place), context.words_of(4, place))


def test_tokens_are_dropped_by_their_position_and_evaluation_drops_nothing() -> None:
    drop, x = HiddenDropout(0.5, 2, DropoutPlace.mlp, TensorParallel.single_rank()), torch.ones(2, 8, 6)
    full = drop(x, DropoutContext.of(0, torch.tensor([7, 9]), positions=torch.arange(8)))
    part = drop(x[1:, :3], DropoutContext.of(0, torch.tensor([9]), positions=torch.tensor([6, 1, 4])))
    assert torch.equal(part, full[1:, [6, 1, 4]])
    assert drop(x, None) is x

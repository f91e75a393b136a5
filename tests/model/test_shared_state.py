"""Stages that send the state of layers along with the hidden states compute what one stage does."""

from dataclasses import replace

import pytest
import torch

from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext
from nanotrain.model.transformer import Stage
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import stages_of_lengths
from tests.model.building import QWEN3, VOCAB, build, randomize

MODEL = replace(
    QWEN3,
    num_layers=5,
    window_size=3,
    window_attn_skip_freq="2",
    num_kv_shared_layers=3,
    layer_input_size=6,
    untie_embeddings_and_output_weights=True,
)


def load(stage: Stage, weights: dict[str, torch.Tensor]) -> Stage:
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            parameter.copy_(weights[name])
    return stage


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 1), (2, 3), (1, 0, 4), (4, 1)])
def test_stages_of_any_lengths_are_the_model(lengths: tuple[int, ...]) -> None:
    model = randomize(build(MODEL))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    context = BatchContext(Batch(tokens, tokens.roll(-1, 1), torch.ones(tokens.shape)))
    expected = model(None, context)
    expected.backward()

    message: torch.Tensor | None = None
    stages = []
    for spec in stages_of_lengths(lengths):
        stages.append(load(build(MODEL, spec=spec), weights))
        message = stages[-1](message, context)
    assert message is not None
    torch.testing.assert_close(message, expected)
    message.backward()
    wanted = dict(model.named_parameters())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=name)


def test_a_message_without_state_is_the_hidden_states() -> None:
    specs = stages_of_lengths((2, 3))
    plain = build(replace(MODEL, num_kv_shared_layers=0, layer_input_size=0), spec=specs[0])
    hidden = torch.randn(2, 9, 32)
    assert plain.messages.pack(hidden, {}) is hidden
    assert plain.messages.widths == (32, 32)
    # keys and values of two heads of 16 channels, with a window and without; inputs of three layers
    assert build(MODEL, spec=specs[0]).messages.widths == (32, 32 + 2 * 2 * 2 * 16 + 3 * 6)
    assert ModelShape.of(MODEL).carried(5) == ()

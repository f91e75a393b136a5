"""Block attention residuals beside the loop over lists of blocks of their paper."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nanotrain.data.batch import Batch
from nanotrain.model.attention_residuals import block_of
from nanotrain.model.context import BatchContext
from nanotrain.model.transformer import Stage
from tests.model.building import LLAMA, build, randomize

STREAMS = 3
ATTENTION = {"residual_type": "attention", "residual_streams": STREAMS}


def paper_read(blocks: list[Tensor], partial: Tensor | None, query: Tensor, eps: float) -> Tensor:
    """Attention of one pseudo-query to complete blocks and the sum of the current one."""
    values = torch.stack(blocks if partial is None else [*blocks, partial])
    keys = nn.functional.rms_norm(values, values.shape[-1:], eps=eps)
    scores = torch.einsum("d,nbtd->nbt", query, keys)
    return torch.einsum("nbt,nbtd->btd", scores.softmax(0), values)


def paper_hidden(stage: Stage, embedded: Tensor, context, *, layers_per_block: int) -> Tensor:
    """The hidden states before the final norm, by lists of blocks."""
    eps = stage.model_config.norm_epsilon
    blocks: list[Tensor] = []
    partial: Tensor | None = embedded
    for layer, block in enumerate(stage.layers.values()):
        if layer % layers_per_block == 0:
            assert partial is not None
            blocks.append(partial)
            partial = None
        sublayers = {"attention": block.attention_output, "mlp": block.mlp_output}
        for name, sublayer in sublayers.items():
            if not hasattr(block, name):
                continue
            query = getattr(block, f"{name}_connection").weight
            output = sublayer(paper_read(blocks, partial, query, eps), context)
            partial = output if partial is None else partial + output
    return paper_read(blocks, partial, stage.leave_streams.weight, eps)


@pytest.mark.parametrize(
    "fields", [{}, {"hybrid_layer_pattern": "-*-*"}, {"num_layers": 2}], ids=["", "halves", "two"]
)
def test_hidden_states_and_gradients_are_those_of_the_paper(fields: dict[str, object]) -> None:
    stage = randomize(build(replace(LLAMA, **{"num_layers": 4} | ATTENTION | fields))).double()
    batch = Batch.from_tokens(
        torch.randint(0, 30, (2, 12), generator=torch.Generator().manual_seed(1))
    )
    embedded = stage.embedding(batch.tokens, None)
    context = stage._layer_context(BatchContext(batch), dropout=None, like=embedded)
    expected = paper_hidden(
        stage, embedded, context, layers_per_block=len(stage.layers) // (STREAMS - 1)
    )
    hidden = stage.enter_streams(embedded)
    for block in stage.layers.values():
        hidden = block(hidden, context)
    actual = stage.leave_streams(hidden)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weights = {
        name: param
        for name, param in stage.named_parameters()
        if "head" not in name and "final_norm" not in name
    }
    ours = torch.autograd.grad(actual.square().sum(), [*weights.values()], retain_graph=True)
    theirs = torch.autograd.grad(expected.square().sum(), [*weights.values()])
    for name, gradient, reference in zip(weights, ours, theirs, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-12)
        # the first sublayer reads the embedding alone, whatever its query
        is_first = name.startswith("layers.0.") and "connection" in name
        assert reference.abs().max() > 0 or is_first, name


def test_layers_are_divided_into_blocks_of_about_one_size() -> None:
    config = replace(LLAMA, num_layers=7, **ATTENTION | {"residual_streams": 4})
    assert [block_of(config, layer) for layer in range(7)] == [0, 0, 0, 1, 1, 2, 2]


def test_a_new_model_reads_the_mean_of_what_has_begun() -> None:
    stage = build(replace(LLAMA, num_layers=2, **ATTENTION))
    connections = [
        getattr(block, f"{half}_connection")
        for block in stage.layers.values()
        for half in ("attention", "mlp")
    ]
    streams = torch.randn(1, 2, STREAMS, 32)
    num_read = []
    for connection in connections:
        torch.nn.init.zeros_(connection.weight)
        read, write = connection.weigh(streams)
        begun = read[0, 0] > 0
        torch.testing.assert_close(
            read[0, 0][begun], torch.full((int(begun.sum()),), 1 / begun.sum())
        )
        num_read.append((int(begun.sum()), int(write.argmax())))
    assert num_read == [(1, 1), (2, 1), (2, 2), (3, 2)]

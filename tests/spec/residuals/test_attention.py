"""Block attention residuals: what a layer and the head declare, keep and launch."""

from dataclasses import replace

import torch

from nanotrain.config.model import ModelConfig
from nanotrain.plan.saved_bytes import saved_bytes
from nanotrain.spec.counts import num_parameters
from nanotrain.spec.kinds.block import block_operators, head_operators
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.shape import ModelShape
from tests.model.building import LLAMA, build, randomize
from tests.spec.residuals.test_hyper_connections import OperatorCounter, shape_of

N, H, TOKENS = 3, 256, 8


def test_every_sublayer_and_the_head_have_one_query_of_zeros() -> None:
    plain = ModelShape.of(ModelConfig(num_layers=1, vocab_size=10))
    assert num_parameters(shape_of("attention")) - num_parameters(plain) == 3 * H


def test_a_sublayer_keeps_its_streams_and_their_weights() -> None:
    plain = ModelShape.of(ModelConfig(num_layers=1, vocab_size=10))
    kept = []
    for shape in (plain, shape_of("attention")):
        sizes = LayerSizes.for_model(shape, seq_length=TOKENS)
        kept.append(saved_bytes(block_operators(sizes, 0)))
    assert kept[1] - kept[0] == 2 * (TOKENS * (N * H * 2 + N * 4) + N * 2)


def test_launches_of_the_head_are_the_operators_that_torch_runs() -> None:
    fields = {"residual_type": "attention", "residual_streams": N}
    stage = randomize(build(replace(LLAMA, num_layers=1, **fields)))
    streams = torch.randn(2, 5, N, 32, requires_grad=True)
    with OperatorCounter() as forward:
        weights = stage.leave_streams.weigh(streams)
    total = weights.sum()
    with OperatorCounter() as backward:
        torch.autograd.grad(total, [streams, *stage.leave_streams.parameters()])
    sizes = LayerSizes.for_model(ModelShape.of(stage.model_config), seq_length=TOKENS)
    weigh, *_ = head_operators(sizes)
    assert weigh.name == "stream_weights"
    assert weigh.launches == forward.count
    assert weigh.backward_launches == forward.count + backward.count

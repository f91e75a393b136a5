"""Hyper-connections beside the formula of their paper, and mHC beside transformers' DeepSeek-V4."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext
from tests.attention.fp64_transformers import modeling_in_fp64
from tests.model.building import LLAMA, build, randomize

STREAMS, HIDDEN = 3, 32
MHC = {"residual_type": "mhc", "residual_streams": STREAMS, "mhc_sinkhorn_iterations": 5}
HYPER = {"residual_type": "hyper_connections", "residual_streams": STREAMS}


def random_stage(**fields):
    """A stage of one layer with random fp64 weights, streams and the context of its layer."""
    stage = randomize(build(replace(LLAMA, num_layers=1, **fields))).double()
    batch = Batch.from_tokens(torch.zeros(2, 12, dtype=torch.int64))
    shape = (2, 12, STREAMS, HIDDEN)
    streams = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    context = stage._layer_context(BatchContext(batch), dropout=None, like=streams)
    return stage, streams.requires_grad_(), context


def copied(theirs: nn.Module, ours: nn.Module, names: dict[str, str]) -> nn.Module:
    """transformers' module with the weights of ours."""
    theirs = theirs.double()
    with torch.no_grad():
        for name, own in names.items():
            theirs.get_parameter(name).copy_(ours.get_parameter(own))
    return theirs


def assert_same(ours: nn.Module, theirs: nn.Module, names: dict[str, str], outputs: list[Tensor]):
    """Equal outputs, and equal gradients of all weights."""
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for output in outputs:
        output.square().sum().backward()
    for name, own in names.items():
        expected = theirs.get_parameter(name).grad
        torch.testing.assert_close(ours.get_parameter(own).grad, expected, rtol=1e-10, atol=1e-12)
        assert expected.abs().max() > 1e-6, name


def test_the_streams_of_mhc_are_those_of_deepseek_v4(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling_in_fp64("deepseek_v4", monkeypatch)
    config = DeepseekV4Config(hidden_size=HIDDEN, hc_mult=STREAMS, hc_sinkhorn_iters=5)
    config.rms_norm_eps, config.hc_eps = LLAMA.norm_epsilon, 1e-6
    stage, streams, context = random_stage(**MHC)
    block = stage.layers["0"]
    names = {"fn": "weight", "base": "bias", "scale": "scale"}
    for half, sublayer in (("attention", block.attention_output), ("mlp", block.mlp_output)):
        connection = getattr(block, f"{half}_connection")
        theirs = modeling_deepseek_v4.DeepseekV4HyperConnection(config)
        theirs = copied(theirs, connection, names)
        post, comb, collapsed = theirs(streams)
        out = sublayer(collapsed, context)
        mixed = torch.matmul(comb.transpose(-1, -2), streams)
        expected = post.unsqueeze(-1) * out.unsqueeze(-2) + mixed
        actual = connection(streams, lambda hidden, run=sublayer: run(hidden, context))
        assert_same(connection, theirs, names, [actual, expected])

    end_names = {"hc_fn": "weight", "hc_base": "bias", "hc_scale": "scale"}
    head = copied(modeling_deepseek_v4.DeepseekV4HyperHead(config), stage.leave_streams, end_names)
    outputs = [stage.leave_streams(streams.flatten(-2)), head(streams)]
    assert_same(stage.leave_streams, head, end_names, outputs)


def test_mixing_matrices_of_mhc_are_doubly_stochastic() -> None:
    stage, streams, _ = random_stage(**MHC | {"mhc_sinkhorn_iterations": 40})
    mix = stage.layers["0"].attention_connection.weigh(streams).mix
    ones = torch.ones(2, 12, STREAMS, dtype=torch.float64)
    torch.testing.assert_close(mix.sum(-1), ones, rtol=0, atol=1e-4)
    torch.testing.assert_close(mix.sum(-2), ones, rtol=0, atol=1e-4)
    assert mix.min() > 0 and mix.std() > 1e-3


def paper_connection(connection: nn.Module, h: Tensor, *, number: int, sublayer) -> Tensor:
    """Algorithm 2 of Zhu et al. 2024 with static and dynamic weights."""
    first = torch.zeros(STREAMS, 1, dtype=h.dtype)
    first[number % STREAMS] = 1
    bias = connection.bias.view(STREAMS, STREAMS + 2)
    static_beta = torch.ones(STREAMS, dtype=h.dtype) + bias[:, 1]
    static_alpha = torch.cat([first, torch.eye(STREAMS, dtype=h.dtype)], dim=1)
    static_alpha = static_alpha + torch.cat([bias[:, :1], bias[:, 2:]], dim=1)
    alpha_fn = torch.cat([connection.weight[:1], connection.weight[2:]]).T
    norm_h = connection.norm(h)
    alpha = torch.tanh(norm_h @ alpha_fn) * connection.scale[0] + static_alpha
    beta = torch.tanh(norm_h @ connection.weight[1]) * connection.scale[1] + static_beta
    mix_h = alpha.transpose(-1, -2) @ h
    out = sublayer(mix_h[..., 0, :])
    return torch.einsum("blh,bln->blnh", out, beta) + mix_h[..., 1:, :]


def test_hyper_connections_are_those_of_their_paper() -> None:
    stage, h, context = random_stage(**HYPER)
    block = stage.layers["0"]
    expected = paper_connection(
        block.attention_connection,
        h,
        number=0,
        sublayer=lambda x: block.attention_output(x, context),
    )
    expected = paper_connection(
        block.mlp_connection, expected, number=1, sublayer=lambda x: block.mlp_output(x, context)
    )
    actual = block(h.flatten(-2), context).unflatten(-1, (STREAMS, HIDDEN))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stage.leave_streams(h.flatten(-2)), h.sum(-2))
    gradients = torch.autograd.grad(actual.sum(), [*block.parameters()])
    assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_new_hyper_connections_compute_a_plain_residual() -> None:
    """Section 2.3: streams of a new model differ by nothing but their reading, in turn."""
    stage, h, context = random_stage(**HYPER)
    block = stage.layers["0"]
    for connection in (block.attention_connection, block.mlp_connection):
        for name in ("weight", "bias"):
            nn.init.zeros_(connection.get_parameter(name))
    x = h[:, :, 0].detach()
    same = x[:, :, None].expand_as(h).flatten(-2)
    attended = x + block.attention_output(x, context)
    expected = attended + block.mlp_output(attended, context)
    for stream in block(same, context).unflatten(-1, (STREAMS, HIDDEN)).unbind(2):
        torch.testing.assert_close(stream, expected)

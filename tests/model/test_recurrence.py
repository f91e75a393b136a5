"""Short convolutions equal those of transformers, inside documents and with the tokens before them
from a cache.
"""

from dataclasses import replace

import pytest
import torch
from transformers.models.lfm2.modeling_lfm2 import Lfm2Config, Lfm2ShortConv

from nanotrain.config.layer_kinds import LinearAttentionConfig
from nanotrain.model.context import LayerContext
from tests.model.building import LLAMA
from tests.model.mixers import assert_near, backward, random_hidden, random_mixer

SHORT = replace(
    LLAMA,
    linear_attention_type="short_conv",
    linear_attention_freq="[1,0]",
    linear_attention=LinearAttentionConfig(conv_kernel_dim=3),
)


@pytest.mark.parametrize("has_biases", [False, True])
def test_a_gated_short_convolution_is_that_of_transformers(has_biases: bool) -> None:
    ours = random_mixer(replace(SHORT, add_bias_linear=has_biases))
    config = Lfm2Config(hidden_size=32, num_hidden_layers=1, conv_L_cache=3, conv_bias=has_biases)
    theirs = Lfm2ShortConv(config, 0).double()
    inputs = [ours.gate_in, ours.gate_out, ours.value]
    with torch.no_grad():
        for leaf in ("weight", "bias")[: 1 + has_biases]:
            getattr(theirs.in_proj, leaf).copy_(torch.cat([getattr(each, leaf) for each in inputs]))
            getattr(theirs.conv, leaf).copy_(
                getattr(ours.conv, leaf).view_as(getattr(theirs.conv, leaf))
            )
            getattr(theirs.out_proj, leaf).copy_(getattr(ours.output, leaf))
    hidden = random_hidden(2, 9, 32)

    found = backward(ours(hidden, LayerContext()), hidden, ours)
    expected = backward(theirs(hidden), hidden, theirs)

    names = [name for name, _ in ours.named_parameters()]
    by_name = dict(zip(names, found[2:], strict=True))
    of_theirs = dict(
        zip([name for name, _ in theirs.named_parameters()], expected[2:], strict=True)
    )
    assert_near(found[:2], expected[:2])
    for leaf in ("weight", "bias")[: 1 + has_biases]:
        joined = torch.cat([by_name[f"{name}.{leaf}"] for name in ("gate_in", "gate_out", "value")])
        conv = by_name[f"conv.{leaf}"].view_as(of_theirs[f"conv.{leaf}"])
        pairs = {"in_proj": joined, "conv": conv, "out_proj": by_name[f"output.{leaf}"]}
        for name, grad in pairs.items():
            assert_near([grad], [of_theirs[f"{name}.{leaf}"]])


def test_documents_are_convolved_as_if_alone() -> None:
    module, hidden = random_mixer(SHORT), random_hidden(2, 12, 32)
    segment_ids = torch.tensor([[0] * 5 + [1] + [2] * 6, [0] * 12])

    found = module(hidden, LayerContext(segment_ids=segment_ids))

    apart = torch.cat(
        [module(part, LayerContext()) for part in hidden[:1].split((5, 1, 6), dim=1)], dim=1
    )
    assert_near([found], [torch.cat((apart, module(hidden[1:], LayerContext())))])

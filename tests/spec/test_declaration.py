"""What kinds of layers declare: convolutions, halos; and every kind has a module, and a name in the
configuration.
"""

from typing import get_args

from nanotrain.config.layer_kinds import LinearAttentionType
from nanotrain.config.model import ModelConfig
from nanotrain.model.sublayers import MIXER_MODULES
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.params import Shard, Uniform
from nanotrain.spec.shape import ModelShape


def test_convolutions_are_sharded_by_channels_and_not_updated_as_matrices() -> None:
    weight, bias = Declaration(ModelShape.of(ModelConfig(vocab_size=8)), "bf16").convolution(
        6, 4, bias=True
    )
    assert (weight.shape, bias.shape) == ((6, 4), (6,))
    for spec in (weight, bias):
        assert spec.shards == (Shard(0, "tp"),) and spec.init == Uniform(-0.5, 0.5)
        assert not spec.needs_whole_matrix and not spec.in_fp8
    assert weight.weight_decay and not bias.weight_decay


def test_every_kind_has_a_module_and_linear_ones_a_name() -> None:
    assert MIXERS.keys() == MIXER_MODULES.keys()
    assert {*get_args(LinearAttentionType)} == {
        name for name in MIXERS if name.startswith("attention_") or not MIXERS[name].has_keys
    }

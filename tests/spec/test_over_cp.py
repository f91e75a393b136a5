"""Bytes that a convolution sends to the neighbours of a rank."""

import pytest

from nanotrain.config.model import ModelConfig
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Sent
from nanotrain.spec.over_cp import halo
from nanotrain.spec.shape import ModelShape

SHAPE = ModelShape.of(ModelConfig(vocab_size=8))


@pytest.mark.parametrize(("index", "num_bytes"), [(0, 40), (1, 80), (2, 40)])
def test_ends_of_a_group_send_one_halo_and_others_two(index: int, num_bytes: int) -> None:
    sizes = LayerSizes(SHAPE, batch_size=5, seq_length=16, cp=3, cp_index=index, itemsize=2)
    assert halo(sizes, channels=2, kernel_size=3) == (Sent("p2p", num_bytes, num_bytes),)

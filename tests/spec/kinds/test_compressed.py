"""Attention to compressed keys, pure: what tp shards, and FLOPs."""

from dataclasses import replace

import pytest

from nanotrain.config.layer_kinds import CompressedAttentionConfig, DSAConfig
from nanotrain.config.model import ModelConfig
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import CompressedAttention, Indexer
from nanotrain.spec.shape import ModelShape
from tests.spec.kinds.sent import sent_over_cp

MODEL = ModelConfig(
    num_layers=3,
    hidden_size=32,
    vocab_size=8,
    num_attention_heads=8,
    num_query_groups=1,
    kv_channels=6,
    window_size=7,
    sparse_attention_type="compressed",
    compressed=CompressedAttentionConfig("WCH", 4, 16, 10, output_groups=4, output_lora_rank=5),
    dsa=DSAConfig(n_heads=3, head_dim=6, topk=8),
)
SHAPE = ModelShape.of(MODEL)


def test_letters_are_kinds_and_the_window_alone_has_other_positions() -> None:
    assert MODEL.mixers == ("sliding", "csa", "hca")
    assert MODEL.window_layers == (True, False, False)
    unset = replace(MODEL, num_layers=5, compressed=CompressedAttentionConfig())
    assert unset.mixers == ("hca", "hca", "hca", "csa", "hca")


def test_tp_shards_heads_and_sums_gradients_of_what_compresses_keys() -> None:
    specs = MIXERS["csa"].declare(Declaration(SHAPE, "fp32", 2, True))
    found = {spec.name: (spec.shape, bool(spec.shards), spec.grad_sum_axes) for spec in specs}
    assert found["query_up.weight"] == ((48, 10), True, ())
    assert found["output_down.weight"] == ((20, 12), True, ())
    assert found["key.weight"] == ((6, 32), False, ("tp",))
    assert found["compressor.position_bias"] == ((4, 12), False, ("tp",))
    assert found["compressor.norm.weight"] == ((6,), False, ("tp",))
    # every rank has all gradients of the index, which it computes from all tokens
    assert found["indexer.position_bias"] == ((4, 12), False, ())
    assert found["indexer.norm.weight"] == ((6,), False, ())
    assert found["indexer.value.weight"] == ((12, 32), False, ("tp",))
    one_series = MIXERS["hca"].declare(Declaration(SHAPE, "fp32"))
    widths = {spec.name: spec.shape for spec in one_series}
    assert widths["compressor.position_bias"] == (16, 6)


def test_cp_sends_tokens_before_chunks_and_gathers_compressed_keys() -> None:
    """A rank at an end of the group has one neighbour."""
    rank = LayerSizes(SHAPE, 2, 64, cp=2, cp_comm_type="allgather").at(1)
    of_window = 2 * 7 * 6
    of_windows = 2 * 7 * (4 * 6 + 6) * 2  # with six rotary channels; of keys and index keys
    gathered = 2 * 2 * 8 * (6 + 6) * 2
    assert sent_over_cp("csa", rank) == {
        "p2p": (2 * (of_window + of_windows), 2 * (of_window + of_windows)),
        "all_gather": (gathered, 0),
        "reduce_scatter": (0, gathered),
    }


def operators(layer: int, length: int) -> list:
    sizes = LayerSizes.for_model(SHAPE, seq_length=length).at(layer)
    return MIXERS[MODEL.mixers[layer]].operators(sizes)


@pytest.mark.parametrize(("layer", "ratio", "topk"), [(0, 0, 0), (1, 4, 8), (2, 16, 10**9)])
def test_flops_are_those_of_the_window_and_of_selected_keys(
    layer: int, ratio: int, topk: int
) -> None:
    length = 256
    (core,) = (each for each in operators(layer, length) if isinstance(each, CompressedAttention))
    pairs = sum(min(at + 1, 8) for at in range(length))
    if ratio:
        pairs += sum(min((at + 1) // ratio, topk) for at in range(length))
    assert core.sequence_flops == pytest.approx(2 * 8 * (6 + 6) * pairs, rel=0.03)


def test_an_index_scores_compressed_keys() -> None:
    (index,) = (each for each in operators(1, 256) if isinstance(each, Indexer))
    pairs = sum((at + 1) // 4 for at in range(256))
    assert index.sequence_flops == pytest.approx(2 * 3 * 6 * pairs, rel=0.02)
    assert not any(isinstance(each, Indexer) for each in operators(2, 256))

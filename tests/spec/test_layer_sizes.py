"""Sizes of a rank: tokens, local widths and the parallelism of products."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from nanotrain.config.model import ModelConfig
from nanotrain.dry_run.stand_ins import _rms_norm
from nanotrain.model.norm import build_norm
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Saved
from nanotrain.spec.shape import ModelShape

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=128)
SIZES = LayerSizes(ModelShape.of(MODEL), batch_size=2, seq_length=8, tp=2, itemsize=2)


def test_sequence_parallelism_shards_the_tokens_outside_of_tensor_parallel_layers() -> None:
    assert (SIZES.tokens, SIZES.outside, SIZES.routed_tokens) == (16, 16, 8)
    assert replace(SIZES, sequence_parallel=True).outside == 8


@pytest.mark.parametrize(
    ("placement", "dropped_by"),
    [
        ("pre", ("layernorm", "pointwise")),
        ("sandwich", ("layernorm", "pointwise")),
        ("post", ()),
    ],
)
def test_recomputed_norms_drop_the_input_of_a_layer_that_is_their_output(
    placement: str, dropped_by: tuple[str, ...]
) -> None:
    shape = ModelShape.of(replace(MODEL, norm_placement=placement))
    assert replace(SIZES, shape=shape).layer_input == Saved(16 * 64, dropped_by=dropped_by)


def test_products_that_share_their_input_are_one() -> None:
    product = SIZES.column({"query": 16, "key": 8})
    assert (product.rows, product.outputs, product.inputs) == (16, 24, 32)
    assert product.weights == ("query.weight", "key.weight")
    output = SIZES.row(16)
    assert (output.outputs, output.inputs, output.shard) == (32, 16, "row")


def test_layers_with_a_window_have_their_own_backend_and_heads() -> None:
    model = replace(
        MODEL, window_size=4, window_attn_skip_freq="2", num_query_groups=4, window_query_groups=2
    )
    sizes = replace(SIZES, shape=ModelShape.of(model), backend="full", window_backend="windowed")
    layers = [sizes.at(layer) for layer in range(2)]
    assert {each.attention_backend: each.shape.query_groups for each in layers} == {
        "full": 4,
        "windowed": 2,
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_offset", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm", "L2Norm"])
def test_a_norm_keeps_what_is_planned_beside_its_input(
    kind: str, is_offset: bool, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The meta device stands for a GPU, where torch's fused RMSNorm keeps one number per row.
    if device == "meta":
        monkeypatch.setattr(F, "rms_norm", _rms_norm)
    if device == "meta" and dtype == torch.bfloat16 and (is_offset or kind == "LayerNorm"):
        pytest.skip("compiled norms keep no copy in fp32; statistics of a LayerNorm as on a CPU")
    model = replace(MODEL, normalization=kind, apply_layernorm_1p=is_offset)
    rows = 40
    weight, bias = (torch.ones(32, dtype=dtype, device=device) for _ in range(2))
    params = (
        {} if kind == "L2Norm" else {"weight": nn.Parameter(weight), "bias": nn.Parameter(bias)}
    )
    norm = build_norm(model, params)  # type: ignore[arg-type]
    x = torch.randn(rows, 32, dtype=dtype, device=device, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() >= rows:  # not the weight
            kept[tensor.untyped_storage()._cdata] = tensor.numel() * tensor.itemsize
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(x)
    shape = ModelShape.of(model)
    sizes = replace(
        SIZES, shape=shape, itemsize=x.itemsize, device="cpu" if device == "cpu" else "cuda"
    )
    assert sum(kept.values()) == rows * (32 * x.itemsize + sizes.norm_extra(32))


def test_a_layer_norm_keeps_its_statistics_in_fp32_on_gpus() -> None:
    assert replace(SIZES, device="cuda").layer_norm_statistics == 8
    assert replace(SIZES, device="cpu").layer_norm_statistics == 4

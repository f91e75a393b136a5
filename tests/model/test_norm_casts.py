"""Layers in fp8 normalize their input in their casts where that is possible, with the same bits, and
keep what is planned.
"""

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nanotrain.config.model import ModelConfig
from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.kernels.fp8.layer import Fp8Options
from nanotrain.memory.recompute_modules import recompute_modules, unchanged
from nanotrain.model import down_projection, norm_casts
from nanotrain.model.context import ModelParallel
from nanotrain.model.transformer import build_stage
from nanotrain.plan.plan import plan_run
from nanotrain.plan.saved_bytes import layer_sizes, saved_bytes
from nanotrain.precision.fp8 import FP8_FORMATS, FP8_RECIPES, RECIPES
from nanotrain.spec.kinds.block import block_operators
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Norm
from tests.model.building import LLAMA, VOCAB, build
from tests.train.saved_tensors import SavedTensors, config_of

FP8 = Fp8Options(RECIPES["blockwise"], FP8_FORMATS["e4m3"], is_fused=True)
PARALLEL = ModelParallel.single_rank()
IN_FP8 = replace(PARALLEL, tp=replace(PARALLEL.tp, fp8=FP8))
BATCH, LENGTH = 2, 64


def trained(
    recipe: str, modules: tuple[str, ...] = (), *, is_cast: bool
) -> tuple[list[Tensor], int]:
    """Logits and gradients of a model in bf16, and the bytes that its forward keeps."""

    def fuses(options: Fp8Options | None) -> bool:
        return is_cast  # without kernels torch's operators cast

    options = replace(FP8, recipe=RECIPES[recipe], is_fused=False)
    parallel = replace(PARALLEL, tp=replace(PARALLEL.tp, fp8=options))
    with (
        patch.object(ModelParallel, "single_rank", lambda: parallel),
        patch.object(norm_casts, "fuses_norm", fuses),
        patch.object(down_projection, "fuses_swiglu", fuses),
    ):
        stage = build(LLAMA, dtype=torch.bfloat16)
        for block in stage.layers.values():
            norm_casts.cast_norms(block, modules, parallel=parallel)
            recompute_modules(block, modules, recompute=stage.parallel.recompute)
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCAB
    saved = SavedTensors(stage.parameters())
    with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        logits = stage.logits(tokens)
    logits.float().square().sum().backward()
    grads = [param.grad for param in stage.parameters()]
    return [logits.detach(), *(grad for grad in grads if grad is not None)], saved.num_bytes


@pytest.mark.parametrize("modules", [(), ("layernorm",)])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_model_has_the_bits_of_norms_and_casts_after_each_other(
    recipe: str, modules: tuple[str, ...]
) -> None:
    separate, joined = (trained(recipe, modules, is_cast=flag)[0] for flag in (False, True))
    assert len(joined) == 1 + 2 * 9 + 2, "of two blocks, the embedding and the last norm"
    assert all(torch.equal(a, b) for a, b in zip(separate, joined, strict=True))


def planned_sizes(recipe: str, words: str = "") -> LayerSizes:
    """The sizes of the same model on a GPU."""
    model = (
        "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --bf16 "
        f"--num-query-groups 2 --seq-length {LENGTH} --micro-batch-size {BATCH}"
    )
    config = config_of(f"{model} --fp8-format e4m3 --fp8-recipe {recipe} {words}")
    return layer_sizes(plan_run(config, 1, rank=0), "cuda")


def kept(sizes: LayerSizes, modules: Collection[str] = ()) -> int:
    """Bytes of two blocks."""
    return sum(saved_bytes(block_operators(sizes, layer), modules) for layer in range(2))


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_the_plan_counts_what_casts_do_not_keep(recipe: str) -> None:
    """Inputs of query, key and value, of gate and up, and of down: one byte instead of two."""
    sizes = planned_sizes(recipe)
    planned = kept(replace(sizes, cast_recipe="")) - kept(sizes)
    separate, joined = (trained(recipe, is_cast=flag)[1] for flag in (False, True))
    # scales of tensors, in the separate form outside of autograd: of 5 inputs and 7 weights
    num_scales = 2 * 12 if recipe == "delayed" else 0
    assert separate - joined == planned - 4 * num_scales
    assert planned > 0


def norms_cast(sizes: LayerSizes) -> list[bool]:
    """Whether casts compute the norms of the first block."""
    return [each.is_cast for each in block_operators(sizes, 0) if isinstance(each, Norm)]


def test_layers_in_bf16_and_recomputed_norms_keep_what_they_kept() -> None:
    sizes = planned_sizes("blockwise")
    assert norms_cast(sizes) == [True, True]
    first_in_bf16 = "--first-last-layers-bf16 --num-layers-at-end-in-bf16 0"
    assert norms_cast(planned_sizes("blockwise", first_in_bf16)) == [False, False]
    separate = replace(sizes, cast_recipe="")
    assert kept(separate, {"pointwise"}) == kept(sizes, {"pointwise"})
    channels = sizes.shape.ffn_size
    dropped = 2 * sizes.tokens * channels - sizes.fp8_bytes(sizes.tokens, channels)
    assert kept(separate, {"layernorm"}) - kept(sizes, {"layernorm"}) == 2 * dropped


def block_of(model_config: ModelConfig, parallel: ModelParallel) -> nn.Module:
    """The first block of a model, without storage."""
    with patch.object(ModelParallel, "single_rank", lambda: parallel):
        return build_stage(model_config).layers["0"]


def is_cast(block: nn.Module) -> bool:
    """Whether both norms of a block return their input."""
    attention, mlp = (
        getattr(block, name).forward is unchanged for name in ("attention_norm", "mlp_norm")
    )
    assert attention == mlp
    return attention


def test_norms_with_other_readers_and_layers_over_ranks_stay_as_they_are() -> None:
    block = block_of(LLAMA, IN_FP8)
    over_ranks = replace(IN_FP8, tp=replace(IN_FP8.tp, group=SimpleNamespace(size=2)))
    deferring = replace(IN_FP8, tp=replace(IN_FP8.tp, wgrad_queue=WgradQueue()))
    for parallel in (over_ranks, deferring):
        norm_casts.cast_norms(block, (), parallel=parallel)
        assert not is_cast(block)
    norm_casts.cast_norms(block, (), parallel=IN_FP8)
    assert is_cast(block)
    layer_norm = replace(LLAMA, normalization="LayerNorm")
    for model_config, parallel in ((LLAMA, PARALLEL), (layer_norm, IN_FP8)):
        block = block_of(model_config, parallel)
        norm_casts.cast_norms(block, (), parallel=IN_FP8)
        assert not is_cast(block)

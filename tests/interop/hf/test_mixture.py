"""Experts in files: one matrix each or fused, read by the box, written as every transformers reads
them.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from nanotrain.comm.group import Group
from nanotrain.config.load import load
from nanotrain.config.model import ModelConfig
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.export import export_weights
from nanotrain.interop.hf.families import (
    FAMILIES,
    config_from_hf,
    config_to_hf,
    family_of,
    model_from_hf,
)
from nanotrain.interop.hf.import_weights import import_weights
from nanotrain.interop.hf.names import map_parameters
from nanotrain.interop.hf.weights import WeightFiles
from nanotrain.model.router import balance_loss, count_tokens
from nanotrain.spec.boxes import Box, TensorBox, flat_range_to_boxes
from tests.interop.hf.configs import MIXTURES
from tests.interop.hf.reference import aligned, reference


def read_whole(folder: Path, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Every parameter of a folder, whole and without padding."""
    mappings = map_parameters(model, FAMILIES[family_of(model)])
    tensors = {name: torch.full(mapping.shape, float("nan")) for name, mapping in mappings.items()}
    wanted = {TensorBox.full(name, tensor.shape): tensor for name, tensor in tensors.items()}
    import_weights(folder, model, wanted=wanted)
    return tensors


def test_entries_that_qwen3_moe_omits_are_those_of_transformers() -> None:
    theirs = transformers.Qwen3MoeConfig()
    assert (
        config_from_hf({"model_type": "qwen3_moe"}).moe.router_pre_softmax
        is not theirs.norm_topk_prob
    )
    sparse = transformers.Qwen3MoeConfig(
        num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3], hidden_size=16, intermediate_size=8,
        moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=8,
    )  # fmt: skip
    layers = transformers.Qwen3MoeForCausalLM(sparse).model.layers
    has_experts = tuple(hasattr(layer.mlp, "experts") for layer in layers)
    assert config_from_hf(sparse.to_dict()).moe_layers == has_experts == (False, True, False, False)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_parameter_is_the_one_transformers_holds(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path)
    model = model_from_hf(tmp_path)
    expected, imported = dict(theirs.named_parameters()), read_whole(tmp_path, model)
    mappings = map_parameters(model, FAMILIES[family_of(model)].namings[-1])
    assert {
        tensor for mapping in mappings.values() for tensor in mapping.tensor_shapes
    } == expected.keys()
    for key, mapping in mappings.items():
        (piece,) = mapping.slices(Box.full(mapping.shape))
        assert torch.equal(imported[key], expected[piece.tensor][piece.stored.slices()])


@pytest.mark.parametrize("name", MIXTURES)
def test_import_then_export_is_the_identity_to_the_bit(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "in")
    model = model_from_hf(tmp_path / "in")
    family = export_weights(
        tmp_path / "out", model, tensors=read_whole(tmp_path / "in", model).items()
    )
    assert family == theirs.config.model_type
    expected, exported = (
        load_file(tmp_path / side / "model.safetensors") for side in ("in", "out")
    )
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[key], expected[key]) for key in expected)

    back = aligned(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert type(back) is type(theirs)
    tokens = torch.randint(
        0, model.vocab_size or 0, (2, 9), generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(back(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("name", MIXTURES)
def test_fused_experts_load_alike(name: str, tmp_path: Path) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "apart")
    (tmp_path / "fused").mkdir()
    theirs.config.save_pretrained(tmp_path / "fused")
    # tied ones share their memory
    apart = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    save_file(apart, tmp_path / "fused" / "model.safetensors")
    model = model_from_hf(tmp_path / "apart")
    apart, fused = read_whole(tmp_path / "apart", model), read_whole(tmp_path / "fused", model)
    assert all(torch.equal(fused[key], apart[key]) for key in apart)


def test_only_the_experts_that_a_rank_holds_are_read(tmp_path: Path) -> None:
    reference("mixtral").save_pretrained(tmp_path)
    model = model_from_hf(tmp_path)
    read: Counter[str] = Counter()

    def count(files: WeightFiles, name: str, box: Box, *, is_whole: bool) -> torch.Tensor:
        read[name] += box.numel
        return real(files, name, box, is_whole=is_whole)

    real = WeightFiles.read
    # Given experts 2 and 3 of 4, and of each the second half of its 48 rows.
    piece = TensorBox("layers.1.mlp.experts.gate.weight", (4, 48, 32), Box((2, 24, 0), (4, 48, 32)))
    target = torch.full(piece.box.shape, float("nan"))
    with patch.object(WeightFiles, "read", count):
        import_weights(tmp_path, model, wanted={piece: target})
    experts = "model.layers.1.block_sparse_moe.experts"
    assert read == {f"{experts}.{expert}.w1.weight": 24 * 32 for expert in (2, 3)}
    assert torch.equal(target, read_whole(tmp_path, model)[piece.name][piece.box.slices()])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    reference("qwen3_moe").save_pretrained(folder)
    return folder


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_flat_range_of_stacked_experts_is_read_as_its_boxes(
    qwen: Path, data: st.DataObject
) -> None:
    model = model_from_hf(qwen)
    whole = read_whole(qwen, model)
    name = data.draw(st.sampled_from([key for key in whole if "experts" in key]))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole[name].numel())] * 2)))
    boxes = flat_range_to_boxes(whole[name].shape, start=start, stop=stop)
    wanted = {
        TensorBox(name, tuple(whole[name].shape), box): torch.full(box.shape, float("nan"))
        for box in boxes
    }
    import_weights(qwen, model, wanted=wanted)
    values = (
        torch.cat([tensor.flatten() for tensor in wanted.values()]) if wanted else torch.empty(0)
    )
    assert torch.equal(values, whole[name].flatten()[start:stop])


def test_the_published_layout_is_read() -> None:
    """The config.json of Qwen/Qwen3-30B-A3B, as published: older names of experts and of rotary
    positions.
    """
    raw = json.loads("""{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""")
    recipe = load(["+config=qwen3_30b_a3b"], to_train=False).config.model
    assert canonical(config_from_hf(raw)) == canonical(
        replace(recipe, moe=replace(recipe.moe, aux_loss_coeff=[0.0]))
    )


@pytest.mark.parametrize(
    ("recipe", "published"),
    [
        ("mixtral_8x7b", 0.02),
        ("qwen3_30b_a3b", 0.001),
        ("qwen3_5_35b_a3b", 0.001),
    ],
)
def test_the_coefficient_of_a_recipe_is_the_published_one_in_transformers_definition(
    recipe, published
) -> None:
    model = load([f"model={recipe}", "--mock-data"]).config.model
    assert config_to_hf(model, family=family_of(model))["router_aux_loss_coef"] == pytest.approx(
        published, rel=1e-5
    )
    # equal gates in all layers: transformers pools them, here they are summed
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    pooled = load_balancing_loss_func((logits,) * model.num_layers, 8, model.moe.router_topk)
    ids = logits.topk(model.moe.router_topk).indices
    tokens = count_tokens(ids[None], num_experts=8, sequence=Group.single_rank("tp_cp"))
    loss = balance_loss(logits.softmax(-1)[None], tokens, topk=model.moe.router_topk, num_tokens=64)
    torch.testing.assert_close(
        published * pooled, model.moe.aux_loss_coeff[0] * model.num_layers * loss, rtol=1e-5, atol=0
    )

"""torch.distributed.checkpoint reads what is exported for Megatron-LM, in the arrangement of its
documentation.
"""

import json
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from nanotrain.config.model import ModelConfig, MTPConfig
from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron import export_run
from nanotrain.interop.megatron.export import check_model, plan_chunks
from nanotrain.interop.megatron.export_run import export_megatron
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape
from tests.interop.megatron.models import (
    DEEPSEEK,
    GATED,
    GPT2,
    HYBRID,
    LLAMA,
    MIXED,
    MLA,
    MOE,
    write_checkpoint,
)

STACK = "decoder.layers."
# norms that are written twice, as transformer-engine and the local modules name them
COPIES = ("pre_mlp_layernorm.weight", "_up_proj.layer_norm_weight")


def exported(tmp_path: Path, model_config: ModelConfig, **options: str):
    """Weights of ours, tensors of the export, and its other names."""
    ours = write_checkpoint(tmp_path / "run", model_config)
    export_megatron(tmp_path / "run", tmp_path / "megatron", **options)
    folder = tmp_path / "megatron" / "iter_0000003"
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    others = {name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata)}
    state = {
        n: torch.zeros(e.size, dtype=e.properties.dtype)
        for n, e in entries.items()
        if n not in others
    }
    objects = dict.fromkeys(others)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    dcp.load(objects, checkpoint_id=folder, no_dist=True)
    assert all(value == [None] for value in objects.values())
    return ours, state, others


def fused_qkv(
    ours: dict[str, torch.Tensor], layer: int, *, leaf: str = "weight", groups: int = 2
) -> torch.Tensor:
    """Per group: its query heads of width 4, its key head, its value head."""
    rows, per_group = [], 4 // groups
    for group in range(groups):
        for head in range(group * per_group, (group + 1) * per_group):
            rows += [
                ours[f"layers.{layer}.attention.query.{leaf}"][4 * head + row] for row in range(4)
            ]
        for name in ("key", "value"):
            rows += [
                ours[f"layers.{layer}.attention.{name}.{leaf}"][4 * group + row] for row in range(4)
            ]
    return torch.stack(rows)


def stacked(ours: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return torch.stack([ours[f"layers.0.{name}"], ours[f"layers.1.{name}"]])


def test_an_export_without_its_lines_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be described has been refused by the import."""

    def refuse(_: object) -> list[str]:
        raise CheckpointError("an argument that no run has", why="", fix="")

    write_checkpoint(tmp_path / "run", LLAMA)
    monkeypatch.setattr(export_run, "describe", refuse)
    with pytest.raises(CheckpointError):
        export_megatron(tmp_path / "run", tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()


def test_llama(tmp_path: Path) -> None:
    ours, state, others = exported(tmp_path, LLAMA)
    expected = {
        "embedding.word_embeddings.weight": ours["embedding.word.weight"],
        "output_layer.weight": ours["head.weight"],
        "decoder.final_layernorm.weight": ours["final_norm.weight"],
        f"{STACK}self_attention.linear_qkv.weight": torch.stack(
            [fused_qkv(ours, 0), fused_qkv(ours, 1)]
        ),
        f"{STACK}self_attention.linear_qkv.layer_norm_weight": stacked(
            ours, "attention_norm.weight"
        ),
        f"{STACK}self_attention.q_layernorm.weight": stacked(ours, "attention.query_norm.weight"),
        f"{STACK}self_attention.k_layernorm.weight": stacked(ours, "attention.key_norm.weight"),
        f"{STACK}self_attention.linear_proj.weight": stacked(ours, "attention.output.weight"),
        f"{STACK}mlp.linear_fc1.layer_norm_weight": stacked(ours, "mlp_norm.weight"),
        f"{STACK}mlp.linear_fc2.weight": stacked(ours, "mlp.down.weight"),
    }
    fc1 = torch.zeros(2, 64, 16)
    fc1[:, :32], fc1[:, 32:] = stacked(ours, "mlp.gate.weight"), stacked(ours, "mlp.up.weight")
    expected[f"{STACK}mlp.linear_fc1.weight"] = fc1
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert len(others) == 8 and f"{STACK}mlp.linear_fc2._extra_state/shard_1_2" in others


def test_the_files_around_the_tensors(tmp_path: Path) -> None:
    exported(tmp_path, LLAMA, dtype="bf16")
    folder = tmp_path / "megatron"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    folder = folder / "iter_0000003"
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    common = torch.load(folder / "common.pt", weights_only=True)
    assert (common["iteration"], common["checkpoint_version"]) == (3, 3.0)
    with pytest.raises(CheckpointError, match="is not empty"):
        export_megatron(tmp_path / "run", tmp_path / "megatron")


def test_step_0_is_a_release(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", LLAMA, step=0)
    export_megatron(tmp_path / "run", tmp_path / "megatron")
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "megatron" / "release" / "common.pt").is_file()


def test_gpt2_has_biases_and_positions_and_no_head(tmp_path: Path) -> None:
    ours, state, _ = exported(tmp_path, GPT2)
    assert "output_layer.weight" not in state
    assert torch.equal(
        state["embedding.position_embeddings.weight"], ours["embedding.position.weight"]
    )
    bias = torch.stack([fused_qkv(ours, layer, leaf="bias", groups=4) for layer in range(2)])
    assert torch.equal(state[f"{STACK}self_attention.linear_qkv.bias"], bias)
    assert torch.equal(state[f"{STACK}mlp.linear_fc1.bias"], stacked(ours, "mlp.up.bias"))
    assert torch.equal(
        state[f"{STACK}mlp.linear_fc1.layer_norm_bias"], stacked(ours, "mlp_norm.bias")
    )
    assert torch.equal(state["decoder.final_layernorm.bias"], ours["final_norm.bias"])


def test_experts_are_stacked_behind_layers(tmp_path: Path) -> None:
    ours, state, others = exported(tmp_path, MOE, dtype="bf16")
    fc1, fc2 = (state[f"{STACK}mlp.experts.experts.linear_fc{number}.weight"] for number in (1, 2))
    assert (
        fc1.shape == (2, 4, 48, 16) and fc2.shape == (2, 4, 16, 24) and fc1.dtype == torch.bfloat16
    )
    assert torch.equal(fc1[1, 2, :24], ours["layers.1.mlp.experts.gate.weight"][2].bfloat16())
    assert torch.equal(fc1[0, 3, 24:], ours["layers.0.mlp.experts.up.weight"][3].bfloat16())
    assert torch.equal(fc2[1], ours["layers.1.mlp.experts.down.weight"].bfloat16())
    shared = state[f"{STACK}mlp.shared_experts.linear_fc1.weight"]
    assert torch.equal(shared[1, 12:], ours["layers.1.mlp.shared.up.weight"].bfloat16())
    biases = torch.stack(
        [ours[f"router/layers.{layer}.mlp.router.expert_bias"] for layer in range(2)]
    )
    assert torch.equal(state[f"{STACK}mlp.router.expert_bias"], biases)  # fp32
    norms = stacked(ours, "mlp_norm.weight").bfloat16()
    assert torch.equal(state[f"{STACK}pre_mlp_layernorm.weight"], norms)
    assert f"{STACK}mlp.experts.experts.linear_fc1._extra_state/shard_1.3_2.4" in others


def test_layers_that_differ_are_not_stacked(tmp_path: Path) -> None:
    ours, state, others = exported(tmp_path, MIXED)
    assert torch.equal(state[f"{STACK}0.self_attention.linear_qkv.weight"], fused_qkv(ours, 0))
    assert torch.equal(state[f"{STACK}0.mlp.linear_fc2.weight"], ours["layers.0.mlp.down.weight"])
    fc2 = state[f"{STACK}1.mlp.experts.experts.linear_fc2.weight"]
    assert torch.equal(fc2, ours["layers.1.mlp.experts.down.weight"])
    assert f"{STACK}1.mlp.experts.experts.linear_fc2._extra_state/shard_3_4" in others
    common = torch.load(tmp_path / "megatron" / "iter_0000003" / "common.pt", weights_only=True)
    assert common["content_metadata"]["non_homogeneous_layers"]


@pytest.mark.parametrize(
    "model_config",
    [LLAMA, GPT2, replace(GPT2, qk_layernorm=True), MOE, MIXED, GATED, MLA, DEEPSEEK, HYBRID],
    ids=["llama", "gpt2", "norms", "moe", "mixed", "gated", "mla", "deepseek", "hybrid"],
)
def test_every_weight_is_read_and_every_tensor_is_full(model_config) -> None:
    check_model(model_config)
    chunks = list(plan_chunks(model_config))
    read, filled, sizes = Counter[str](), Counter[str](), {}
    for chunk in chunks:
        assert sum(source.box.numel for source in chunk.sources) == chunk.box.numel
        filled[chunk.key] += chunk.box.numel
        sizes[chunk.key] = prod(chunk.shape)
        is_copy = chunk.key.endswith(COPIES)
        read.update({} if is_copy else {source.name: source.box.numel for source in chunk.sources})
    assert filled == sizes
    declared = {
        f"model/{spec.name}": prod(spec.shape)
        for spec in declare_model(ModelShape.of(model_config))
    }
    assert {
        name: count for name, count in read.items() if not name.startswith("router/")
    } == declared


def test_hybrids_of_other_letters_or_sizes_are_one_error() -> None:
    check_model(HYBRID)
    mamba = replace(HYBRID.mamba, conv_kernel_dim=3)
    model_config = replace(HYBRID, mamba=mamba, norm_epsilon=1e-6, mtp=MTPConfig(num_layers=1))
    with pytest.raises(CheckpointError) as error:
        check_model(model_config)
    for name in ("multi-token prediction", "mamba_conv_kernel_dim", "norm_epsilon"):
        assert name in str(error.value)


def test_all_obstacles_are_one_error() -> None:
    model_config = replace(
        LLAMA, layer_scale=True, scale_embeddings=True, final_logit_softcapping=30.0
    )
    with pytest.raises(
        CheckpointError, match="scale_embeddings, layer_scale, final_logit_softcapping"
    ):
        check_model(model_config)

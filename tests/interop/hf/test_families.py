"""config.json: read in every existing format, written so that it reads back, compared with the
configured model.
"""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.config.schema import with_values
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.families import (
    FAMILIES,
    NUM_NEAREST,
    check_against,
    config_from_hf,
    config_to_hf,
    cure_of_folder,
    family_of,
    model_from_hf,
)
from tests.interop.hf.configs import CONFIG_CLASSES, CONFIGS, LLAMA_SHAPE, YARN
from tests.model.building import FAMILIES as MODELS
from tests.model.building import GPT2, LLAMA, LLAMA3, QWEN2, QWEN3

LLAMA_JSON = LLAMA_SHAPE | {"model_type": "llama"}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_of_transformers_is_read_as_transformers_reads_ours(
    name: str, tmp_path: Path
) -> None:
    family, fields = deepcopy(CONFIGS[name])  # transformers adds to dicts of rotary positions
    getattr(transformers, CONFIG_CLASSES.get(family, f"{family}Config"))(**fields).save_pretrained(
        tmp_path
    )
    model = model_from_hf(tmp_path)
    written = config_to_hf(model, family=family_of(model))
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert canonical(model_from_hf(tmp_path)) == canonical(model)
    back = transformers.AutoConfig.from_pretrained(tmp_path)
    assert back.vocab_size == model.vocab_size
    assert back.tie_word_embeddings is not model.untie_embeddings_and_output_weights
    # LongCat-Flash counts them
    blocks_per_layer = 2 if model.moe is not None and model.moe.shortcut else 1
    assert back.num_hidden_layers == blocks_per_layer * model.num_layers
    if model.use_rope_scaling:
        assert back.rope_parameters == fields.get(
            "rope_parameters", FAMILIES["cwm"].defaults["rope_parameters_of_none"]
        )
    if model.position_embedding_type == "yarn":
        layered = back.rope_parameters.get("compress", back.rope_parameters)
        actual = layered.get("full_attention", layered)
        expected = {
            "GptOss": {
                **FAMILIES["gpt_oss"].defaults["rope_parameters_of_none"],
                "rope_theta": 150000.0,
            },
            "DeepseekV4": YARN | {"rope_theta": 160000.0},
        }.get(family, YARN)
        assert expected.items() <= actual.items()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_exported_as_its_own_family(name: str) -> None:
    assert family_of(MODELS[name]) == ("llama" if name == "llama3" else name)


@given(
    base=st.sampled_from([GPT2, LLAMA, LLAMA3, QWEN2, QWEN3]),
    heads=st.integers(1, 8),
    width=st.sampled_from([8, 16]),
    ffn=st.none() | st.integers(1, 500),
    vocab_size=st.integers(1, 10**6),
    untied=st.booleans(),
)
def test_what_a_family_can_hold_comes_back_equal(
    base: ModelConfig, heads: int, width: int, ffn: int | None, vocab_size: int, untied: bool
) -> None:
    model = replace(
        base,
        hidden_size=heads * width,
        num_attention_heads=heads,
        num_query_groups=None if base is GPT2 else 1,
        kv_channels=None if base is GPT2 else width,
        ffn_hidden_size=ffn,
        vocab_size=vocab_size,
        untie_embeddings_and_output_weights=untied,
    )
    written = config_to_hf(model, family=family_of(model))
    assert canonical(config_from_hf(written)) == canonical(model)


@pytest.mark.parametrize(
    ("model", "lost"),
    [
        (replace(LLAMA, activation="gelu"), "activation"),
        (replace(LLAMA, position_embedding_type="none"), "position_embedding_type"),
        (replace(GPT2, num_query_groups=2), "num_query_groups"),
        (replace(QWEN3, add_bias_linear=True), "add_bias_linear"),
    ],
)
def test_a_model_no_family_can_hold_is_refused_by_name(model: ModelConfig, lost: str) -> None:
    with pytest.raises(HuggingFaceError, match=lost) as error:
        family_of(model)
    assert error.value.why.count("cannot represent") == NUM_NEAREST
    assert f"; {len(FAMILIES) - NUM_NEAREST} other families cannot either" in error.value.why
    with pytest.raises(HuggingFaceError, match="cannot represent"):
        family_of(GPT2, name="llama")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"model_type": "olmo4"},
            "olmo4 is not supported: the nearest names are olmo",
        ),
        ({"model_type": "qwen3_moe", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, "qkv_bias"),
        ({"model_type": "longcat_flash", "zero_expert_type": "copy"}, "zero_expert_type"),
        ({"model_type": "longcat_flash", "mla_scale_q_lora": False}, "mla_scale_q_lora"),
        ({"model_type": "longcat_flash", "router_bias": True}, "router_bias"),
        ({"model_type": "qwen3_moe", "num_experts": 0}, "num_experts: 0"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 5}, "experts in some layer"),
        ({"model_type": "llama4_text", "num_experts_per_tok": 2}, "num_experts_per_tok: 2"),
        ({"model_type": "llama4_text", "attention_bias": True}, "attention_bias"),
        (
            {"model_type": "llama4_text", "layer_types": ["sliding_attention"] * 2},
            "chunked_attention or full_attention",
        ),
        (
            {"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window",
        ),
    ],
)
def test_features_we_lack_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(LLAMA_JSON | change)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_proper_config_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(HuggingFaceError, match=r"config\.json"):
        model_from_hf(tmp_path)


def test_rotary_positions_change_for_longer_contexts() -> None:
    longer = replace(LLAMA, rotary_base=5e5, max_position_embeddings=4096, hidden_size=64)
    explicit = frozenset({"rotary_base", "max_position_embeddings"})
    assert check_against(LLAMA, longer, explicit=explicit) == replace(longer, hidden_size=32)
    assert check_against(LLAMA, longer, explicit=frozenset()) == LLAMA
    learned = replace(LLAMA, position_embedding_type="learned_absolute")
    with pytest.raises(HuggingFaceError, match="--max-position-embeddings 4096 contradicts"):
        check_against(learned, longer, explicit=explicit)


def test_an_explicit_field_that_contradicts_names_both_values() -> None:
    with pytest.raises(HuggingFaceError, match=r"--hidden-size 64 contradicts.*hidden_size = 32"):
        check_against(LLAMA, replace(LLAMA, hidden_size=64), explicit=frozenset({"hidden_size"}))


def test_the_width_of_an_mlp_that_no_layer_has_is_harmless() -> None:
    """As in training from the start; a layer without experts has an MLP of that width."""
    moe, explicit = MoEConfig(num_experts=4, ffn_hidden_size=24), frozenset({"ffn_hidden_size"})
    experts = replace(LLAMA, moe=moe, ffn_hidden_size=None)
    assert (
        check_against(experts, replace(experts, ffn_hidden_size=100), explicit=explicit) == experts
    )
    dense = replace(LLAMA, moe=replace(moe, layer_freq="[0]*1+[1]*1"))
    with pytest.raises(HuggingFaceError, match="--ffn-hidden-size 100 contradicts"):
        check_against(dense, replace(dense, ffn_hidden_size=100), explicit=explicit)


def test_a_field_that_config_json_leaves_open_is_unset() -> None:
    with pytest.raises(HuggingFaceError, match=r"--window-size 8 contradicts.*window_size = unset"):
        check_against(LLAMA, replace(LLAMA, window_size=8), explicit=frozenset({"window_size"}))


def test_fields_not_set_explicitly_give_way_and_free_ones_are_taken() -> None:
    configured = replace(
        LLAMA, hidden_size=64, num_query_groups=None, make_vocab_size_divisible_by=256
    )
    explicit = frozenset({"num_query_groups", "make_vocab_size_divisible_by"})
    model = check_against(LLAMA, configured, explicit=explicit)
    assert model == replace(LLAMA, make_vocab_size_divisible_by=256)


def test_an_explicit_field_may_repeat_what_config_json_says() -> None:
    configured = ModelConfig(hidden_size=32, num_attention_heads=4, kv_channels=8, vocab_size=131)
    explicit = frozenset({"hidden_size", "num_attention_heads", "kv_channels", "vocab_size"})
    assert check_against(LLAMA, configured, explicit=explicit) == replace(
        LLAMA, init_method_std=configured.init_method_std
    )


MIXTRAL = replace(LLAMA, moe=MoEConfig(num_experts=4, ffn_hidden_size=24))


def test_losses_of_the_router_are_free_beside_pretrained_experts() -> None:
    configured = ModelConfig(
        moe=MoEConfig(aux_loss_coeff=[0.01], router_topk=2, layer_freq="[1]*2")
    )
    explicit = frozenset({"moe.aux_loss_coeff", "moe.router_topk", "moe.layer_freq"})
    assert check_against(MIXTRAL, configured, explicit=explicit) == replace(
        MIXTRAL,
        moe=replace(MIXTRAL.moe, aux_loss_coeff=[0.01]),
        init_method_std=configured.init_method_std,
    )
    with pytest.raises(HuggingFaceError, match="--moe-aux-loss-coeff 0.01 contradicts"):
        check_against(LLAMA, configured, explicit=frozenset({"moe.aux_loss_coeff"}))
    with pytest.raises(
        HuggingFaceError, match="--moe-router-topk 3 contradicts.*moe.router_topk = 2"
    ):
        check_against(
            MIXTRAL,
            replace(configured, moe=replace(configured.moe, router_topk=3)),
            explicit=explicit,
        )


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"moe.router_score_function": "sigmoid"}, "moe.router_score_function"),
        ({"moe.shared_expert_intermediate_size": 8}, "moe.shared_expert_intermediate_size"),
        ({"moe.router_topk_scaling_factor": 2.0}, "moe.router_topk_scaling_factor"),
        ({"moe.layer_freq": "2"}, "mixtral cannot represent ffn_hidden_size, moe.layer_freq"),
    ],
)
def test_a_mixture_no_family_can_hold_is_refused_by_name(change: dict[str, Any], lost: str) -> None:
    assert (
        family_of(
            replace(MIXTRAL, moe=replace(MIXTRAL.moe, aux_loss_coeff=[0.1], z_loss_coeff=0.1))
        )
        == "mixtral"
    )
    assert (
        family_of(replace(MIXTRAL, qk_layernorm=True, moe=replace(MIXTRAL.moe, layer_freq="2")))
        == "qwen3_moe"
    )
    with pytest.raises(HuggingFaceError, match=lost):
        family_of(with_values(MIXTRAL, change), name="mixtral")


def test_a_run_and_a_name_on_the_hub_are_answered_with_what_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    step = tmp_path / "run" / "checkpoints" / "step-00000001"
    (step / "manifest.json").write_text("{}")
    for folder in (Path("run"), step):
        assert cure_of_folder(folder).startswith(f"--load {folder} --finetune starts from")
    assert "hf download gpt2 --local-dir gpt2" in cure_of_folder(Path("gpt2"))
    assert "hf download org/a-b.c --local-dir a-b.c" in cure_of_folder(Path("org/a-b.c"))
    for other in (tmp_path, Path("/nowhere"), Path("a/b/c")):
        assert "hf download" not in cure_of_folder(other)

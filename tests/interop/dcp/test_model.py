"""The model of a checkpoint: what is guessed, asked for and taken from the user."""

from pathlib import Path

import torch

from nanotrain.interop.dcp.import_run import describe
from tests.interop.dcp.opened import lines_of, open_state, state_of
from tests.interop.dcp.programs import HEADS_FLAG


def test_what_shapes_show_is_guessed_and_said(tmp_path: Path) -> None:
    opened = open_state(tmp_path, state_of("titan_llama"))
    model = opened.config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (2, 16, 32)
    assert (model.num_query_groups, model.kv_channels, model.vocab_size) == (2, 4, 40)
    assert model.untie_embeddings_and_output_weights
    text = "\n".join(describe(opened))
    assert "guessed from the shapes of tensors: num_layers 2, hidden_size 16" in text
    assert "in no tensor, so the defaults are taken: --rotary-base 10000" in text
    assert text.endswith("not imported: dataloader, lr_scheduler")


def test_a_setting_of_the_user_is_not_guessed(tmp_path: Path) -> None:
    text = lines_of(
        tmp_path, state_of("titan_llama"), f"{HEADS_FLAG} --rotary-base 5e5 --hidden-size 16"
    )
    assert " hidden_size" not in text and "--rotary-base" not in text


def test_names_of_transformers_have_their_family(tmp_path: Path) -> None:
    opened = open_state(tmp_path, state_of("titan_qwen3"), "")
    assert opened.config.model.qk_layernorm and opened.config.model.num_attention_heads == 4
    dense = {"model.embed_tokens.weight": torch.ones(40, 16), "model.norm.weight": torch.ones(16)}
    dense |= {"lm_head.weight": torch.zeros(40, 16)}
    sizes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "mlp.up_proj": (32, 16)}
    sizes |= {"self_attn.v_proj": (8, 16), "self_attn.o_proj": (16, 16)}
    sizes |= {"mlp.gate_proj": (32, 16), "mlp.down_proj": (16, 32)}
    sizes |= {"input_layernorm": (16,), "post_attention_layernorm": (16,)}
    layer = {f"model.layers.0.{name}.weight": torch.ones(size) for name, size in sizes.items()}
    opened = open_state(tmp_path / "llama", dense | layer)
    assert opened.config.model.untie_embeddings_and_output_weights and opened.counters is None


def test_another_head_is_not_tied(tmp_path: Path) -> None:
    tied = "--no-untie-embeddings-and-output-weights"
    text = lines_of(tmp_path / "other", state_of("titan_llama"), f"{HEADS_FLAG} {tied}")
    assert "output.weight differs from the embedding" in text
    state = state_of("titan_llama") | {
        "output.weight": state_of("titan_llama")["tok_embeddings.weight"]
    }
    state = {name: value for name, value in state.items() if ".output." not in name}
    assert not open_state(tmp_path / "same", state).config.model.untie_embeddings_and_output_weights

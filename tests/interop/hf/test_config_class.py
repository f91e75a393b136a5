"""What transformers' own config class makes of a config.json, and entries that nobody read."""

from typing import Any

import pytest

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.config_class import Entries, pass_over, understand
from nanotrain.interop.hf.families import config_from_hf

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
LLAMA = SMALL | {"model_type": "llama"}
YARN = {"type": "yarn", "factor": 4.0}


def test_entries_remember_which_of_them_were_read() -> None:
    entries = Entries({"a": 1, "b": 2, "c": 3, "d": 4}, names={"z": "d"})
    assert entries["a"] == 1
    assert (entries | {"e": 5}).get("b") == 2
    pass_over(entries, "z")
    assert entries.was_read == {"a", "b", "z", "d"}
    assert dict(entries)["c"] == 3 and "c" not in entries.was_read


@pytest.mark.parametrize(
    ("entries", "originals"),
    [
        ({"rope_scaling": YARN}, 64),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 16}, 16),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 8}}, 8),
        (  # the entry beside the table comes first
            {
                "rope_scaling": YARN | {"original_max_position_embeddings": 8},
                "original_max_position_embeddings": 16,
            },
            16,
        ),
        (  # the older table comes first
            {
                "rope_scaling": YARN | {"original_max_position_embeddings": 8},
                "rope_parameters": {"rope_type": "default"},
            },
            8,
        ),
    ],
)
def test_rotary_positions_have_the_precedence_of_transformers(
    entries: dict[str, Any], originals: int
) -> None:
    yarn = config_from_hf(LLAMA | entries).yarn
    assert yarn is not None
    assert yarn.original_max_position_embeddings == originals


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"is_causal": False}, "is_causal: False: nanotrain does not read it for a llama"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ({"hidden_size": "32"}, "'hidden_size' expected int, got str"),
    ],
)
def test_an_entry_that_nobody_reads_is_refused_by_name(entries: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(LLAMA | entries)


@pytest.mark.parametrize(
    "entries",
    [
        {"attention_dropout": 0.1, "bos_token_id": 7, "use_cache": False, "torch_dtype": "float16"},
        {"an_entry_that_transformers_does_not_declare": 3, "auto_map": {"AutoConfig": "code.py"}},
        {"head_dim": 8, "architectures": None, "id2label": {"0": "a"}},
    ],
)
def test_entries_without_effect_may_have_any_value(entries: dict[str, Any]) -> None:
    assert config_from_hf(LLAMA | entries) == config_from_hf(LLAMA)


def test_the_class_sees_no_entry_about_files_or_programs() -> None:
    entries = understand(LLAMA | {"attn_implementation": "none of these", "torch_dtype": "int4"})
    assert entries["dtype"] is None and entries["num_key_value_heads"] == 4
    assert entries["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}

"""config.json as tables: defaults, older names, supported values, models without a feature."""

import pytest

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.layout import Layout
from tests.model.building import LLAMA

LAYOUT = Layout(
    entries={
        "width": "hidden_size",
        "n_positions": "max_position_embeddings",
        "num_experts": "moe.num_experts",
    },
    defaults={"width": 8, "num_experts": 4},
    required={"act": ("silu", "swish"), "bias": (False,)},
    fixed={"qk_layernorm": True},
)


def test_entries_left_out_have_defaults_and_older_names_are_read() -> None:
    values = LAYOUT.read({"n_ctx": 16, "num_local_experts": 6, "act": "swish", "bias": None})
    assert values["hidden_size"] == 8 and values["qk_layernorm"] is True
    assert (values["max_position_embeddings"], values["moe.num_experts"]) == (16, 6)


@pytest.mark.parametrize("entry", [{"act": "relu"}, {"bias": True}, {"num_experts": 0}])
def test_unsupported_values_are_refused_by_name(entry: dict[str, object]) -> None:
    with pytest.raises(HuggingFaceError, match=next(iter(entry))):
        LAYOUT.read(entry)


def test_a_model_without_experts_is_not_read_back_as_one() -> None:
    written = LAYOUT.write(LLAMA)
    assert (written["width"], written["act"], written["num_experts"]) == (
        LLAMA.hidden_size,
        "silu",
        0,
    )

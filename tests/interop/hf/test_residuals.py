"""Entries about attention beside the MLP: what is read, what is refused and what is written."""

from typing import Any

import pytest

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_from_hf, config_to_hf
from tests.interop.hf.side_by_side import LLAMA_SHAPE, NEOX_SHAPE, NEW_FALCON

FALCON = NEOX_SHAPE | {"model_type": "falcon"}
STABLELM = LLAMA_SHAPE | {"model_type": "stablelm"}


@pytest.mark.parametrize(
    ("entries", "values"),
    [
        (FALCON, ("parallel", True, 1)),
        (FALCON | {"multi_query": False}, ("parallel", True, 4)),
        (FALCON | NEW_FALCON, ("parallel", False, 2)),
        (FALCON | NEW_FALCON | {"num_ln_in_parallel_attn": 1}, ("parallel", True, 2)),
        (STABLELM, ("plain", False, 2)),
        (STABLELM | {"use_parallel_residual": True}, ("parallel", True, 2)),
        (NEOX_SHAPE | {"model_type": "gpt_neox"}, ("parallel", False, 4)),
        (
            NEOX_SHAPE | {"model_type": "gpt_neox", "use_parallel_residual": False},
            ("plain", False, 4),
        ),
    ],
)
def test_kind_of_residual_and_norms_of_a_model(
    entries: dict[str, Any], values: tuple[str, bool, int]
) -> None:
    model = config_from_hf(entries)
    assert (model.residual_type, model.parallel_shared_norm, model.query_groups) == values


def test_rotary_positions_have_the_names_of_gpt_neox() -> None:
    """A config.json from before `rope_parameters`, as that of Pythia."""
    old = NEOX_SHAPE | {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 2000}
    model = config_from_hf(old)
    assert (model.rotary_percent, model.rotary_base) == (0.5, 2000.0)
    written = config_to_hf(model, family="gpt_neox")
    assert (written["rotary_pct"], written["rotary_emb_base"]) == (0.5, 2000.0)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (FALCON | {"alibi": True}, "alibi"),
        (FALCON | {"parallel_attn": False}, "parallel_attn"),
        (FALCON | {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        (STABLELM | {"qk_layernorm": True}, "qk_layernorm"),
        (LLAMA_SHAPE | {"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm"),
        (LLAMA_SHAPE | {"model_type": "cohere", "logit_scale": 0.0}, "logit_scale"),
        (LLAMA_SHAPE | {"model_type": "cohere2", "sliding_window": None}, "sliding_window"),
        (LLAMA_SHAPE | {"model_type": "olmo", "clip_qkv": 8.0}, "clip_qkv"),
    ],
)
def test_what_the_model_cannot_express_is_refused(entries: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(entries)

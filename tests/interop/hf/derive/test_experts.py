"""Routers and experts in the code of transformers, by families whose rows are known."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanotrain.interop.hf.derive.folder import derive_family
from nanotrain.interop.hf.families import FAMILIES
from tests.interop.hf.derive.folders import change_config, restored_tables, write_folder


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    with restored_tables():
        yield


def derive(folder: Path, name: str, **entries: Any) -> Any:
    write_folder(folder, name)
    change_config(folder, **entries)
    del FAMILIES[name]
    return derive_family(folder)


def test_a_sigmoid_router_has_a_bias_a_scale_and_shared_experts(tmp_path: Path) -> None:
    row = derive(tmp_path, "hy_v3").row
    fixed = {"moe.router_enable_expert_bias": True, "moe.router_score_function": "sigmoid"}
    assert fixed.items() <= row["fixed"].items()
    assert row["entries"]["router_scaling_factor"] == "moe.router_topk_scaling_factor"
    assert {"mlp_layer_types", "shared_experts"} <= set(row["parts"])


def test_a_sum_without_an_epsilon_is_a_setting(tmp_path: Path) -> None:
    row = derive(tmp_path, "flint").row
    assert row["fixed"]["moe.router_norm_epsilon"] == 0.0
    assert row["required"]["norm_topk_prob"] == [True]
    assert row["entries"]["shared_expert_intermediate_size"].startswith("moe.shared_expert")


def test_sigmoid_scores_without_their_sum_are_named(tmp_path: Path) -> None:
    missing = derive(tmp_path, "flint", norm_topk_prob=False).missing
    assert str(missing[0]).startswith("sigmoid scores that are not normalized: config.json has")


def test_experts_in_one_tensor_are_known_by_its_shape(tmp_path: Path) -> None:
    layers = derive(tmp_path, "aria_text").row["layers"]
    fused = layers["mlp.experts.gate"]
    assert fused["fused"] == ["mlp.experts.gate", "mlp.experts.up"] and fused["transposed"]
    assert layers["mlp.experts.down"]["transposed"]

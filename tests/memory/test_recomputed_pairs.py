"""The tables name functions that blocks have."""

from operator import attrgetter
from typing import get_args

import pytest

from nanotrain.config.parallel import RecomputeModule
from nanotrain.memory.recomputed_pairs import CHECKPOINTED, DISCARDED, discarded_pairs
from nanotrain.model.transformer import build_stage
from tests.plan.test_saved_bytes import MODELS, SIZES
from tests.train.saved_tensors import config_of

BLOCKS = (
    "output gate",
    "shared",
    "mla",
    "kda",
    "attention beside Mamba-2",
    "short convolution",
    "side by side, one norm",
)


def test_every_module_has_functions() -> None:
    assert {*CHECKPOINTED, *DISCARDED} == {*get_args(RecomputeModule)}


def test_every_path_is_a_function_of_a_block() -> None:
    paths = {path for paths in CHECKPOINTED.values() for path in paths}
    for pair in discarded_pairs(DISCARDED):
        paths.update({pair.first, pair.second})
    # over Mamba-2 beside attention: its projections have no scan of their own
    blocks = [
        build_stage(config_of(f"{SIZES} {MODELS[name]}").model).layers["0"] for name in BLOCKS
    ]
    missing = set()
    for path in paths:
        if not any(_has(block, path) for block in blocks):
            missing.add(path)
    # the table lists every operator for every place of a mixer, though some mixers lack it
    assert missing == {
        "attention.attention.gate_output",
        "attention.attention.mix",
        "attention.attention.prepare_scan",
        "attention.attention.run_scan",
        "attention.mamba.apply_gate",
        "attention.mamba.core_attention",
        "attention.mamba.mix",
        "attention.mamba.prepare_query_key",
    }


def _has(block: object, path: str) -> bool:
    try:
        return callable(attrgetter(path)(block))
    except AttributeError:
        return False


@pytest.mark.parametrize(
    ("modules", "is_inside"), [(["pointwise"], False), (["pointwise", "moe"], True)]
)
def test_a_pair_inside_of_a_recomputed_module_is_left_out(
    modules: list[str], is_inside: bool
) -> None:
    firsts = {pair.first for pair in discarded_pairs(modules)}
    assert ("mlp.experts.activation" not in firsts) is is_inside
    assert "mlp_norm.forward" in firsts

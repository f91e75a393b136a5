"""Law L1 for families of Hugging Face: a step of a family's model in six layouts equals one rank.

A row of `LLAMA_LIKE` is enough. Features of models are held in more layouts by
test_model_features.py; here are the combinations that families have. The layouts take turns: with
NANOTRAIN_DRILLS=1 every family is trained in all six.
"""

import os
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
import transformers

from nanotrain.config.model import ModelConfig
from nanotrain.interop.hf.families import config_from_hf
from tests.harness import SHORT_NAMES, run_ranks
from tests.interop.hf.configs import CONFIG_CLASSES, CONFIGS
from tests.interop.hf.llama_like import LLAMA_LIKE
from tests.laws.compare import OPTIM, assert_alike
from tests.laws.worlds import VOCAB_SIZE, Case, Outcome, train_cases, train_layouts

BATCH = {"global_batch_size": 4}
SP = {"sequence_parallel": True}
# ranks, sizes of axes, options
Layout = tuple[int, dict[str, Any], dict[str, Any]]
LAYOUTS: list[Layout] = [
    (2, {"strategy": "optim", "tp": 2, "etp": 1}, SP),
    (2, {"strategy": "optim", "cp": 2}, {}),
    (2, {"strategy": "optim_grads", "pp": 2}, {}),
    (2, {"strategy": "optim_grads_params", "ep": 2}, {}),
    (2, {"strategy": "no_shard"}, {}),
    (4, {"strategy": "optim", "tp": 2, "pp": 2, "etp": 1, "ep": 2}, SP),
]
NAMES = list(LLAMA_LIKE)
HAS_ALL = os.environ.get("NANOTRAIN_DRILLS") == "1"


@cache
def model_of(name: str) -> ModelConfig:
    """The model of a tiny configuration, with the vocabulary of the samples."""
    family, fields = CONFIGS[name]
    config_class = CONFIG_CLASSES.get(family, f"{family}Config")
    raw = getattr(transformers, config_class)(**fields).to_dict()
    return replace(config_from_hf(raw), vocab_size=VOCAB_SIZE)


def case_of(name: str, layout: Layout) -> Case:
    """A step of a family's model in a layout."""
    num_ranks, sizes, options = layout
    model = model_of(name)
    parallel = {SHORT_NAMES[axis]: size for axis, size in sizes.items()} | options
    if model.moe is None:
        expert_axes = {SHORT_NAMES["ep"], SHORT_NAMES["etp"]}
        parallel = {key: size for key, size in parallel.items() if key not in expert_axes}
    if "cp" in sizes and model.sparse_attention_type is not None:
        parallel["cp_comm_type"] = "allgather"  # the one that selects keys
    if "pp" in sizes and model.num_layers % 2:
        parallel["decoder_first_pipeline_num_layers"] = 2
    axes = [sizes.get(axis, 1) for axis in ("tp", "cp", "pp")]
    num_samples = 4 * axes[0] * axes[1] * axes[2] // num_ranks
    train = BATCH | {"micro_batch_size": num_samples // 2}
    return Case(1).but(model=asdict(model), train=train, optim=OPTIM, parallel=parallel)


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Outcome]:
    """What one rank computes, by name."""
    cases = [case_of(name, (1, {}, {})) for name in NAMES]
    (outcomes,) = run_ranks(1, train_cases, cases, shares=True)
    return dict(zip(NAMES, outcomes, strict=True))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_family_trains_alike_in_six_layouts(num_ranks: int, one_rank: dict[str, Outcome]) -> None:
    rows = []
    for index, name in enumerate(NAMES):
        layouts = LAYOUTS if HAS_ALL else LAYOUTS[index % len(LAYOUTS) :][:1]
        rows += [(name, layout) for layout in layouts if layout[0] == num_ranks]
    cases = [case_of(name, layout) for name, layout in rows]
    by_rank = run_ranks(num_ranks, train_layouts, cases, shares=True)
    for index, (name, layout) in enumerate(rows):
        outcomes = [outcomes[index] for outcomes in by_rank]
        assert_alike(
            outcomes, [one_rank[name]], row=f"{name} {layout}", lr=OPTIM["lr"], global_batch=4
        )

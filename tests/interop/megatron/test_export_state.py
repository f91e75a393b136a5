"""State of optimizers that is written for Megatron-LM, and what is refused or left out."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest

from nanotrain.checkpoint.manifest import Manifest, TensorEntry
from nanotrain.config.config import Config, OptimConfig, ParallelConfig
from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import to_dict
from nanotrain.errors import CheckpointError
from nanotrain.interop.hf.names import checkpoint_shapes
from nanotrain.interop.megatron.export import plan_chunks
from nanotrain.interop.megatron.export_state import (
    StateOptions,
    aliases,
    left_out,
    notes,
    plan_state,
    require_state,
    run_state,
)
from tests.interop.megatron.models import LLAMA, MOE

SCALE = {"scale": 4096.0, "is_dynamic": True, "clean_steps": 3, "overflows_left": 2}


def config_of(model_config: ModelConfig, **optim: Any) -> Config:
    return Config(model=model_config, optim=OptimConfig(lr=1e-2, **optim))


def manifest_of(config: Config, *kinds: str, **optimizer: Any) -> Manifest:
    """A checkpoint after three steps, one of them skipped."""
    tensors = {}
    for name, shape in checkpoint_shapes(config.model).items():
        tensors[name] = TensorEntry(shape, "fp32", ())
        for kind in kinds if name.startswith("model/") else ():
            tensors[f"{kind}/{name.removeprefix('model/')}"] = TensorEntry(shape, "fp32", ())
    counters = {"consumed_samples": 24, "curve_batch_size": 8}
    objects = {"train": counters, "optimizer": {"num_updates": 2, "loss_scale": SCALE} | optimizer}
    return Manifest(3, {}, tensors, objects=objects, config=to_dict(config), topology={})


MOMENTS = ("optimizer/exp_avg", "optimizer/exp_avg_sq")


def test_counters_are_where_each_optimizer_reads_them() -> None:
    config = config_of(LLAMA, min_lr=1e-3, lr_decay_samples=80, lr_warmup_samples=48)
    state = run_state(config, manifest_of(config, *MOMENTS), options=StateOptions())
    entry = state["optimizer"]
    assert entry["grad_scaler"]["growth_tracker"] == 3
    assert entry["grad_scaler"]["scale"].tolist() == [4096.0]
    for groups in (entry["param_groups"], entry["optimizer"]["param_groups"]):
        assert [group["wd_mult"] for group in groups] == [1.0, 0.0]
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        assert [group["step"] for group in groups] == [2, 2]
        assert groups[0]["lr"] == pytest.approx(5e-3)
    assert entry["state"] == {}  # FusedAdam has no such state
    scheduler = state["opt_param_scheduler"]
    assert (scheduler["num_steps"], scheduler["lr_warmup_steps"]) == (24, 48)
    assert (scheduler["lr_decay_steps"], scheduler["wd_incr_steps"]) == (80, 800)
    assert isinstance(state["args"], Namespace) and state["args"].consumed_train_samples == 24
    assert state["args"].iteration == 3, "a step that was skipped counts"


def test_the_adam_of_torch_has_updates_in_its_state() -> None:
    config = config_of(LLAMA)
    options = StateOptions(has_torch_adam=True)
    entry = run_state(config, manifest_of(config, *MOMENTS), options=options)["optimizer"]
    assert entry["state"]["common_step"] == 2 and entry["optimizer"]["state"]["common_step"] == 2


def test_split_experts_have_an_optimizer_of_their_own() -> None:
    config = replace(config_of(MOE), parallel=ParallelConfig(expert_model_parallel_size=2))
    manifest = manifest_of(config, *MOMENTS)
    chained = run_state(config, manifest, options=StateOptions())["optimizer"]
    assert chained.keys() == {0, 1}
    assert [group["is_expert_parallel"] for group in chained[1]["param_groups"]] == [True]
    single = run_state(config, manifest, options=StateOptions(expert_ranks=1))["optimizer"]
    assert [group["is_expert_parallel"] for group in single["param_groups"]] == [False, False]


def test_main_parameters_have_the_keys_of_both_optimizers_and_are_stored_once() -> None:
    weights = list(plan_chunks(MOE))
    key = "decoder.final_layernorm.weight"
    main, other = f"optimizer.state.fp32_param.{key}", f"optimizer.state.param.{key}"
    state = list(plan_state(weights, has_main=False))
    assert not [chunk for chunk in state if chunk.key == main]
    assert aliases(weights, has_main=False)[key] == [main, other]
    state = list(plan_state(weights, has_main=True))
    assert [chunk.sources[0].name for chunk in state if chunk.key == main] == [
        "model/final_norm.weight"
    ]
    assert aliases(weights, has_main=True)[main] == [other]
    assert not [chunk for chunk in state if "expert_bias" in chunk.key]  # no parameter
    moment = f"optimizer.state.exp_avg.{key}"
    assert [chunk.sources[0].name for chunk in state if chunk.key == moment] == [
        "optimizer/exp_avg/final_norm.weight"
    ]


def test_all_obstacles_are_one_error() -> None:
    config = config_of(LLAMA, optimizer="muon", decoupled_lr=1e-3)
    manifest = manifest_of(config, "optimizer/momentum", trained_sets=[])
    with pytest.raises(CheckpointError, match="state of muon.*decoupled_lr.*frozen") as error:
        require_state(config, manifest)
    assert "--no-optim" in str(error.value)


def test_what_megatron_lm_would_compute_in_another_way_is_said() -> None:
    for decays_vectors in (False, True):
        config = config_of(LLAMA, apply_wd_to_all_params=decays_vectors)
        config = replace(config, data=replace(config.data, seq_length=12))
        state = run_state(config, manifest_of(config, *MOMENTS), options=StateOptions())
        lines = "\n".join(notes(config, vars(state["args"])))
        assert ("biases and norms decay here" in lines) is decays_vectors


def test_every_weight_needs_its_moments() -> None:
    config = config_of(LLAMA)
    require_state(config, manifest_of(config, *MOMENTS))
    with pytest.raises(CheckpointError, match="without state, as optimizer/exp_avg_sq/embedding"):
        require_state(config, manifest_of(config, "optimizer/exp_avg"))


def test_what_is_left_out_is_named() -> None:
    manifest = manifest_of(config_of(LLAMA), *MOMENTS, "ema")
    assert left_out(manifest, has_state=True) == ["left out: ema (25 tensors)"]
    (line,) = left_out(manifest, has_state=False)
    assert line.startswith("left out: optimizer/exp_avg (25 tensors), optimizer/exp_avg_sq (25")
    assert left_out(manifest_of(config_of(LLAMA)), has_state=False) == []

"""The part of the model on a rank: it needs no batch and no schedule."""

from dataclasses import fields, replace

import pytest

from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.plan.model_plan import ModelPlan, plan_model
from nanotrain.plan.plan import plan_run
from nanotrain.spec.shape import ModelShape
from nanotrain.topology.topology import Topology


def config_of(recipe: str, settings: str) -> Config:
    return load([f"+config={recipe}", *settings.split()], to_train=False).config


@pytest.mark.parametrize("batch_size", [24, 96])
def test_a_plan_has_the_part_of_the_model_whatever_the_batch(batch_size: int) -> None:
    layout = "--vocab-size 2048 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    config = config_of("tiny", f"{layout} --global-batch-size {batch_size}")
    topology = Topology.of(config.parallel, 8)
    for rank in range(8):
        shape = ModelShape.of(config.model)
        model = plan_model(config, topology, shape=shape, rank=rank)
        plan = plan_run(config, 8, rank=rank)
        named = {field.name: getattr(plan, field.name) for field in fields(ModelPlan)}
        assert named == vars(model)
        assert model.resident_bytes == plan.resident_bytes
        # equal parts of a batch that no rank could read: the model has no use for it
        other = replace(config, train=replace(config.train, global_batch_size=1))
        assert plan_model(other, topology, shape=shape, rank=rank).stages == model.stages


def test_all_parameters_are_decayed_where_it_is_asked_for() -> None:
    for settings, decays in {"": False, "--apply-wd-to-all-params": True}.items():
        config = config_of("tiny", f"--vocab-size 2048 --qk-layernorm {settings}")
        (stage,) = plan_run(config, 1, rank=0).stages
        specs = [param.spec for param in stage.params]
        assert {spec.weight_decay for spec in specs if len(spec.shape) == 1} == {decays}
        assert all(spec.weight_decay for spec in specs if len(spec.shape) > 1)

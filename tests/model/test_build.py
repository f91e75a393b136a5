"""A stage on the meta device allocates what its parameters are declared as."""

import pytest
import torch

from nanotrain.model.build import build_stage, collect_specs
from nanotrain.topology.stages import split_layers
from tests.model.building import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_registers_the_declared_parameters_in_order(name: str) -> None:
    for spec in split_layers(2, 2):
        stage = build_stage(MODELS[name], spec, dtype=torch.bfloat16)
        allocated = [(name, tuple(parameter.shape)) for name, parameter in stage.named_parameters()]
        assert allocated == [(spec.name, spec.shape) for spec in collect_specs(stage)]
        assert all(p.is_meta and p.dtype is torch.bfloat16 for p in stage.parameters())

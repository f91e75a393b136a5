"""From a configuration to a stage on the meta device, and the specs of its parameters."""

import torch

from nanotrain.config.config import ModelConfig
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.stage import Stage
from nanotrain.precision.dtypes import DTYPE_NAMES
from nanotrain.topology.parameters import declare_stage
from nanotrain.topology.params import ParamSpec
from nanotrain.topology.shape import ModelShape
from nanotrain.topology.stages import StageSpec

ALONE = ModelParallel.single_rank()


def build_stage(
    model_config: ModelConfig, stage: StageSpec, *, dtype: torch.dtype, parallel: ModelParallel = ALONE
) -> Stage:
    """The modules of a stage, on the meta device: shapes and names, no storage.

    Args:
        model_config: the whole model's shape, its vocabulary size set.
        stage: which part of the model to build.
        dtype: of the parameters and activations.
        parallel: what the layers talk over.
    """
    return Stage(model_config, stage, dtype=dtype, parallel=parallel)


def collect_specs(stage: Stage) -> tuple[ParamSpec, ...]:
    """Every parameter of a stage, in registration order: embedding, layers, final norm, head."""
    return declare_stage(
        ModelShape.of(stage.model),
        stage.spec,
        dtype=DTYPE_NAMES[next(stage.parameters()).dtype],
        tensor_parallel_size=stage.parallel.tp.group.size,
        sequence_parallel=stage.parallel.tp.sequence_parallel,
    )

"""From a configuration to a stage without storage, and from the stage to what its parameters are.

`build_stage` makes the modules on the meta device; `collect_specs` says for each parameter its global shape, how the
axes cut it and how it starts. `PARAMETERS` is the table both the sharding and the start values rest on.
"""

from dataclasses import dataclass

import torch

from nanotrain.config.config import ModelConfig
from nanotrain.model.stage import Stage
from nanotrain.topology.params import Cut, ParamKind, ParamSpec
from nanotrain.topology.stages import StageSpec

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

ROWS = (Cut(0, "tp"),)
COLUMNS = (Cut(1, "tp"),)


@dataclass(frozen=True)
class Role:
    """What a parameter is, whichever layer it stands in."""

    kind: ParamKind
    cuts: tuple[Cut, ...] = ()
    reduce_axes: tuple[str, ...] = ()


# The last two words of a parameter's name -> its role. Weights are [outputs, inputs]: layers that open a block are cut
# along their outputs, those that close it along their inputs; a bias follows the outputs.
PARAMETERS: dict[str, Role] = {
    "word.weight": Role(ParamKind.embedding, ROWS),
    "position.weight": Role(ParamKind.embedding),
    "query.weight": Role(ParamKind.matrix, ROWS),
    "key.weight": Role(ParamKind.matrix, ROWS),
    "value.weight": Role(ParamKind.matrix, ROWS),
    "gate.weight": Role(ParamKind.matrix, ROWS),
    "up.weight": Role(ParamKind.matrix, ROWS),
    "output.weight": Role(ParamKind.output_matrix, COLUMNS),
    "down.weight": Role(ParamKind.output_matrix, COLUMNS),
    "head.weight": Role(ParamKind.matrix, ROWS),
    "query.bias": Role(ParamKind.bias, ROWS),
    "key.bias": Role(ParamKind.bias, ROWS),
    "value.bias": Role(ParamKind.bias, ROWS),
    "gate.bias": Role(ParamKind.bias, ROWS),
    "up.bias": Role(ParamKind.bias, ROWS),
    "output.bias": Role(ParamKind.bias),
    "down.bias": Role(ParamKind.bias),
    # Each tp rank norms its own heads with the same weight, so the gradients of all of them belong to it.
    "query_norm.weight": Role(ParamKind.norm, reduce_axes=("tp",)),
    "key_norm.weight": Role(ParamKind.norm, reduce_axes=("tp",)),
    "attention_norm.weight": Role(ParamKind.norm),
    "attention_norm.bias": Role(ParamKind.bias),
    "mlp_norm.weight": Role(ParamKind.norm),
    "mlp_norm.bias": Role(ParamKind.bias),
    "final_norm.weight": Role(ParamKind.norm),
    "final_norm.bias": Role(ParamKind.bias),
}


def build_stage(model: ModelConfig, stage: StageSpec, *, dtype: torch.dtype) -> Stage:
    """The modules of a stage, on the meta device: shapes and names, no storage.

    Args:
        model: the whole model's shape, its vocabulary size set.
        stage: which part of the model to build.
        dtype: of the parameters and activations.
    """
    return Stage(model, stage, dtype=dtype)


def collect_specs(stage: Stage) -> tuple[ParamSpec, ...]:
    """Every parameter of a stage, in registration order: embedding, layers, final norm, head."""
    return tuple(_spec(name, parameter, stage=stage) for name, parameter in stage.named_parameters())


def _spec(name: str, parameter: torch.Tensor, *, stage: Stage) -> ParamSpec:
    role = PARAMETERS[".".join(name.split(".")[-2:])]
    return ParamSpec(
        name=name,
        shape=tuple(parameter.shape),
        dtype=DTYPES[parameter.dtype],
        cuts=role.cuts,
        reduce_axes=role.reduce_axes,
        stage=stage.spec.index,
        kind=role.kind,
        is_tied=stage.is_tied and name == "embedding.word.weight",
    )

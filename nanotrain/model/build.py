"""From a configuration to a stage without storage, and from the stage to what its parameters are.

`build_stage` makes the modules on the meta device; `collect_specs` says for each parameter its global shape, how the
axes cut it and how it starts. `PARAMETERS` is the table both the sharding and the start values rest on.
"""

from dataclasses import dataclass

import torch

from nanotrain.config.config import ModelConfig
from nanotrain.model.attention import shared_rows
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.stage import Stage
from nanotrain.topology.params import ParamKind, ParamSpec, Shard
from nanotrain.topology.stages import StageSpec

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

ALONE = ModelParallel.single_rank()

ROWS = (Shard(0, "tp"),)
COLUMNS = (Shard(1, "tp"),)


@dataclass(frozen=True)
class Role:
    """What a parameter is, whichever layer it stands in.

    Attributes:
        sums_over_tp: every tp rank's gradient is a part of the sum: each norms heads, or routes tokens, of its own.
        meets_sequence_shards: the same holds under sequence parallelism, where each rank sees its own tokens.
    """

    kind: ParamKind
    shards: tuple[Shard, ...] = ()
    sums_over_tp: bool = False
    meets_sequence_shards: bool = False


# The last two words of a parameter's name -> its role. Weights are [outputs, inputs]: layers that open a block are cut
# along their outputs, those that close it along their inputs; a bias follows the outputs.
PARAMETERS: dict[str, Role] = {
    "word.weight": Role(ParamKind.embedding, ROWS),
    "position.weight": Role(ParamKind.embedding, meets_sequence_shards=True),
    "query.weight": Role(ParamKind.matrix, ROWS),
    "key.weight": Role(ParamKind.matrix, ROWS),
    "value.weight": Role(ParamKind.matrix, ROWS),
    "query_down.weight": Role(ParamKind.matrix, meets_sequence_shards=True),
    "query_up.weight": Role(ParamKind.matrix, ROWS),
    "kv_down.weight": Role(ParamKind.matrix, meets_sequence_shards=True),
    "kv_up.weight": Role(ParamKind.matrix, ROWS),
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
    "output.bias": Role(ParamKind.bias, meets_sequence_shards=True),
    "down.bias": Role(ParamKind.bias, meets_sequence_shards=True),
    "router.weight": Role(ParamKind.matrix, sums_over_tp=True),
    "query_norm.weight": Role(ParamKind.norm, sums_over_tp=True),
    "key_norm.weight": Role(ParamKind.norm, sums_over_tp=True),
    "query_latent_norm.weight": Role(ParamKind.norm, meets_sequence_shards=True),
    "query_latent_norm.bias": Role(ParamKind.bias, meets_sequence_shards=True),
    "kv_latent_norm.weight": Role(ParamKind.norm, meets_sequence_shards=True),
    "kv_latent_norm.bias": Role(ParamKind.bias, meets_sequence_shards=True),
    "attention_norm.weight": Role(ParamKind.norm, meets_sequence_shards=True),
    "attention_norm.bias": Role(ParamKind.bias, meets_sequence_shards=True),
    "mlp_norm.weight": Role(ParamKind.norm, meets_sequence_shards=True),
    "mlp_norm.bias": Role(ParamKind.bias, meets_sequence_shards=True),
    "final_norm.weight": Role(ParamKind.norm, meets_sequence_shards=True),
    "final_norm.bias": Role(ParamKind.bias, meets_sequence_shards=True),
}

# The experts' matrices are stacked along dim 0 and reduced over ranks of their own.
EXPERT_PARAMETERS: dict[str, Role] = {
    "gate.weight": Role(ParamKind.matrix, (Shard(0, "ep"), Shard(1, "etp"))),
    "up.weight": Role(ParamKind.matrix, (Shard(0, "ep"), Shard(1, "etp"))),
    "down.weight": Role(ParamKind.output_matrix, (Shard(0, "ep"), Shard(2, "etp"))),
}


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
    return tuple(_spec(name, parameter, stage=stage) for name, parameter in stage.named_parameters())


def _spec(name: str, parameter: torch.Tensor, *, stage: Stage) -> ParamSpec:
    """The whole parameter of which a stage holds a part."""
    parallel, words = stage.parallel, name.split(".")
    is_expert = "experts" in words
    place = ".".join(words[-2:])
    role = (EXPERT_PARAMETERS if is_expert else PARAMETERS)[place]
    is_shared = words[-2] in ("key", "value") and shared_rows(stage.model, parallel.tp.group) is not None
    shards = () if is_shared else role.shards
    sizes = {"tp": parallel.tp.group.size, "ep": parallel.ep.size, "etp": parallel.etp.size}
    shape = list(parameter.shape)
    for cut in shards:
        shape[cut.dim] *= sizes[cut.axis]
    meets_shards = role.meets_sequence_shards and parallel.tp.sequence_parallel
    is_tied = stage.is_tied and name == "embedding.word.weight"
    return ParamSpec(
        name=name,
        shape=tuple(shape),
        dtype=DTYPES[parameter.dtype],
        shards=shards,
        grad_sum_axes=("tp",) * (role.sums_over_tp or is_shared or meets_shards) + ("embed",) * is_tied,
        stage=stage.spec.index,
        kind=role.kind,
        is_expert=is_expert,
        is_tied=is_tied,
    )

"""Peak memory of a rank of another program, by kind.

memory_of_program   MemoryPlan of the ranks of one pipeline stage

Parameters, gradients and optimizer state, and the operators of `program_bytes.py` over the pipeline
schedule.
"""

from math import prod
from typing import NamedTuple, get_args

from nanotrain.config.parallel import ShardingStrategy
from nanotrain.parallel.pp.actions import Schedule
from nanotrain.plan.memory_plan import MemoryPlan, peak_of_step, runtime_bytes
from nanotrain.plan.saved_bytes import StageBytes
from nanotrain.planner.program_bytes import ProgramBytes
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.stage_time import Numel, Stages
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.layer_sizes import FP32, INT64

MIB = 2**20
TOKEN_TENSORS = 5  # int64 tensors of the tokens of a microbatch
# Transformer Engine has one workspace of matrix products, and further ones for the streams that
# compute experts and for products that overlap collectives of tp.
EXPERT_WORKSPACES = 4
OVERLAP_WORKSPACES = 3


class StateBytes(NamedTuple):
    """Bytes of the state of a rank."""

    params: int
    grads: int
    optimizer: int


def _state_bytes(scenario: Scenario, local: Numel) -> StateBytes:
    """Bytes of parameters, gradients and optimizer state, from the number of parameters.

    Weights in fp8 take as much as in bf16: Transformer Engine has them by rows and by columns.
    """
    dense = _group_state_bytes(scenario, local.dense, shard_group="dp_shard")
    expert = _group_state_bytes(scenario, local.expert, shard_group="expert_dp_shard")
    return StateBytes(
        params=dense.params + expert.params,
        grads=dense.grads + expert.grads,
        optimizer=dense.optimizer + expert.optimizer,
    )


def _group_state_bytes(scenario: Scenario, numel: int, *, shard_group: str) -> StateBytes:
    """State of the dense or the expert parameters of a rank."""
    engine = scenario.engine
    precision = Precision.of(scenario.config.precision)
    strategy = scenario.config.parallel.data_parallel_sharding_strategy
    zero_stage = get_args(ShardingStrategy).index(strategy)  # 0 to 3
    shards = len(scenario.ranks(shard_group))
    itemsize = precision.params.itemsize
    param_bytes = itemsize
    main_bytes = FP32 if itemsize < FP32 else 0
    if engine.name == "fsdp2" and zero_stage == 3:
        # FSDP's shards are the main parameters themselves
        param_bytes = FP32
        main_bytes = 0

    grads = numel * precision.grads.itemsize
    if zero_stage > 1:
        grads = numel * precision.main_grads.itemsize // shards
    if engine.memory.keeps_low_precision_grads and itemsize < FP32:
        grads += numel * itemsize
    return StateBytes(
        params=numel * param_bytes // (shards if zero_stage == 3 else 1),
        grads=grads,
        optimizer=numel * (main_bytes + 2 * FP32) // (shards if zero_stage > 0 else 1),
    )


def _gathered_bytes(scenario: Scenario, numel: int) -> int:
    """Full-size units of FSDP: two layers and the ends, and the gradients of a layer."""
    if scenario.config.parallel.data_parallel_sharding_strategy != "optim_grads_params":
        return 0
    shape = scenario.shape
    num_ends = 1 if shape.is_tied else 2
    ends = num_ends * shape.padded_vocab_size * shape.hidden_size // scenario.sizes["tp"]
    layer = max(0, numel - ends) // shape.num_layers
    low = Precision.of(scenario.config.precision).params.itemsize
    return low * (2 * layer + ends) + 2 * low * layer


def memory_of_program(scenario: Scenario, pp_rank: int, *, schedule: Schedule) -> MemoryPlan:
    """The memory of the ranks of a pipeline stage in another program.

    Args:
        scenario: configuration, machine and engine.
        pp_rank: pipeline coordinate.
        schedule: the pipeline schedule of a step, of all ranks.
    """
    stages = scenario.stages[pp_rank]
    layers = ProgramBytes(scenario)
    numel = Stages(scenario).numel(stages)
    stage_bytes: dict[int, StageBytes] = {}
    weights: set[tuple[int, int]] = set()
    for stage in stages:
        peak = layers.stage(stage)
        weights |= peak.weights
        stage_bytes[stage.index] = StageBytes(peak.kept, 0, peak.kept, working=peak.further)
    unused = 0
    if layers.fuses_wgrads:
        # Transformer Engine returns a tensor of a weight's shape where the product has added its
        # gradient to the buffer
        unused = sum(prod(shape) for shape in weights) * layers.sizes.itemsize
    peak_bytes = peak_of_step(schedule.freeing_first(pp_rank), stage_bytes)
    has_head = stages[-1].has_head
    working = peak_bytes.working + _token_bytes(scenario, layers, has_head=has_head)
    state = _state_bytes(scenario, numel)
    gathered = _gathered_bytes(scenario, numel.dense + numel.expert)
    axes = [axis for axis in ("tp", "cp", "pp", "dp", "ep") if scenario.sizes[axis] > 1]
    return MemoryPlan(
        pp_rank=pp_rank,
        params=state.params,
        grads=state.grads,
        optimizer=state.optimizer,
        activations=peak_bytes.activations,
        working=working + _workspace_bytes(scenario),
        communication=unused + gathered,
        runtime=runtime_bytes(len(axes)),
    )


def _token_bytes(scenario: Scenario, layers: ProgramBytes, *, has_head: bool) -> int:
    """Tokens of a microbatch, messages of the pipeline and deferred products of the head."""
    sizes = layers.sizes
    num_bytes = sizes.tokens * TOKEN_TENSORS * INT64
    if scenario.sizes["pp"] > 1:  # hidden states and gradients on their way
        num_bytes += 3 * layers.hidden
    if "attention mask" in scenario.features:
        scores = scenario.config.train.micro_batch_size * scenario.config.data.seq_length**2
        num_bytes += scores // scenario.sizes["cp"]
    if "deferred wgrad of the head" in scenario.features and has_head:
        logits = sizes.columns * sizes.itemsize * sizes.tokens
        # measured: a further tensor of the weight's shape
        num_bytes += 2 * (logits + layers.inside) + sizes.columns * sizes.width
    return num_bytes


def _workspace_bytes(scenario: Scenario) -> int:
    """Workspaces of matrix products: torch's of forward and backward, and Transformer Engine's."""
    is_old = scenario.gpu.is_before_hopper
    is_small = is_old and not scenario.config.train.deterministic_mode
    torch_bytes = 2 * (8_519_680 if is_small else 32 * MIB)
    if scenario.engine.name != "megatron":
        return torch_bytes
    num_workspaces = 0
    # measured: runs with experts have it even if their layers are Megatron-LM's own
    if "local layers" not in scenario.features or scenario.shape.moe is not None:
        num_workspaces += 1
    if "grouped products" in scenario.features:
        num_workspaces += EXPERT_WORKSPACES
    if "overlapped tp" in scenario.features:
        num_workspaces += OVERLAP_WORKSPACES
    return torch_bytes + (4 if is_old else 32) * MIB * num_workspaces

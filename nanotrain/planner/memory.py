"""Peak memory of the heaviest rank, by kind.

Engine nanotrain: the numbers that a run plans before it starts (plan/). Other engines: their
parameters, gradients and optimizer state, and the operators of `program_bytes.py` over the pipeline
schedule.
"""

from dataclasses import replace
from math import prod
from typing import get_args

from nanotrain.config.parallel import ShardingStrategy
from nanotrain.parallel.pp.actions import Schedule
from nanotrain.plan.memory_plan import (
    MemoryPlan,
    built_schedule,
    peak_of_step,
    plan_memory,
    runtime_bytes,
)
from nanotrain.plan.saved_bytes import StageBytes
from nanotrain.planner.program_bytes import ProgramBytes
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.stage_time import Numel, Stages
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.layer_sizes import FP32, INT64

MIB = 2**20


def estimate_memory(scenario: Scenario) -> MemoryPlan:
    """The memory of the pipeline rank that needs the most."""
    return max(
        (memory_of_rank(scenario, rank) for rank in range(scenario.sizes["pp"])),
        key=lambda plan: plan.total,
    )


def memory_of_rank(scenario: Scenario, pp_rank: int) -> MemoryPlan:
    """The memory of the ranks of a pipeline stage."""
    if scenario.engine.name != "nanotrain":
        return _estimated(scenario, pp_rank)
    schedule = _in_flight_schedule(scenario)
    return plan_memory(
        scenario.config, scenario.world_size, pp_rank=pp_rank, device="cuda", schedule=schedule
    )


def _in_flight_schedule(scenario: Scenario) -> Schedule:
    """The schedule of as many microbatches as it takes until no more are in flight."""
    name, shape = scenario.config.parallel.pipeline_schedule, scenario.pipeline
    if name != "gpipe":
        shape = replace(shape, num_microbatches=min(shape.num_microbatches, 4 * shape.num_ranks))
    return built_schedule(name, shape)


def _state(scenario: Scenario, local: Numel) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state, from the number of parameters.

    Weights in fp8 take as much as in bf16: Transformer Engine has them by rows and by columns.
    """
    config, engine = scenario.config, scenario.engine
    precision, strategy = (
        Precision.of(config.precision),
        config.parallel.data_parallel_sharding_strategy,
    )
    low, level = precision.params.itemsize, get_args(ShardingStrategy).index(strategy)
    # FSDP's shards are the main parameters themselves
    stored, main = (
        (FP32, 0) if engine.name == "fsdp2" and level == 3 else (low, FP32 * (low < FP32))
    )
    params = grads = optimizer = 0
    for numel, name in ((local.dense, "dp_shard"), (local.expert, "expert_dp_shard")):
        shards = len(scenario.ranks(name))
        params += numel * stored // (shards if level == 3 else 1)
        grads += (
            numel * precision.main_grads.itemsize // shards
            if level > 1
            else numel * precision.grads.itemsize
        )
        grads += numel * low if engine.memory.low_grads and low < FP32 else 0
        optimizer += numel * (main + 2 * FP32) // (shards if level > 0 else 1)
    return params, grads, optimizer


def _gathered(scenario: Scenario, elements: int) -> int:
    """Full-size units of FSDP: two layers and the ends, and the gradients of a layer."""
    if scenario.config.parallel.data_parallel_sharding_strategy != "optim_grads_params":
        return 0
    shape, low = scenario.shape, Precision.of(scenario.config.precision).params.itemsize
    ends = (2 - shape.is_tied) * shape.padded_vocab_size * shape.hidden_size // scenario.sizes["tp"]
    layer = max(0, elements - ends) // shape.num_layers
    return low * (2 * layer + ends) + 2 * low * layer


def _estimated(scenario: Scenario, pp_rank: int) -> MemoryPlan:
    """The memory of another program."""
    stages, layers = scenario.stages[pp_rank], ProgramBytes(scenario)
    numel = Stages(scenario).numel(stages)
    peaks = {stage.index: layers.stage(stage) for stage in stages}
    weights = frozenset(weight for peak in peaks.values() for weight in peak.weights)
    # Transformer Engine returns a tensor of a weight's shape where the product has added its
    # gradient to the buffer
    unused = sum(map(prod, weights)) * layers.sizes.itemsize if layers.fuses_wgrads else 0
    bytes_of = {
        index: StageBytes(peak.kept, 0, peak.kept, working=peak.further)
        for index, peak in peaks.items()
    }
    most = peak_of_step(_in_flight_schedule(scenario).freeing_first(pp_rank), bytes_of)
    sizes = layers.sizes
    tokens = sizes.tokens * 5 * INT64
    if scenario.sizes["pp"] > 1:  # hidden states and gradients on their way
        tokens += 3 * layers.hidden
    if "attention mask" in scenario.features:
        tokens += (
            scenario.config.train.micro_batch_size
            * scenario.config.data.seq_length**2
            // scenario.sizes["cp"]
        )
    if "deferred wgrad of the head" in scenario.features and stages[-1].has_head:
        tokens += 2 * (sizes.columns * sizes.itemsize * sizes.tokens + layers.inside)
        tokens += sizes.columns * sizes.width  # measured: a further tensor of the weight's shape
    params, grads, optimizer = _state(scenario, numel)
    return MemoryPlan(
        pp_rank=pp_rank,
        params=params,
        grads=grads,
        optimizer=optimizer,
        activations=most.activations,
        working=most.working + tokens + _workspaces(scenario),
        communication=unused + _gathered(scenario, numel.dense + numel.expert),
        runtime=runtime_bytes(
            sum(scenario.sizes[axis] > 1 for axis in ("tp", "cp", "pp", "dp", "ep"))
        ),
    )


def _workspaces(scenario: Scenario) -> int:
    """Workspaces of matrix products: two of torch's, of forward and backward, and those of
    Transformer Engine.

    It has one, four more for the streams of the products of experts, and three more for those
    beside collectives of tp.
    """
    is_old = scenario.gpu.name.startswith(("a", "v", "l"))
    own = 2 * (8_519_680 if is_old and not scenario.config.train.deterministic_mode else 32 * MIB)
    # measured: runs with experts have the second one even if their layers are Megatron-LM's own
    is_local = "local layers" in scenario.features and scenario.shape.moe is None
    number = (
        (not is_local)
        + 4 * ("grouped products" in scenario.features)
        + 3 * ("overlapped tp" in scenario.features)
    )
    return own + (4 if is_old else 32) * MIB * number * (scenario.engine.name == "megatron")

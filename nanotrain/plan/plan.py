"""`Plan`: everything of one rank that is determined before a device is touched.

    Config -> plan_run(config, world_size, rank) -> Plan -> build.build_run

Pure: no process group, no module. `plan_run` accepts any rank of any world size and takes the same
time for all of them.
`traffic.sent_bytes` computes the bytes that a step sends from a plan.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from nanotrain.attention.backends import backend_flags
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.notation import read_pipeline_layout
from nanotrain.config.parallel import ParallelConfig
from nanotrain.config.rules.check import OPEN_NAMES
from nanotrain.config.schedules import (
    batch_schedule,
    global_batch_size,
    length_schedule,
    samples_of_steps,
)
from nanotrain.config.schema import ENTRIES, check_choice, value_of
from nanotrain.data.sampler import SamplerConfig
from nanotrain.errors import ErrorCollector
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.lr import LR_DECAYS
from nanotrain.optim.muon import SCALAR_RULES
from nanotrain.optim.rule import UpdateRule
from nanotrain.optim.state import ShardPart, host_fraction, split_shard, state_bytes
from nanotrain.parallel.cp import CORE_ATTENTIONS
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.options import DataParallelOptions
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.schedules import SCHEDULES, build_schedule, forward_only
from nanotrain.parallel.pp.transfers import RankPlan, plan_rank
from nanotrain.plan.buffers import BufferPlan, plan_buffers
from nanotrain.plan.matrices import MatrixGrid, matrix_grids, per_matrix_bytes
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.fp8 import RECIPES
from nanotrain.spec.counts import layer_weights
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.parameters import declare_stage
from nanotrain.spec.params import LocalParam, localize
from nanotrain.spec.residuals import stream_width
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.shared_state import message_width
from nanotrain.spec.stages import StageSpec, balanced_lengths, split_layers, stages_of_lengths
from nanotrain.spec.trainable import (
    TrainableSet,
    first_trained_stage,
    mark_trainable,
    trained_set,
)
from nanotrain.topology.groups import GroupName, GroupSpec
from nanotrain.topology.replays import require_replicas
from nanotrain.topology.topology import Topology


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage on this rank."""

    spec: StageSpec  # layers of the stage
    params: tuple[LocalParam, ...]  # local parameters in registration order
    # dense, dense in fp8, experts, experts in fp8; only those that have parameters
    buffers: tuple[BufferPlan, ...]
    # indices of its layers of multi-token prediction, after those of the model
    mtp_layers: range = range(0)


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes resident on a rank during the run, alignment and padding included."""

    params: int = 0  # model params, or their shards
    # at most this much for gathered FSDP units where params are sharded; exactly this much with a
    # double buffer
    units: int = 0
    grads: int = 0  # gradient buffers, or gradient shards
    # at most this much for full-size buckets in flight, if gradients are sharded or received
    grad_buckets: int = 0
    # the state of the update rule, and main params that are separate from the model params
    optimizer: int = 0

    def __add__(self, other: "ResidentBytes") -> "ResidentBytes":
        return ResidentBytes(
            params=self.params + other.params,
            units=self.units + other.units,
            grads=self.grads + other.grads,
            grad_buckets=self.grad_buckets + other.grad_buckets,
            optimizer=self.optimizer + other.optimizer,
        )

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.params + self.units + self.grads + self.grad_buckets + self.optimizer


@dataclass(frozen=True)
class Plan:
    """One rank's part of a run."""

    config: Config  # complete: the vocabulary size is set
    topology: Topology  # all ranks and their groups
    rank: int  # global rank, 0 to world_size - 1
    groups: Mapping[GroupName, GroupSpec]  # the groups of this rank by name
    shape: ModelShape  # sizes of the model
    stages: tuple[StagePlan, ...]  # the pipeline stages of this rank, ascending
    sampler: SamplerConfig  # which samples this rank reads
    # actions and transfers of a training step; `StepSchedules` has those of other batch sizes
    train_schedule: RankPlan
    valid_schedule: RankPlan  # forwards and transfers of a validation batch
    # factor of the loss that the gradient collectives divide by: the ranks of `dp_cp` if they
    # average, else 1
    num_averaged_ranks: int
    trainable: TrainableSet = TrainableSet()  # parameters that are trained

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank per step."""
        return self.sampler.num_microbatches

    @property
    def data_parallel(self) -> DataParallelOptions:
        """Sharding, reductions and gathers of data parallelism, the same for every buffer."""
        return DataParallelOptions.of(self.config.parallel, self.config.precision)

    @property
    def layers(self) -> list[int]:
        """The layers of this rank, including multi-token prediction, by index in the model."""
        return [layer for stage in self.stages for layer in (*stage.spec.layers, *stage.mtp_layers)]

    def keeps_fp8_weights(self, num_microbatches: int) -> bool:
        """Whether GPUs cast weights for fp8 products once per step, and keep them until its end."""
        fp8 = self.config.precision.fp8
        if fp8 is None or fp8.recipe == "nvfp4":
            return False
        if fp8.param_gather or self.data_parallel.strategy.shard_params:
            return False
        if self.config.train.cuda_graph_impl != "none":  # a graph has the casts that it captured
            return False
        return num_microbatches > 1

    def _gathered_numel(self, layout: BufferLayout) -> int:
        """Most elements of gathered FSDP units of a buffer at any time."""
        if self.data_parallel.num_gather_blocks:
            return sum(layout.gather_blocks(self.data_parallel.num_gather_blocks).numel.values())
        if not self.config.parallel.reshard_after_forward:
            return layout.numel
        shared_numel, numel = self._shared_and_unit_numel(layout)
        sizes = list(numel.values())
        num_units = 1 + self.data_parallel.num_prefetched_units
        together = max(sum(sizes[first : first + num_units]) for first in range(len(sizes)))
        if (self.config.memory.recompute_num_layers or 1) > 1:
            # if a group of layers is recomputed, one of them is gathered together with the layer
            # whose backward waits
            together = sum(sorted(sizes)[-max(2, num_units) :])
        return shared_numel + together

    def _shared_and_unit_numel(self, layout: BufferLayout) -> tuple[int, dict[str, int]]:
        """Elements that are gathered with every unit, and elements of each unit."""
        numel = layout.numel_of_units
        shared_numel = 0
        if self.shape.num_mtp_layers:
            # multi-token prediction reads embedding and head together with its own unit
            for bucket in layout.buckets:
                if bucket.is_shared:  # a head may have a weight and a bias
                    shared_numel += numel.pop(min(bucket.units), 0)
        if not shared_numel and self.shape.is_tied and "head" in numel:
            # the final norm is gathered together with the embedding
            numel["head"] += numel.get("embedding", 0)
        return shared_numel, numel

    @property
    def rule(self) -> UpdateRule:
        """The update rule of the optimizer."""
        return OPTIMIZERS[self.config.optim.optimizer]

    def parts_of(self, buffer: BufferPlan) -> Iterator[ShardPart]:
        """The parts of this rank's shards of a buffer, each stored together by the optimizer."""
        outer_index = buffer.replicate.index if buffer.layout.num_outer_shards > 1 else 0
        for bucket in buffer.layout.buckets:
            ranges = bucket.update_ranges(buffer.shard.index, outer_index=outer_index)
            fraction = host_fraction(self.config.optim)
            yield from split_shard(
                ranges, bucket.update_numel, rule=self.rule, host_fraction=fraction
            )

    def matrix_grids(self) -> Iterator[MatrixGrid]:
        """The matrices that a rule for matrices updates, and the ranks that share them."""
        return matrix_grids(
            self.trained_buffers, self.rule.matrix, config=self.config.optim, groups=self.groups
        )

    @property
    def buffers(self) -> tuple[BufferPlan, ...]:
        """The buffers of all stages of this rank."""
        return tuple(buffer for stage in self.stages for buffer in stage.buffers)

    @property
    def trained_buffers(self) -> tuple[BufferPlan, ...]:
        """The buffers with gradients."""
        return tuple(buffer for buffer in self.buffers if buffer.layout.is_trainable)

    def samples_of(self, steps: int, *, batch_size: int | None = None) -> int:
        """Samples of the first `steps` steps.

        Args:
            steps: number of steps.
            batch_size: global batch size of step 0 where a resume has changed it.
        """
        if self.sampler.schedule:
            return samples_of_steps(self.sampler.schedule, steps)
        if batch_size is None:
            batch_size = self.sampler.global_batch_size
        return steps * batch_size

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """[B, S, H] of this rank's hidden states between two stages, for unsplit samples.

        H is the width of all residual streams.
        """
        return self.hidden_shape_of(self.config.data.seq_length)

    def hidden_shape_of(self, seq_length: int) -> tuple[int, int, int]:
        """[B, S, H] between two stages, if samples are split into sequences of `seq_length`."""
        num_sequences = self.config.data.seq_length // seq_length
        batch_size = self.config.train.micro_batch_size * num_sequences
        return batch_size, seq_length // self.num_sequence_shards, stream_width(self.shape)

    @property
    def message_widths(self) -> tuple[int, ...]:
        """Elements per hidden state of the message to every stage of the pipeline."""
        axis_sizes = {axis: spec.size for axis, spec in self.groups.items()}
        sizes = LayerSizes.of(self.config, self.shape, sizes=axis_sizes)
        specs = stage_specs(self.config.parallel, self.shape)
        return tuple(message_width(sizes, spec.first_layer) for spec in specs)

    @property
    def num_sequence_shards(self) -> int:
        """Ranks over which the hidden states of a sequence are sharded."""
        tp = self.groups["tp"].size if self.config.parallel.sequence_parallel else 1
        return self.groups["cp"].size * tp

    @property
    def resident_bytes(self) -> ResidentBytes:
        """Bytes of params, grads and optimizer state (the table in docs/zero.md)."""
        num_bytes = per_matrix_bytes(self.matrix_grids(), self.rule.matrix)
        buffer_bytes = (self._buffer_bytes(buffer) for buffer in self.buffers)
        return sum(buffer_bytes, ResidentBytes(optimizer=num_bytes))

    def _buffer_bytes(self, buffer: BufferPlan) -> ResidentBytes:
        """Resident bytes of one buffer."""
        layout = buffer.layout
        num_shards = buffer.shard.size
        num_updated = layout.numel // num_shards // layout.num_outer_shards
        precision = Precision.of(self.config.precision)
        param_size = buffer.param_size(precision)
        units = 0
        params = layout.numel * param_size
        if self.data_parallel.strategy.shard_params:
            params = layout.numel // num_shards * param_size
            units = self._gathered_numel(layout) * param_size
        if buffer.is_fp8:
            params += num_updated * precision.params.itemsize  # written by the optimizer
        if not layout.is_trainable:
            return ResidentBytes(params=params, units=units)
        return ResidentBytes(
            params=params,
            units=units,
            grads=self._grad_bytes(buffer, num_updated, precision=precision),
            grad_buckets=self._grad_bucket_bytes(buffer, precision=precision),
            optimizer=state_bytes(
                self.parts_of(buffer), self.rule, config=self.config.optim, precision=precision
            ),
        )

    def _grad_bytes(self, buffer: BufferPlan, num_updated: int, *, precision: Precision) -> int:
        """Bytes of the gradient buffer, or of its shard.

        `num_updated` is the number of elements that the optimizer of this rank updates.
        """
        numel = buffer.layout.numel
        if self.data_parallel.strategy.shard_grads:
            return numel // buffer.shard.size * precision.main_grads.itemsize
        num_bytes = numel * precision.grads.itemsize
        if precision.main_grads != precision.grads:
            num_bytes += num_updated * precision.main_grads.itemsize
        return num_bytes

    def _grad_bucket_bytes(self, buffer: BufferPlan, *, precision: Precision) -> int:
        """Bytes of full-size gradient buckets in flight."""
        opened = buffer.layout.open_numel * precision.grads.itemsize
        num_bytes = 0
        if self.data_parallel.strategy.shard_grads:
            num_bytes += opened
            if precision.main_grads != precision.grads and buffer.replicate.size > 1:
                num_bytes += opened // buffer.shard.size  # the shard in the reduced dtype
        if self.data_parallel.by_all_to_all:
            num_bytes += opened  # received
        return num_bytes


def plan_run(config: Config, world_size: int, *, rank: int, stage: str = "") -> Plan:
    """Plan one rank's part of a run.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        rank: global rank.
        stage: stage of the data, where stages train other parameters; by default the first.

    Raises:
        ConfigError: an unknown name, a batch that does not fit, or replays without replicas.
        TopologyError: a layout that does not fit the ranks or the model.
    """
    check_names(config)
    topology = Topology.of(config.parallel, world_size, has_experts=config.model.moe is not None)
    require_replicas(topology, replay_interval=config.train.replay_interval)
    groups = topology.group_specs(rank)
    shape = ModelShape.of(config.model)
    trainable = trained_set(config, shape, stage=stage)
    batch_size = global_batch_size(config.train, groups["dp"].size)
    # Saved with the configuration, so that a resume on other ranks reports that an unset size has
    # changed.
    config = replace(config, train=replace(config.train, global_batch_size=batch_size))
    readers = _readers(config.data, groups, end_ranks=topology.end_ranks)
    sampler = SamplerConfig(
        dp_rank=groups["dp"].index,
        dp_size=groups["dp"].size,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=batch_size,
        schedule=batch_schedule(config),
        lengths=length_schedule(config),
        readers_per_sample=readers.num_ranks,
        unread_length=None if readers.includes_rank else config.data.seq_length,
    )
    stages = _plan_stages(
        config, shape, groups=groups, coords=topology.coords(rank), trainable=trainable
    )
    pipeline = PipelineShape.of(config.parallel, sampler.num_microbatches)
    schedule = config.parallel.pipeline_schedule
    num_averaged_ranks = 1
    if config.parallel.ddp_average_in_collective:
        num_averaged_ranks = groups["dp_cp"].size
    return Plan(
        config=config,
        topology=topology,
        rank=rank,
        groups=groups,
        shape=shape,
        stages=tuple(stages),
        sampler=sampler,
        train_schedule=plan_train_schedule(
            config,
            groups,
            num_microbatches=sampler.num_microbatches,
            trainable=trainable,
        ),
        valid_schedule=_rank_plan(schedule, pipeline, rank=groups["pp"].index, is_training=False),
        num_averaged_ranks=num_averaged_ranks,
        trainable=trainable,
    )


class Readers(NamedTuple):
    """Ranks that read a sample."""

    num_ranks: int
    includes_rank: bool  # whether the planned rank is one of them


def _readers(
    data: DataConfig, groups: Mapping[GroupName, GroupSpec], *, end_ranks: Sequence[int]
) -> Readers:
    """The ranks that read a sample.

    The first stage needs tokens, the last one labels, and the stages between them at most the
    borders of documents.
    """
    pp = groups["pp"]
    is_by_all = data.reset_position_ids or data.reset_attention_mask
    pipeline_ranks = range(pp.size) if is_by_all else end_ranks
    num_ranks = groups["tp"].size * groups["cp"].size * len(pipeline_ranks)
    return Readers(num_ranks, pp.index in pipeline_ranks)


def plan_train_schedule(
    config: Config,
    groups: Mapping[GroupName, GroupSpec],
    *,
    num_microbatches: int,
    trainable: TrainableSet,
) -> RankPlan:
    """The actions and transfers of this rank in a training step of `num_microbatches`."""
    pipeline = PipelineShape.of(config.parallel, num_microbatches)
    shape = ModelShape.of(config.model)
    first_trained = first_trained_stage(
        trainable, shape, stages=stage_specs(config.parallel, shape)
    )
    return _rank_plan(
        config.parallel.pipeline_schedule,
        pipeline,
        rank=groups["pp"].index,
        first_trained_stage=first_trained,
    )


@lru_cache(maxsize=1024)  # thousands of layouts of a search have few pipelines
def _rank_plan(
    name: str,
    pipeline: PipelineShape,
    *,
    rank: int,
    is_training: bool = True,
    first_trained_stage: int = 0,
) -> RankPlan:
    """The actions and transfers of a rank; in validation the forwards alone."""
    schedule = build_schedule(name, pipeline)
    if not is_training:
        return plan_rank(forward_only(schedule), rank)
    return plan_rank(schedule, rank, first_trained_stage=first_trained_stage)


def check_names(config: Config) -> None:
    """Check the settings that name an entry of a table of implementations.

    Raises:
        ConfigError: unknown names, all in one error; suggests the nearest of each.
    """
    tables: dict[str, Iterable[str]] = {
        "pipeline_schedule": SCHEDULES,
        "cp_comm_type": CORE_ATTENTIONS,
        "attention_backend": backend_flags(),
        "optimizer": OPTIMIZERS,
        "muon_scalar_optimizer": SCALAR_RULES,
        "lr_decay_style": LR_DECAYS,
        "fp8_recipe": RECIPES,
    }
    assert tables.keys() == set(OPEN_NAMES)
    errors = ErrorCollector()
    for name, known in tables.items():
        with errors:
            check_choice(name, value_of(config, ENTRIES[name].key), known=known)
    errors.raise_errors()


def _plan_stages(
    config: Config,
    shape: ModelShape,
    *,
    groups: Mapping[GroupName, GroupSpec],
    coords: Mapping[str, int],
    trainable: TrainableSet,
) -> Iterator[StagePlan]:
    """The stages of this rank, ascending."""
    sizes = {axis: groups[axis].size for axis in ("tp", "ep", "etp")}
    declaration = Declaration(
        shape,
        config.precision.params_dtype,
        sizes["tp"],
        config.parallel.sequence_parallel,
        config.optim.apply_wd_to_qk_layernorm,
        config.optim.apply_wd_to_all_params,
    )
    specs = stage_specs(config.parallel, shape)
    for index in config.parallel.stages_of(coords["pp"]):
        spec = specs[index]
        declared = mark_trainable(declare_stage(declaration, spec), trainable)
        params = tuple(localize(param, coords=coords, sizes=sizes) for param in declared)
        buffers = tuple(plan_buffers(params, config, groups=groups))
        yield StagePlan(spec, params, buffers, shape.mtp_layers if spec.has_head else range(0))


def stage_specs(parallel: ParallelConfig, shape: ModelShape) -> tuple[StageSpec, ...]:
    """The stages of all pipeline ranks; a hybrid layer pattern is split by its weights."""
    if parallel.pipeline_model_parallel_layout is not None:
        return stages_of_lengths(read_pipeline_layout(parallel.pipeline_model_parallel_layout))
    per_rank = parallel.num_virtual_stages_per_pipeline_rank
    num_stages = parallel.pipeline_model_parallel_size * per_rank
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    has_set_ends = first is not None or last is not None or any(parallel.counted_ends)
    if shape.has_half_layers and num_stages > 1 and not has_set_ends:
        return stages_of_lengths(balanced_lengths(layer_weights(shape), num_stages))
    return split_layers(
        shape.num_layers,
        num_stages,
        first=first,
        last=last,
        stages_per_rank=per_rank,
        counted_ends=parallel.counted_ends,
    )

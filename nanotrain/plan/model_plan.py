"""`ModelPlan`: the part of the model on one rank, and the bytes that it has there during a run.

    Config, Topology -> plan_model(config, topology, shape=, rank=) -> ModelPlan

plan_model     stages, parameters and buffers of any rank
stage_specs    the layers of the stages of all pipeline ranks

Pure: no process group, no module, and no batch: `Plan` (plan.py) adds samples and schedules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nanotrain.config.config import Config
from nanotrain.config.notation import read_pipeline_layout
from nanotrain.config.parallel import ParallelConfig
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.rule import UpdateRule
from nanotrain.optim.state import ShardPart, host_fraction, split_shard, state_bytes
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.options import DataParallelOptions
from nanotrain.plan.buffers import (
    BufferPlan,
    MatrixGrid,
    matrix_grids,
    per_matrix_bytes,
    plan_buffers,
)
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.counts import layer_weights
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.parameters import declare_stage
from nanotrain.spec.params import LocalParam, localize
from nanotrain.spec.residuals import stream_width
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.shared_state import message_width
from nanotrain.spec.stages import StageSpec, balanced_lengths, split_layers, stages_of_lengths
from nanotrain.spec.trainable import TrainableSet, mark_trainable, trained_set
from nanotrain.topology.groups import GroupName, GroupSpec
from nanotrain.topology.topology import Topology


@dataclass(frozen=True)
class StagePlan:
    """A pipeline stage on this rank."""

    spec: StageSpec  # layers of the stage
    params: tuple[LocalParam, ...]  # local parameters in registration order
    # dense, dense in fp8, experts, experts in fp8; only buffers that have parameters
    buffers: tuple[BufferPlan, ...]
    # indices of its layers of multi-token prediction, which follow the model's
    mtp_layers: range = range(0)
    mtp_predictions: tuple[int, ...] = ()  # the layer of each further prediction


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


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The part of the model on one rank: its stages, their parameters and buffers."""

    config: Config  # complete: the vocabulary size is set
    topology: Topology  # all ranks and their groups
    rank: int  # global rank, 0 to world_size - 1
    groups: Mapping[GroupName, GroupSpec]  # the groups of this rank by name
    shape: ModelShape  # sizes of the model
    stages: tuple[StagePlan, ...]  # the pipeline stages of this rank, ascending
    trainable: TrainableSet = TrainableSet()  # parameters that are trained

    @property
    def data_parallel(self) -> DataParallelOptions:
        """Sharding, reductions and gathers of data parallelism, the same for every buffer."""
        return DataParallelOptions.of(self.config.parallel, self.config.precision)

    @property
    def layers(self) -> list[int]:
        """The layers that this rank computes, by index in the model.

        Multi-token prediction is included, a repeated layer as often as it is computed.
        """
        layers: list[int] = []
        for stage in self.stages:
            layers += (*stage.spec.layers, *stage.mtp_predictions)
        return layers

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


def plan_model(
    config: Config, topology: Topology, *, shape: ModelShape, rank: int, stage: str = ""
) -> ModelPlan:
    """Plan the part of the model on one rank.

    Args:
        config: a validated configuration with the vocabulary size set.
        topology: ranks of the run.
        shape: sizes of its model.
        rank: global rank.
        stage: stage of the data, where stages train other parameters; by default the first.

    Raises:
        ConfigError: patterns of trained parameters that match none.
        TopologyError: a layout that does not fit the model.
    """
    groups = topology.group_specs(rank)
    trainable = trained_set(config, shape, stage=stage)
    stages = _plan_stages(
        config, shape, groups=groups, coords=topology.coords(rank), trainable=trainable
    )
    return ModelPlan(
        config=config,
        topology=topology,
        rank=rank,
        groups=groups,
        shape=shape,
        stages=tuple(stages),
        trainable=trainable,
    )


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
        mtp_layers = shape.mtp_layers if spec.has_head else range(0)
        predictions = shape.mtp_predictions if spec.has_head else ()
        yield StagePlan(spec, params, buffers, mtp_layers, predictions)


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

"""`Plan`: everything that is determined before a device is touched, for one rank. Pure: no process
group, no module.

    Config -> plan_run(config, world_size, rank) -> Plan -> build.build_run

`plan_run` accepts any rank of any world size and takes the same time for all of them.
`traffic.sent_bytes` computes the bytes that a step sends from a plan.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product

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
from nanotrain.kernels.fp8.layer import layers_in_bf16
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.lr import LR_DECAYS
from nanotrain.optim.muon import SCALAR_RULES
from nanotrain.optim.rule import UpdateRule
from nanotrain.optim.state import ShardPart, host_fraction, split_shard, state_bytes
from nanotrain.parallel.cp import CORE_ATTENTIONS
from nanotrain.parallel.dp.layout import BufferLayout, plan_layout
from nanotrain.parallel.dp.options import DataParallelOptions, layout_rules
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.schedules import SCHEDULES, build_schedule, forward_only
from nanotrain.parallel.pp.transfers import RankPlan, plan_rank
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.fp8 import RECIPES, WEIGHT_DTYPE
from nanotrain.spec.counts import layer_weights
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.parameters import declare_stage
from nanotrain.spec.params import LocalParam, localize
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec, balanced_lengths, split_layers, stages_of_lengths
from nanotrain.topology.groups import GroupName, GroupSpec
from nanotrain.topology.topology import Topology


@dataclass(frozen=True)
class BufferPlan:
    """One flat buffer of a stage: its dense parameters or its expert parameters, of one dtype."""

    shard: GroupSpec  # ranks that share the buckets
    replicate: GroupSpec  # ranks with the same shard
    layout: BufferLayout  # buckets and the range of every parameter
    is_fp8: bool = False  # weights that are gathered in fp8

    def param_size(self, precision: Precision) -> int:
        """Bytes of an element as it is gathered."""
        return WEIGHT_DTYPE.itemsize if self.is_fp8 else precision.params.itemsize


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

    params: int  # model params, or their shards
    # at most this much for gathered FSDP units where params are sharded; exactly this much with a
    # double buffer
    units: int
    grads: int  # gradient buffers, or gradient shards
    # at most this much for full-size buckets in flight, if gradients are sharded or received
    grad_buckets: int
    # the state of the update rule, and main params that are separate from the model params
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
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

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank per step."""
        return self.sampler.num_microbatches

    @property
    def data_parallel(self) -> DataParallelOptions:
        """What data parallelism shards, reduces and gathers; the run uses the same options for
        every buffer.
        """
        return DataParallelOptions.of(self.config.parallel, self.config.precision)

    def keeps_fp8_weights(self, num_microbatches: int) -> bool:
        """Whether GPUs cast weights once per step for fp8 products, and keep them so until its end."""
        fp8, is_whole = self.config.precision.fp8, not self.data_parallel.strategy.shard_params
        return fp8 is not None and not fp8.param_gather and is_whole and num_microbatches > 1

    def _gathered_numel(self, layout: BufferLayout) -> int:
        if self.data_parallel.num_gather_blocks:
            return sum(layout.gather_blocks(self.data_parallel.num_gather_blocks).numel.values())
        if not self.config.parallel.reshard_after_forward:
            return layout.numel
        numel = layout.numel_of_units
        # multi-token prediction reads embedding and head beside its own unit
        shared = (
            [numel.pop(min(b.units)) for b in layout.buckets if b.is_shared]
            if self.shape.num_mtp_layers
            else []
        )
        # the final norm, beside the embedding
        if not shared and self.shape.is_tied and "head" in numel:
            numel["head"] += numel.get("embedding", 0)
        num_units, sizes = 1 + self.data_parallel.num_prefetched_units, list(numel.values())
        together = max(sum(sizes[first : first + num_units]) for first in range(len(sizes)))
        # if a group of layers is recomputed, one of them is gathered beside the layer whose
        # backward waits
        if (self.config.memory.recompute_num_layers or 1) > 1:
            together = sum(sorted(sizes)[-max(2, num_units) :])
        return sum(shared) + together

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

    @property
    def buffers(self) -> tuple[BufferPlan, ...]:
        """The buffers of all stages of this rank."""
        return tuple(buffer for stage in self.stages for buffer in stage.buffers)

    def samples_of(self, steps: int, *, batch_size: int | None = None) -> int:
        """Samples of the first `steps` steps; `batch_size` is that of step 0 where a resume has
        changed it.
        """
        schedule = self.sampler.schedule
        return (
            samples_of_steps(schedule, steps)
            if schedule
            else steps * (batch_size or self.sampler.global_batch_size)
        )

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """[B, S, H] of this rank's hidden states between two stages, for samples that are not
        split.
        """
        return self.hidden_shape_of(self.config.data.seq_length)

    def hidden_shape_of(self, seq_length: int) -> tuple[int, int, int]:
        """`hidden_shape` where samples are split into sequences of `seq_length` tokens."""
        batch_size = self.config.train.micro_batch_size * (
            self.config.data.seq_length // seq_length
        )
        return batch_size, seq_length // self.num_sequence_shards, self.shape.hidden_size

    @property
    def num_sequence_shards(self) -> int:
        """Ranks over which the hidden states of a sequence are sharded."""
        tp = self.groups["tp"].size if self.config.parallel.sequence_parallel else 1
        return self.groups["cp"].size * tp

    @property
    def resident_bytes(self) -> ResidentBytes:
        """Bytes of params, grads and optimizer state (the table in docs/zero.md)."""
        precision, strategy = Precision.of(self.config.precision), self.data_parallel.strategy
        grad_size, main_grad_size = precision.grads.itemsize, precision.main_grads.itemsize
        params = units = grads = buckets = optimizer = 0
        for buffer in self.buffers:
            layout, num_shards, param_size = (
                buffer.layout,
                buffer.shard.size,
                buffer.param_size(precision),
            )
            params += layout.numel // (num_shards if strategy.shard_params else 1) * param_size
            if strategy.shard_params:
                units += self._gathered_numel(layout) * param_size
            num_updated = layout.numel // num_shards // layout.num_outer_shards
            # what the optimizer writes
            params += num_updated * precision.params.itemsize * buffer.is_fp8
            optimizer += state_bytes(
                self.parts_of(buffer), self.rule, config=self.config.optim, precision=precision
            )
            opened = layout.open_numel * grad_size
            if strategy.shard_grads:
                grads += layout.numel // num_shards * main_grad_size
                buckets += opened
                if precision.main_grads != precision.grads and buffer.replicate.size > 1:
                    buckets += opened // num_shards  # the shard in the reduced dtype
            else:
                grads += layout.numel * grad_size
                grads += (
                    num_updated * main_grad_size if precision.main_grads != precision.grads else 0
                )
            if self.data_parallel.by_all_to_all:
                buckets += opened  # received
        return ResidentBytes(params, units, grads, buckets, optimizer)


def plan_run(config: Config, world_size: int, *, rank: int) -> Plan:
    """Plan one rank's part of a run.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        rank: global rank.

    Raises:
        ConfigError: an unknown schedule, core attention or optimizer, or a batch that does not fit
            the ranks.
        TopologyError: a layout that does not fit the ranks or the model.
    """
    check_names(config)
    topology = Topology.of(config.parallel, world_size, has_experts=config.model.moe is not None)
    groups, shape = topology.group_specs(rank), ModelShape.of(config.model)
    batch_size = global_batch_size(config.train, groups["dp"].size)
    # Saved with the configuration, so that a resume on other ranks reports that an unset size has
    # changed.
    config = replace(config, train=replace(config.train, global_batch_size=batch_size))
    num_readers, is_reader = _readers(config.data, groups, end_ranks=topology.end_ranks)
    sampler = SamplerConfig(
        dp_rank=groups["dp"].index,
        dp_size=groups["dp"].size,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=batch_size,
        schedule=batch_schedule(config),
        lengths=length_schedule(config),
        readers_per_sample=num_readers,
        unread_length=None if is_reader else config.data.seq_length,
    )
    pipeline = PipelineShape.of(config.parallel, sampler.num_microbatches)
    of_pipeline = partial(
        _rank_plan, config.parallel.pipeline_schedule, pipeline, rank=groups["pp"].index
    )
    return Plan(
        config=config,
        topology=topology,
        rank=rank,
        groups=groups,
        shape=shape,
        stages=tuple(_plan_stages(config, shape, groups=groups, coords=topology.coords(rank))),
        sampler=sampler,
        train_schedule=of_pipeline(),
        valid_schedule=of_pipeline(is_training=False),
        num_averaged_ranks=groups["dp_cp"].size if config.parallel.ddp_average_in_collective else 1,
    )


def _readers(
    data: DataConfig, groups: Mapping[GroupName, GroupSpec], *, end_ranks: Sequence[int]
) -> tuple[int, bool]:
    """The number of ranks that read a sample, and whether this rank is one of them.

    The first stage needs tokens, the last one labels, and those between at most the borders of
    documents.
    """
    pp, is_by_all = groups["pp"], data.reset_position_ids or data.reset_attention_mask
    readers = range(pp.size) if is_by_all else end_ranks
    return groups["tp"].size * groups["cp"].size * len(readers), pp.index in readers


def plan_train_schedule(
    config: Config, groups: Mapping[GroupName, GroupSpec], *, num_microbatches: int
) -> RankPlan:
    """The actions and transfers of this rank in a training step of `num_microbatches`."""
    pipeline = PipelineShape.of(config.parallel, num_microbatches)
    return _rank_plan(config.parallel.pipeline_schedule, pipeline, rank=groups["pp"].index)


@lru_cache(maxsize=1024)  # thousands of layouts of a search have few pipelines
def _rank_plan(
    name: str, pipeline: PipelineShape, *, rank: int, is_training: bool = True
) -> RankPlan:
    """The actions and transfers of a rank; in validation the forwards alone."""
    schedule = build_schedule(name, pipeline)
    return plan_rank(schedule if is_training else forward_only(schedule), rank)


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
) -> Iterator[StagePlan]:
    sizes = {axis: groups[axis].size for axis in ("tp", "ep", "etp")}
    declaration = Declaration(
        shape,
        config.precision.params_dtype,
        sizes["tp"],
        config.parallel.sequence_parallel,
        config.optim.apply_wd_to_qk_layernorm,
    )
    specs = stage_specs(config.parallel, shape)
    for spec in (specs[index] for index in config.parallel.stages_of(coords["pp"])):
        declared = declare_stage(declaration, spec)
        params = tuple(localize(param, coords=coords, sizes=sizes) for param in declared)
        buffers = tuple(_plan_buffers(params, config, groups=groups))
        yield StagePlan(spec, params, buffers, shape.mtp_layers if spec.has_head else range(0))


def stage_specs(parallel: ParallelConfig, shape: ModelShape) -> tuple[StageSpec, ...]:
    """The stages of all pipeline ranks; of a hybrid layer pattern those that share its weights
    best.
    """
    if parallel.pipeline_model_parallel_layout is not None:
        return stages_of_lengths(read_pipeline_layout(parallel.pipeline_model_parallel_layout))
    per_rank = parallel.num_virtual_stages_per_pipeline_rank
    num_stages = parallel.pipeline_model_parallel_size * per_rank
    first, last = (
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    )
    if (
        shape.has_half_layers
        and num_stages > 1
        and first is last is None
        and not any(parallel.counted_ends)
    ):
        return stages_of_lengths(balanced_lengths(layer_weights(shape), num_stages))
    return split_layers(
        shape.num_layers,
        num_stages,
        first=first,
        last=last,
        stages_per_rank=per_rank,
        counted_ends=parallel.counted_ends,
    )


def _plan_buffers(
    params: Sequence[LocalParam], config: Config, *, groups: Mapping[GroupName, GroupSpec]
) -> Iterator[BufferPlan]:
    """The buffers of a stage: dense, dense in fp8, experts, experts in fp8; those that have
    parameters.
    """
    parallel, fp8_names = config.parallel, set(fp8_gathered(params, config))
    pairs = (
        (groups["dp_shard"], groups["dp_replicate"]),
        (groups["expert_dp_shard"], groups["expert_dp_replicate"]),
    )
    is_outer_sharded = parallel.outer_dp_sharding_strategy == "optim"
    for is_expert, is_fp8 in product((False, True), (False, True)):
        shard, replicate = pairs[is_expert]
        chosen = [
            param
            for param in params
            if param.spec.is_expert == is_expert and (param.spec.name in fp8_names) == is_fp8
        ]
        num_outer_shards = replicate.size if is_outer_sharded else 1
        sizes = {"num_shards": shard.size, "num_outer_shards": num_outer_shards}
        rules = layout_rules(parallel, **sizes, is_expert=is_expert)
        if chosen:
            yield BufferPlan(shard, replicate, plan_layout(chosen, rules), is_fp8)


def fp8_gathered(params: Sequence[LocalParam], config: Config) -> Iterator[str]:
    """The names of the weights that are gathered in fp8.

    With one scale per block, replicated key and value projections are left out: a rank multiplies
    only with the rows of its heads, and its blocks begin at the first of these rows.
    """
    fp8 = config.precision.fp8
    if fp8 is None or not fp8.param_gather:
        return
    is_per_tensor = RECIPES[fp8.recipe].is_per_tensor
    for spec in (param.spec for param in with_fp8_products(params, config)):
        has_rows_of_ranks = "tp" in spec.grad_sum_axes and not is_per_tensor
        if spec.unit.startswith("layers.") and not has_rows_of_ranks:
            yield spec.name


def with_fp8_products(params: Sequence[LocalParam], config: Config) -> list[LocalParam]:
    """The weights of fp8 products."""
    in_bf16 = {
        f"layers.{layer}" for layer in layers_in_bf16(config.precision.fp8, config.model.num_layers)
    }
    has_fp8 = config.precision.fp8 is not None
    return [
        param
        for param in params
        if has_fp8 and param.spec.in_fp8 and param.spec.unit not in in_bf16
    ]

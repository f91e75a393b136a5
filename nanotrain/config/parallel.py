"""The sections of the parallel layout and of activation memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

from nanotrain.config.option import above, at_least, option
from nanotrain.errors import TopologyError
from nanotrain.quantities import count_of, round_up

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
DispatchDType = Literal["bf16", "fp8", "mxfp8"]
OuterShardingStrategy = Literal["no_shard", "optim"]
FlexBackend = Literal["deepep", "hybridep"]
RecomputeGranularity = Literal["full", "selective"]
RecomputeModule = Literal[
    "core_attn", "mlp", "moe", "layernorm", "mla_up_proj", "moe_act", "pointwise"
]
RecomputeMethod = Literal["uniform", "block"]

# schedules that place stages in a V: rank r has the r-th stage from either end
V_SCHEDULES = {"zb-v", "dualpipev"}
# schedules that compute weight gradients after the backward of the input
DEFERRING_SCHEDULES = {"zb-h1", *V_SCHEDULES}


def all_to_all_ranks(comm_type: str | None, cp: int, *, sizes: Sequence[int] = ()) -> int:
    """Context-parallel ranks that exchange heads for tokens.

    Args:
        comm_type: value of --cp-comm-type; None without context parallelism.
        cp: context-parallel ranks.
        sizes: value of --hierarchical-context-parallel-sizes.

    >>> all_to_all_ranks("a2a", 8), all_to_all_ranks("p2p", 8), all_to_all_ranks("a2a+p2p", 8)
    (8, 1, 2)
    """
    if comm_type == "a2a":
        return cp
    if comm_type == "a2a+p2p":
        return sizes[0] if sizes else gcd(cp, 2)
    return 1


@dataclass(frozen=True)
class ParallelConfig:
    """The parallel layout: sizes of the groups, sharding and overlap."""

    tensor_model_parallel_size: int = option(1, check=at_least(1))
    """tensor-parallel ranks"""

    pipeline_model_parallel_size: int = option(1, check=at_least(1))
    """pipeline-parallel ranks"""

    context_parallel_size: int = option(1, check=at_least(1))
    """context-parallel ranks, which split each sequence"""

    expert_model_parallel_size: int = option(1, check=at_least(1))
    """expert-parallel ranks, a subset of dp x cp x tp"""

    expert_tensor_parallel_size: int | None = option(None, check=at_least(1))
    """tensor-parallel ranks of the experts; unset: tensor_model_parallel_size"""

    moe_hierarchical_dispatch: int | None = option(None, check=at_least(1))
    """send a token once to every so many consecutive ranks of ep, such as those of a node, and copy
    it to the ranks of its experts there; 1: once to every rank; unset: once to every expert
    """

    moe_dispatch_fwd_dtype: DispatchDType = option("bf16")
    """send tokens to their experts in blocks of fp8_recipe, with scales: fp8, or mxfp8 for the
    recipe of this name; bf16: in params_dtype, as gradients are sent
    """

    moe_flex_dispatcher_backend: FlexBackend | None = option(None)
    """send a token once to every rank with its experts, by the kernels of a library that is
    installed: deepep; hybridep: by all-to-all, with a warning; unset: by all-to-all
    """

    moe_expert_rank_capacity_factor: float | None = option(None, check=at_least(1))
    """send the same number of rows to every expert-parallel rank, this factor times an even share
    of the tokens, so that the host need not wait for token counts; a step that has more tokens for
    a rank is taken again with exact numbers; unset: exact numbers
    """

    overlap_moe_expert_parallel_comm: bool | None = option(None)
    """run the forward of a microbatch in turns with the backward of another, so that the products
    of one hide dispatch and combine of the other; unset: on GPUs where the plan is faster with it
    and fits, never on CPUs
    """

    num_distributed_optimizer_instances: int = option(1, check=at_least(1))
    """hybrid sharding: number of groups that each hold one full set of optimizer shards"""

    sequence_parallel: bool = option(False)
    """shard activations along the sequence between tensor-parallel layers"""

    tp_comm_overlap: bool = option(False)
    """tensor-parallel layers multiply tokens of one rank while those of another are sent: in the
    forward and for the gradients of row-parallel outputs; by symmetric memory inside a node, by
    all-to-alls elsewhere; needs sequence_parallel; not in the head and layers in fp8
    """

    num_virtual_stages_per_pipeline_rank: int = option(1, check=at_least(1))
    """virtual stages per pipeline rank"""

    pipeline_schedule: str = option("1f1b")
    """name of the pipeline schedule, such as gpipe, 1f1b, interleaved, zb-h1, zb-v or dualpipev"""

    decoder_first_pipeline_num_layers: int | None = option(None, check=at_least(1))
    """layers of the first pipeline rank, over all its virtual stages; unset: an even split"""

    decoder_last_pipeline_num_layers: int | None = option(None, check=at_least(0))
    """layers of the last pipeline rank, over all its virtual stages; 0: it has the head and
    multi-token prediction only; unset: an even split"""

    account_for_embedding_in_pipeline_split: bool = option(False)
    """count the embedding as a layer where layers are split evenly over stages: the first one has a
    layer less
    """

    account_for_loss_in_pipeline_split: bool = option(False)
    """count the head and the loss as a layer where layers are split evenly over stages: the last
    one has a layer less
    """

    pipeline_model_parallel_layout: str | None = option(None)
    """layers of every pipeline stage, as Et*3|(tt|)*2L: E embedding, t layer, L loss, | next stage;
    unset: an even split
    """

    cp_comm_type: str = option("p2p")
    """attention over a split sequence, such as p2p (ring attention), a2a (Ulysses), a2a+p2p (both,
    on two levels) or allgather
    """

    hierarchical_context_parallel_sizes: list[int] = option([], check=at_least(1))
    """cp_comm_type a2a+p2p: ranks of an all-to-all, and of a ring; their product is
    context_parallel_size; unset: 2 and the rest
    """

    use_tp_pp_dp_mapping: bool = option(False)
    """rank order tp-cp-ep-pp-dp instead of tp-cp-ep-dp-pp"""

    data_parallel_sharding_strategy: ShardingStrategy = option("no_shard")
    """what is sharded: no_shard, optim (ZeRO-1), optim_grads (ZeRO-2) or optim_grads_params
    (ZeRO-3)
    """

    outer_dp_sharding_strategy: OuterShardingStrategy = option("no_shard")
    """what is sharded across optimizer instances: no_shard, or optim (main params and optimizer
    state)
    """

    ddp_bucket_size: int | None = option(None, check=at_least(1))
    """elements at which a gradient bucket is closed; unset: max(40000000, 1000000 * shard ranks)"""

    ddp_pad_buckets_for_high_nccl_busbw: bool = option(False)
    """pad buckets to a multiple of 65536 elements"""

    reduce_scatter_with_fp32_accumulation: bool = option(False)
    """reduce-scatter low-precision gradients as an all-to-all and a local fp32 sum, as fp32
    gradients always are
    """

    nccl_ub: bool = option(False)
    """allocate flat buffers of parameters and gradients in NCCL's memory, and register them with
    its communicators; on GPUs
    """

    ddp_average_in_collective: bool = option(False)
    """average gradients inside the collective instead of before it"""

    force_all_reduce: bool = option(False)
    """optim: all-reduce gradients instead of reduce-scatter, so that every rank has all of them for
    inspection
    """

    reshard_after_forward: bool = option(True)
    """optim_grads_params: free a unit after its forward; off: keep it gathered until its backward
    """

    fsdp_prefetch_depth: int = option(1, check=at_least(1))
    """optim_grads_params with overlap_param_gather: units gathered ahead"""

    fsdp_double_buffer: bool = option(False)
    """optim_grads_params: gather units in turn into fixed memory, of 1 + fsdp_prefetch_depth units
    """

    gradient_accumulation_fusion: bool | None = option(None)
    """matrix products add weight gradients to the gradient buffer; unset: on GPUs"""

    overlap_grad_reduce: bool = option(False)
    """overlap the gradient reduction with the backward pass"""

    overlap_param_gather: bool = option(False)
    """overlap the parameter all-gather with the next forward pass; optim_grads_params: with the
    unit before
    """

    auto_layout: bool = option(False)
    """before training search the fastest layout of the ranks that fits into their memory; settings
    of the command line stay as they are, and so does the layout of a run that resumes on as many
    ranks
    """

    distributed_timeout_minutes: float = option(10.0, check=above(0, at_most=525_600))
    """timeout of collectives"""

    distributed_timeout_seconds_after_init: float | None = option(
        None, check=above(0, at_most=31_536_000)
    )
    """timeout of collectives after the first step; unset: distributed_timeout_minutes"""

    @property
    def all_to_all_ranks(self) -> int:
        """Context-parallel ranks that exchange heads for tokens; 1 where none do."""
        sizes = self.hierarchical_context_parallel_sizes
        return all_to_all_ranks(self.cp_comm_type, self.context_parallel_size, sizes=sizes)

    @property
    def counted_ends(self) -> tuple[int, int]:
        """Layers that embedding and head count as where layers are split evenly over stages."""
        embedding = int(self.account_for_embedding_in_pipeline_split)
        head = int(self.account_for_loss_in_pipeline_split)
        return embedding, head

    def stages_of(self, pp_rank: int) -> list[int]:
        """The stages on a pipeline rank, ascending: every pp-th, in a V back and forth.

        >>> parallel = ParallelConfig(1, 4, num_virtual_stages_per_pipeline_rank=2)
        >>> parallel.stages_of(0), parallel.stages_of(3)
        ([0, 4], [3, 7])
        """
        pp = self.pipeline_model_parallel_size
        is_v = self.pipeline_schedule in V_SCHEDULES
        stages = []
        for chunk in range(self.num_virtual_stages_per_pipeline_rank):
            is_backwards = is_v and chunk % 2 == 1
            position = pp - 1 - pp_rank if is_backwards else pp_rank
            stages.append(chunk * pp + position)
        return stages

    @property
    def end_ranks(self) -> tuple[int, ...]:
        """The pipeline ranks of the first and of the last stage; one rank if it has both."""
        pp = self.pipeline_model_parallel_size
        last_stage = pp * self.num_virtual_stages_per_pipeline_rank - 1
        ends = {0, last_stage}
        return tuple(rank for rank in range(pp) if ends.intersection(self.stages_of(rank)))

    @property
    def uses_deep_ep(self) -> bool:
        """Whether DeepEP's kernels send tokens to experts on other ranks."""
        is_named = self.moe_flex_dispatcher_backend == "deepep"
        return is_named and self.expert_model_parallel_size > 1

    @property
    def may_overlap_experts(self) -> bool:
        """Whether the plan decides to overlap tokens on their way."""
        is_unset = self.overlap_moe_expert_parallel_comm is None
        return is_unset and self.expert_model_parallel_size > 1

    def leaves_to_planner(self, device_type: str) -> bool:
        """Whether the planner chooses settings before the plan of a run.

        Args:
            device_type: `cuda` or `cpu`.

        >>> ParallelConfig(auto_layout=True).leaves_to_planner("cpu")
        True
        >>> experts = ParallelConfig(expert_model_parallel_size=2)
        >>> experts.leaves_to_planner("cuda"), experts.leaves_to_planner("cpu")
        (True, False)
        """
        if self.auto_layout:
            return True
        return self.may_overlap_experts and device_type == "cuda"

    @property
    def dispatch_ranks_per_node(self) -> int | None:
        """Consecutive ranks of ep that a token is sent to once; None: once to every expert."""
        return 1 if self.uses_deep_ep else self.moe_hierarchical_dispatch

    def data_parallel_size(self, world_size: int) -> int:
        """Data-parallel ranks: world size / (tp x cp x pp).

        Raises:
            TopologyError: where the ranks do not divide.

        >>> ParallelConfig(tensor_model_parallel_size=2).data_parallel_size(8)
        4
        """
        tp = self.tensor_model_parallel_size
        cp = self.context_parallel_size
        pp = self.pipeline_model_parallel_size
        unit = tp * cp * pp
        if world_size % unit == 0:
            return world_size // unit
        ranks = count_of(round_up(world_size, unit), "rank")
        command = f" (nanotrain train --nproc-per-node {unit} ...)" if world_size == 1 else ""
        raise TopologyError(
            f"{count_of(world_size, 'rank')} cannot form tp={tp} x cp={cp} x pp={pp}",
            why=f"tp*cp*pp = {unit} must divide the world size",
            fix=f"run on {ranks}{command} or lower one of the three sizes",
        )


@dataclass(frozen=True)
class MemoryConfig:
    """Activations: what is recomputed in the backward pass, or offloaded to host memory, instead of
    kept.
    """

    recompute_granularity: RecomputeGranularity | None = option(None)
    """recompute activations: full (whole layers) or selective (the modules of recompute_modules);
    unset: keep all
    """

    recompute_method: RecomputeMethod | None = option(None)
    """full: uniform (groups of recompute_num_layers layers) or block (the first
    recompute_num_layers layers of each stage); unset: uniform
    """

    recompute_num_layers: int | None = option(None, check=at_least(1))
    """full: layers of a group (uniform) or recomputed layers of each stage (block); unset: 1"""

    recompute_modules: list[RecomputeModule] = option([])
    """selective: core_attn, mlp, moe, layernorm, mla_up_proj, moe_act, or pointwise (all operators
    between products and attention); empty: core_attn
    """

    cpu_offloading: bool = option(False)
    """keep what the first layers save for the backward in host memory"""

    cpu_offloading_num_layers: int = option(0, check=at_least(0))
    """cpu_offloading: layers of each stage, from the first"""

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The modules of selective recomputation; none with another granularity.

        >>> MemoryConfig(recompute_granularity="selective").recomputed_modules
        ('core_attn',)
        """
        if self.recompute_granularity != "selective":
            return ()
        return tuple(self.recompute_modules) or ("core_attn",)

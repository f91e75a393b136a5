"""Rules of the parallel layout for pipeline stages: their layers and schedules."""

from nanotrain.config.notation import count_mtp_layers, read_pipeline_layout
from nanotrain.config.parallel import V_SCHEDULES
from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.config.schema import typed
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of


def num_stages(c: Settings) -> int:
    """Pipeline stages, virtual ones included.

    Settings of stages that have no effect on one rank are an error of their own (unused.py).
    """
    return 1 if c.pp == 1 else c.pp * c.parallel.num_virtual_stages_per_pipeline_rank


def stages_text(c: Settings) -> str:
    """The stages as a product: pp=2 x 4 = 8."""
    per_rank = num_stages(c) // c.pp
    return f"pp={c.pp} x {per_rank} = {num_stages(c)}" if per_rank > 1 else f"pp={c.pp}"


def layout_lengths(c: Settings) -> tuple[int, ...] | None:
    """Layers of every stage in `pipeline_model_parallel_layout`; None without one."""
    layout = c.parallel.pipeline_model_parallel_layout
    return read_pipeline_layout(layout) if layout else None


def end_lengths(c: Settings) -> list[int]:
    """Layers of the first and of the last of several pipeline ranks, where they are set."""
    if c.pp == 1:
        return []
    ends = (
        c.parallel.decoder_first_pipeline_num_layers,
        c.parallel.decoder_last_pipeline_num_layers,
    )
    return [length for length in ends if length is not None]


def num_counted_layers(c: Settings) -> int:
    """Layers that are split evenly over stages, and layers that embedding and head count as."""
    counted = c.model.num_layers
    if c.pp > 1:
        counted += sum(c.config.parallel.counted_ends)
    return counted


def stages_between_ends(c: Settings) -> int:
    """Stages whose number of layers is not set."""
    return (c.pp - len(end_lengths(c))) * (num_stages(c) // c.pp)


def longest_stage(c: Settings) -> int:
    """Layers of the longest pipeline stage, or virtual stage."""
    lengths = layout_lengths(c)
    if lengths is not None:
        return max(lengths)
    stages_per_rank = num_stages(c) // c.pp
    longest = 1
    for rank_length in end_lengths(c):
        longest = max(longest, -(-rank_length // stages_per_rank))
    between = stages_between_ends(c)
    if between > 0:
        layers_between = c.model.num_layers - sum(end_lengths(c))
        longest = max(longest, -(-layers_between // between))
    return longest


def ranks_without_layers(c: Settings) -> list[int]:
    """Pipeline ranks without first and last stage to which a layout gives no layers."""
    lengths = layout_lengths(c)
    if lengths is None or len(lengths) != num_stages(c):
        return []
    parallel = c.config.parallel
    ranks = []
    for rank in range(c.pp):
        has_layers = any(lengths[stage] > 0 for stage in parallel.stages_of(rank))
        if rank not in parallel.end_ranks and not has_layers:
            ranks.append(rank)
    return ranks


def check_layers_per_stage(c: Settings) -> Errors:
    """An even split gives every stage a layer."""
    has_layout = c.parallel.pipeline_model_parallel_layout is not None
    if not has_layout and num_counted_layers(c) < num_stages(c):
        yield ConfigError(
            f"{count_of(c.model.num_layers, 'layer')} cannot fill {stages_text(c)} pipeline stages",
            why="every stage has at least one layer",
            fix=f"set --num-layers {num_stages(c)} or a smaller --pipeline-model-parallel-size",
        )


def check_stage_layout(c: Settings) -> Errors:
    """The stages of `pipeline_model_parallel_layout` match the ranks and layers of the model."""
    lengths = layout_lengths(c)
    if lengths is None:
        return
    if sum(lengths) != c.model.num_layers:
        yield ConfigError(
            f"pipeline_model_parallel_layout has {sum(lengths)} of "
            f"{count_of(c.model.num_layers, 'layer')}",
            why="every t of the layout is a layer",
            fix="change --pipeline-model-parallel-layout or --num-layers",
        )
    if len(lengths) != num_stages(c):
        yield ConfigError(
            f"pipeline_model_parallel_layout has {count_of(len(lengths), 'stage')} for "
            f"{stages_text(c)}",
            why="stages are separated by |",
            fix="change --pipeline-model-parallel-layout, --pipeline-model-parallel-size or "
            "--num-virtual-stages-per-pipeline-rank",
        )
    if ranks := ranks_without_layers(c):
        yield ConfigError(
            f"pipeline_model_parallel_layout leaves pipeline rank {ranks[0]} without layers",
            why="m, the layers of multi-token prediction, run on the stage of L",
            fix="write m right before L and give that stage a t, as |t|t|mL instead of |tt|m|L",
        )


def check_stage_layout_mtp(c: Settings) -> Errors:
    """The number of MTP layers in `pipeline_model_parallel_layout` is `mtp_num_layers`."""
    layout = c.parallel.pipeline_model_parallel_layout
    if not layout:
        return
    num_layers = count_mtp_layers(layout)
    if num_layers is not None and num_layers != (c.mtp.num_layers or 0):
        yield ConfigError(
            f"pipeline_model_parallel_layout has {count_of(num_layers, 'layer')} of multi-token "
            "prediction",
            why=f"mtp_num_layers is {typed(c.mtp.num_layers)}",
            fix=f"set --mtp-num-layers {num_layers} or leave m out of "
            "--pipeline-model-parallel-layout",
        )


def check_counted_ends(c: Settings) -> Errors:
    """Check embedding or loss that count as a layer of an even split."""
    counted = num_counted_layers(c)
    if counted <= c.model.num_layers:
        return
    if counted % num_stages(c) != 0:
        yield ConfigError(
            f"{counted} layers cannot be split evenly over {stages_text(c)} pipeline stages",
            why=f"num_layers is {c.model.num_layers}, and embedding or loss count as a layer",
            fix="change --num-layers or the stages, or set --pipeline-model-parallel-layout "
            "instead",
        )
    if end_lengths(c) or c.parallel.pipeline_model_parallel_layout is not None:
        yield ConfigError(
            "account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split beside "
            "lengths of stages",
            why="they change the even split, which is not used where lengths are set",
            fix="leave one of them out",
        )


def check_end_lengths(c: Settings) -> Errors:
    """Check layers of the first and last rank, with virtual stages and in V schedules."""
    parallel = c.parallel
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    if any(length % virtual != 0 for length in end_lengths(c)):
        yield ConfigError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers with "
            f"{virtual} virtual stages per pipeline rank",
            why="they are the layers of the first and last rank, which its virtual stages share "
            "evenly",
            fix="set --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers "
            f"to multiples of {virtual}",
        )
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    has_ends = first is not None or last is not None
    if has_ends and parallel.pipeline_schedule in V_SCHEDULES:
        yield ConfigError(
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers with "
            f"--pipeline-schedule {parallel.pipeline_schedule}",
            why="its first and last stage are on one rank, so lengths of the first and last rank "
            "do not set theirs",
            fix="set --pipeline-model-parallel-layout, or --account-for-loss-in-pipeline-split",
        )


def check_expert_overlap(c: Settings) -> Errors:
    """Check dispatch and combine that overlap the products of another microbatch."""
    if not c.parallel.overlap_moe_expert_parallel_comm:
        return
    schedule = c.parallel.pipeline_schedule
    if schedule not in ("1f1b", "interleaved", "dualpipev"):
        yield ConfigError(
            f"overlap_moe_expert_parallel_comm with pipeline_schedule {schedule}",
            why="it has no full backward of another microbatch beside every forward",
            fix="set --pipeline-schedule interleaved or dualpipev, or leave "
            "--overlap-moe-expert-parallel-comm out",
        )
    if c.parallel.data_parallel_sharding_strategy == "optim_grads_params":
        yield ConfigError(
            "overlap_moe_expert_parallel_comm with data_parallel_sharding_strategy "
            "optim_grads_params",
            why="the forward and the backward that run in turns would gather and free the "
            "parameters of each other",
            fix="set --data-parallel-sharding-strategy optim or optim_grads, or leave "
            "--overlap-moe-expert-parallel-comm out",
        )
    if c.memory.cpu_offloading:
        yield ConfigError(
            "overlap_moe_expert_parallel_comm with cpu_offloading",
            why="activations come back from the host in the order of one backward, without a "
            "forward between",
            fix="leave out --cpu-offloading or --overlap-moe-expert-parallel-comm",
        )


def check_layers_between_ends(c: Settings) -> Errors:
    """Check the layers that the first and last rank leave for the stages between."""
    ends = end_lengths(c)
    if not ends:
        return
    stages = stages_between_ends(c)
    layers = c.model.num_layers - sum(ends)
    what = f"{count_of(layers, 'layer', verb='is')} left for {stages} of {stages_text(c)} pipeline"
    flags = "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
    why = (
        f"of {c.model.num_layers} layers the first and last rank have "
        f"{' + '.join(map(str, ends))}, and every other stage has at least one"
    )
    if stages > 0 and layers < stages:
        yield ConfigError(
            f"{what} stages",
            why=why,
            fix=f"change {flags} so that they leave at least {stages}",
        )
    if stages == 0 and layers != 0:
        yield ConfigError(f"{what} stages", why=why, fix=f"change {flags} so that they leave none")

"""The layers of a small model, and their pipeline stages."""

from collections.abc import Sequence
from dataclasses import replace

from nanotrain.config.notation import read_pipeline_layout, write_pipeline_layout
from nanotrain.config.parallel import ParallelConfig


def shrink_layers(
    num_layers: int, parallel: ParallelConfig, *, per_stage: int = 2
) -> tuple[int, ParallelConfig]:
    """The number of layers of a small model, and the layout with its stages.

    A stage keeps `per_stage` layers; one stage has one more if the stages were uneven. A stage
    whose length is a setting keeps at most 3 layers.

    >>> shrink_layers(80, ParallelConfig(pipeline_model_parallel_size=4))[0]
    8
    >>> parallel = ParallelConfig(
    ...     pipeline_model_parallel_size=4, decoder_first_pipeline_num_layers=7
    ... )
    >>> num_layers, small = shrink_layers(61, parallel)
    >>> num_layers, small.decoder_first_pipeline_num_layers
    (9, 3)
    """
    if parallel.pipeline_model_parallel_layout is not None:
        lengths = _shrink_stages(read_pipeline_layout(parallel.pipeline_model_parallel_layout))
        layout = write_pipeline_layout(lengths)
        return sum(lengths), replace(parallel, pipeline_model_parallel_layout=layout)
    ends = (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
    # the virtual stages of a rank share its layers evenly
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    first, last = (None if size is None else virtual * min(size // virtual, 3) for size in ends)
    num_set_ranks = len([size for size in ends if size is not None])
    num_between = (parallel.pipeline_model_parallel_size - num_set_ranks) * virtual
    num_other_layers = num_layers - sum(size or 0 for size in ends)
    if counted := sum(parallel.counted_ends):
        middle = 2 * num_between - counted  # even again with the ends
    else:
        middle = _layers_between(num_other_layers, num_between, per_stage=per_stage)
    parallel = replace(
        parallel, decoder_first_pipeline_num_layers=first, decoder_last_pipeline_num_layers=last
    )
    return middle + (first or 0) + (last or 0), parallel


def _shrink_stages(lengths: Sequence[int]) -> list[int]:
    """Shrink stages to at most 3 layers each; inner stages keep at least one.

    Inner stages have none where Megatron-LM would run multi-token prediction.
    """
    small = []
    for index, length in enumerate(lengths):
        is_end = index in (0, len(lengths) - 1)
        least = 0 if is_end else 1
        small.append(min(length, 3) or least)
    return small


def _layers_between(left: int, num_stages: int, *, per_stage: int) -> int:
    """Layers of the small model in stages without a set length.

    In the full model these stages have `left` layers.
    """
    if not num_stages:
        return 0
    is_uneven = left % num_stages > 0
    return min(left, per_stage * num_stages + (1 if is_uneven else 0))

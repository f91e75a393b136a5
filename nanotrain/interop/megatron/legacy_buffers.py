"""State of the distributed optimizer in files of ranks, `distrib_optim.pt`.

A file has one flat tensor per model chunk, and one for its experts with expert parallelism, of the
main parameters and of each moment. Parameters lie there from the last to the first, each at a
multiple of 64 elements from the beginning of its bucket; buckets follow one another without
padding.

Source: Megatron-LM, `param_and_grad_buffer.py` and `distrib_optimizer.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanotrain.interop.megatron.buckets import ALIGNMENT, MAIN
from nanotrain.interop.megatron.legacy_optimizer import Parameter, RankState, add_tensor
from nanotrain.interop.megatron.optimizer_state import MAIN_KEYS, MOMENTS
from nanotrain.quantities import round_up
from nanotrain.untrusted import shown, whole_number

BEGINNINGS = {MAIN: MAIN_KEYS[0], **MOMENTS}
WORD, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class Buckets:
    """When a bucket ends."""

    size: int | None  # elements after which it does; None: at the end of the buffer
    has_shared_embedding: bool  # the embedding is on two stages, and has a bucket of its own

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], *, pp: int, is_tied: bool) -> "Buckets":
        """The buckets that the stored arguments describe.

        Raises:
            ValueError: their number is set in place of their size, or there are no numbers.
        """
        size = None
        if arguments.get("overlap_grad_reduce"):
            if arguments.get("ddp_num_buckets"):
                raise ValueError("ddp_num_buckets is set, and buckets of a known size are read")
            num_ranks = 1  # gradients are reduced over data and context parallelism
            for name in ("data_parallel_size", "context_parallel_size"):
                num_ranks *= whole_number(arguments.get(name) or 1, name)
            default = max(40_000_000, 1_000_000 * num_ranks)
            size = whole_number(arguments.get("ddp_bucket_size") or default, "ddp_bucket_size")
        if arguments.get("overlap_param_gather_with_optimizer_step"):
            size = None
        has_mtp = bool(arguments.get("mtp_num_layers"))
        return cls(size, has_shared_embedding=pp > 1 and (is_tied or has_mtp))


def add_buffers(content: Any, state: RankState, *, buckets: Buckets, stage: int) -> None:
    """Add main parameters and moments to the tensors of a rank.

    Args:
        content: content of its file.
        state: its tensors.
        buckets: when a bucket ends.
        stage: its pipeline stage; on others than the first, only an embedding has a bucket.

    Raises:
        ValueError: the buffers have other parameters.
    """
    chained = content if isinstance(content, list) else [content]
    if len(chained) > 2:
        raise ValueError(f"there are {len(chained)} distributed optimizers")
    for number, optimizer in enumerate(chained):
        if optimizer is None:
            continue  # another rank has its file
        members = [member for member in state.parameters if member.is_expert == bool(number)]
        for chunk in range(len(state.chunks)):
            own = [member for member in members if member.chunk == chunk]
            size = buckets.size if stage == 0 and chunk == 0 else None
            shared = None
            if buckets.has_shared_embedding:
                shared = WORD if WORD in state.chunks[chunk] else HEAD
            buffers = buffers_of(optimizer, chunk)
            add_buffer(own, buffers, bucket_size=size, shared=shared)


def buffers_of(optimizer: Any, chunk: int) -> Mapping[str, Tensor]:
    """The flat tensors of a model chunk, by kind of state.

    Raises:
        ValueError: there are none, or of several data types.
    """
    by_dtype = optimizer.get(chunk) if isinstance(optimizer, dict) else None
    if not isinstance(by_dtype, dict) or len(by_dtype) != 1:
        raise ValueError(f"the distributed optimizer has not one buffer of model chunk {chunk}")
    buffers = next(iter(by_dtype.values()))
    for kind in BEGINNINGS:
        if not isinstance(buffers, dict) or not isinstance(buffers.get(kind), Tensor):
            raise ValueError(f"a buffer of the distributed optimizer has no {kind}")
        if buffers[kind].dim() != 1 or buffers[kind].shape != buffers[MAIN].shape:
            raise ValueError(f"{kind} of the distributed optimizer is of another shape than {MAIN}")
    return buffers


def add_buffer(
    members: Sequence[Parameter],
    buffers: Mapping[str, Tensor],
    *,
    bucket_size: int | None,
    shared: str | None,
) -> None:
    """Add the state of the parameters of a buffer."""
    end = 0
    for member, start in positions(members, bucket_size=bucket_size, shared=shared):
        weight = member.tensors[""]
        end = start + weight.numel()
        for kind, beginning in BEGINNINGS.items():
            values = buffers[kind][start:end]
            if values.numel() != weight.numel():
                raise ValueError(f"{shown(member.name)} lies behind the end of a buffer")
            add_tensor(member, values.view(weight.shape), beginning=beginning)
    if end != buffers[MAIN].numel():
        raise ValueError(
            f"the parameters of a buffer of the distributed optimizer end at element {end:,}, it "
            f"has {buffers[MAIN].numel():,}"
        )


def positions(
    members: Sequence[Parameter], *, bucket_size: int | None, shared: str | None
) -> Iterator[tuple[Parameter, int]]:
    """The parameters of a buffer and their first elements.

    Args:
        members: the parameters in the order of their modules.
        bucket_size: elements after which a bucket ends.
        shared: name of an embedding that has a bucket of its own.
    """
    bucket = 0
    cursor = 0  # from the beginning of the bucket
    for member in reversed(members):
        is_alone = member.name == shared
        if is_alone and cursor:
            bucket += round_up(cursor, ALIGNMENT)  # the bucket before has the padding of this one
            cursor = 0
        start = round_up(cursor, ALIGNMENT)
        yield member, bucket + start
        cursor = start + member.tensors[""].numel()
        if is_alone or (bucket_size is not None and cursor >= bucket_size):
            bucket += cursor
            cursor = 0

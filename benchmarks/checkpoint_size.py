"""Sizes of a checkpoint's metadata, from plans: the manifest, and what the ranks send to write and
to read it.

    python benchmarks/checkpoint_size.py                    # the table of docs/checkpoint.md
    python benchmarks/checkpoint_size.py --world-size 4096 +config=mixtral8x7b --expert-model-parallel-size 8

    save   each rank -> its report -> the tree of control -> rank 0 -> manifest.json; the verdict back along the tree
    load   rank 0 <- manifest.json; the manifest along the tree -> each rank

To plan all ranks of a large world would take minutes, so the chunks of a sample are counted and
multiplied.
"""

import argparse
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from nanotrain.checkpoint.manifest import (
    ChunkEntry,
    Manifest,
    TensorEntry,
    plain_json,
    tensor_from_dict,
    tensor_to_dict,
    to_json,
)
from nanotrain.checkpoint.plan import split_box
from nanotrain.checkpoint.write import shard_name
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.errors import NanotrainError, report
from nanotrain.optim.state import Replica, host_fraction, ranges_to_save, split_shard
from nanotrain.optim.stored import num_scales
from nanotrain.parallel.dp.layout import clip_ranges
from nanotrain.plan.buffers import BufferPlan
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.precision.dtypes import DTYPE_NAMES, TORCH_DTYPES, Precision
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.params import ParamSpec
from nanotrain.spec.shape import ModelShape
from nanotrain.topology.topology import control_levels

HEADER = (
    "ranks | chunks | manifest.json | sent per rank at a save | received by rank 0 | by any other, at most | "
    "received per rank at a load"
)
RUNS = {
    "llama70b": "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4",
    "deepseek_v3": "",
}


@dataclass(frozen=True)
class MetadataSize:
    """Sizes of the metadata of one checkpoint; estimates where ranks were sampled."""

    num_chunks: int
    manifest_bytes: int  # size of manifest.json, without objects and configuration (some kB)
    report_bytes: int  # bytes that a rank sends at a save, on average
    # bytes of reports that rank 0 receives, and at most any other rank
    received_at_save: tuple[int, int]
    received_at_load: int  # bytes of the manifest that each rank but the first receives


def metadata_size(config: Config, world_size: int, *, num_sampled: int = 8) -> MetadataSize:
    """The metadata of a checkpoint of a run.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: number of ranks of the run.
        num_sampled: number of ranks to plan, the first and the last among them; with all ranks the
            counts are exact.
    """
    parallel = config.parallel
    dp_size, pp_size = (
        parallel.data_parallel_size(world_size),
        parallel.pipeline_model_parallel_size,
    )
    # Few microbatches: what a rank saves does not depend on them, and the transfers of many take
    # seconds to plan.
    batch = config.train.micro_batch_size * dp_size * pp_size
    few = replace(config, train=replace(config.train, global_batch_size=batch))
    num_sampled = min(num_sampled, world_size)
    ranks = [index * (world_size - 1) // max(num_sampled - 1, 1) for index in range(num_sampled)]
    shards = [planned_shard(plan_run(few, world_size, rank=rank)) for rank in ranks]
    sample = _merge(shards)
    declared = _without_chunks(sample, declare_model(ModelShape.of(config.model)))

    def of_all(size: Callable[[Manifest], int]) -> int:
        """Chunks and files grow with the ranks, names of tensors do not."""
        names = replace(
            sample, files={}, tensors={n: replace(e, chunks=()) for n, e in sample.tensors.items()}
        )
        return (size(sample) - size(names)) * world_size // num_sampled + size(declared)

    report = sum(len(pickle.dumps(shard)) for shard in shards) // num_sampled
    # each rank of the last level hands on the reports of the ranks up to the next one of it
    top = control_levels(0, world_size)[-1] if world_size > 1 else (0, 1)
    return MetadataSize(
        num_chunks=of_all(
            lambda manifest: sum(len(entry.chunks) for entry in manifest.tensors.values())
        ),
        manifest_bytes=of_all(lambda manifest: len(to_json(manifest))),
        report_bytes=report,
        received_at_save=(report * (world_size - 1), report * (top[1] - 1)),
        received_at_load=of_all(_sent_bytes) if world_size > 1 else 0,
    )


def _merge(shards: Sequence[Manifest]) -> Manifest:
    """The manifest of some ranks, which do not cover the tensors."""
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in shard.tensors.items():
            before = tensors[name].chunks if name in tensors else ()
            tensors[name] = replace(entry, chunks=before + entry.chunks)
    files = {name: nbytes for shard in shards for name, nbytes in shard.files.items()}
    return Manifest(0, files, tensors, objects={}, config={}, topology={})


def _without_chunks(sample: Manifest, specs: Sequence[ParamSpec]) -> Manifest:
    """The tensors of the whole model, of the kinds and dtypes of a sample."""
    kinds = {name.rpartition("/")[0]: entry.dtype for name, entry in sample.tensors.items()}
    entries = {
        f"{kind}/{spec.name}": TensorEntry(spec.shape, dtype, ())
        for kind, dtype in kinds.items()
        for spec in specs
    }
    return replace(sample, files={}, tensors=entries)


def _sent_bytes(manifest: Manifest) -> int:
    """Bytes of a manifest as it is sent after it was read, compressed."""
    rows = {
        name: tensor_from_dict(plain_json(tensor_to_dict(entry)), name)
        for name, entry in manifest.tensors.items()
    }
    return len(zlib.compress(pickle.dumps(replace(manifest, tensors=rows)), 1))


def planned_shard(plan: Plan) -> Manifest:
    """What a rank writes of parameters and optimizer state, with other checksums and without the
    header of its file.
    """
    file = shard_name(plan.rank, plan.topology.world_size)
    tensors: dict[str, TensorEntry] = {}
    for buffer in plan.buffers:
        for box, dtype in _saved_boxes(plan, buffer):
            size = TORCH_DTYPES[dtype].itemsize
            made = tuple(
                ChunkEntry(
                    chunk,
                    file,
                    f"{box.name}@{chunk.text}",
                    _some_checksum(f"{box.name}{chunk.text}"),
                    chunk.numel * size,
                )
                for chunk in split_box(box.box, size)
            )
            before = tensors[box.name].chunks if box.name in tensors else ()
            tensors[box.name] = TensorEntry(box.shape, dtype, before + made)
    nbytes = sum(chunk.nbytes for entry in tensors.values() for chunk in entry.chunks)
    return Manifest(
        0, {file: nbytes} if nbytes else {}, tensors, objects={}, config={}, topology={}
    )


def _some_checksum(text: str) -> str:
    """Eight digits, as incompressible as those of a chunk."""
    return f"{zlib.crc32(text.encode()):08x}"


def _saved_boxes(plan: Plan, buffer: BufferPlan) -> Iterator[tuple[TensorBox, str]]:
    """The boxes of a buffer that this rank saves and their dtypes, as
    `DistributedOptimizer.tensors_to_save`.
    """
    precision, config = Precision.of(plan.config.precision), plan.config.optim
    shards_across = buffer.layout.num_outer_shards > 1
    replica = Replica(0, 1)
    if not shards_across:
        replica = Replica(buffer.replicate.index, buffer.replicate.size)
    for bucket in buffer.layout.buckets:
        ranges = bucket.update_ranges(
            buffer.shard.index, outer_index=buffer.replicate.index if shards_across else 0
        )
        saved = ranges_to_save(ranges, replica)
        for part in split_shard(
            ranges, bucket.update_numel, rule=plan.rule, host_fraction=host_fraction(config)
        ):
            dtypes = {
                "model": precision.main if precision.has_separate_main_params else precision.params
            }
            dtypes |= {
                f"optimizer/{name}": precision.state_dtype(name)
                for name in part.state_names(plan.rule, config)
            }
            dtypes |= {} if config.ema_decay is None else {"ema": torch.float32}
            for prefix, dtype in dtypes.items():
                # scaled values are saved in fp32
                name = DTYPE_NAMES[torch.float32 if num_scales(1, dtype) else dtype]
                for inside in clip_ranges(saved, start=part.start, stop=part.stop):
                    yield from ((box, name) for box in inside.boxes(f"{prefix}/{inside.name}"))


def row(size: MetadataSize, world_size: int) -> str:
    """A row of the table."""
    first, other = size.received_at_save
    sizes = f"{size.num_chunks:,} | {size.manifest_bytes / 1e6:,.0f} MB | {size.report_bytes / 1e3:,.1f} kB"
    received = (
        f"{first / 1e6:,.0f} MB | {other / 1e6:,.1f} MB | {size.received_at_load / 1e6:,.0f} MB"
    )
    return f"{world_size:,} | {sizes} | {received} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of two recipes, or of the configuration on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, nargs="+", default=(1024, 16384))
    known, flags = parser.parse_known_args(arguments)
    named = (
        {"the command line": flags}
        if flags
        else {k: [f"+config={k}", *v.split()] for k, v in RUNS.items()}
    )
    print(f"| model | {HEADER} |\n|---|" + "---:|" * 7)
    for name, words in named.items():
        try:
            config = load(words, to_train=False).config
            for world_size in known.world_size:
                print(f"| {name} | {row(metadata_size(config, world_size), world_size)}")
        except NanotrainError as error:
            sys.exit(report(error))


if __name__ == "__main__":
    main()

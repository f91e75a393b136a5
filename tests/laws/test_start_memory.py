"""Law L5 at the start: initial weights, Hugging Face weights and checkpoints never bring a full
model onto a rank.

Every tensor that an operation reads or writes is counted while it is alive, over the planned
resident bytes.
"""

import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.interop.hf.families import model_from_hf
from tests.harness import run_ranks
from tests.laws.test_any_topology import save
from tests.laws.worlds import VOCAB_SIZE, Case, build_here

SMALL = 4096  # bytes below which a tensor is not counted
STRATEGY = "optim_grads_params"
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


class LiveBytes(TorchDispatchMode):
    """The most bytes alive at once, and those of the largest storage."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self._sizes: dict[int, int] = {}  # of the storages that were counted last, by address
        self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._see(tensor)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        """Count a tensor, and all others again if it is new and large and no view of one of them."""
        num_bytes, address = tensor.untyped_storage().nbytes(), tensor.untyped_storage().data_ptr()
        seen = self._seen.get(id(tensor))
        # a later tensor may have the id of a dead one
        if num_bytes < SMALL or (seen is not None and seen() is tensor):
            return
        self._seen[id(tensor)] = weakref.ref(tensor)
        if self._sizes.get(address) == num_bytes:
            return
        alive = {
            key: tensor
            for key, reference in self._seen.items()
            if (tensor := reference()) is not None
        }
        self._seen = {key: self._seen[key] for key in alive}
        storages = (tensor.untyped_storage() for tensor in alive.values())
        self._sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.most = max(self.most, sum(self._sizes.values()))
        self.largest = max(self.largest, num_bytes)


def measure_starts(
    ctx: ParallelContext, case: Case, weights: Path, folder: Path
) -> dict[str, dict[str, int]]:
    """Bytes while a run starts from a seed, from Hugging Face weights and from a checkpoint."""
    save(ctx, case, folder)
    starts: dict[str, dict[str, Any]] = {
        "seed": {},
        "weights": {},
        "checkpoint": {"checkpoint": folder / "checkpoints" / "step-00000002", "folder": folder},
    }
    found = {}
    for name, arguments in starts.items():
        with LiveBytes() as live:
            started = (
                case.but(checkpoint={"pretrained_checkpoint": str(weights)})
                if name == "weights"
                else case
            )
            run = build_here(ctx, started, **arguments)
        planned, buckets = (
            run.plan.resident_bytes,
            [bucket for dp in run.data_parallel for bucket in dp.buckets],
        )
        found[name] = {
            "full": sum(bucket.layout.numel for bucket in buckets) * 4,
            "bucket": max(bucket.layout.numel for bucket in buckets) * 4,
            "resident": planned.params + planned.grads + planned.optimizer,
            "most": live.most,
            "largest": live.largest,
        }
    return found


def test_no_start_holds_the_full_model_on_a_rank(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).float().save_pretrained(tmp_path / "weights")
    case = Case(1).but(
        model=asdict(model_from_hf(tmp_path / "weights")),
        parallel={"data_parallel_sharding_strategy": STRATEGY, "ddp_bucket_size": 5000},
        train={"micro_batch_size": 1, "global_batch_size": 4},
    )
    for found in run_ranks(
        4, measure_starts, case, tmp_path / "weights", tmp_path, threads=False, strategy=STRATEGY
    ):
        for name, sizes in found.items():
            print(name, sizes)
            assert sizes["resident"] == sizes["full"], (
                "with d = 4 the four shards are the size of one model"
            )
            assert sizes["most"] <= sizes["resident"] + 3 * sizes["bucket"] // 2, name
            assert sizes["largest"] <= sizes["full"] // 4, name

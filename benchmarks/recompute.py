"""Recomputation: peak of activations and CPU time by setting, beside torch's own checkpoint on a
plain Llama.

    python benchmarks/recompute.py                       # the 10m shape, fp32, one thread
    python benchmarks/recompute.py --model 25m --rounds 8

Forward and backward in one process, all contenders in turn, several rounds. The plain Llama of
baselines.py runs as its users checkpoint it: `torch.utils.checkpoint` around every block, without
reentrance. Times are medians of CPU time; the peak counts bytes of all live tensors that the
forward and backward allocate, with parameter gradients.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from baselines import SHAPES, Llama, Shape, batches
from model import CPU, drop_gradients, model_config, stage_pass
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from nanotrain.config.config import Config
from nanotrain.config.schema import config_from_dict
from nanotrain.memory.block_transforms import transform_blocks
from nanotrain.memory.recompute import Recompute
from nanotrain.model.context import ModelParallel
from nanotrain.model.parameters import initialize
from nanotrain.model.transformer import Stage, build_stage

FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "selective: core_attn": SELECTIVE,
    "selective: layernorm": SELECTIVE | {"recompute_modules": ["layernorm"]},
    "selective: pointwise": SELECTIVE | {"recompute_modules": ["pointwise"]},
    "selective: core_attn layernorm mlp": SELECTIVE
    | {"recompute_modules": ["core_attn", "layernorm", "mlp"]},
    "full block 4": FULL | {"recompute_method": "block", "recompute_num_layers": 4},
    "full uniform 1": FULL | {"recompute_method": "uniform", "recompute_num_layers": 1},
    "full uniform 2": FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
}
PLAIN = {"plain Llama": False, "plain Llama, torch's checkpoint": True}


class PeakBytes(TorchDispatchMode):
    """The most bytes of live storages that were allocated inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._live.values()))
        return out


@dataclass(frozen=True)
class Contender:
    """A function that runs forward and backward, and with what its time is compared."""

    name: str
    run: Callable[[], float]
    rival: str


def nanotrain_pass(shape: Shape, tokens: Tensor, *, memory: dict[str, Any]) -> Callable[[], float]:
    """Forward and backward of nanotrain's model with a setting of recomputation."""
    config: Config = config_from_dict({"memory": memory})
    model = model_config(shape)
    plain, recompute = build_stage(model), Recompute()
    parallel = replace(ModelParallel.single_rank(), recompute=recompute)
    stage = Stage(model, plain.spec, params=plain.params, parallel=parallel).to_empty(device="cpu")
    initialize(stage, stage.params, seed=0)
    stage.layer_functions = transform_blocks(stage.layers.values(), config, recompute=recompute)
    return stage_pass(stage, tokens)


def plain_pass(shape: Shape, tokens: Tensor, *, is_checkpointed: bool) -> Callable[[], float]:
    """Forward and backward of the plain Llama."""
    torch.manual_seed(0)
    model = Llama(shape)
    if is_checkpointed:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def run() -> float:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        return drop_gradients(model, loss)

    return run


def cpu_time(run: Callable[[], float]) -> float:
    """Seconds of CPU time of all threads."""
    start = time.process_time()
    run()
    return time.process_time() - start


def compare(shape: Shape, *, rounds: int) -> list[str]:
    """The rows of the table."""
    tokens = next(batches(shape, 0, CPU))
    contenders = [
        Contender(name, nanotrain_pass(shape, tokens, memory=memory), "none")
        for name, memory in SETTINGS.items()
    ]
    contenders += [
        Contender(name, plain_pass(shape, tokens, is_checkpointed=is_checkpointed), "plain Llama")
        for name, is_checkpointed in PLAIN.items()
    ]
    peaks = {}
    for contender in contenders:
        contender.run()
        with PeakBytes() as mode:
            contender.run()
        peaks[contender.name] = mode.peak
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            seconds[contender.name].append(cpu_time(contender.run))

    def ratio(name: str, rival: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds[rival], strict=True))

    rows = [
        f"| {c.name} | {peaks[c.name] / 1e6:.0f} MB | {peaks[c.name] / peaks[c.rival]:.2f} | "
        f"{ratio(c.name, c.rival):.2f} |"
        for c in contenders
    ]
    ours, torchs = (
        ratio("full uniform 1", "none"),
        ratio("plain Llama, torch's checkpoint", "plain Llama"),
    )
    speed = ratio("plain Llama, torch's checkpoint", "full uniform 1")
    return [
        *rows,
        "",
        f"recompute full: {ours:.2f} of its time without; torch: {torchs:.2f}; torch / ours: {speed:.2f}x",
    ]


def main() -> None:
    """Run all contenders in turn and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="10m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.model}, {args.threads} threads, medians of {args.rounds} rounds\n")
    print("| recomputation | peak | of its peak without | of its CPU time without |")
    print("|---|---:|---:|---:|")
    print("\n".join(compare(SHAPES[args.model], rounds=args.rounds)), flush=True)


if __name__ == "__main__":
    main()

"""The budget of one training step on a named card, from the plan and the operators of the model; needs no GPU.

    python benchmarks/roofline.py                                   # llama1b on an H100
    python benchmarks/roofline.py --card A100 --world-size 8 +config=gpt2_124m --micro-batch-size 16

One microbatch runs forward and backward on the meta device, which computes nothing. Every operator is counted with its
FLOPs and the bytes that it reads and writes; its time is the longer of the two at the attainable share of the card's
peak. Attention counts as one fused operator per direction. Gradients, optimizer and communication follow from the plan.

    tp       the sharded stage runs in a world that sends nothing; its collectives are counted
    cp       every rank has an equal share of each sequence: the work of all of it, divided
    pp       the stages of the rank; the bubble is the schedule's, with equal stages
    ep       tokens are spread evenly, so a rank computes as much as without; only their traffic is added

A group inside a node communicates over the card's links, any other over the network.

The times are a model, not a measurement: operators are neither fused nor overlapped, and the shares below are assumed.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.traffic import TrafficCounter
from nanotrain.config.config import ParallelConfig
from nanotrain.config.load import load
from nanotrain.data.batch import Batch
from nanotrain.model import transformer
from nanotrain.model.context import BatchContext
from nanotrain.model.parallel import ModelParallel
from nanotrain.parallel.cp import sdpa
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.schedules import build_schedule
from nanotrain.parallel.pp.simulate import simulate
from nanotrain.parallel.tp import loss as vocabulary_loss
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.precision.policy import Precision
from nanotrain.topology.groups import GroupSpec
from nanotrain.topology.hardware import peak_flops
from nanotrain.topology.topology import Topology
from nanotrain.train.plans.plan import Plan, StagePlan, plan_run
from nanotrain.train.plans.traffic import sent_bytes

CLASSES = ("GEMM", "attention", "elementwise", "loss", "gradients", "optimizer", "communication", "bubble")
RANKS_PER_NODE = 8
NETWORK_BYTES_PER_S = 50e9  # one 400 Gb/s adapter per card, one direction
GIB = 2**30
# Host time to launch one operator from eager Python (assumed).
LAUNCH_S = 10e-6
# AdamW per element of the shard: norm 4, clipping 8, main params and moments read with gradients 16 and written 12,
# copy to the model params 4 + their size. All in fp32.
OPTIMIZER_BYTES = 44
# Operators that allocate or look at a tensor and touch none of its memory.
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "lift_fresh", "new_empty_strided"}
WRITES_ONLY = {"fill_", "zero_", "zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "new_zeros"}
LOOK_UPS = {"embedding", "gather", "index", "index_select"}
SCATTERS = {"scatter_add_", "index_add_", "index_put_"}  # touch of their target what is scattered


@dataclass(frozen=True)
class Card:
    """Peaks of a card, from the vendor's data sheet, and the shares of them that large operators attain (assumed)."""

    device_name: str  # a name that `peak_flops` has, in bf16
    memory_bytes_per_s: float
    link_bytes_per_s: float  # NVLink, one direction
    gemm_share: float
    attention_share: float
    memory_share: float = 0.85
    link_share: float = 0.75


# NVIDIA data sheets: H100 SXM5 80 GB, H200 SXM 141 GB, A100 SXM4 80 GB. The attention shares are of FlashAttention-2,
# which reaches about the same FLOP/s on Hopper as 60 % of an A100's peak.
CARDS = {
    "H100": Card("NVIDIA H100 80GB HBM3", 3.35e12, 450e9, gemm_share=0.72, attention_share=0.35),
    "H200": Card("NVIDIA H200", 4.8e12, 450e9, gemm_share=0.72, attention_share=0.35),
    "A100": Card("NVIDIA A100-SXM4-80GB", 2.039e12, 300e9, gemm_share=0.8, attention_share=0.6),
}


@dataclass
class Cost:
    """Work of one class of operators."""

    flops: float = 0.0
    num_bytes: float = 0.0
    launches: int = 0
    seconds: float = 0.0


@dataclass
class Budget:
    """Costs by class, and the card that they are timed on."""

    card: Card
    dtype: str
    costs: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    traffic: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))  # the same communication, by group

    def send(self, group: GroupSpec, num_bytes: float) -> None:
        """Count bytes that the rank sends over a group."""
        is_inside = len({rank // RANKS_PER_NODE for rank in group.ranks}) == 1
        bandwidth = self.card.link_bytes_per_s if is_inside else NETWORK_BYTES_PER_S
        for cost in (self.costs["communication"], self.traffic[group.name]):
            cost.num_bytes += num_bytes
            cost.seconds += num_bytes / (bandwidth * self.card.link_share)

    def idle(self, seconds: float) -> None:
        """Count time in which the rank waits for other pipeline stages."""
        self.costs["bubble"].seconds += seconds

    def add(self, name: str, *, flops: float = 0.0, num_bytes: float = 0.0, launches: int = 1, times: int = 1) -> None:
        """Count an operator that runs `times` times."""
        card, cost = self.card, self.costs[name]
        peak = peak_flops(card.device_name, self.dtype) or 0.0
        share = {"GEMM": card.gemm_share, "attention": card.attention_share}.get(name, 1.0)
        bandwidth = card.memory_bytes_per_s * card.memory_share
        seconds = max(flops / (peak * share) if flops else 0.0, num_bytes / bandwidth)
        cost.flops += flops * times
        cost.num_bytes += num_bytes * times
        cost.launches += launches * times
        cost.seconds += seconds * times

    @property
    def seconds(self) -> float:
        """Time of the step on the device, without overlap."""
        return sum(cost.seconds for cost in self.costs.values())


class OperatorCount(TorchDispatchMode):
    """Adds every operator to a budget, `times` times."""

    def __init__(self, budget: Budget, *, times: int, share: float = 1.0) -> None:
        super().__init__()
        self._budget, self._times, self._share = budget, times, share
        self.in_loss = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in FREE:
            return out
        counted = flop_registry.get(torch.ops.aten.addmm if name == "addmm_" else func.overloadpacket)
        if counted is not None:
            flops = counted(*args, **(kwargs or {}), out_val=out)
            self.add("GEMM", flops=flops, num_bytes=_bytes(name, args, out))
        else:
            self.add("loss" if self.in_loss else "elementwise", num_bytes=_bytes(name, args, out))
        return out

    def add(self, name: str, **work: float) -> None:
        """Count one operator of a microbatch, of which this rank computes its share."""
        mine = {key: amount * self._share for key, amount in work.items()}
        self._budget.add(name, times=self._times, **mine)  # type: ignore[arg-type]


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _bytes(name: str, args: Sequence[Any], out: Any) -> int:
    """Bytes that an operator reads and writes; each tensor once per direction."""
    written = sum(tensor.nbytes for tensor in _tensors(out))
    if name in WRITES_ONLY:
        return written
    if name in LOOK_UPS:
        return 2 * written
    if name in SCATTERS:
        return 2 * sum(tensor.nbytes for tensor in _tensors(list(args[1:])))
    sources = args[1:] if name == "copy_" else args
    return written + sum(tensor.nbytes for tensor in _tensors(list(sources)))


class _Attention(torch.autograd.Function):
    """Causal attention as one operator forward and one backward, without scores in memory."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, count: OperatorCount) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.count, batch, length, heads = count, query.shape[0], query.shape[1], query.shape[2]
        # Half of the pairs, a product for the scores and one for the values: 2 FLOPs per multiplication and addition.
        ctx.flops = batch * heads * length**2 * (query.shape[3] + value.shape[3])
        out = query.new_empty((*query.shape[:3], value.shape[3]))
        ctx.num_bytes = query.nbytes + key.nbytes + value.nbytes + out.nbytes
        count.add("attention", flops=ctx.flops, num_bytes=ctx.num_bytes)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Five products instead of two: the scores are computed again.
        ctx.count.add("attention", flops=2.5 * ctx.flops, num_bytes=2 * ctx.num_bytes)
        return *(torch.empty_like(saved) for saved in ctx.saved_tensors), None


class _RMSNorm(torch.autograd.Function):
    """torch's fused RMSNorm of CUDA: one operator forward, two backward (the gradients of input and weight)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, count: OperatorCount) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.count = count
        count.add("elementwise", num_bytes=2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.count.add("elementwise", num_bytes=3 * x.nbytes)
        ctx.count.add("elementwise", num_bytes=2 * x.nbytes)
        return torch.empty_like(x), torch.empty_like(weight), None


@contextmanager
def _on_meta(count: OperatorCount) -> Iterator[None]:
    """Let fused operators and the loss of the model run on the meta device, marked for the count."""
    cross_entropy = transformer.vocab_parallel_cross_entropy

    def attend(query: Tensor, *, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        out: Tensor = _Attention.apply(query, key, value, count)
        return out

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = _RMSNorm.apply(x, weight, count)
        return out

    def marked(*args: Any, **kwargs: Any) -> Tensor:
        count.in_loss = True
        try:
            return cross_entropy(*args, **kwargs)
        finally:
            count.in_loss = False

    def softmax_gradient(logits: Tensor, **given: Tensor | Any) -> tuple[Tensor, Tensor]:
        """The Triton kernels: one read for the log-sum-exp, then the gradient in place."""
        count.add("loss", num_bytes=logits.nbytes)
        logsumexp = given["combine"](logits.new_empty((logits.shape[0], 1), dtype=torch.float32))
        picked = (logits.gather(1, given["column"]).float() - logsumexp) * given["is_local"]
        count.add("loss", num_bytes=2 * logits.nbytes)
        return picked[:, 0], logits

    chunk_elements = {"meta": vocabulary_loss.CHUNK_ELEMENTS["cuda"]}
    with (
        patch.object(sdpa, "attend", attend),
        patch.object(F, "rms_norm", rms_norm),
        patch.object(vocabulary_loss, "softmax_gradient", softmax_gradient),
        patch.object(transformer, "vocab_parallel_cross_entropy", marked),
        patch.dict(vocabulary_loss.CHUNK_ELEMENTS, chunk_elements),
    ):
        yield


def budget_of(plan: Plan, card: Card) -> Budget:
    """The budget of one step of a rank.

    Args:
        plan: of the rank; its tensor-parallel group lies where that of rank 0 does.
        card: the device.
    """
    if plan.shape.moe is not None and plan.groups["tp"].size > 1:
        raise SystemExit("experts are not counted with tensor parallelism: leave --tensor-model-parallel-size at 1")
    budget = Budget(card, plan.config.precision.params_dtype.value)
    for stage in plan.stages:
        _count_microbatches(plan, stage, budget)
    _add_bubble(plan, budget)
    _count_gradients(plan, budget)
    _count_optimizer(plan, budget)
    for (name, _), num_bytes in sent_bytes(plan).items():
        if name != "tp":  # of tp only what optimizers send; the rest was counted where it ran
            budget.send(plan.groups[name], num_bytes)  # type: ignore[index]
    return budget


def _count_microbatches(plan: Plan, stage: StagePlan, budget: Budget) -> None:
    """Forward and backward of a stage, for all microbatches."""
    config, size = plan.config, plan.groups["tp"].size
    count = OperatorCount(budget, times=plan.num_microbatches, share=1 / plan.groups["cp"].size)
    batch_size, length = config.train.micro_batch_size, config.data.seq_length
    tokens = torch.empty((batch_size, length), dtype=torch.int64, device="meta")
    batch = BatchContext(Batch(tokens, tokens, torch.empty(tokens.shape, device="meta"), None, None))
    with _tensor_parallel(size, is_sequence_parallel=config.parallel.sequence_parallel) as (tensor_parallel, traffic):
        parallel = replace(ModelParallel.single_rank(), tp=tensor_parallel, sequence=tensor_parallel.group)
        module = transformer.Stage(config.model, stage.spec, params=stage.params, parallel=parallel)
        hidden = None
        if not stage.spec.has_embedding:
            parts = size if config.parallel.sequence_parallel else 1
            shape, dtype = (batch_size, length // parts, config.model.hidden_size), TORCH_DTYPES[budget.dtype]
            hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        with _on_meta(count), count:
            out = module(hidden, batch)
            out.backward(None if out.dim() == 0 else torch.empty_like(out))
        if size > 1:
            budget.send(plan.groups["tp"], traffic.bytes("tp") * plan.num_microbatches / plan.groups["cp"].size)


@contextmanager
def _tensor_parallel(size: int, *, is_sequence_parallel: bool) -> Iterator[tuple[TensorParallel, TrafficCounter]]:
    """Rank 0 of a tensor-parallel group whose collectives return at once, and what it sends."""
    if size == 1:
        yield TensorParallel.single_rank(), TrafficCounter()
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        group = ParallelContext.attach(Topology.of(ParallelConfig(tensor_model_parallel_size=size), size)).group("tp")
        yield TensorParallel(group, is_sequence_parallel), group.traffic
    finally:
        dist.destroy_process_group()


def _add_bubble(plan: Plan, budget: Budget) -> None:
    """The time in which a rank waits for others, from the schedule on a clock, with equal stages."""
    pp = plan.groups["pp"].size
    if pp > 1:
        parallel = plan.config.parallel
        shape = PipelineShape(pp, parallel.num_virtual_stages_per_pipeline_rank, plan.num_microbatches)
        idle = simulate(build_schedule(parallel.pipeline_schedule, shape)).bubble_fraction
        budget.idle(idle / (1 - idle) * budget.seconds)


def _count_gradients(plan: Plan, budget: Budget) -> None:
    """Copies of the first microbatch's gradients to the buffer, and additions of the others'."""
    precision = Precision.of(plan.config.precision)
    read, buffer = precision.params.itemsize, precision.grads.itemsize
    for param in (param for stage in plan.stages for param in stage.params):
        numel = param.box.numel
        budget.add("gradients", num_bytes=numel * (read + buffer))
        budget.add("gradients", num_bytes=numel * (read + 2 * buffer), times=plan.num_microbatches - 1)


def _count_optimizer(plan: Plan, budget: Budget) -> None:
    """AdamW on this rank's shard."""
    itemsize = Precision.of(plan.config.precision).params.itemsize
    for layout in (buffer.layout for stage in plan.stages for buffer in stage.buffers):
        for bucket in layout.buckets:
            budget.add("optimizer", num_bytes=bucket.update_numel * (OPTIMIZER_BYTES + itemsize), launches=8)


def table(budget: Budget, plan: Plan) -> str:
    """The Markdown table of a budget and its model FLOPs utilization."""
    lines = ["| class | TFLOP | GiB | operators | ms | share |", "|---|---:|---:|---:|---:|---:|"]
    for name in CLASSES:
        cost = budget.costs[name]
        numbers = f"{cost.flops / 1e12:,.1f} | {cost.num_bytes / GIB:,.1f} | {cost.launches:,}"
        lines.append(f"| {name} | {numbers} | {cost.seconds * 1e3:,.1f} | {cost.seconds / budget.seconds:.0%} |")
    total = sum(cost.launches for cost in budget.costs.values())
    lines.append(f"| sum | | | {total:,} | {budget.seconds * 1e3:,.1f} | |")
    cards = math.prod(plan.groups[axis].size for axis in ("tp", "cp", "pp"))  # type: ignore[index]  # per batch
    tokens = plan.num_microbatches * plan.config.train.micro_batch_size * plan.config.data.seq_length / cards
    peak = peak_flops(budget.card.device_name, budget.dtype)
    mfu = f"{tokens * plan.flops_per_token / budget.seconds / peak:.1%}" if peak else "unknown"
    lines.append(f"\n{tokens / budget.seconds:,.0f} tokens/s per card, MFU {mfu}; host time to launch the operators")
    lines.append(f"{total * LAUNCH_S * 1e3:,.0f} ms at {LAUNCH_S * 1e6:.0f} us each.")
    for name, sent in budget.traffic.items():
        lines.append(f"{name}: {sent.num_bytes / GIB:,.2f} GiB sent, {sent.seconds * 1e3:,.1f} ms")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--card", choices=CARDS, default="H100")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help="the rank that is counted; the last one has the loss")
    known, flags = parser.parse_known_args(arguments)
    if not any(flag.startswith("+config=") for flag in flags):
        flags = ["+config=llama1b", "--global-batch-size", str(2 * known.world_size), *flags]
    plan = plan_run(load([*flags, "--mock-data"]).config, known.world_size, rank=known.rank)
    budget = budget_of(plan, CARDS[known.card])
    train = plan.config.train
    print(f"{known.card}, {known.world_size} ranks, {plan.num_microbatches} microbatches per step and rank,", end=" ")
    print(f"{train.micro_batch_size} x {plan.config.data.seq_length} tokens each, {budget.dtype}\n")
    print(table(budget, plan))


if __name__ == "__main__":
    main(sys.argv[1:])

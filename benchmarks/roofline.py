"""The budget of one training step on a named card, from the plan and the operators of the model;
needs no GPU.

    python benchmarks/roofline.py                                   # llama1b on an H100
    python benchmarks/roofline.py --card A100 --world-size 8 +config=gpt2_124m --micro-batch-size 16
    python benchmarks/roofline.py --world-size 2048 +config=deepseek_v3 [--rank 512]

One microbatch runs forward and backward on the meta device, which computes nothing. Every operator
is counted with its FLOPs and the bytes that it reads and writes; its time is the longer of the two
at the attainable share of the card's peak. Attention counts as one fused operator per direction, in
the time of the kernel that torch picks. Gradients, optimizer and communication follow from the
plan.

    tp       the sharded stage runs in a world that sends nothing; its collectives are counted
    cp       every rank has an equal share of each sequence: the work of all of it, divided
    pp       the stages of the rank, of the slowest one without --rank; the bubble is that of equal stages
    ep, etp  every rank of ep receives equally many tokens

A group inside a node communicates over the card's links, any other over the network.

The times are a model, not a measurement: operators are neither fused nor overlapped, and the shares
below are assumed.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))  # where a test loads this file by its path
from cards import CARDS, Card, attention_kernel, attention_share
from operator_count import OperatorCount, on_meta

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.recorder import Recorder
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.config.parallel import ParallelConfig
from nanotrain.data.batch import Batch
from nanotrain.dry_run.stand_ins import even_counts
from nanotrain.errors import NanotrainError, report
from nanotrain.kernels.fp8.layer import fp8_options, layers_in_bf16
from nanotrain.kernels.fp8.products import keep_weights
from nanotrain.memory.block_transforms import transform_blocks
from nanotrain.memory.recompute import Recompute
from nanotrain.model import transformer
from nanotrain.model.context import BatchContext, LayerContext, ModelParallel
from nanotrain.parallel.ep import token_dispatcher
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.schedules import build_schedule
from nanotrain.parallel.pp.simulate import simulate
from nanotrain.parallel.tp.layers import TensorParallel
from nanotrain.plan.buffers import with_fp8_products
from nanotrain.plan.model_plan import StagePlan
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.plan.traffic import sent_bytes
from nanotrain.precision.dtypes import TORCH_DTYPES, Precision
from nanotrain.precision.fp8 import FP8_RECIPES, GROUPED_CAPABILITY, RECIPES
from nanotrain.spec.counts import flops_per_token, peak_flops
from nanotrain.topology.groups import GroupSpec
from nanotrain.topology.topology import Topology

CLASSES = (
    "GEMM",
    "fp8 GEMM",
    "attention",
    "elementwise",
    "loss",
    "gradients",
    "optimizer",
    "communication",
    "bubble",
)
RANKS_PER_NODE = 8
NETWORK_BYTES_PER_S = 50e9  # one 400 Gb/s adapter per card, one direction
GIB = 2**30
# Host time to launch one operator from eager Python (assumed).
LAUNCH_S = 10e-6
# AdamW per element of the shard: norm 4, clipping of the gradients 8, main params and moments read
# with gradients 16 and written 12, copy to the model params 4 + their size. All in fp32.
OPTIMIZER_BYTES = 44


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
    attention_share: float = 0.0
    costs: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    # the same communication, by group
    traffic: dict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))

    def send(self, group: GroupSpec, num_bytes: float) -> None:
        """Count bytes that the rank sends over a group."""
        is_inside = len({rank // RANKS_PER_NODE for rank in group.ranks}) == 1
        bandwidth = self.card.link_bytes_per_s if is_inside else NETWORK_BYTES_PER_S
        for cost in (self.costs["communication"], self.traffic[group.name]):
            cost.num_bytes += num_bytes
            cost.seconds += num_bytes / (bandwidth * self.card.link_share)

    @cached_property
    def peak(self) -> float:
        """FLOP/s of products of the dtype; 0 where it is unknown."""
        return peak_flops(self.card.device_name, self.dtype) or 0.0

    @cached_property
    def _fp8_peak(self) -> float:
        return peak_flops(self.card.device_name, "fp8") or 0.0

    def idle(self, seconds: float) -> None:
        """Count time in which the rank waits for other pipeline stages."""
        self.costs["bubble"].seconds += seconds

    def add(
        self,
        name: str,
        *,
        flops: float = 0.0,
        num_bytes: float = 0.0,
        launches: int = 1,
        times: int = 1,
    ) -> None:
        """Count an operator that runs `times` times."""
        card, cost = self.card, self.costs[name]
        shares = {
            "GEMM": card.gemm_share,
            "fp8 GEMM": card.gemm_share,
            "attention": self.attention_share,
        }
        share, peak = shares.get(name, 1.0), self._fp8_peak if name == "fp8 GEMM" else self.peak
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


def budget_of(
    plan: Plan, card: Card, *, has_triton: bool = True, is_fused: bool | None = None
) -> Budget:
    """The budget of one step of a rank.

    Args:
        plan: plan of the rank; its groups inside layers have the links of those of rank 0.
        card: the device.
        has_triton: count the Triton kernels of the loss, products that write weight gradients and
            joined projections, not their torch forms.
        is_fused: count the kernels that cast to fp8, and what they allow; None is `has_triton`.
    """
    is_fused = has_triton if is_fused is None else is_fused
    budget = Budget(card, plan.config.precision.params_dtype, attention_share(plan, card))
    with _model_parallel(plan, is_fused=is_fused) as parallel:
        for stage in plan.stages:
            _count_microbatches(plan, stage, budget, parallel=parallel, has_triton=has_triton)
    writes = has_triton and not plan.data_parallel.strategy.shard_grads
    _count_gradients(plan, budget, writes=writes, writes_fp8=writes and is_fused)
    _add_bubble(plan, budget)
    _count_optimizer(plan, budget)
    for (name, _), num_bytes in sent_bytes(plan).items():
        if name != "tp":  # of tp only what optimizers send; the rest was counted where it ran
            budget.send(plan.groups[name], num_bytes)  # type: ignore[index]
    return budget


def moe_layer(plan: Plan, card: Card, *, has_triton: bool = True) -> str:
    """The operators of one layer of experts in one microbatch, forward and backward, and the bytes
    they touch.
    """
    budget = Budget(card, plan.config.precision.params_dtype)
    count, train = OperatorCount(budget, times=1), plan.config.train
    shape = (train.micro_batch_size, plan.config.data.seq_length, plan.shape.hidden_size)
    hidden = torch.empty(shape, dtype=TORCH_DTYPES[budget.dtype], device="meta", requires_grad=True)
    with _model_parallel(plan, is_fused=True) as parallel:
        spec, params = next((each.spec, each.params) for each in plan.stages if each.spec.layers)
        layers = transformer.Stage(
            plan.config.model, spec, params=params, parallel=parallel
        ).layers.values()
        layer = next(block.mlp for block in layers if hasattr(block.mlp, "experts")).to("meta")
        with on_meta(count, has_triton=has_triton), _even_routing(plan), count:
            out = layer(hidden, LayerContext(aux_loss_scale=1.0))
            out.backward(torch.empty_like(out))
    launches = sum(cost.launches for cost in budget.costs.values())
    moved = budget.costs["elementwise"]
    return f"{launches} operators; all but products: {moved.num_bytes / 1e9:.1f} GB, {moved.seconds * 1e3:.1f} ms"


def slowest(
    config: Config, world_size: int, *, card: Card, has_triton: bool = True
) -> tuple[Plan, Budget]:
    """The plan and budget of the rank with the most work, of one per kind of pipeline rank."""
    kinds: dict[object, Plan] = {}
    for rank in plan_run(config, world_size, rank=0).groups["pp"].ranks:
        plan = plan_run(config, world_size, rank=rank)
        specs = [stage.spec for stage in plan.stages]
        kind = [
            (s.has_embedding, s.has_head, tuple(map(plan.shape.has_experts, s.layers)))
            for s in specs
        ]
        kinds.setdefault(tuple(kind), plan)
    budgets = [(plan, budget_of(plan, card, has_triton=has_triton)) for plan in kinds.values()]
    return max(budgets, key=lambda each: each[1].seconds)


def _count_microbatches(
    plan: Plan, stage: StagePlan, budget: Budget, *, parallel: ModelParallel, has_triton: bool
) -> None:
    """Forward and backward of a stage, for all microbatches."""
    config, group, num_cp = plan.config, parallel.tp.group, plan.groups["cp"].size
    count = OperatorCount(budget, times=plan.num_microbatches, share=1 / num_cp)
    batch_size, length = config.train.micro_batch_size, config.data.seq_length
    tokens = torch.empty((batch_size, length), dtype=torch.int64, device="meta")
    batch = BatchContext(
        Batch(tokens, tokens, torch.empty(tokens.shape, device="meta"), None, None)
    )
    module = transformer.Stage(config.model, stage.spec, params=stage.params, parallel=parallel).to(
        "meta"
    )
    module.layer_functions = transform_blocks(
        module.layers.values(), config, recompute=parallel.recompute
    )
    hidden = None
    if not stage.spec.has_embedding:
        parts = group.size if parallel.tp.sequence_parallel else 1
        shape, dtype = (
            (batch_size, length // parts, config.model.hidden_size),
            TORCH_DTYPES[budget.dtype],
        )
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    before = group.traffic.bytes("tp")
    _cast_weights(module, OperatorCount(budget, times=1))
    # the recorder runs each operator once per shapes of its arguments
    with on_meta(count, has_triton=has_triton), _even_routing(plan), Recorder(), count:
        out = module(hidden, batch)
        out.backward(None if out.dim() == 0 else torch.empty_like(out))
    if group.size > 1:
        sent = group.traffic.bytes("tp") - before
        budget.send(plan.groups["tp"], sent * plan.num_microbatches / num_cp)


def _cast_weights(module: transformer.Stage, count: OperatorCount) -> None:
    """Once per step, where weights are kept in fp8."""
    for block in module.layers.values():
        keep_weights(block)
        for hook in block._forward_pre_hooks.values():
            with count:
                hook(block, ())


def _with_fp8(parallel: ModelParallel, plan: Plan, *, is_fused: bool) -> ModelParallel:
    precision, keeps = (
        plan.config.precision,
        is_fused and plan.keeps_fp8_weights(plan.num_microbatches),
    )
    known = {"sequence": parallel.sequence, "capability": GROUPED_CAPABILITY}
    fp8 = fp8_options(precision.fp8, **known, is_fused=is_fused, keeps_weights=keeps)
    in_bf16 = layers_in_bf16(precision.fp8, plan.config.model.num_layers)
    return replace(parallel, tp=replace(parallel.tp, fp8=fp8), layers_in_bf16=in_bf16)


@contextmanager
def _model_parallel(plan: Plan, *, is_fused: bool) -> Iterator[ModelParallel]:
    """The groups of rank 0 of a world of tp, ep and etp whose collectives return at once."""
    recompute = Recompute()
    sizes = {axis: plan.groups[axis].size for axis in ("tp", "ep", "etp")}  # type: ignore[index]
    world_size = math.lcm(sizes["tp"], sizes["ep"] * sizes["etp"])
    if world_size == 1:
        yield _with_fp8(
            replace(ModelParallel.single_rank(), recompute=recompute), plan, is_fused=is_fused
        )
        return
    # importing it registers the backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        parallel = ParallelConfig(
            tensor_model_parallel_size=sizes["tp"],
            expert_model_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=sizes["etp"],
        )
        has_experts = plan.shape.moe is not None
        group = ParallelContext.attach(
            Topology.of(parallel, world_size, has_experts=has_experts)
        ).group
        parallel_groups = replace(
            ModelParallel.single_rank(),
            tp=TensorParallel(group("tp"), plan.config.parallel.sequence_parallel),
            ep=group("ep"),
            etp=group("etp"),
            dispatch=token_dispatcher.DispatchOptions.of(plan.config),
            sequence=group("tp_cp"),
            recompute=recompute,
        )
        yield _with_fp8(parallel_groups, plan, is_fused=is_fused)
    finally:
        dist.destroy_process_group()


@contextmanager
def _even_routing(plan: Plan) -> Iterator[None]:
    """Let every rank send equally many tokens to every other, as the meta device has no counts."""
    # whole sequences are run
    unsplit = replace(plan, groups={**plan.groups, "cp": GroupSpec.single_rank("cp")})
    with patch.object(
        token_dispatcher,
        "on_host",
        lambda _, parts: [even_counts(unsplit, counts, ep=ep) for counts, ep in parts],
    ):
        yield


def _add_bubble(plan: Plan, budget: Budget) -> None:
    """The time in which a rank waits for others, from the schedule on a clock, with equal stages."""
    pp = plan.groups["pp"].size
    if pp > 1:
        parallel = plan.config.parallel
        shape = PipelineShape(
            pp, parallel.num_virtual_stages_per_pipeline_rank, plan.num_microbatches
        )
        idle = simulate(build_schedule(parallel.pipeline_schedule, shape)).bubble_fraction
        budget.idle(idle / (1 - idle) * budget.seconds)


def _count_gradients(plan: Plan, budget: Budget, *, writes: bool, writes_fp8: bool) -> None:
    """Copies of the first microbatch's gradients to the buffer, and additions of the others'.

    `writes`: whether products write to the buffer, as outside of compiled graphs; these move more
    bytes themselves. Those of fp8 write the first microbatch's where a tensor has one scale, and
    are added from bf16 after it.
    """
    precision, fp8 = Precision.of(plan.config.precision), plan.config.precision.fp8
    read, buffer = precision.params.itemsize, precision.grads.itemsize
    in_fp8 = {
        id(param) for stage in plan.stages for param in with_fp8_products(stage.params, plan.config)
    }
    for param in (param for stage in plan.stages for param in stage.params):
        numel, later = param.box.numel, plan.num_microbatches - 1
        if fp8 is not None and fp8.wgrad and id(param) in in_fp8:
            is_direct = writes_fp8 and RECIPES[fp8.recipe].is_per_tensor
            name, first = ("fp8 GEMM", buffer - read) if is_direct else ("gradients", read + buffer)
            budget.add(name, num_bytes=numel * first, launches=not is_direct)
            budget.add("gradients", num_bytes=numel * (read + 2 * buffer), times=later)
            continue
        is_grouped = param.spec.is_expert and len(param.spec.shape) == 3 and read == 2
        is_product = len(param.spec.shape) == 2 or is_grouped
        if writes and is_product and not param.spec.name.startswith("embedding."):
            # instead of a gradient in the parameters' dtype, which was counted; the launch is the
            # product's
            budget.add("GEMM", num_bytes=numel * (buffer - read), launches=0)
            budget.add("GEMM", num_bytes=numel * (2 * buffer - read), launches=0, times=later)
            continue
        budget.add("gradients", num_bytes=numel * (read + buffer))
        budget.add("gradients", num_bytes=numel * (read + 2 * buffer), times=later)


def _count_optimizer(plan: Plan, budget: Budget) -> None:
    """AdamW on this rank's shard."""
    itemsize = Precision.of(plan.config.precision).params.itemsize
    for layout in (buffer.layout for stage in plan.stages for buffer in stage.buffers):
        for bucket in layout.buckets:
            budget.add(
                "optimizer",
                num_bytes=bucket.update_numel * (OPTIMIZER_BYTES + itemsize),
                launches=8,
            )


def table(budget: Budget, plan: Plan) -> str:
    """The Markdown table of a budget and its model FLOPs utilization."""
    lines = ["| class | TFLOP | GiB | operators | ms | share |", "|---|---:|---:|---:|---:|---:|"]
    for name in (each for each in CLASSES if each != "fp8 GEMM" or each in budget.costs):
        cost = budget.costs[name]
        numbers = f"{cost.flops / 1e12:,.1f} | {cost.num_bytes / GIB:,.1f} | {cost.launches:,}"
        lines.append(
            f"| {name} | {numbers} | {cost.seconds * 1e3:,.1f} | {cost.seconds / budget.seconds:.0%} |"
        )
    total = sum(cost.launches for cost in budget.costs.values())
    lines.append(f"| sum | | | {total:,} | {budget.seconds * 1e3:,.1f} | |")
    cards = math.prod(plan.groups[axis].size for axis in ("tp", "cp", "pp"))  # type: ignore[index]  # per batch
    tokens = (
        plan.num_microbatches
        * plan.config.train.micro_batch_size
        * plan.config.data.seq_length
        / cards
    )
    peak = peak_flops(budget.card.device_name, budget.dtype)
    mfu = (
        f"{tokens * flops_per_token(plan.shape, plan.config.data.seq_length) / budget.seconds / peak:.1%}"
        if peak
        else "unknown"
    )
    lines.append(
        f"\n{tokens / budget.seconds:,.0f} tokens/s per card, MFU {mfu}; host time to launch the operators"
    )
    lines.append(f"{total * LAUNCH_S * 1e3:,.0f} ms at {LAUNCH_S * 1e6:.0f} us each.")
    for name, sent in budget.traffic.items():
        lines.append(f"{name}: {sent.num_bytes / GIB:,.2f} GiB sent, {sent.seconds * 1e3:,.1f} ms")
    return "\n".join(lines)


def gain_of_fp8(flags: Sequence[str], world_size: int, *, card: Card) -> dict[str, list[float]]:
    """How much faster than bf16 a step is, by recipe: casts by torch's operators, and by kernels."""
    gains, bf16 = {}, slowest(load(flags).config, world_size, card=card)[1].seconds
    for recipe, row in FP8_RECIPES.items():
        fp8 = ["--fp8-format", row.formats[-1], "--fp8-recipe", recipe]
        plan = plan_run(load([*flags, *fp8]).config, world_size, rank=0)
        gains[recipe] = [
            bf16 / budget_of(plan, card, is_fused=is_fused).seconds for is_fused in (False, True)
        ]
    return gains


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--card", choices=CARDS, default="H100")
    parser.add_argument("--torch-forms", action="store_true", help="count torch's operators alone")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument(
        "--moe-layer", action="store_true", help="count one layer of experts and microbatch alone"
    )
    parser.add_argument(
        "--gain-of-fp8", action="store_true", help="compare the step with bf16, for every recipe"
    )
    parser.add_argument(
        "--rank", type=int, help="the rank that is counted; unset: one of the slowest stage"
    )
    known, flags = parser.parse_known_args(arguments)
    if not any(flag.startswith("+config=") for flag in flags):
        flags = ["+config=llama1b", "--global-batch-size", str(2 * known.world_size), *flags]
    try:
        config, card, has_triton = (
            load([*flags, "--mock-data"]).config,
            CARDS[known.card],
            not known.torch_forms,
        )
        plan = plan_run(config, known.world_size, rank=known.rank or 0)
    except NanotrainError as error:
        sys.exit(report(error))
    if known.gain_of_fp8:
        print("| recipe | casts by torch's operators | by kernels |\n|---|---:|---:|")
        for recipe, gains in gain_of_fp8(
            [*flags, "--mock-data"], known.world_size, card=card
        ).items():
            print(f"| {recipe} | {gains[0]:.2f} x | {gains[1]:.2f} x |")
        return
    if known.moe_layer:
        print(moe_layer(plan, card, has_triton=has_triton))
        return
    if known.rank is None:
        plan, budget = slowest(config, known.world_size, card=card, has_triton=has_triton)
    else:
        budget = budget_of(plan, card, has_triton=has_triton)
    train = plan.config.train
    print(
        f"{known.card}, rank {plan.rank} of {known.world_size}, {plan.num_microbatches} microbatches per step,",
        end=" ",
    )
    print(
        f"{train.micro_batch_size} x {config.data.seq_length} tokens each, {budget.dtype},", end=" "
    )
    print(f"attention by {attention_kernel(plan, card)}\n")
    print(table(budget, plan))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Compare every parallel axis with data parallelism on the same processes, and with torch's FSDP2 +
tensor parallelism.

    python benchmarks/parallel.py                             # 2 and 4 processes, the 10m shape, fp32
    python benchmarks/parallel.py --only TP --ranks 2 --rounds 1
    python benchmarks/parallel.py --output FILE --note TEXT   # also write the table as Markdown

Every layout trains the same model on the same global batch, 4 samples per process, with ZeRO-1 and
overlapped gradient reduction: an axis of size 2, and data parallelism of size 2 if there are 4
processes. Contenders run in turn, as in throughput.py, those of nanotrain on the same processes.
Ratios are to the reference of the same round, medians over rounds.

Bytes are those that comm/ counted in the last step over the group of the axis, per rank (mean over
ranks), with the closed form of docs/parallel/. The rows sent over `ep` depend on the routing; its
closed form assumes balanced experts.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from baselines import Shape
from throughput import Contender, Figure, Job, Outcome, nanotrain_command, run, torch_command

from nanotrain.config.model import ModelConfig
from nanotrain.plan.traffic import COUNT_BYTES, EXPERT_BYTES, TOKEN_TRIPS
from nanotrain.spec.kinds.core_attention import key_values_over_cp
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.shape import ModelShape

NUM_EXPERTS, TOPK, EXPERT_WIDTH = 8, 2, 256
EVERY = 2  # one layer in EVERY has experts
BYTES = 4  # of an fp32 number: activations, parameters and gradients
ABOUT = """# Every axis

{note}; torch {torch}, gloo.
`python benchmarks/parallel.py`, {model} shape, fp32, median of {rounds} rounds of {steps} steps.

Ratios above 1: faster than nanotrain's data parallelism ("x DP"; of the same model) and than torch's FSDP2 with tensor
and sequence parallelism ("x torch's TP") on the same processes and global batch, by the clock and by the CPU time of
all ranks. MB are sent per rank and step over the group; the closed form is that of docs/parallel/. That of `ep`
assumes balanced experts.

{body}
"""


@dataclass(frozen=True)
class Step:
    """The sizes of one step on one rank of a layout.

    Attributes:
        shape: sizes of the model.
        micro_batch: samples per microbatch.
        num_microbatches: microbatches per step.
        num_readers: ranks that read different samples.
    """

    shape: Shape
    micro_batch: int
    num_microbatches: int
    num_readers: int

    @property
    def hidden_bytes(self) -> int:
        """Size of one microbatch's hidden states; A in docs/parallel/."""
        return self.micro_batch * self.shape.seq * self.shape.hidden * BYTES


Form = Callable[[Step], float]


def dp_sent(step: Step) -> float:
    """docs/zero.md, `optim`: gradients and parameters, both fp32."""
    s = step.shape
    key_value = s.hidden // s.heads * s.kv_heads
    layer = 2 * s.hidden * (s.hidden + key_value) + 3 * s.hidden * s.ffn + 2 * s.hidden
    elements = 2 * s.vocab * s.hidden + s.layers * layer + s.hidden
    return 2 * BYTES * elements * (step.num_readers - 1) / step.num_readers


def expert_dp_sent(step: Step) -> float:
    """The same for experts that are replicated on every rank."""
    elements = step.shape.layers // EVERY * NUM_EXPERTS * 3 * step.shape.hidden * EXPERT_WIDTH
    return 2 * BYTES * elements * (step.num_readers - 1) / step.num_readers


def tp_sent(step: Step, *, sequence_parallel: bool) -> float:
    """docs/parallel/tp.md on 2 ranks; with sequence parallelism the norms' gradients are
    all-reduced at the end.
    """
    layers, positions = step.shape.layers, step.micro_batch * step.shape.seq
    times = 10 * layers + 4 if sequence_parallel else 8 * layers + 4
    loss = positions * BYTES + BYTES
    norms = (
        (2 * layers + 1) * step.shape.hidden * BYTES / step.num_readers if sequence_parallel else 0
    )
    return step.num_microbatches * (times * step.hidden_bytes / 2 + loss) + norms


def pp_sent(step: Step, *, num_stages: int) -> float:
    """docs/parallel/pp.md on 2 ranks: a microbatch crosses every stage boundary twice, once per
    direction.
    """
    return step.num_microbatches * (num_stages - 1) * step.hidden_bytes


def cp_sent(step: Step, *, comm_type: str) -> float:
    """docs/parallel/cp.md on 2 ranks."""
    shape = step.shape
    sizes = {
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
    }
    rank = LayerSizes(
        ModelShape.of(ModelConfig(**sizes)),
        batch_size=step.micro_batch,
        seq_length=shape.seq // 2,
        itemsize=BYTES,
        cp=2,
        cp_comm_type=comm_type,
    )
    operations = key_values_over_cp(rank, heads=shape.heads, groups=shape.kv_heads)
    num_bytes = sum(sent.forward + sent.backward for sent in operations)
    return step.num_microbatches * shape.layers * num_bytes


def ep_sent(step: Step) -> float:
    """docs/parallel/ep.md on 2 ranks, with balanced experts."""
    shape = step.shape
    tokens = TOKEN_TRIPS * step.micro_batch * shape.seq * TOPK * shape.hidden * BYTES
    num_bytes = EXPERT_BYTES["ep", "all_to_all"](tokens, NUM_EXPERTS * COUNT_BYTES, 2)
    return step.num_microbatches * shape.layers // EVERY * num_bytes


@dataclass(frozen=True)
class Layout:
    """One row of the table.

    Attributes:
        name: its name in the table.
        axis: the group whose bytes are shown.
        form: closed form of the bytes; None for torch, whose bytes are not counted.
        flags: flags in addition to those of all layouts.
        num_sharers: ranks that read the same samples.
        micro_batch: samples per microbatch; None for all samples of a rank in one microbatch.
        reference: data parallelism with the same model.
        torch_strategy: a strategy of baselines.py, instead of nanotrain.
    """

    name: str
    axis: str = ""
    form: Form | None = None
    flags: tuple[str, ...] = ()
    num_sharers: int = 1
    micro_batch: int | None = None
    reference: str = "DP"
    torch_strategy: str | None = None

    def step(self, job: Job, num_processes: int) -> Step:
        """How a rank's samples of the global batch are split into microbatches."""
        samples = job.shape.micro_batch * self.num_sharers
        micro_batch = self.micro_batch or samples
        return Step(
            job.shape, micro_batch, samples // micro_batch, num_processes // self.num_sharers
        )

    def contender(self, job: Job, num_processes: int) -> Contender:
        """The contender to launch."""
        micro_batch = self.step(job, num_processes).micro_batch
        if self.torch_strategy is not None:
            command = torch_command(self.torch_strategy, f"--micro-batch={micro_batch}")
        else:
            batch = f"--global-batch-size={job.shape.micro_batch * num_processes}"
            command = nanotrain_command(*ZERO, batch, *self.flags, micro_batch=micro_batch)
        return Contender(self.name, num_processes, command)


ZERO = ("--data-parallel-sharding-strategy=optim", "--overlap-grad-reduce", "--num-workers=0")
TP = "--tensor-model-parallel-size=2"
PP = "--pipeline-model-parallel-size=2"
CP = "--context-parallel-size=2"
MOE = (
    f"--num-experts={NUM_EXPERTS}",
    f"--moe-router-topk={TOPK}",
    f"--moe-ffn-hidden-size={EXPERT_WIDTH}",
    f"--moe-layer-freq={EVERY}",
)
VIRTUAL = "--num-virtual-stages-per-pipeline-rank=2"
TORCH_TP = "torch FSDP2 + TP2 SP"


def tp_layout(name: str, *flags: str) -> Layout:
    """Tensor parallelism, with or without sequence parallelism."""
    form = partial(tp_sent, sequence_parallel=bool(flags))
    return Layout(name, "tp", form, (TP, *flags), num_sharers=2)


def pp_layout(schedule: str, *flags: str) -> Layout:
    """A pipeline of 2 ranks with one of the schedules, 4 microbatches per step."""
    form = partial(pp_sent, num_stages=4 if flags else 2)
    flags = (PP, f"--pipeline-schedule={schedule}", *flags)
    return Layout(f"PP2 {schedule}", "pp", form, flags, num_sharers=2, micro_batch=2)


def cp_layout(comm_type: str) -> Layout:
    """Context parallelism with one of the attention backends."""
    form = partial(cp_sent, comm_type=comm_type)
    flags = (CP, f"--cp-comm-type={comm_type}")
    return Layout(f"CP2 {comm_type}", "cp", form, flags, num_sharers=2)


LAYOUTS = (
    Layout("DP", "dp_shard", dp_sent),
    Layout("torch FSDP2", torch_strategy="fsdp2"),
    Layout(TORCH_TP, torch_strategy="fsdp2_tp", num_sharers=2),
    tp_layout("TP2"),
    tp_layout("TP2 SP", "--sequence-parallel"),
    *(pp_layout(schedule) for schedule in ("gpipe", "1f1b", "zb-h1")),
    pp_layout("interleaved", VIRTUAL),
    *(cp_layout(comm_type) for comm_type in ("p2p", "allgather", "a2a")),
    Layout("MoE DP", "expert_dp_shard", expert_dp_sent, MOE, reference="MoE DP"),
    Layout("MoE EP2", "ep", ep_sent, (*MOE, "--expert-model-parallel-size=2"), reference="MoE DP"),
)
HEADS = (
    "processes",
    "layout",
    "tokens/s",
    "x DP",
    "by CPU",
    "x torch's TP",
    "by CPU",
    "group",
    "MB sent",
    "form",
    "off",
)


def row(
    layout: Layout, job: Job, *, num_processes: int, measured: dict[str, list[Outcome]]
) -> list[str]:
    """The table cells of one layout."""
    outcomes = measured[layout.name]
    speed = statistics.median(outcome.tokens_per_second for outcome in outcomes)
    ratios = []
    for rival in (layout.reference, TORCH_TP if layout.reference == "DP" else ""):
        ratios += ratios_to(outcomes, measured[rival]) if rival in measured else ["", ""]
    traffic = ["", "", "", ""]
    if layout.form is not None:
        sent, form = outcomes[-1].sent[layout.axis], layout.form(layout.step(job, num_processes))
        off = "0" if sent == form else f"{sent - form:+,.0f} B ({sent / form - 1:+.1%})"
        traffic = [layout.axis, f"{sent / 1e6:.3f}", f"{form / 1e6:.3f}", off]
    return [str(num_processes), layout.name, f"{speed:,.0f}", *ratios, *traffic]


def ratios_to(outcomes: list[Outcome], rival: list[Outcome]) -> list[str]:
    """Ratios of tokens per second and per CPU second; above 1 the rival is slower."""
    attributes = ("tokens_per_second", "tokens_per_cpu_second")
    return [Figure.of(attribute, outcomes, [rival]).cells()[1] for attribute in attributes]


def main() -> None:
    """Run every world size and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("smoke", "10m", "25m"), default="10m")
    parser.add_argument("--ranks", type=int, nargs="+", choices=(2, 4), default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--only", default="", help="run layouts whose name contains this, and their references"
    )
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--note", default="", help="date and machine, for the file")
    args = parser.parse_args()

    chosen = {layout.name for layout in LAYOUTS if args.only in layout.name}
    chosen |= {layout.reference for layout in LAYOUTS if layout.name in chosen} | {TORCH_TP}
    layouts = [layout for layout in LAYOUTS if layout.name in chosen]
    job = Job(args.model, "fp32", args.warmup, args.steps)
    lines = [list(HEADS), ["---"] * len(HEADS)]
    for num_processes in args.ranks:
        contenders = [layout.contender(job, num_processes) for layout in layouts]
        ours = [
            c
            for c, layout in zip(contenders, layouts, strict=True)
            if layout.torch_strategy is None
        ]
        measured = run(job, [ours, *([c] for c in contenders if c not in ours)], args.rounds)
        lines += [
            row(layout, job, num_processes=num_processes, measured=measured) for layout in layouts
        ]
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    print(body)
    if args.output:
        args.output.write_text(ABOUT.format(**vars(args), torch=torch.__version__, body=body))


if __name__ == "__main__":
    main()

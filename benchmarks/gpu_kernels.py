"""Every kernel alone on one GPU: is it right, and how fast is it.

    python benchmarks/gpu_kernels.py [--group experts attention] [--minutes 3]
    python benchmarks/gpu_kernels.py --device cpu      # small sizes; Triton's interpreter, if installed

A row prints its time, GB/s or TFLOP/s, and the relative error beside a reference in fp32 or fp64.
A row above its error bound is WRONG; one that raises is FAILED; both make the exit code 1. Each
group runs in a process of its own, because after an illegal access to memory every later kernel of
a process fails, and a kernel that never ends holds up only its group.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_measure import Machine, Measurement, failed, measure, relative_error
from gpu_products import bf16_experts, dense_products, fp8_casts, fp8_experts, fp8_products
from gpu_rows import FAILED, LEFT_OUT, Row, RowReport
from torch import Tensor

from nanotrain.attention.delta_rule import DeltaInputs, delta_rule
from nanotrain.attention.ssd import ssd
from nanotrain.kernels.permute import TORCH_FORM, form_of, plan_permutation

GROUP_SECONDS = 120.0  # what a group may take
CPU_SCALE = 64  # what sizes are divided by on a CPU


# name -> query heads, key/value heads, head dims of keys and values, whether values are padded
ATTENTION = {
    "32 heads of 128, 8 of keys": (32, 8, 128, 128, False),
    "32 heads of 64, 8 of keys": (32, 8, 64, 64, False),
    "MLA, 16 heads of 192/128": (16, 16, 192, 128, False),
    "MLA, 16 heads of 192/128, values padded": (16, 16, 192, 128, True),
    "16 heads of 256": (16, 16, 256, 256, False),
}
# kernels that SDPA may take; none named: as torch selects
SDPA_KERNELS: tuple[tuple[str, ...], ...] = ((), ("FLASH_ATTENTION",), ("CUDNN_ATTENTION",))


def attention(machine: Machine) -> Iterator[Measurement]:
    """Causal attention, forward and backward, by each of torch's kernels."""
    from nanotrain.attention.sdpa import attend, restricted

    length = 4096 // machine.scale
    kernels = SDPA_KERNELS if machine.device == "cuda" else SDPA_KERNELS[:1]
    for name, (heads, groups, width, value_width, pads) in ATTENTION.items():
        query = machine.tensor(2, length, heads, width).requires_grad_()
        key = machine.tensor(2, length, groups, width).requires_grad_()
        value = machine.tensor(2, length, groups, value_width).requires_grad_()

        def forward(query=query, key=key, value=value, pads=pads) -> Tensor:
            return attend(query, key=key, value=value, pads_values=pads)

        def error(forward=forward, query=query, key=key, value=value) -> float:
            sample = [x.detach()[:1].float() for x in (query, key, value)]
            expected = attend(sample[0], key=sample[1], value=sample[2], repeats_heads=True)
            return relative_error(forward()[:1], expected)

        for allowed in kernels:

            def run(forward=forward, allowed=allowed) -> None:
                with restricted(allowed):
                    out = forward()
                    out.backward(torch.ones_like(out))

            yield Measurement(
                f"attention, {name}, {' '.join(allowed) or 'torch chooses'}",
                run,
                flops=3.5 * 2 * heads * length**2 * (width + value_width),
                error=error,
            )


def permutation(machine: Machine) -> Iterator[Measurement]:
    """Permutation of tokens into the order of experts, and back."""
    topk = 8
    tokens, hidden = machine.tokens, machine.hidden // 2
    ids = torch.rand(tokens, 64, device=machine.device).topk(topk).indices
    plan = plan_permutation(ids, 64)
    x = machine.tensor(tokens, hidden)
    pairs = machine.tensor(tokens * topk, hidden)
    weights = torch.rand(tokens, topk, device=machine.device)
    form = form_of(x)
    moved = 2 * x.numel() * (topk + 1)
    given = {"order": plan.order, "inverse": plan.inverse, "weights": weights}
    yield Measurement("plan of a permutation", lambda: plan_permutation(ids, 64))
    calls = {
        "spread": lambda form: form.spread(x, plan.order, inverse=plan.inverse),
        "combine": lambda form: form.combine(pairs, plan.inverse, weights=weights),
        "combine backward": lambda form: form.combine_backward(x, pairs, **given)[0],
    }
    for name, call in calls.items():
        yield Measurement(
            f"permutation, {name}",
            lambda call=call: call(form),
            moved_bytes=moved,
            error=lambda call=call: relative_error(call(form), call(TORCH_FORM)),
        )


def pointwise(machine: Machine) -> Iterator[Measurement]:
    """Kernels of the loss and of SwiGLU."""
    from nanotrain.kernels import triton_softmax, triton_swiglu

    logits = machine.tensor(2048 // machine.scale, 128256 // machine.scale)
    ones = torch.ones(len(logits), 1, device=machine.device)
    column = torch.zeros(len(logits), 1, device=machine.device, dtype=torch.int64)
    lse = logits.float().logsumexp(1, keepdim=True)
    facts = {"logsumexp": lse, "column": column, "local_mask": ones, "scale": ones}
    gradient = logits.float().softmax(1) - F.one_hot(column[:, 0], logits.shape[1])
    yield Measurement(
        "log-sum-exp of logits",
        lambda: triton_softmax.row_logsumexp(logits),
        moved_bytes=2 * logits.numel(),
        error=lambda: relative_error(triton_softmax.row_logsumexp(logits), lse),
        bound=1e-5,
    )
    work = logits.clone()
    yield Measurement(
        "gradient of logits, in place",
        lambda: triton_softmax.softmax_gradient_(work, **facts),
        moved_bytes=4 * logits.numel(),
        error=lambda: relative_error(
            triton_softmax.softmax_gradient_(logits.clone(), **facts), gradient
        ),
    )
    gate = machine.tensor(machine.tokens, machine.hidden)
    up = machine.tensor(machine.tokens, machine.hidden)
    yield Measurement(
        "SwiGLU",
        lambda: triton_swiglu.swiglu(gate, up),
        moved_bytes=6 * gate.numel(),
        error=lambda: relative_error(
            triton_swiglu.swiglu(gate, up), F.silu(gate.float()) * up.float()
        ),
    )


# name -> heads of keys, heads of values, dims of keys and values, decays per head
SCANS = {
    "Mamba-2, nemotron nano": (8, 64, 128, 64, 1),
    "gated delta rule, qwen3_next": (16, 32, 128, 128, 1),
    "Kimi delta attention": (32, 32, 128, 128, 128),
}


def scans(machine: Machine) -> Iterator[Measurement]:
    """Scans of 8,192 tokens, forward and backward, in bf16; the reference has fp32 inputs."""
    for name, (groups, heads, key_dim, value_dim, decays) in SCANS.items():
        tokens = machine.tokens
        is_ssd = name.startswith("Mamba")
        rule = ssd if is_ssd else delta_rule
        inputs = DeltaInputs(
            query=machine.tensor(1, tokens, groups, key_dim).requires_grad_(),
            key=machine.tensor(1, tokens, groups, key_dim).requires_grad_(),
            value=machine.tensor(1, tokens, heads, value_dim).requires_grad_(),
            decay=-torch.rand(1, tokens, heads, decays, device=machine.device),
            beta=torch.rand(1, tokens, heads, 1, device=machine.device),
        )

        def run(rule=rule, inputs=inputs) -> None:
            out, _ = rule(inputs)
            out.backward(torch.ones_like(out))

        def error(rule=rule, inputs=inputs) -> float:
            expected, _ = rule(inputs.map(lambda tensor: tensor.detach().double()))
            return relative_error(rule(inputs)[0], expected)

        yield Measurement(f"scan, {name}, forward and backward", run, error=error, bound=2e-2)


def router(machine: Machine) -> Iterator[Measurement]:
    """The products of a router with 256 experts."""
    from nanotrain.model.router import router_logits

    x = machine.tensor(machine.tokens, machine.hidden).requires_grad_()
    weight = torch.randn(256, machine.hidden, device=machine.device).requires_grad_()

    def run() -> None:
        logits = router_logits(x, weight)
        logits.backward(torch.ones_like(logits))

    yield Measurement(
        "router, forward and backward",
        run,
        flops=6 * x.numel() * 256,
        error=lambda: relative_error(router_logits(x, weight), x.double() @ weight.double().t()),
    )


def host(machine: Machine) -> Iterator[Measurement]:
    """Launches of tiny kernels, whose time is that of the host."""
    tiny = torch.zeros(8, device=machine.device)
    yield Measurement("300 launches of add_", lambda: [tiny.add_(1) for _ in range(300)])
    from nanotrain.kernels import triton_swiglu

    rows = machine.tensor(8, 64)
    yield Measurement(
        "300 launches of a Triton kernel",
        lambda: [triton_swiglu.swiglu(rows, rows) for _ in range(300)],
    )


Maker = Callable[[Machine], Iterator[Measurement]]
GROUPS: dict[str, tuple[Maker, ...]] = {
    "products": (dense_products, fp8_casts, fp8_products),
    "experts": (bf16_experts, fp8_experts),
    "attention": (attention,),
    "permutation": (permutation,),
    "pointwise": (pointwise,),
    "scans": (scans,),
    "router": (router,),
    "host": (host,),
}


def run_group(name: str, machine: Machine) -> Iterator[Row]:
    """The rows of a group; a maker that raises leaves out its own rows only."""
    torch.manual_seed(0)
    for maker in GROUPS[name]:
        try:
            for measurement in maker(machine):
                yield measure(measurement, machine.device)
        except Exception as fault:
            yield failed(f"{name}: {maker.__name__}", fault)


def launch_group(name: str, device: str, *, timeout_s: float) -> Iterator[Row]:
    """Run a group in a process of its own; the rows as they come."""
    command = [sys.executable, str(Path(__file__)), "--device", device, "--one-group", name]
    environment = dict(os.environ)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    process = subprocess.Popen(
        ["timeout", f"{timeout_s:.0f}", *command],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None, "the output is a pipe"
    for line in process.stdout:
        if line.startswith("{"):
            yield Row(**json.loads(line))
    code = process.wait()
    if code == 124:
        yield Row(f"{name}: its other rows", FAILED, f"had not ended after {timeout_s:.0f} s")
    elif code:
        yield Row(f"{name}: its process", FAILED, f"ended with code {code}")


def check_kernels(report: RowReport, groups: Sequence[str], device: str, minutes: float) -> None:
    """Add the rows of all groups to a report, within some minutes."""
    end = time.monotonic() + 60 * minutes
    for name in groups:
        left = end - time.monotonic()
        if left < 10:
            report.add(Row(f"{name}: all rows", LEFT_OUT, "the time was up"))
            continue
        for row in launch_group(name, device, timeout_s=min(left, GROUP_SECONDS)):
            report.add(row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the kernels; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--group", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="folder of the table")
    parser.add_argument("--one-group", choices=GROUPS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing to measure; --device cpu runs the rows at small sizes")
        return 2
    if args.one_group:
        machine = Machine(args.device, scale=1 if args.device == "cuda" else CPU_SCALE)
        for row in run_group(args.one_group, machine):
            print(json.dumps(vars(row)), flush=True)
        return 0
    report = RowReport("kernels", folder=args.out, machine=f"torch {torch.__version__}")
    check_kernels(report, args.group, args.device, args.minutes)
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""The gated delta rule and Mamba-2 beside the chunked torch code of transformers, forward and
backward on one thread.

    python benchmarks/linear_attention.py

Both sides run in turn in one process; the table shows the least CPU time of each, their ratio, and
the bytes that are kept for the backward.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from nanotrain.attention.delta_rule import delta_rule
from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.attention.ssd import ssd

LENGTH, ROUNDS, MIB = 2048, 4, 2**20
# heads of queries and keys, heads of values, channels of each; the ratio of heads is that of
# Qwen3-Next
SHAPES = {
    "gated delta rule": (4, 8, 128),
    "decays per channel": (4, 4, 128),
    "Mamba-2": (2, 16, 64),
}
MAMBA_CHUNK = 128  # of Nemotron-H


def ours(inputs: DeltaInputs) -> Tensor:
    """The rule of this package."""
    return delta_rule(inputs)[0]


def theirs(inputs: DeltaInputs) -> Tensor:
    """The rule of transformers without kernels."""
    is_per_channel = inputs.decay.shape[-1] > 1
    rule = chunk_kimi_delta_attention if is_per_channel else torch_chunk_gated_delta_rule
    decay = inputs.decay if is_per_channel else inputs.decay[..., 0]
    out: Tensor = getattr(rule, "__wrapped__", rule)(
        *(inputs.query, inputs.key, inputs.value, decay, inputs.beta[..., 0]),
        use_qk_l2norm_in_kernel=True,
    )[0]
    return out


def their_ssd(inputs: DeltaInputs) -> Tensor:
    """The scan of transformers, whose decays are a rate of each head times the step."""
    rates = -torch.ones(inputs.value.shape[2])
    scan = getattr(mamba2_chunk_scan, "__wrapped__", mamba2_chunk_scan)
    out: Tensor = scan(
        *(inputs.value, inputs.beta[..., 0], rates, inputs.key, inputs.query),
        chunk_size=MAMBA_CHUNK,
    )
    return out


def our_ssd(inputs: DeltaInputs) -> Tensor:
    """The scan of this package."""
    return ssd(replace(inputs, decay=-inputs.beta))[0]


def measure(rule: Callable[[DeltaInputs], Tensor], inputs: DeltaInputs) -> tuple[float, float]:
    """Milliseconds of CPU time of one forward and backward, and bytes kept between them."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    start = time.process_time()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = rule(inputs)
    out.backward(torch.ones_like(out))
    return (time.process_time() - start) * 1e3, sum(kept.values())


def main() -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    print(f"{LENGTH} tokens in fp32; CPU milliseconds, and MiB kept for the backward\n")
    print(
        "| | heads | transformers | nanotrain | ratio | kept | kept |\n|---|---|---:|---:|---:|---:|---:|"
    )
    for name, (groups, heads, channels) in SHAPES.items():
        width = channels if name == "decays per channel" else 1
        inputs = DeltaInputs(
            torch.randn(1, LENGTH, groups, channels),
            torch.randn(1, LENGTH, groups, channels),
            torch.randn(1, LENGTH, heads, channels),
            -torch.rand(1, LENGTH, heads, width),
            torch.rand(1, LENGTH, heads, 1),
        ).map(lambda x: x.requires_grad_())
        sides = (their_ssd, our_ssd) if name == "Mamba-2" else (theirs, ours)
        rounds = [tuple(measure(side, inputs) for side in sides) for _ in range(ROUNDS)]
        (their_ms, their_bytes), (our_ms, our_bytes) = (
            min(side) for side in zip(*rounds, strict=True)
        )
        print(
            f"| {name} | {groups}, {heads} x {channels} | {their_ms:.0f} | {our_ms:.0f} | {our_ms / their_ms:.2f} "
            f"| {their_bytes / MIB:.0f} | {our_bytes / MIB:.0f} |"
        )


if __name__ == "__main__":
    main()

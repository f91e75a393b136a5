"""Small inputs of the Triton kernels of scans, the rules and their results in fp64."""

from dataclasses import replace

import torch
from torch import Tensor

from nanotrain.attention.chunk_scan import delta_rule_by_triton, ssd_by_triton
from nanotrain.attention.scan_inputs import DeltaInputs
from tests.attention.delta_inputs import recurrence, ssd_recurrence

CHUNK, LENGTH, HEADS, KEY_DIM, VALUE_DIM = 16, 21, 2, 18, 20
# groups of heads, and whether decays are per channel
KINDS = {"mamba2": (1, False), "gated_delta_net": (1, False), "kda": (2, True)}


def small_inputs(kind: str, *, has_documents: bool) -> tuple[DeltaInputs, Tensor]:
    """Inputs in fp64 with gradients, two chunks long, and an initial state."""
    groups, by_channel = KINDS[kind]
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, LENGTH, *shape, generator=draw, dtype=torch.float64)

    decay = -normal(HEADS, KEY_DIM if by_channel else 1).exp() * 0.3
    inputs = DeltaInputs(
        query=normal(groups, KEY_DIM),
        key=normal(groups, KEY_DIM) + 0.5,
        value=normal(HEADS, VALUE_DIM),
        decay=decay,
        beta=normal(HEADS, 1).sigmoid(),
    ).map(lambda x: x.half().double().requires_grad_())  # numbers of 16 bits, exactly
    shape = (VALUE_DIM, KEY_DIM) if kind == "mamba2" else (KEY_DIM, VALUE_DIM)
    state = torch.randn(1, HEADS, *shape, generator=draw, dtype=torch.float64).requires_grad_()
    if has_documents:
        starts = torch.zeros(1, LENGTH, dtype=torch.bool)
        starts[:, [6, 18]] = True
        inputs = replace(inputs, starts=starts)
    return inputs, state


def in_dtype(inputs: DeltaInputs, dtype: torch.dtype) -> DeltaInputs:
    """Leaf copies in a dtype, decays and factors in fp32."""

    def copy(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.detach().to(dtype).requires_grad_()

    return replace(
        inputs,
        query=copy(inputs.query, dtype),
        key=copy(inputs.key, dtype),
        value=copy(inputs.value, dtype),
        decay=copy(inputs.decay, torch.float32),
        beta=copy(inputs.beta, torch.float32),
    )


def expected(kind: str, inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and final state, token after token."""
    rule = ssd_recurrence if kind == "mamba2" else recurrence
    return rule(inputs, state)


def computed(kind: str, inputs: DeltaInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs and final state by the kernels."""
    rule = ssd_by_triton if kind == "mamba2" else delta_rule_by_triton
    return rule(inputs, state)


def distance(found: Tensor, exact: Tensor) -> float:
    """Length of the difference, relative to that of the exact tensor."""
    difference = found.double() - exact
    return float(difference.norm() / exact.norm())

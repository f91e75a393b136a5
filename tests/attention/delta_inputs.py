"""Random inputs of the gated delta rule, the rule and the scan of Mamba-2 token by token."""

import torch
from torch import Tensor

from nanotrain.attention.delta_rule import NORM_EPS
from nanotrain.attention.scan_inputs import DeltaInputs

BATCH, GROUPS, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 4, 8, 6


def random_inputs(
    length: int, *, by_channel: bool, documents: bool = False, dtype: torch.dtype = torch.float64
) -> DeltaInputs:
    """Inputs that need gradients; borders of documents lie at other tokens of each sample."""
    draw = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(BATCH, length, *shape, generator=draw, dtype=torch.float64)

    groups = HEADS if by_channel else GROUPS  # KDA has no groups
    inputs = DeltaInputs(
        query=normal(groups, KEY_DIM),
        key=normal(groups, KEY_DIM) + 0.5,
        value=normal(HEADS, VALUE_DIM),
        decay=-normal(HEADS, KEY_DIM if by_channel else 1).exp() * 0.3,
        beta=normal(HEADS, 1).sigmoid(),
    ).map(lambda x: x.to(dtype).requires_grad_())
    if not documents:
        return inputs
    return DeltaInputs(*tensors(inputs), starts=torch.rand(BATCH, length, generator=draw) < 0.15)


def tensors(inputs: DeltaInputs) -> tuple[Tensor, ...]:
    """What has gradients."""
    return inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta


def recurrence(inputs: DeltaInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and final state, token after token."""
    repeats = inputs.value.shape[2] // inputs.key.shape[2]
    query, key = (
        (x / ((x * x).sum(-1, keepdim=True) + NORM_EPS).sqrt()).repeat_interleave(repeats, dim=2)
        for x in (inputs.query, inputs.key)
    )
    if state is None:
        state = key.new_zeros(len(key), key.shape[2], key.shape[3], inputs.value.shape[3])
    outputs = []
    for t in range(key.shape[1]):
        if inputs.starts is not None:
            state = state * ~inputs.starts[:, t, None, None, None]
        state = state * inputs.decay[:, t, :, :, None].exp()
        predicted = (state * key[:, t, :, :, None]).sum(-2)
        correction = inputs.beta[:, t] * (inputs.value[:, t] - predicted)
        state = state + key[:, t, :, :, None] * correction[:, :, None]
        outputs.append((state * query[:, t, :, :, None]).sum(-2) / query.shape[-1] ** 0.5)
    return torch.stack(outputs, dim=1), state


def ssd_recurrence(inputs: DeltaInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and final state of Mamba-2, token after token."""
    batch, length, heads, value_dim = inputs.value.shape
    repeats = heads // inputs.key.shape[2]
    query, key = (x.repeat_interleave(repeats, dim=2) for x in (inputs.query, inputs.key))
    state = query.new_zeros(batch, heads, value_dim, key.shape[3]) if state is None else state
    outputs = []
    for t in range(length):
        if inputs.starts is not None:
            state = state * ~inputs.starts[:, t, None, None, None]
        state = state * inputs.decay[:, t, ..., None].exp()
        state = state + (inputs.beta[:, t] * inputs.value[:, t])[..., None] * key[:, t, :, None]
        outputs.append((state * query[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1), state

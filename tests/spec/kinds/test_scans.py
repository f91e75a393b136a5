"""Costs of scans are those of the operators that torch runs, counted on the meta device."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from nanotrain.attention.delta_rule import delta_rule
from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.attention.ssd import ssd
from nanotrain.config.layer_kinds import LinearAttentionConfig, MambaConfig
from nanotrain.config.model import ModelConfig
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Scan
from nanotrain.spec.shape import ModelShape

ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::new_empty_strided")
VIEWS = ("aten::detach", "aten::_unsafe_view", "aten::_reshape_alias", *ALLOCATIONS)
Counted = tuple[int, int, int]  # launches, bytes and FLOPs


class OperatorCount(TorchDispatchMode):
    """Operators that compute, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and func._schema.name not in VIEWS:
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            self.launches += 1
            self.num_bytes += sum(map(stored_bytes, tensors))
        return out


def stored_bytes(x: Tensor) -> int:
    """Bytes that a tensor reads, once where it is expanded."""
    return (
        min(x.numel() * x.itemsize, x.untyped_storage().nbytes())
        if 0 in x.stride()
        else x.numel() * x.itemsize
    )


def counted(kind: str, length: int, groups: int, heads: int, key: int, value: int) -> list[Counted]:
    """Forward and backward of a scan in bf16."""
    shapes = {
        "query": (groups, key),
        "key": (groups, key),
        "value": (heads, value),
        "decay": (heads, key if kind == "kda" else 1),
        "beta": (heads, 1),
    }
    tensors = {}
    for name, shape in shapes.items():
        dtype = torch.float32 if name in ("decay", "beta") else torch.bfloat16
        tensors[name] = torch.empty(
            1, length, *shape, dtype=dtype, device="meta", requires_grad=True
        )
    scan = ssd if kind == "mamba2" else delta_rule
    results = []
    with OperatorCount() as count, FlopCounterMode(display=False) as flops:
        out, _ = scan(DeltaInputs(**tensors))
    results.append((count.launches, count.num_bytes, flops.get_total_flops()))
    grad = torch.empty_like(out)
    with OperatorCount() as count, FlopCounterMode(display=False) as flops:
        out.backward(grad)
    results.append((count.launches, count.num_bytes, flops.get_total_flops()))
    return results


@pytest.mark.parametrize("kind", ["mamba2", "gated_delta_net", "kda"])
@pytest.mark.parametrize(
    ("length", "groups", "heads", "key", "value"),
    [(2048, 16, 32, 128, 128), (8192, 8, 64, 128, 64), (1024, 2, 8, 64, 64)],
)
def test_a_scan_costs_what_its_operators_do(
    kind: str, length: int, groups: int, heads: int, key: int, value: int
) -> None:
    groups = heads if kind == "kda" else groups
    model = ModelConfig(
        num_layers=1,
        hidden_size=heads * value // 2,
        num_attention_heads=1,
        vocab_size=8,
        linear_attention_type=kind,  # type: ignore[arg-type]
        linear_attention=LinearAttentionConfig(
            num_key_heads=groups, num_value_heads=heads, key_head_dim=key, value_head_dim=value
        ),
        mamba=MambaConfig(state_dim=key, head_dim=value, num_groups=groups, num_heads=heads),
    )
    sizes = LayerSizes.for_model(ModelShape.of(model), seq_length=length)
    operators = MIXERS[kind].operators(sizes)
    (scan,) = (operator for operator in operators if isinstance(operator, Scan))
    results = counted(kind, length, groups, heads, key, value)
    for cost, (launches, num_bytes, flops) in zip(
        (scan.forward, scan.backward), results, strict=True
    ):
        assert cost.launches == pytest.approx(launches, rel=0.05)
        assert cost.num_bytes == pytest.approx(num_bytes, rel=0.06)
        assert cost.flops == pytest.approx(flops, rel=0.01)

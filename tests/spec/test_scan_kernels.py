"""Costs of the Triton kernels of scans are those of the tensors that they are launched with."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.spec.scan_cost import ScanSizes
from nanotrain.spec.scan_kernels import kernel_costs

pytest.importorskip("triton")

from nanotrain.kernels import triton_chunk_scan, triton_chunk_scan_backward
from nanotrain.kernels.triton_scan_inputs import Inputs

SIZES = ScanSizes(tokens=512, num_chunks=8, chunk=64, heads=4, groups=2, key=128, value=128)
RULES = ("mamba2", "gated_delta_net", "kda")
# tensors that each kernel reads and writes, by the names of its arguments' fields
VECTORS = ("query", "key", "decay")
TOUCHED = {
    "_prepare": (*VECTORS, "pairs", "queries", "keys"),
    "_sum_back": ("grad_decay", "grad_decay"),
    "_walk": ("key", "decay", "targets", "rate", "states", "corrections", "reads"),
    "_walk_back": (*VECTORS, "pairs", "reads", "grad_out", "states", "corrections"),
    "_chunk_gradients": (
        *VECTORS, "corrections", "kept_states", "kept_corrections", "grad_out", "states", "reads",
        "grad_query", "grad_key", "grad_decay",
    ),
    "_system_gradients": (
        "key", "decay", "value", "rate", "reads", "corrections", "grad_key", "grad_key",
        "grad_value", "grad_decay", "grad_decay", "grad_rate",
    ),
}  # fmt: skip
DELTA = {"_prepare": ("value", "targets", "reads", "rate")}
# what a walk reads in place of vectors and decays, where every channel has its decay
DECAYED = {"query": "queries", "key": "keys"}
FORWARD_WALK = ("query", "key", "decay", "pairs", "targets", "reads", "out")


class Launches:
    """Bytes of the launches of each kernel, in order."""

    def __init__(self) -> None:
        self.bytes: list[tuple[str, int]] = []

    def kernel(self, name: str) -> Any:
        """A kernel that is not run."""
        recorder = self

        class Kernel:
            def __getitem__(self, grid: Any) -> Any:
                def launch(*args: Any, **options: Any) -> None:
                    recorder.bytes.append((name, touched_bytes(name, args)))

                return launch

        return Kernel()


def walked(names: tuple[str, ...], tensors: dict[str, Tensor | None]) -> tuple[str, ...]:
    """The names of what a walk reads; of decays per channel only the last token of a chunk."""
    if tensors["queries"] is None:
        return names
    return tuple(DECAYED.get(each, each) for each in names if each != "decay")


def touched_bytes(name: str, args: Any) -> int:
    """Bytes of the tensors that a kernel touches."""
    names = TOUCHED[name]
    if name == "_sum_back":
        return len(names) * int(args[0].nbytes)
    tensors: dict[str, Tensor | None] = args[0]._asdict()
    if name == "_prepare":
        tensors |= {"single_decay": args[1], **args[2]._asdict()}
        if args[1] is not None:
            names = (*names, "single_decay")
        if tensors["reads"] is not None:
            names = (*names, *DELTA["_prepare"])
    elif name == "_walk":
        tensors |= args[1]._asdict()
        kept, tensors["out"] = args[3], args[4]
        if kept is None:
            names = FORWARD_WALK
        else:
            tensors |= kept._asdict()
        if tensors["reads"] is None:
            names = (*names, "rate")
            names = tuple(each for each in names if each not in ("reads", "corrections"))
        names = walked(names, tensors)
    elif name == "_walk_back":
        tensors |= {**args[1]._asdict(), "grad_out": args[2], **args[4]._asdict()}
        tensors["reads"] = args[1].reads
        names = walked(names, tensors)
    elif name == "_chunk_gradients":
        kept = {f"kept_{key}": value for key, value in args[1]._asdict().items()}
        grads = {f"grad_{key}": value for key, value in args[4]._asdict().items()}
        tensors |= {**kept, "grad_out": args[2], **args[3]._asdict(), **grads}
        if tensors["reads"] is None:
            names = (*names, "rate", "grad_rate", "grad_value")
    else:
        grads = {f"grad_{key}": value for key, value in args[2]._asdict().items()}
        tensors |= {**args[1]._asdict(), **grads}
    given = [tensors[each] for each in names]
    return sum(x.nbytes for x in given if x is not None)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    recorder = Launches()
    for module in (triton_chunk_scan, triton_chunk_scan_backward):
        for name in TOUCHED:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, recorder.kernel(name))
    yield recorder


@pytest.mark.parametrize("rule", RULES)
def test_bytes_are_those_of_the_launched_tensors(rule: str, launches: Launches) -> None:
    sizes = replace(SIZES, groups=4) if rule == "kda" else SIZES
    corrects = rule != "mamba2"

    def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(1, 512, *shape, dtype=dtype, device="meta")

    decays = sizes.key if rule == "kda" else 1
    value = on_meta(sizes.heads, sizes.value)
    inputs = Inputs(
        on_meta(sizes.groups, sizes.key),
        on_meta(sizes.groups, sizes.key),
        value,
        on_meta(sizes.heads, decays, dtype=torch.float32),
        on_meta(sizes.heads, dtype=torch.float32),
        None,
    )
    constants = triton_chunk_scan.scan_sizes(inputs, corrects=corrects)
    decay = torch.empty_like(inputs.decay)
    prepared = triton_chunk_scan.prepare(inputs, constants, decay=decay)
    dtype = torch.bfloat16 if corrects else torch.float32
    out, _ = triton_chunk_scan.walk(inputs, prepared, initial=None, sizes=constants, dtype=dtype)
    num_forward = len(launches.bytes)
    triton_chunk_scan_backward.scan_backward(
        inputs, None, sizes=constants, grad_out=out, grad_final=None
    )
    passes = kernel_costs(rule, sizes, itemsize=2, batch=1)["triton"]
    counted = [list(passes.forward), list(passes.backward)]
    if rule != "kda":  # sums over heads are torch's
        del counted[1][-2]
    for costs, found in zip(
        counted, (launches.bytes[:num_forward], launches.bytes[num_forward:]), strict=True
    ):
        assert len(costs) == len(found)
        for cost, (name, num_bytes) in zip(costs, found, strict=True):
            assert cost.num_bytes == pytest.approx(num_bytes, rel=0.03), name


@pytest.mark.parametrize("rule", RULES)
def test_a_forward_is_few_launches_and_moves_few_times_its_inputs(rule: str) -> None:
    sizes = {
        "mamba2": ScanSizes(8192, 128, 64, 64, 8, 128, 64),
        "gated_delta_net": ScanSizes(4096, 64, 64, 32, 16, 128, 128),
        "kda": ScanSizes(4096, 64, 64, 32, 32, 128, 128),
    }[rule]
    forward = kernel_costs(rule, sizes, itemsize=2, batch=1)["triton"].forward
    vectors = 2 * sizes.groups * sizes.key * 2
    values = sizes.heads * sizes.value * (6 if rule == "mamba2" else 4)
    decays = sizes.heads * (sizes.key if rule == "kda" else 1) * 4
    minimum = sizes.tokens * (vectors + values + decays + sizes.heads * 4)
    assert sum(cost.launches for cost in forward) <= 4
    times = {"mamba2": 1.8, "gated_delta_net": 3.0, "kda": 2.9}[rule]
    assert sum(cost.num_bytes for cost in forward) < times * minimum

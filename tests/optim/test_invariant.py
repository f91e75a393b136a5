"""The step of `--invariant`: the same bits for any borders of shards and ranges."""

from dataclasses import replace

import pytest
import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.invariant import EXACT_ARITHMETIC, in_whole_vectors
from nanotrain.optim.rule import PLAIN_ARITHMETIC, MatrixRule, ParamRange, UpdateStep

NUMEL = 1003


def ranges(sizes: list[int]) -> tuple[list[ParamRange], dict[str, torch.Tensor]]:
    """Ranges of these sizes of the same numbers, and the tensors that they are views of."""
    draw = torch.Generator().manual_seed(0)
    names = ("main", "grad", "exp_avg", "exp_avg_sq")
    flat = {name: torch.randn(NUMEL, generator=draw) for name in names}
    flat["exp_avg_sq"].square_()
    parts = {name: tensor.split(sizes) for name, tensor in flat.items()}
    found = []
    for main, grad, exp_avg, exp_avg_sq in zip(*parts.values(), strict=True):
        state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        found.append(ParamRange(main, grad, state, weight_decay=True))
    return found, flat


def step() -> UpdateStep:
    return UpdateStep(
        OptimConfig(),
        number=torch.tensor(3.0),
        lr=1e-2,
        decoupled_lr=1e-2,
        weight_decay=0.1,
        found_inf=torch.tensor(0.0),
    )


def updated(sizes: list[int], *, is_invariant: bool = True) -> dict[str, torch.Tensor]:
    """The tensors after a step of AdamW on these ranges."""
    rule = OPTIMIZERS["adam"]
    parts, flat = ranges(sizes)
    (in_whole_vectors(rule) if is_invariant else rule).update(parts, step())
    return flat


@pytest.mark.parametrize("sizes", [[1] * 3 + [1000], [7, 333, 663], [64, 939]])
def test_ranges_of_any_size_are_updated_alike(sizes: list[int]) -> None:
    reference = updated([NUMEL])
    assert all(torch.equal(value, reference[name]) for name, value in updated(sizes).items())


def test_the_update_is_that_of_the_rule() -> None:
    plain = updated([NUMEL], is_invariant=False)
    for name, value in updated([NUMEL]).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["muon", "adam_h"])
def test_directions_of_ranges_of_any_size_are_alike(name: str) -> None:
    rule = OPTIMIZERS[name].matrix
    form = in_whole_vectors(OPTIMIZERS[name]).matrix
    assert rule is not None and form is not None

    def directions(sizes: list[int], chosen: MatrixRule = form) -> torch.Tensor:
        parts, flat = ranges(sizes)
        if name == "muon":
            states = [{"momentum_buffer": part.state["exp_avg"]} for part in parts]
            parts = [replace(part, state=state) for part, state in zip(parts, states, strict=True)]
        computed = torch.cat([chosen.direction(part, step()) for part in parts])
        return torch.cat([computed, flat["exp_avg"], flat["exp_avg_sq"]])

    whole = directions([NUMEL])
    assert torch.equal(directions([7, 333, 663]), whole)
    torch.testing.assert_close(directions([NUMEL], rule), whole)


def test_products_are_summed_alike_in_any_parts() -> None:
    left, right = torch.randn(2, NUMEL).double()
    arithmetic = in_whole_vectors(OPTIMIZERS["adam_h"]).matrix.arithmetic
    sums = []
    for sizes in ([NUMEL], [500, 503], [1, 2, 1000]):
        parts = zip(left.split(sizes), right.split(sizes), strict=True)
        bins = sum(arithmetic.dot(a, b) for a, b in parts)
        sums.append(float(arithmetic.join(bins)))
    assert sums[0] == sums[1] == sums[2]
    assert sums[0] == pytest.approx(float(left @ right))


def test_the_norm_does_not_depend_on_shards() -> None:
    grads = torch.randn(NUMEL, dtype=torch.float64)
    device = grads.device
    joined = []
    for sizes in ([NUMEL], [500, 503], [1, 2, 1000]):
        bins = sum(EXACT_ARITHMETIC.local([part], device=device) for part in grads.split(sizes))
        joined.append(float(EXACT_ARITHMETIC.join(bins)))
    assert joined[0] == joined[1] == joined[2]
    plain = PLAIN_ARITHMETIC.join(PLAIN_ARITHMETIC.local([grads.float()], device=device))
    assert joined[0] == pytest.approx(float(plain), rel=1e-6)

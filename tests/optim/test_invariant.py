"""The step of `--invariant`: the same bits for any borders of shards and ranges."""

import pytest
import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.invariant import EXACT_ARITHMETIC, in_whole_vectors
from nanotrain.optim.rule import PLAIN_ARITHMETIC, ParamRange, UpdateStep

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

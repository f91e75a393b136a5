"""`--optimizer adam` on param ranges of flat shards is torch's AdamW on global tensors."""

import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim.adam import ADAM, FusedAdamW
from nanotrain.optim.rule import ParamRange

CONFIG = OptimConfig(lr=1e-2, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)


def param_range(values: torch.Tensor, *, decays: bool) -> ParamRange:
    weight = values.clone()
    weight.grad = torch.zeros_like(weight)
    return ParamRange(weight, {name: torch.zeros_like(weight) for name in ADAM.state_names}, decays)


def reference(values: torch.Tensor, *, weight_decay: float) -> torch.optim.AdamW:
    param = torch.nn.Parameter(values.clone())
    return torch.optim.AdamW([param], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=weight_decay)


def test_ranges_follow_torch_with_and_without_weight_decay():
    # Given a matrix that decays and a bias that does not,
    start = torch.randn(150, generator=torch.Generator().manual_seed(0))
    ranges = [param_range(start[:100], decays=True), param_range(start[100:], decays=False)]
    optimizer = FusedAdamW(ranges, CONFIG)
    references = [reference(start[:100], weight_decay=0.1), reference(start[100:], weight_decay=0.0)]
    # when both are updated with the same gradients,
    for step in range(4):
        grads = torch.randn(150, generator=torch.Generator().manual_seed(step + 1)).split([100, 50])
        for ours, torchs, grad in zip(ranges, references, grads, strict=True):
            ours.main_param.grad.copy_(grad)
            torchs.param_groups[0]["params"][0].grad = grad.clone()
            torchs.step()
        optimizer.step()
    # then weights and moments are equal, and the moments lie where they were laid.
    for ours, torchs in zip(ranges, references, strict=True):
        (param,) = torchs.param_groups[0]["params"]
        torch.testing.assert_close(ours.main_param, param.detach(), rtol=1e-6, atol=1e-7)
        for name in ADAM.state_names:
            torch.testing.assert_close(ours.state[name], torchs.state[param][name], rtol=1e-6, atol=1e-9)


def test_state_exists_before_the_first_step():
    ours = param_range(torch.ones(7), decays=True)
    optimizer = FusedAdamW([ours], CONFIG)
    state = optimizer.state[ours.main_param]
    assert state["exp_avg"] is ours.state["exp_avg"] and state["step"].item() == 0


def test_bias_correction_continues_from_the_saved_step():
    # Given one optimizer that took a step and one whose state was copied and count was set,
    first, second = param_range(torch.ones(5), decays=True), param_range(torch.ones(5), decays=True)
    one, other = FusedAdamW([first], CONFIG), FusedAdamW([second], CONFIG)
    first.main_param.grad.fill_(2.0)
    one.step()
    second.main_param.copy_(first.main_param)
    for name in ADAM.state_names:
        second.state[name].copy_(first.state[name])
    other.state[second.main_param]["step"].fill_(1)
    # when both take the next,
    for ours, optimizer in ((first, one), (second, other)):
        ours.main_param.grad.fill_(-1.0)
        optimizer.step()
    # then they are equal to the bit.
    assert torch.equal(first.main_param, second.main_param)


def test_zero_gradient_and_zero_weight_stay_zero():
    # Gaps and padding are updated along with what lies around them.
    ours = param_range(torch.zeros(9), decays=True)
    optimizer = FusedAdamW([ours], CONFIG)
    for _ in range(3):
        optimizer.step()
    assert not ours.main_param.any()

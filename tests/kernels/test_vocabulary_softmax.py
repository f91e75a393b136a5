"""The softmax part of the vocabulary loss in torch's operators against fp64."""

import pytest
import torch

from nanotrain.kernels.vocabulary_softmax import softmax_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_form_equals_fp64(dtype):
    torch.manual_seed(1)
    logits = (4 * torch.randn(5, 37)).to(dtype)
    exact, column = logits.double().requires_grad_(), torch.tensor([[0], [36], [3], [4], [5]])
    log_probs = exact.log_softmax(1).gather(1, column)[:, 0]
    (-log_probs.sum()).backward()
    picked, gradient = softmax_gradient(logits, column=column, is_local=torch.ones(5, 1), combine=lambda local: local)
    torch.testing.assert_close(picked.double(), log_probs.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-4, atol=1e-6)

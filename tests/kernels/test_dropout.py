"""Dropout: the share that is dropped, masks that do not repeat, and a backward with the mask of the
forward.
"""

import pytest
import torch

from nanotrain.kernels.dropout import dropout, keep_factors, mix_in, sample_words


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_share_that_is_dropped_is_the_rate(rate: float) -> None:
    words = mix_in(sample_words(1, torch.arange(40))[:, None], torch.arange(5000))
    factors = keep_factors(words, rate, dtype=torch.float32)
    torch.testing.assert_close(factors.unique(), torch.tensor([0, 1 / (1 - rate)]))
    dropped = factors == 0
    # 200,000 draws: five standard deviations
    assert dropped.float().mean().item() == pytest.approx(rate, abs=0.005)
    for dim in (0, 1):  # neither samples nor positions repeat, and neighbours are independent
        shifted = dropped.roll(1, dim)
        assert (dropped & shifted).float().mean().item() == pytest.approx(rate**2, abs=0.006)


def test_words_depend_on_the_seed_the_sample_and_all_its_bits() -> None:
    ids = torch.tensor([0, 1, 2**32, 2**33])
    words = [sample_words(seed, ids) for seed in (0, 1, 2**32, 2**40)]
    assert len(set(torch.cat(words).tolist())) == 16
    assert torch.equal(sample_words(5, ids), sample_words(5, ids))
    assert all(0 <= word < 2**32 for word in torch.cat(words).tolist())


def test_the_backward_has_the_mask_of_the_forward_and_kept_elements_grow() -> None:
    x = torch.rand(2, 3, 50, dtype=torch.float64) + 1
    x.requires_grad_()
    words = mix_in(sample_words(0, torch.arange(2))[:, None], torch.arange(3))
    out = dropout(x, words, rate=0.25)
    out.sum().backward()
    kept = out != 0
    assert 0 < kept.sum() < x.numel()
    torch.testing.assert_close(out, torch.where(kept, x / 0.75, 0.0))
    torch.testing.assert_close(x.grad, torch.where(kept, 1 / 0.75, 0.0).double())

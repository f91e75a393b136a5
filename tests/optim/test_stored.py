"""`StoredTensor`: rounding, scales of blocks, and reading back to the bit."""

import pytest
import torch

from nanotrain.optim.stored import SCALE_BLOCK, StoredTensor, stored_bytes

CPU = torch.device("cpu")
NUMEL = 3 * SCALE_BLOCK + 100
# of one element, relative: half a unit in the last of 24, 8 and 11 bits
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def noise(seed: int = 0) -> torch.Tensor:
    """Blocks of very different magnitudes."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    values[:SCALE_BLOCK] *= 1e-12
    values[SCALE_BLOCK : 2 * SCALE_BLOCK] *= 1e9
    return values


@pytest.mark.parametrize("dtype", ROUNDING)
def test_elements_are_rounded_once_and_read_back_to_the_bit(dtype):
    stored = StoredTensor.zeros(NUMEL, dtype, device=CPU)
    assert not stored.read().any()
    stored.write(noise())
    relative = ((stored.read() - noise()) / noise()).abs()
    # fp16 numbers 2^29 times smaller than the largest of their block begin to lose bits
    assert relative.max() <= ROUNDING[dtype]
    before = stored.read().clone()
    stored.write(before.clone())
    assert torch.equal(stored.read(), before)


def test_a_largest_element_that_rounds_up_keeps_its_scale():
    # 2 - 2^-13 becomes 2 in fp16, which has another exponent; the scale must not change when it is
    # read and written.
    values = torch.full((SCALE_BLOCK,), 2.0 - 2.0**-13)
    values[1:] = torch.logspace(-30, 0, SCALE_BLOCK - 1, base=2.0)
    stored = StoredTensor.zeros(SCALE_BLOCK, torch.float16, device=CPU)
    stored.write(values)
    once, scales = stored.read(), stored.scales.clone()
    stored.write(once)
    assert torch.equal(stored.read(), once) and torch.equal(stored.scales, scales)


def test_a_chunk_is_written_without_a_change_of_the_others():
    stored = StoredTensor.zeros(NUMEL, torch.float16, device=CPU)
    stored.write(noise())
    before = stored.read()
    stored.write(noise(1)[SCALE_BLOCK : 2 * SCALE_BLOCK], SCALE_BLOCK)
    after = stored.read()
    assert torch.equal(after[:SCALE_BLOCK], before[:SCALE_BLOCK])
    assert torch.equal(after[2 * SCALE_BLOCK :], before[2 * SCALE_BLOCK :])
    assert torch.equal(
        after[SCALE_BLOCK : 2 * SCALE_BLOCK], stored.read(SCALE_BLOCK, 2 * SCALE_BLOCK)
    )
    assert not torch.equal(after, before)


def test_a_second_moment_is_never_rounded_to_zero():
    values = torch.tensor([1.0, 1e-30, 0.0])
    plain, square = (
        StoredTensor.zeros(3, torch.float16, device=CPU, is_square=is_square)
        for is_square in (0, 1)
    )
    plain.write(values)
    square.write(values)
    assert plain.read()[1] == 0.0
    assert square.read()[1] > 0.0 and square.read()[2] == 0.0


def test_fp32_is_read_as_a_view():
    stored = StoredTensor.zeros(NUMEL, torch.float32, device=CPU)
    stored.read(100, 200).fill_(7.0)
    assert stored.values.sum() == 700.0


@pytest.mark.parametrize("dtype", ROUNDING)
def test_the_bytes_are_those_allocated(dtype):
    stored = StoredTensor.zeros(NUMEL, dtype, device=CPU)
    assert sum(tensor.nbytes for tensor in stored.tensors) == stored_bytes(NUMEL, dtype)

"""Groups of tokens, and the arguments of torch's scaled grouped product: padding and scales, without a GPU."""

import torch

from nanotrain.kernels.fp8 import scaled_grouped_mm
from nanotrain.kernels.fp8.quantize import quantize
from nanotrain.kernels.fp8.scaled_grouped_mm import Groups

OFFS = torch.tensor([3, 3, 20], dtype=torch.int32)  # experts of 3, 0 and 17 tokens; 2 of 22 are dropped
GROUPS = Groups.of(OFFS, num_tokens=22)


def test_every_token_has_its_expert_and_dropped_ones_none() -> None:
    assert GROUPS.experts.tolist() == [0] * 3 + [2] * 17 + [3] * 2
    assert GROUPS.per_token(torch.tensor([[1.0], [2.0], [3.0]]))[:, 0].tolist() == [1.0] * 3 + [3.0] * 19


def test_the_largest_of_each_expert_leaves_dropped_tokens_out() -> None:
    values = torch.arange(22.0)[:, None]
    assert GROUPS.largest(values)[:, 0].tolist() == [2.0, 0.0, 19.0]


def test_padding_gives_each_expert_a_multiple_of_16_and_keeps_the_sums() -> None:
    """What the kernel sums over: padded tokens of an expert are zero, dropped ones lie behind the last offset."""
    offs, rows, length = GROUPS.pad()
    assert offs.tolist() == [16, 16, 48] and offs.dtype is torch.int32 and length % 16 == 0
    assert rows.tolist() == [0, 1, 2, *range(16, 33), 48, 49] and length > 49
    tokens = torch.randn(22, 16, generator=torch.Generator().manual_seed(0))
    values = quantize(tokens, torch.ones(22, 1), block=(1, None), dtype=torch.float8_e4m3fn).values
    padded = scaled_grouped_mm._scatter_rows(values, rows, length=length)
    for expert, (start, stop) in enumerate([(0, 3), (3, 3), (3, 20)]):
        first = 0 if expert == 0 else int(offs[expert - 1])
        inside = padded[first : int(offs[expert])].float()
        assert torch.equal(inside.sum(0), values[start:stop].float().sum(0))


def test_the_kernel_gets_rows_columns_and_a_scale_of_each(monkeypatch) -> None:
    calls = []

    def record(a, b, *, scales, offs):
        calls.append((a, b, *scales, offs))
        return torch.zeros(1)

    class OnDevice:
        """A quantized matrix that says it lies on a GPU."""

        def __init__(self, quantized) -> None:
            self.values, self.inverse_scales = _Cuda(quantized.values), quantized.inverse_scales

    class _Cuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(scaled_grouped_mm, "_multiply", record)
    inverse = torch.full((22, 1), 0.5)
    tokens = quantize(torch.ones(22, 32), inverse, block=(1, None), dtype=torch.float8_e4m3fn)
    matrices = quantize(torch.ones(3 * 48, 32), torch.ones(144, 1), block=(1, None), dtype=torch.float8_e4m3fn)
    scaled_grouped_mm.multiply_tokens(OnDevice(tokens), OnDevice(matrices), groups=GROUPS, dtype=torch.bfloat16)
    a, b, scale_a, scale_b, offs = calls[-1]
    assert a.shape == (22, 32) and b.shape == (3, 32, 48) and b.stride(1) == 1, "K is contiguous in both"
    assert scale_a.shape == (22,) and scale_b.shape == (3, 48) and offs is OFFS

    columns = [OnDevice(tokens), OnDevice(tokens)]
    columns[0].inverse_scales, columns[1].inverse_scales = torch.ones(3, 32), torch.full((3, 1), 2.0)
    scaled_grouped_mm.multiply_matrices(*columns, groups=GROUPS, dtype=torch.bfloat16)
    a, b, scale_a, scale_b, offs = calls[-1]
    length = GROUPS.pad()[2]
    assert a.shape == (32, length) and a.is_contiguous() and b.shape == (length, 32) and b.stride(0) == 1
    assert scale_a.shape == scale_b.shape == (96,) and offs.tolist() == [16, 16, 48]

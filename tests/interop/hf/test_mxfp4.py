"""MXFP4 by the tables of the OCP specification; boxes beside transformers are in test_weights.py."""

import pytest
import torch

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.mxfp4 import BLOCK, Mxfp4Tensor, dequantized, stored_shape

# E2M1, section 5.3.3: sign, two bits of exponent, one of mantissa
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def packed(codes: list[int]) -> torch.Tensor:
    """One block of 32 values: two per byte, the lower half first."""
    low, high = codes[::2], codes[1::2]
    pairs = [first | second << 4 for first, second in zip(low, high, strict=True)]
    return torch.tensor(pairs, dtype=torch.uint8).view(1, 1, 1, 16)


@pytest.mark.parametrize("scale", [127, 128, 120, 0, 250])
def test_every_code_has_the_value_of_the_specification(scale: int) -> None:
    codes = [*range(16), *range(16)]
    tensor = Mxfp4Tensor("w", packed(codes), scales=torch.tensor([[[scale]]], dtype=torch.uint8))
    assert tensor.get_shape() == [1, BLOCK, 1]
    values = tensor[slice(0, 1), slice(0, BLOCK), slice(0, 1)].flatten()
    signed = [*E2M1, *(-value for value in E2M1)] * 2
    expected = torch.tensor(signed, dtype=torch.float64) * 2.0 ** (scale - 127)
    assert values.dtype is torch.bfloat16
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("box", [(0, 1), (31, 33), (5, 64), (33, 34), (0, 96)])
def test_a_box_reads_its_blocks_alone(box: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 5, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 5, 3), generator=generator, dtype=torch.uint8)
    whole = Mxfp4Tensor("w", blocks, scales=scales)[slice(0, 2), slice(0, 96), slice(0, 5)]

    class Recorded:
        """A tensor in a file, of which the slices that are read are noted."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            self.reads: list[slice] = []

        def get_shape(self) -> list[int]:
            return list(self.tensor.shape)

        def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
            self.reads.append(index[2])
            return self.tensor[index]

    stored = Recorded(blocks)
    tensor = Mxfp4Tensor("w", stored, scales=Recorded(scales))
    start, stop = box
    found = tensor[slice(1, 2), slice(start, stop), slice(2, 4)]
    assert torch.equal(found, whole[1:2, start:stop, 2:4])
    assert stored.reads == [slice(start // 32, -(-stop // 32))]


def test_pairs_are_joined_under_their_name_and_others_stay() -> None:
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    scales = torch.full((1, 2, 1), 127, dtype=torch.uint8)
    norm = torch.ones(3)
    joined = dequantized({"a_blocks": blocks, "a_scales": scales, "norm": norm, "b_scales": norm})
    assert set(joined) == {"a", "norm", "b_scales"} and joined["norm"] is norm
    assert stored_shape(joined["a"]) == (1, 32, 2)
    with pytest.raises(HuggingFaceError, match=r"a_blocks is \[1, 2, 1, 8\]"):
        dequantized({"a_blocks": blocks[..., :8], "a_scales": scales})

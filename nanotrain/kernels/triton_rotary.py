"""The Triton kernel of RoPE: `rotate`.

A program rotates some heads of one token, so that it reads the cosines and sines of its position once.

    B batch   S sequence   N heads   D width of a head   P pairs (2 P <= D)
"""

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TILE = 2048  # pairs that a program rotates at once


if triton is not None:

    @triton.jit
    def _rotate(
        x: tl.tensor,
        cos: tl.tensor,
        sin: tl.tensor,
        out: tl.tensor,
        length: tl.tensor,
        num_heads: tl.tensor,
        width: tl.tensor,
        num_pairs: tl.tensor,
        x_batch: tl.tensor,
        x_token: tl.tensor,
        x_head: tl.tensor,
        out_batch: tl.tensor,
        out_token: tl.tensor,
        out_head: tl.tensor,
        table_batch: tl.tensor,
        sign: tl.tensor,
        tile: tl.constexpr,
        block: tl.constexpr,
    ) -> None:
        token = tl.program_id(0).to(tl.int64)
        batch, position = token // length, token % length
        head, pair = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile), tl.arange(0, block)
        angle = batch * table_batch + position * num_pairs + pair
        c = tl.load(cos + angle, mask=pair < num_pairs, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + angle, mask=pair < num_pairs, other=0.0).to(tl.float32)[None, :] * sign
        source = x + batch * x_batch + position * x_token + head[:, None] * x_head
        target = out + batch * out_batch + position * out_token + head[:, None] * out_head
        inside = (head < num_heads)[:, None] & (pair < num_pairs)[None, :]
        low = tl.load(source + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + num_pairs + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(target + pair[None, :], (low * c - high * s).to(out.dtype.element_ty), mask=inside)
        tl.store(target + num_pairs + pair[None, :], (high * c + low * s).to(out.dtype.element_ty), mask=inside)
        for start in range(2 * num_pairs, width, block):
            channel = start + pair[None, :]
            inside = (head < num_heads)[:, None] & (channel < width)
            tl.store(target + channel, tl.load(source + channel, mask=inside, other=0.0), mask=inside)


def rotate(x: Tensor, *, cos: Tensor, sin: Tensor, sign: int, out: Tensor) -> Tensor:
    """Rotate every pair by its angle, times the sign.

    Args:
        x: [B, S, N, D]; copied first where the channels of a head are not next to each other.
        cos: [S, 1, P] or [B, S, 1, P]; sin alike.
        sin: of the angles.
        sign: 1, or -1 for the backward.
        out: [B, S, N, D], in the dtype of x, the channels of a head next to each other.

    Returns:
        out.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, length, num_heads, width = x.shape
    num_pairs = cos.shape[-1]
    if x.numel():
        block = triton.next_power_of_2(num_pairs)
        tile = min(triton.next_power_of_2(num_heads), max(1, TILE // block))
        strides = (*x.stride()[:3], *out.stride()[:3], length * num_pairs if cos.dim() == 4 else 0)
        sizes = (length, num_heads, width, num_pairs)
        grid = (batch * length, triton.cdiv(num_heads, tile))
        _rotate[grid](x, cos, sin, out, *sizes, *strides, float(sign), tile=tile, block=block)
    return out

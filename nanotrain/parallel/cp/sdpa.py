"""Attention over a sequence that is whole on this rank: the core of a group of one.

    document_mask   causal, ending at document borders
    attend          softmax attention, plain causal or masked
    PlainCore       both, as the model asks for them

Shape legend of this room:

    B batch   S sequence   N query heads   G key/value heads (N is a multiple of G)   D, Dv widths of a head
"""

import torch.nn.functional as F
from torch import Tensor


def segment_mask(segment_ids: Tensor) -> Tensor:
    """The causal mask that ends at document borders.

    Args:
        document_ids: [B, S] integers, equal within a document.

    Returns:
        [B, 1, S, S] bool, True where attention is allowed.
    """
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return same.tril()


def attend(query: Tensor, *, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention of every query over the keys it may see.

    Args:
        query: [B, S, N, D].
        key: [B, Sk, G, D].
        value: [B, Sk, G, Dv].
        mask: [B or 1, 1, S, Sk] bool, True where a query (row) may see a key (column); None for plain causal.

    Returns:
        [B, S, N, Dv].
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if grouped and not query.is_cuda:  # torch's own grouping is 1.4 to 1.5 times slower than repeating on the CPU
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        grouped = False
    width, value_width = key.shape[-1], value.shape[-1]
    is_narrow = value_width < width and not query.is_cuda
    if is_narrow:  # else torch's CPU kernel is out of the question and the long way takes 2 to 4 times as long
        value = F.pad(value, (0, width - value_width))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return (out[..., :value_width] if is_narrow else out).transpose(1, 2)


class SDPAttention:
    """Every query and key is here."""

    def plan_mask(self, segment_ids: Tensor | None, *, tokens: Tensor) -> Tensor | None:
        """[B, 1, S, S] bool with document ids, else None: plain causal."""
        return None if segment_ids is None else segment_mask(segment_ids)

    def __call__(self, query: Tensor, *, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """`attend`."""
        return attend(query, key=key, value=value, mask=mask)

"""The masks of all-gather attention are rows of the full mask."""

import torch

from nanotrain.parallel.cp.all_gather import AllGatherAttention
from nanotrain.parallel.cp.sdpa import full_mask
from nanotrain.parallel.cp.split import local_positions
from tests.harness import ranks
from tests.parallel.cp.sequences import Shape, segments


@ranks(2, cp=2)
def test_chunk_masks_are_rows_of_the_full_mask(ctx):
    shape, group = Shape(), ctx.group("cp")
    attention = AllGatherAttention(group)
    tokens = torch.zeros(shape.batch, shape.length // 2)
    rows = local_positions(shape.length, index=group.index, size=2).chunk(2)
    for segment_ids, window in ((segments(shape), None), (None, None), (segments(shape), 5), (None, 0)):
        full = full_mask(segment_ids, length=2 * tokens.shape[1], device=tokens.device, window=window)
        masks = attention.plan_mask(segment_ids, tokens=tokens, window=window)
        for mask, queries in zip(masks, rows, strict=True):
            assert torch.equal(mask, full[:, :, queries, : mask.shape[-1]])
            assert not full[:, :, queries, mask.shape[-1] :].any(), "keys after the chunk are never attended to"

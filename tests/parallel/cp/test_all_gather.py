"""The masks of all-gather attention are rows of the full mask."""

import torch

from nanotrain.parallel.cp.all_gather import AllGatherAttention
from nanotrain.parallel.cp.sdpa import full_mask
from nanotrain.parallel.cp.split import local_positions
from tests.harness import ranks
from tests.parallel.cp.sequences import Shape, random_inputs, run, segments, shard


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


class Unmasked(AllGatherAttention):
    """Plans as on CUDA."""

    def plan_mask(self, segment_ids, *, tokens, window=None):
        return (None, None)


@ranks(2, cp=2)
def test_causal_attention_aligned_to_the_last_key_equals_the_mask(ctx):
    for shape in (Shape(), Shape(groups=2)):
        inputs = shard(random_inputs(shape, dtype=torch.float64), ctx.group("cp"))
        results = [run(core_attention(ctx.group("cp")), inputs) for core_attention in (AllGatherAttention, Unmasked)]
        for with_mask, without in zip(*results, strict=True):
            assert torch.allclose(with_mask, without, rtol=1e-12, atol=1e-12)

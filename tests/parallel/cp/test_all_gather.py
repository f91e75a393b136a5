"""All-gather attention plans one call per chunk; on CUDA plain causal calls are aligned to the last
key.
"""

import torch

from nanotrain.attention.sdpa import LayerKernels, attend
from nanotrain.parallel.cp.all_gather import AllGatherAttention
from nanotrain.parallel.cp.split import local_positions
from tests.harness import ranks
from tests.parallel.cp.sequences import Shape, full_mask, random_inputs, run, segments, shard


@ranks(2, cp=2, shares=True)
def test_the_calls_have_the_rows_of_the_full_mask(ctx):
    shape, group = Shape(), ctx.group("cp")
    attention = AllGatherAttention(group)
    tokens = torch.zeros(shape.batch, shape.length // 2)
    rows = local_positions(shape.length, index=group.index, size=2).chunk(2)
    for segment_ids, window in (
        (segments(shape), None),
        (None, None),
        (segments(shape), 5),
        (None, 0),
    ):
        full = full_mask(segment_ids, length=shape.length, window=window)
        calls = attention.plan_mask(segment_ids, tokens=tokens, window=window)
        for call, queries in zip(calls, rows, strict=True):
            mask = call.masked_tile.mask()
            assert torch.equal(mask, full[:, :, queries, : mask.shape[-1]])
            assert not full[:, :, queries, mask.shape[-1] :].any(), (
                "keys after the chunk are never attended to"
            )


class LowerRight:
    """The kernel as on CUDA."""

    def __call__(self, query, *, key, value, call, scores):
        assert call.is_causal and scores is None
        return attend(query, key=key, value=value)


@ranks(2, cp=2, shares=True)
def test_causal_attention_aligned_to_the_last_key_equals_the_tiles(ctx):
    for shape in (Shape(), Shape(groups=2)):
        inputs = shard(random_inputs(shape, dtype=torch.float64), ctx.group("cp"))
        cores = [
            AllGatherAttention(ctx.group("cp"), kernels)
            for kernels in (None, LayerKernels(LowerRight()))
        ]
        for with_tiles, without in zip(*(run(core, inputs) for core in cores), strict=True):
            assert torch.allclose(with_tiles, without, rtol=1e-12, atol=1e-12)

"""DeepEP's interface over torch's all-to-all, with checks of what its kernels take.

It stands in for the module `deep_ep` where no GPU is: shapes and dtypes as
github.com/deepseek-ai/DeepEP documents them (docs/legacy.md and `Buffer`).
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist

topk_idx_t = torch.int64
# arguments of a dispatch without a known layout
DISPATCH = {
    *("topk_idx", "topk_weights", "is_token_in_rank", "previous_event", "async_finish"),
    *("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert"),
}


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer:
    """One instance per process group and size."""

    built: list["Buffer"] = []

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        assert num_nvl_bytes > 0 and num_rdma_bytes == 0
        self.group = group
        self.size = group.size()
        self.calls = []
        Buffer.built.append(self)

    get_dispatch_config = get_combine_config = staticmethod(lambda num_ranks: Config())

    @staticmethod
    def capture():
        return SimpleNamespace(event="an event")

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype is topk_idx_t and topk_idx.dim() == 2
        assert topk_idx.min() >= -1 and topk_idx.max() < num_experts
        self.num_local = num_experts // self.size
        ranks = torch.where(topk_idx < 0, self.size, topk_idx // self.num_local)
        is_sent = torch.zeros(len(topk_idx), self.size + 1, dtype=torch.bool)
        is_sent = is_sent.scatter_(1, ranks, True)[:, :-1]
        experts = topk_idx[topk_idx >= 0].bincount(minlength=num_experts)
        return is_sent.sum(0).int(), None, experts.int(), is_sent, None

    def dispatch(self, x, handle=None, **given):
        assert x.dtype is torch.bfloat16 and x.dim() == 2 and x.is_contiguous()
        self.calls.append("dispatch" if handle is None else "dispatch again")
        if handle is not None:
            assert not given, "a known layout sends rows alone"
            return self._send(x, handle), None, None, None, None, SimpleNamespace()
        assert given.keys() == DISPATCH
        tokens = len(x)
        is_sent = given["is_token_in_rank"]
        per_rank = given["num_tokens_per_rank"]
        topk_idx, topk_weights = given["topk_idx"], given["topk_weights"]
        assert (is_sent.shape, is_sent.dtype) == ((tokens, self.size), torch.bool)
        assert per_rank.dtype is given["num_tokens_per_expert"].dtype is torch.int32
        assert topk_weights.dtype is torch.float32 and topk_weights.shape == topk_idx.shape
        assert given["async_finish"] and given["previous_event"] is not None
        received = torch.empty(self.size, dtype=torch.int32)
        dist.all_to_all_single(received, per_rank, group=self.group)
        source = torch.cat([column.nonzero()[:, 0] for column in is_sent.unbind(1)])
        handle = (source, per_rank.tolist(), received.tolist(), tokens)
        rows = self._send(x, handle)
        ids = self._send(topk_idx, handle) - self.group.rank() * self.num_local
        ids = torch.where((ids >= 0) & (ids < self.num_local), ids, -1)
        weights = torch.where(ids < 0, 0.0, self._send(topk_weights, handle))
        counts = ids[ids >= 0].bincount(minlength=self.num_local).tolist()
        event = SimpleNamespace(current_stream_wait=lambda: self.calls.append("wait"))
        return rows, ids, weights, counts, handle, event

    def combine(self, x, handle, topk_weights=None):
        assert x.dtype is torch.bfloat16 and x.is_contiguous()
        assert topk_weights is None or topk_weights.dtype is torch.float32
        self.calls.append("combine")
        sums = None if topk_weights is None else self._sum(topk_weights, handle)
        return self._sum(x, handle).to(x.dtype), sums, SimpleNamespace()

    def _send(self, x, handle):
        source, sent, received, _ = handle
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x[source], received, sent, group=self.group)
        return out

    def _sum(self, rows, handle):
        source, sent, received, tokens = handle
        back = rows.new_empty(sum(sent), rows.shape[1])
        dist.all_to_all_single(back, rows.contiguous(), sent, received, group=self.group)
        return torch.zeros(tokens, rows.shape[1]).index_add_(0, source, back.float())

"""A token dispatcher by DeepEP's kernels: a token is sent once to every rank with its experts.

    dispatch   token --> the ranks of its experts, with expert numbers and weights
    experts    permute, grouped products, weighted sum of the rows of each token
    combine    one row per token and rank --> the token's rank, which sums them

The backward of dispatch is a combine and the other way round, with the layout of the forward. The
host waits once per layer, inside of `dispatch`, for the number of tokens that arrive. DeepEP takes
bf16 rows. It is called as `deep_ep.Buffer` of its versions 1 and 2 documents it
(github.com/deepseek-ai/DeepEP, docs/legacy.md).

T tokens of this rank   R tokens that arrive   K experts per token   E experts   H hidden
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.work import translate_errors
from nanotrain.kernels.permute import permute, plan_permutation, unpermute
from nanotrain.parallel.ep.splits import RunExperts
from nanotrain.parallel.ep.token_dispatcher import DispatchOptions, Finish, KeptSplits, Routing

PACKAGE = "deep_ep"


def has_deep_ep() -> bool:
    """Whether the package of DeepEP is installed."""
    return find_spec(PACKAGE) is not None


class Arrived(NamedTuple):
    """Tokens that arrived from all ranks of ep."""

    x: Tensor  # [R, H]
    topk_ids: Tensor  # [R, K] int64, experts of this rank; -1 for experts of other ranks
    topk_weights: Tensor  # [R, K] fp32


class Layout:
    """The layout of one dispatch, which its combine and both backwards use."""

    def __init__(self, buffer: Any, group: Group) -> None:
        self.buffer = buffer
        self.group = group
        self.handle: Any = None
        self.event: Any = None
        self.counts: list[int] = []  # tokens of each local expert

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, *, topk_weights: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Start to send tokens; returns what arrives, complete after `wait`."""
        with translate_errors("dispatch", self.group):
            per_rank, per_node, per_expert, is_sent, _ = self.buffer.get_dispatch_layout(
                topk_ids, num_experts
            )
            arrived = self.buffer.dispatch(
                x.contiguous(),
                topk_idx=topk_ids,
                topk_weights=topk_weights.contiguous(),
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_sent,
                num_tokens_per_expert=per_expert,
                previous_event=self.buffer.capture(),
                async_finish=True,
            )
        rows, ids, weights, self.counts, self.handle, self.event = arrived
        return rows, ids, weights

    def wait(self) -> None:
        """Let the current stream wait for the tokens; another computation may run meanwhile."""
        self.group.turns.hand_over()
        self.event.current_stream_wait()
        self.event = None

    def send_again(self, x: Tensor) -> Tensor:
        """[T, H] -> [R, H], the rows of tokens on the ranks of their experts."""
        with translate_errors("dispatch", self.group):
            rows: Tensor = self.buffer.dispatch(x.contiguous(), handle=self.handle)[0]
        return rows

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> Any:
        """[R, H] -> [T, H], the sum over ranks; with weights [R, K] also the sum of these."""
        given = None if weights is None else weights.contiguous()
        with translate_errors("combine", self.group):
            x, sums, _ = self.buffer.combine(rows.contiguous(), self.handle, topk_weights=given)
        return x, sums


class DeepEPTokenDispatcher:
    """Dispatch and combine by DeepEP; rank i of `ep` holds the i-th equal share of the experts."""

    has_padding = False

    def __init__(
        self, num_experts: int, *, ep: Group, etp: Group, options: DispatchOptions
    ) -> None:
        assert etp.size == 1, "checked by the rules of layouts"
        self._num_experts = num_experts
        self._num_local = num_experts // ep.size
        self._ep = ep

    def __call__(self, x: Tensor, routing: Routing, *, kept: KeptSplits | None = None) -> Finish:
        """Send tokens [T, H]; the result runs the experts and returns [T, H].

        A recomputed forward sends them again, and keeps nothing.
        """
        process_group = self._ep.process_group
        assert process_group is not None, "a group of several ranks"
        layout = Layout(build_buffer(process_group, x.shape[1] * x.itemsize), self._ep)
        # DeepEP marks a dropped pair by -1
        dropped = routing.topk_ids == self._num_experts
        topk_ids = routing.topk_ids.masked_fill(dropped, -1).to(index_dtype())
        arriving = Arrived(
            *_Dispatch.apply(x, routing.topk_weights, topk_ids, self._num_experts, layout)
        )

        def finish(run_experts: RunExperts) -> Tensor:
            layout.wait()
            rows = self._run(arriving, layout.counts, run_experts=run_experts)
            out: Tensor = _Combine.apply(rows, layout)
            return out

        return finish

    def _run(self, arrived: Arrived, counts: list[int], *, run_experts: RunExperts) -> Tensor:
        """The weighted sums [R, H] of the local experts' outputs for each token."""
        ids = arrived.topk_ids.long()
        local_ids = torch.where(ids < 0, self._num_local, ids)
        permutation = plan_permutation(local_ids, self._num_local)
        permuted = permute(arrived.x, permutation, num_permuted=sum(counts))
        outputs = run_experts(permuted, permutation.offs)
        return unpermute(outputs, permutation, topk_weights=arrived.topk_weights)


class _Dispatch(torch.autograd.Function):
    """Tokens and weights to the ranks of their experts; gradients are combined."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, ids: Tensor, num_experts: int, layout: Layout
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H], [T, K] -> [R, H], [R, K], [R, K], complete after `Layout.wait`."""
        ctx.layout = layout
        rows, local_ids, local_weights = layout.dispatch(
            x, ids, topk_weights=weights, num_experts=num_experts
        )
        ctx.mark_non_differentiable(local_ids)
        return rows, local_ids, local_weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """The gradients of tokens and weights, summed over the ranks they were sent to."""
        grad_rows, _, grad_weights = grads
        grad_x, summed = ctx.layout.combine(grad_rows, grad_weights)
        return grad_x, summed, None, None, None


class _Combine(torch.autograd.Function):
    """The sum of a token's rows over ranks; the gradient is sent to all of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layout: Layout) -> Tensor:
        """[R, H] -> [T, H]."""
        ctx.layout = layout
        out: Tensor = layout.combine(rows)[0]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """[T, H] -> [R, H]."""
        return ctx.layout.send_again(grads[0]), None


def index_dtype() -> torch.dtype:
    """The dtype of expert numbers that the installed DeepEP was built for."""
    dtype: torch.dtype = getattr(import_module(PACKAGE), "topk_idx_t", torch.int64)
    return dtype


@cache
def build_buffer(process_group: dist.ProcessGroup, row_bytes: int) -> Any:
    """The memory that the layers of a process share, of the sizes that DeepEP recommends.

    Args:
        process_group: the ranks of ep.
        row_bytes: bytes of a token.
    """
    buffer_class = import_module(PACKAGE).Buffer
    num_ranks = process_group.size()
    nvlink_bytes = 0
    rdma_bytes = 0
    for get_config in (buffer_class.get_dispatch_config, buffer_class.get_combine_config):
        config = get_config(num_ranks)
        nvlink_bytes = max(nvlink_bytes, config.get_nvl_buffer_size_hint(row_bytes, num_ranks))
        rdma_bytes = max(rdma_bytes, config.get_rdma_buffer_size_hint(row_bytes, num_ranks))
    return buffer_class(process_group, nvlink_bytes, rdma_bytes)

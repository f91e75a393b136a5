"""A reduce-scatter for gloo that sends each slice to its owner once: (d-1)/d of the tensor.

gloo's own runs a whole all-reduce and, for bf16 and fp16, rounds at every hop. Here every member receives the d
versions of its slice and sums them itself, in rank order and in fp32, rounding once:

    rank 0  [a0 a1 a2 a3] --+                       scratch of rank 2
    rank 1  [b0 b1 b2 b3] --+-- all_to_all_single --> [a2 b2 c2 d2] --> a2 + b2 + c2 + d2
    rank 2  [c0 c1 c2 c3] --+
    rank 3  [d0 d1 d2 d3] --+
"""

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.pending import Pending


def start(output: Tensor, tensor: Tensor, group: Group) -> Pending:
    """Begin to exchange the slices; `wait` sums them into `output`."""
    received = torch.empty(group.size, output.numel(), dtype=tensor.dtype)
    work = dist.all_to_all_single(received.view(-1), tensor.view(-1), group=group.process_group, async_op=True)
    return Pending("reduce_scatter", group, [work], finish=lambda: _sum_in_rank_order(output.view(-1), received))


def _sum_in_rank_order(output: Tensor, received: Tensor) -> None:
    """output [n] = received [d, n] summed over d, in fp32 where the dtype is narrower."""
    if output.dtype not in (torch.bfloat16, torch.float16):
        torch.add(received[0], received[1], out=output)
        for part in received[2:]:
            output.add_(part)
        return
    total = received[0].float()
    for part in received[1:]:
        total.add_(part)
    output.copy_(total)

"""Split sizes of a token dispatcher, and the transfers and reorderings that follow from them.

    Splits                 split sizes over ep and etp, and the token counts of each source rank
    all_gather_tokens      permuted tokens of the ranks that share an expert's matrices
    reduce_scatter_tokens  inverse of it, with a sum
    run_in_expert_order    the experts, on tokens in the order of their source ranks

P permuted tokens   E experts   H hidden
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import all_to_all
from nanotrain.comm.group import Group
from nanotrain.kernels.permute import inverse_of, reorder

# Runs the local experts: permuted tokens [P, H], and offs [local experts] int32, the end of each
# expert's tokens.
RunExperts = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Splits:
    """Split sizes, in permuted tokens."""

    ep_inputs: list[int]  # sent to each rank of ep
    ep_outputs: list[int]  # received from each rank of ep
    etp: list[int]  # received by each rank of etp over its ep group
    # [etp * ep, local experts] int32, by source rank; a further column counts padding
    tokens_per_expert: Tensor
    num_experts: int  # local experts

    @classmethod
    def exact(cls, numbers: list[int], counts: Tensor, *, ep: Group, etp: Group) -> "Splits":
        """Split sizes from token counts.

        Args:
            numbers: the elements of `counts` on the host.
            counts: [1 + etp, E] on the device, sent by this rank and received by each rank of etp.
            ep: group of the all-to-all.
            etp: group of the ranks that share an expert's matrices.
        """
        num_local = counts.shape[1] // ep.size
        sums = [sum(counts_of_rank) for counts_of_rank in _split_list(numbers, num_local)]
        sent, *received = _split_list(sums, ep.size)
        return cls(
            ep_inputs=sent,
            ep_outputs=received[etp.index],
            etp=[sum(outputs) for outputs in received],
            tokens_per_expert=counts[1:].reshape(-1, num_local),
            num_experts=num_local,
        )

    @classmethod
    def padded(cls, counts: Tensor, num_rows: int, *, ep: Group, etp: Group) -> "Splits":
        """`num_rows` rows between any two ranks; counts [1 + etp, E] stay on the device."""
        sizes = [num_rows] * ep.size
        received = counts[1:].reshape(etp.size * ep.size, -1)
        padding = num_rows - received.sum(1, keepdim=True, dtype=received.dtype)
        return cls(
            ep_inputs=sizes,
            ep_outputs=sizes,
            etp=[sum(sizes)] * etp.size,
            tokens_per_expert=torch.cat([received, padding], 1),
            num_experts=received.shape[1],
        )


def _split_list(numbers: list[int], size: int) -> list[list[int]]:
    """Consecutive lists of `size` numbers."""
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def all_gather_tokens(permuted: Tensor, group: Group, *, splits: list[int]) -> Tensor:
    """[local split, H] -> [sum(splits), H], in the order of the group.

    The backward sums the gradients of all ranks.
    """
    if group.size == 1:
        return permuted
    # torch has no all-gather of uneven sizes; this sends the same bytes
    copies = permuted.repeat(group.size, 1)
    sent = [len(permuted)] * group.size
    return all_to_all(copies, group, input_splits=sent, output_splits=splits)


def reduce_scatter_tokens(permuted: Tensor, group: Group, *, splits: list[int]) -> Tensor:
    """[sum(splits), H], partial sums -> [local split, H], their sum over the group."""
    if group.size == 1:
        return permuted
    num_permuted = splits[group.index]
    received = [num_permuted] * group.size
    partials = all_to_all(permuted, group, input_splits=splits, output_splits=received)
    return partials.view(group.size, num_permuted, permuted.shape[1]).sum(0)


def run_in_expert_order(permuted: Tensor, splits: Splits, *, run_experts: RunExperts) -> Tensor:
    """The outputs of the experts for tokens in the order of their source ranks."""
    counts = splits.tokens_per_expert
    offs = counts.sum(0).cumsum(0, dtype=torch.int32)[: splits.num_experts]
    if 1 in counts.shape:  # one source or one expert: the tokens are in order
        return run_experts(permuted, offs)
    order = _expert_order(counts, num_permuted=sum(splits.etp))
    inverse = inverse_of(order)
    permuted = run_experts(reorder(permuted, order, inverse=inverse), offs)
    return reorder(permuted, inverse, inverse=order)


def _expert_order(tokens_per_expert: Tensor, *, num_permuted: int) -> Tensor:
    """The order [P] int64 by expert, of tokens that are sorted by source rank, then expert."""
    blocks = torch.repeat_interleave(tokens_per_expert.flatten(), output_size=num_permuted)
    return (blocks % tokens_per_expert.shape[1]).argsort(stable=True)

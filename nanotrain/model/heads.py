"""The heads of a projection: which ones a tp rank computes, and their channels."""

from torch import Tensor

from nanotrain.comm.group import Group


def local_heads(num_heads: int, group: Group) -> range:
    """The heads that a tp rank computes, at least one; several ranks may share a head."""
    first = group.index * num_heads // group.size
    return range(first, first + max(1, num_heads // group.size))


def head_channels(heads: range, head_dim: int) -> slice:
    """The channels of consecutive heads in a projection of all heads."""
    return slice(heads.start * head_dim, heads.stop * head_dim)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[..., heads * head_dim] -> [..., heads, head_dim]."""
    return x.unflatten(-1, (-1, head_dim))

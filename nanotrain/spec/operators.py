"""Operators of a layer: what one rank computes, keeps, sends and launches; pure, without torch.

    Saved, Sent                  bytes kept for the backward; bytes sent over cp
    Operator                     fields of every operator
    Product, ExpertProduct       matrix products with a weight, and with the weights of experts
    Norm, Rotary, Residual, Gate, Activation     elementwise operators
    Attention, Indexer           operators on pairs of tokens
    SparseAttention, GatheredAttention, GatheredBlocks    attention to selected keys
    CompressedAttention                                   to a window and to compressed keys
    Convolution, Scan            operators that read the tokens in order
    Router, Dispatch             tokens to experts
    Lookup, Loss                 both ends of a model

A kind of layer returns its operators in forward order (spec/kinds). All other numbers are folds:
FLOPs (spec/counts.py), saved bytes (plan/saved_bytes.py), bytes over cp (plan/traffic.py), time
(planner/operator_time.py) and the bytes of other programs (planner/other_programs.py).

Sizes are those of one rank and one microbatch.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from nanotrain.spec.shape import Chunks

# the recompute module of all operators between products and attention
POINTWISE = "pointwise"
# recompute modules of the norms in front of a mixer or an MLP
NORM_MODULES = ("layernorm", POINTWISE)


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd keeps from the forward of an operator to its backward."""

    num_bytes: int
    dropped_by: tuple[str, ...] = ()  # recompute modules, any of which drops them
    only_with: str = ""  # recompute module that keeps them; empty: kept without one

    def bytes_with(self, modules: Collection[str]) -> int:
        """Bytes that are kept if some modules are recomputed.

        >>> Saved(8, dropped_by=("mlp",)).bytes_with({"mlp"})
        0
        """
        if self.only_with and self.only_with not in modules:
            return 0
        if not modules:
            return self.num_bytes
        is_dropped = any(module in modules for module in self.dropped_by)
        return 0 if is_dropped else self.num_bytes


class Sent(NamedTuple):
    """Bytes that a rank sends over cp by one collective operation."""

    operation: str
    forward: int
    backward: int


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Fields of every operator."""

    name: str
    module: str = ""  # the recompute module that runs it again
    recomputed_by: tuple[str, ...] = ()  # further recompute modules that run it again
    saves: tuple[Saved, ...] = ()
    working: int = 0  # bytes of temporaries during its backward
    over_cp: tuple[Sent, ...] = ()

    @property
    def active_weights(self) -> int:
        """Weights that a token is multiplied with, on average."""
        return 0

    @property
    def sequence_flops(self) -> int:
        """Forward FLOPs of scores and recurrences, which MFU counts in addition to weights."""
        return 0

    def is_recomputed(self, modules: Collection[str]) -> bool:
        """Whether it runs again if some modules are recomputed.

        >>> Operator(name="rope", recomputed_by=("pointwise",)).is_recomputed({"pointwise"})
        True
        """
        return any(module in modules for module in (self.module, *self.recomputed_by))

    def saved_bytes(self, modules: Collection[str] = ()) -> int:
        """Bytes kept for the backward if some modules are recomputed."""
        return sum(saved.bytes_with(modules) for saved in self.saves)


Operators = list[Operator]


@dataclass(frozen=True, kw_only=True)
class Product(Operator):
    """Product of tokens with the weights of one or several linear layers that share their input."""

    weights: tuple[str, ...]  # names of the parameters, relative to the layer
    rows: int  # tokens
    outputs: int
    inputs: int
    shard: str = ""  # "column" or "row": its parallelism over tp; empty: replicated
    casts_norm: bool = False  # its input is a norm that casts to fp8 compute

    @property
    def active_weights(self) -> int:
        """Elements of the weights."""
        return self.outputs * self.inputs

    @property
    def flops(self) -> int:
        """Forward FLOPs."""
        return 2 * self.rows * self.outputs * self.inputs


@dataclass(frozen=True, kw_only=True)
class ExpertProduct(Product):
    """Products of routed tokens with one weight per local expert."""

    num_experts: int  # of the rank
    topk: int  # choices per token
    num_choices: int  # experts of all ranks, zero experts included

    @property
    def active_weights(self) -> int:
        """Elements of the weights of the chosen experts, on average."""
        return self.num_experts * self.outputs * self.inputs * self.topk // self.num_choices


@dataclass(frozen=True, kw_only=True)
class Norm(Operator):
    """A norm of each row, or of each head."""

    numel: int
    is_cast: bool = False  # the casts of a product compute it; only factors per row are written
    launches: int = 1  # kernels of the forward
    backward_launches: int = 1


@dataclass(frozen=True, kw_only=True)
class Rotary(Operator):
    """Rotary positions of queries and keys."""

    numel: int
    passes: int = 6  # reads and writes of all elements where it is not one fused operator


@dataclass(frozen=True, kw_only=True)
class Residual(Operator):
    """Addition to the residual stream, after dropout."""

    numel: int


@dataclass(frozen=True, kw_only=True)
class Gate(Operator):
    """A product with the activation of a gate."""

    numel: int
    weights: tuple[str, ...] = ()  # the projection of a scalar gate
    inputs: int = 0  # width that this projection reads

    @property
    def active_weights(self) -> int:
        """Elements of the projection."""
        return self.inputs


@dataclass(frozen=True, kw_only=True)
class Activation(Operator):
    """The activation function of an MLP, or of experts, and the product with its gate."""

    rows: int
    width: int  # inner width
    is_gated: bool
    is_cast: bool = False  # the casts of the down projection compute it

    @property
    def numel(self) -> int:
        """Elements of the output."""
        return self.rows * self.width


@dataclass(frozen=True, kw_only=True)
class Attention(Operator):
    """Causal attention of all queries of the rank's sequences; cp shards heads or queries."""

    batch: int
    heads: int  # of the tp rank
    kv_heads: int  # of the tp rank
    head_dim: int
    value_head_dim: int
    chunks: tuple[Chunks, ...]  # chunks of one sequence: number and length
    window: int | None = None  # keys that a query attends to at most

    @property
    def sequence_flops(self) -> int:
        """Forward FLOPs of scores and weighted sums of values, of the causal pairs only.

        A chunk of L tokens with a window of W keys has (2 W L - W^2) / 2 pairs; L^2 / 2 without.
        """
        doubled_pairs = 0
        for count, length in self.chunks:
            window = length if self.window is None else min(self.window, length)
            doubled_pairs += count * window * (2 * length - window)
        width = self.head_dim + self.value_head_dim
        return self.batch * self.heads * width * doubled_pairs


@dataclass(frozen=True, kw_only=True)
class SparseAttention(Attention):
    """Attention to selected keys, computed in torch: scores of all keys, a block at a time."""


@dataclass(frozen=True, kw_only=True)
class GatheredAttention(Attention):
    """Attention to selected keys, which are gathered in compressed channels for all heads."""

    compressed: int  # channels of a value
    width: int  # channels of a key, of which the values are the first

    @property
    def selected_pairs(self) -> float:
        """Pairs of a query and a selected key, of all sequences and cp ranks."""
        channels = self.heads * (self.head_dim + self.value_head_dim)
        return self.sequence_flops / (2 * channels)


@dataclass(frozen=True, kw_only=True)
class GatheredBlocks(Attention):
    """Attention to selected blocks of keys, which are gathered for each key/value head."""

    @property
    def gathered_keys(self) -> float:
        """Keys that are gathered for all queries, key/value heads, sequences and cp ranks."""
        channels = self.heads * (self.head_dim + self.value_head_dim)
        pairs = self.sequence_flops / (2 * channels)
        return pairs * self.kv_heads


@dataclass(frozen=True, kw_only=True)
class CompressedAttention(Attention):
    """Attention to the keys of a window and to compressed keys, the others masked."""

    ratio: int = 0  # tokens of a compressed key; 0: there are none
    topk: int | None = None  # compressed keys that a query attends to at most

    @property
    def compressed_pairs(self) -> int:
        """Pairs of a query and a compressed key before it, of all sequences and cp ranks."""
        if not self.ratio:
            return 0
        length = self.chunks[0].length
        return self.batch * length * length // (2 * self.ratio)

    @property
    def selected_pairs(self) -> int:
        """Pairs of a query and a compressed key that an indexer selects for it."""
        if not self.ratio:
            return 0
        length = self.chunks[0].length
        num_keys = length // self.ratio
        topk = num_keys if self.topk is None else min(self.topk, num_keys)
        doubled_pairs = topk * (2 * length - topk * self.ratio)
        return self.batch * doubled_pairs // 2

    @property
    def sequence_flops(self) -> int:
        """Forward FLOPs of scores and weighted sums, of the window and the selected pairs only."""
        width = self.head_dim + self.value_head_dim
        return super().sequence_flops + 2 * self.heads * width * self.selected_pairs


@dataclass(frozen=True, kw_only=True)
class Indexer(Operator):
    """Index scores of all pairs of tokens, the selection of keys, and the loss of the scores."""

    heads: int  # heads of the index; every tp rank has all of them
    head_dim: int
    num_positions: int  # of the rank's sequences, on all cp ranks
    length: int  # of a sequence
    topk: int  # keys per query
    gathers: bool  # whether attention gathers the selected keys
    attention_heads: int  # of the tp rank, whose probabilities are the target of the loss
    attention_head_dim: int  # channels of the scores of attention
    has_loss: bool
    has_sparse_loss: bool  # over the selected keys
    sums_over_tp: bool = True  # whether the target of the loss is a mean over heads of all tp ranks

    @property
    def sequence_flops(self) -> int:
        """Scores of the causal half of all pairs."""
        return self.heads * self.head_dim * self.length * self.num_positions

    @property
    def causal_pairs(self) -> float:
        """Pairs of a query and a key before it."""
        return self.num_positions * self.length / 2

    @property
    def selected_pairs(self) -> float:
        """Pairs of a query and a selected key."""
        topk = min(self.topk, self.length)
        return self.num_positions * topk * (1 - topk / (2 * self.length))

    @property
    def scored_pairs(self) -> float:
        """Pairs with an index score, which a query with few keys needs for the loss only."""
        if self.has_loss and not self.gathers_loss:
            return self.causal_pairs
        topk = min(self.topk, self.length)
        return self.causal_pairs * (1 - (topk / self.length) ** 2)

    @property
    def gathers_loss(self) -> bool:
        """Whether the loss gathers the selected index keys."""
        return self.gathers and self.has_sparse_loss

    @property
    def loss_pairs(self) -> float:
        """Pairs of the loss; where other keys are masked it computes all of them."""
        if not self.has_loss:
            return 0.0
        return self.selected_pairs if self.gathers_loss else self.causal_pairs


@dataclass(frozen=True, kw_only=True)
class Convolution(Operator):
    """Short convolutions over tokens, of every channel by itself."""

    weights: tuple[str, ...]
    rows: int  # tokens
    channels: int  # of all convolutions
    kernel_size: int

    @property
    def active_weights(self) -> int:
        """Elements of the weights."""
        return self.channels * self.kernel_size


@dataclass(frozen=True)
class ScanCost:
    """FLOPs, bytes and launches of one pass of a scan over all chunks."""

    flops: int
    num_bytes: int  # read and written
    launches: int
    steps: int = 0  # chunks that a program walks along, one after the other
    programs: int = 1  # programs that walk


@dataclass(frozen=True)
class ScanPasses:
    """The kernels of a scan, one after the other."""

    forward: tuple[ScanCost, ...]
    backward: tuple[ScanCost, ...]


@dataclass(frozen=True, kw_only=True)
class Scan(Operator):
    """A recurrence over tokens, computed in chunks; the backward computes it again."""

    recurrence_flops: int  # FLOPs of the recurrence token by token
    fused_bytes: int  # inputs, outputs and states of the chunks, where one kernel computes it
    rule: str  # "mamba2", "gated_delta_net" or "kda"
    # by torch's operators in fp32
    forward: ScanCost
    backward: ScanCost  # cost of the backward and of the recomputed forward
    # by kernels in 16 bits, by row of attention/scan_kernels.py
    kernels: Mapping[str, ScanPasses]

    @property
    def sequence_flops(self) -> int:
        """FLOPs of the recurrence token by token, as MFU counts them."""
        return self.recurrence_flops


@dataclass(frozen=True, kw_only=True)
class Router(Operator):
    """Scores of experts, the choice of the top k, and the balance losses."""

    weights: tuple[str, ...]
    rows: int  # tokens that the rank routes
    inputs: int
    num_choices: int


@dataclass(frozen=True, kw_only=True)
class Dispatch(Operator):
    """Tokens to the ranks of their experts, or back."""

    tokens: int  # tokens that the rank routes
    rows: int  # rows that it sends, padding included


@dataclass(frozen=True, kw_only=True)
class Lookup(Operator):
    """Embeddings of the tokens."""

    rows: int


@dataclass(frozen=True, kw_only=True)
class Loss(Operator):
    """Cross-entropy over the vocabulary."""

    rows: int
    columns: int  # columns of the logits on this rank

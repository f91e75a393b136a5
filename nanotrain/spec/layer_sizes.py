"""`LayerSizes`: the sizes of one rank, one layer and one microbatch that operators depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from nanotrain.config.config import Config
from nanotrain.config.parallel import all_to_all_ranks
from nanotrain.spec.operators import NORM_MODULES, Product, Saved
from nanotrain.spec.shape import ModelShape

# bytes of an element
FP8 = 1
FP32 = 4
FP64 = 8
INT32 = 4
INT64 = 8
# tokens of a channel that share a scale (None: all), and its bytes
SCALES = {"rowwise": (None, FP32), "blockwise": (128, FP32), "mxfp8": (32, FP8)}
# recipes whose scales need no amax of the tensor that is cast
SWIGLU_RECIPES = ("delayed", "blockwise", "mxfp8")


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a rank, and of the layer that `at` selects."""

    shape: ModelShape  # of the model, with the heads and norms of the layer
    batch_size: int  # sequences of a microbatch
    seq_length: int  # tokens of a sequence on this rank
    itemsize: int = 2  # bytes per element of activations
    layer: int = 0  # index in the model
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    cp_index: int = 0  # rank in the cp group
    cp_comm_type: str | None = None  # None without context parallelism
    cp_sizes: tuple[int, ...] = ()  # ranks of an all-to-all and of a ring, with a2a+p2p
    sequence_parallel: bool = False
    device: str = "cuda"
    backend: str = ""  # attention backend of layers without a window
    window_backend: str = ""  # attention backend of layers with a window
    routed_rows: int = 0  # rows that the rank's tokens need at their experts
    expert_rows: int = 0  # rows that the rank sends to experts, padding included
    has_fp8: bool = False  # linear layers multiply in fp8
    # recipe of fp8 layers whose casts compute norms and SwiGLU (`cast_recipe` in
    # plan/saved_bytes.py); empty: none do
    cast_recipe: str = ""
    layers_in_bf16: frozenset[int] = frozenset()  # layers without fp8
    writes_head: bool = False  # the gradient of the head is added to the gradient buffer

    @classmethod
    def of(cls, config: Config, shape: ModelShape, *, sizes: Mapping[Any, int]) -> Self:
        """The sizes of a rank.

        Args:
            config: a validated configuration.
            shape: shape of its model.
            sizes: ranks of tp, cp, ep and etp.
        """
        tp = sizes["tp"]
        cp = sizes["cp"]
        itemsize = FP32 if config.precision.params_dtype == "fp32" else 2
        cp_comm_type = config.parallel.cp_comm_type if cp > 1 else None
        sequence_parallel = config.parallel.sequence_parallel and tp > 1
        return cls(
            shape,
            batch_size=config.train.micro_batch_size,
            seq_length=config.data.seq_length // cp,
            itemsize=itemsize,
            tp=tp,
            cp=cp,
            ep=sizes["ep"],
            etp=sizes["etp"],
            cp_comm_type=cp_comm_type,
            cp_sizes=tuple(config.parallel.hierarchical_context_parallel_sizes),
            sequence_parallel=sequence_parallel,
            has_fp8=config.precision.fp8 is not None,
        )

    @property
    def all_to_all_ranks(self) -> int:
        """Context-parallel ranks that exchange heads for tokens."""
        return all_to_all_ranks(self.cp_comm_type, self.cp, sizes=self.cp_sizes)

    @classmethod
    def for_model(cls, shape: ModelShape, *, seq_length: int) -> Self:
        """The sizes of a model on one rank that computes one sequence."""
        return cls(shape, batch_size=1, seq_length=seq_length)

    def at(self, layer: int) -> Self:
        """The sizes of a layer of the model, by its index."""
        return replace(self, shape=self.shape.for_layer(layer), layer=layer)

    @property
    def tokens(self) -> int:
        """Tokens of the rank."""
        return self.batch_size * self.seq_length

    @property
    def outside(self) -> int:
        """Tokens of the rank outside of tensor-parallel layers."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def routed_tokens(self) -> int:
        """Tokens that the rank routes: each tp rank a slice of the sequence."""
        return self.tokens // self.tp

    @property
    def width(self) -> int:
        """Bytes of the hidden state of a token."""
        return self.shape.hidden_size * self.itemsize

    @property
    def columns(self) -> int:
        """Columns of the vocabulary."""
        return self.shape.padded_vocab_size // self.tp

    @property
    def attention_backend(self) -> str:
        """The attention backend of the layer."""
        return self.window_backend if self.shape.has_window(self.layer) else self.backend

    @property
    def layer_input(self) -> Saved:
        """The input of a mixer or MLP; recomputed norms drop it where it is the output of one."""
        has_norm, _ = self.shape.norms_of(self.layer)
        dropped_by = NORM_MODULES if has_norm else ()
        return Saved(self.outside * self.width, dropped_by=dropped_by)

    @property
    def casts_norm(self) -> bool:
        """Whether projections that alone read the layer's input normalize it in their casts."""
        has_norm, _ = self.shape.norms_of(self.layer)
        has_own_norm = has_norm and not self.shape.parallel_shared_norm
        return bool(self.cast_recipe) and has_own_norm and self.shape.normalization != "LayerNorm"

    @property
    def casts_swiglu(self) -> bool:
        """Whether the down projection of an MLP computes SwiGLU in its casts."""
        return self.cast_recipe in SWIGLU_RECIPES and self.shape.has_plain_swiglu

    @property
    def projected_input(self) -> Saved:
        """The layer's input, as projections keep it that alone read it."""
        kept = self.layer_input
        if not self.casts_norm:
            return kept
        return replace(kept, num_bytes=self.fp8_bytes(self.outside, self.shape.hidden_size))

    def fp8_bytes(self, rows: int, channels: int) -> int:
        """Bytes of a transposed operand in fp8 with the scales of its channels."""
        num_bytes = rows * channels * FP8
        if self.cast_recipe in SCALES:
            block, scale_bytes = SCALES[self.cast_recipe]
            num_blocks = -(-rows // (block or rows))
            num_bytes += channels * num_blocks * scale_bytes
        return num_bytes

    @property
    def layer_norm_statistics(self) -> int:
        """Bytes of the mean and the inverse deviation that a LayerNorm keeps per row.

        They are fp32 on GPUs; on CPUs they have the dtype of its input.
        """
        return 2 * (self.itemsize if self.device == "cpu" else FP32)

    def norm_extra(self, width: int) -> int:
        """Bytes per row that a norm keeps beside its input: statistics, and a copy's difference.

        On CPUs a LayerNorm whose weight is an offset from 1 keeps a copy of its input in fp32 in
        place of the input; on GPUs the copy is inside a compiled block.

        Args:
            width: elements of a row.
        """
        if self.shape.normalization != "LayerNorm":
            return FP32  # the inverse root mean square
        if self.shape.has_offset_norms and self.device == "cpu":
            return 2 * FP32 + width * (FP32 - self.itemsize)
        return self.layer_norm_statistics

    def column(
        self,
        widths: Mapping[str, int],
        *,
        saves: tuple[Saved, ...] = (),
        casts_norm: bool = False,
    ) -> Product:
        """Projections of the layer's input, by the local widths of their outputs."""
        weights = tuple(f"{name}.weight" for name in widths)
        return Product(
            name="column",
            weights=weights,
            rows=self.tokens,
            outputs=sum(widths.values()),
            inputs=self.shape.hidden_size,
            shard="column",
            saves=saves,
            casts_norm=casts_norm,
        )

    def row(self, inputs: int, *, saves: tuple[Saved, ...] = ()) -> Product:
        """The row-parallel projection of `inputs` local features into the residual stream."""
        return Product(
            name="row",
            weights=("output.weight",),
            rows=self.tokens,
            outputs=self.shape.hidden_size,
            inputs=inputs,
            shard="row",
            saves=saves,
        )

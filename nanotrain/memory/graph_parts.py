"""The parts of a block that CUDA graphs capture, by the values of `--cuda-graph-scope`.

    empty                        a dense layer as a whole; with experts attention and router
    attn, mamba                  norm, attention or the layer in its place, residual sum
    mlp                          norm, dense MLP, residual sum
    moe_router, moe_preprocess   router; the shared expert in a graph of its own

Between the graphs of a layer with experts the norm, the dispatch of tokens, the experts and the sum
run eagerly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import nn

ATTENTION_INPUTS = ("full", "windowed", "query_scale", "sequence_positions", "dropout")


@dataclass(frozen=True)
class Part:
    """A function of a block, of hidden states and the context of the layers."""

    path: str  # of the function in the block
    modules: tuple[str, ...]  # paths of the modules whose parameters it reads; "": the block
    reads: tuple[str, ...]  # fields of the context that it reads
    # whether its input and its output are hidden states that only the next part reads
    is_link: bool = True


WHOLE = Part("forward", ("",), ATTENTION_INPUTS)
ATTEND = Part("attend", ("attention_norm", "attention", "attention_post_norm"), ATTENTION_INPUTS)
FEED_FORWARD = Part("feed_forward", ("mlp_norm", "mlp", "mlp_post_norm"), ("dropout",))
ROUTE = Part(
    "mlp.route",
    ("mlp.router",),
    ("sequence_positions", "aux_loss_scale"),
    is_link=False,
)
SHARED_EXPERT = Part("mlp.shared.forward", ("mlp.shared",), (), is_link=False)


def parts_of(block: nn.Module, scope: Sequence[str]) -> list[Part]:
    """The parts of a block that are captured.

    Args:
        block: a transformer block.
        scope: values of `--cuda-graph-scope`; empty: all.
    """
    kinds = _kinds_of(block)
    if "full" in scope:
        scope = ()
    is_half = len(kinds) == 1
    if "moe" not in kinds and (is_half or not scope):
        return [WHOLE] if _is_in_scope(kinds, scope) else []
    parts = []
    if _is_in_scope(kinds & {"attn", "mamba"}, scope):
        parts.append(ATTEND)
    if _is_in_scope(kinds & {"mlp"}, scope):
        parts.append(FEED_FORWARD)
    routes = not scope or not {"moe_router", "moe_preprocess"}.isdisjoint(scope)
    if "moe" in kinds and routes:
        parts.append(ROUTE)
        if attrgetter("mlp.shared")(block) is not None:
            parts.append(SHARED_EXPERT)
    return parts


def _kinds_of(block: nn.Module) -> set[str]:
    """The kinds of layers in a block, by their names in `--cuda-graph-scope`."""
    kinds = set()
    mixer = getattr(block, "attention", None)
    if mixer is not None:
        kinds.add("attn" if hasattr(mixer, "core_attention") else "mamba")
    mlp = getattr(block, "mlp", None)
    if mlp is not None:
        kinds.add("moe" if hasattr(mlp, "router") else "mlp")
    return kinds


def _is_in_scope(kinds: set[str], scope: Sequence[str]) -> bool:
    return bool(kinds) and (not scope or not kinds.isdisjoint(scope))

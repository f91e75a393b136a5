"""Launches of a layer with CUDA graphs: the host launches a graph in place of its operators.

capture_layer   the parts of a layer; parts in one graph are launched at once

With experts attention and router are in graphs; norm, dispatch, experts and the sum are not, and
the shared expert counts as if it were not. A `--cuda-graph-scope` that leaves out attention, or a
part of a dense layer, counts as no graph of the layer.
"""

from dataclasses import replace

from nanotrain.config.train import TrainConfig
from nanotrain.planner.parts import Part, Parts

GRAPH_LAUNCHES = (2, 2, 0)  # forward and backward: a copy of the input, and the replay
MIXERS = {"attn", "mamba"}
ROUTERS = {"moe_router", "moe_preprocess"}


def has_graphs(train: TrainConfig) -> bool:
    """Whether layers have CUDA graphs."""
    return train.cuda_graph_impl != "none"


def captures_router(train: TrainConfig) -> bool:
    """Whether routers are in graphs."""
    return has_graphs(train) and _has_scope(train, ROUTERS)


def capture_layer(parts: Parts, train: TrainConfig) -> Parts:
    """The parts of a layer, where all parts in one graph are launched at once.

    Args:
        parts: parts of the layer, in forward order.
        train: settings of the graphs.
    """
    if not has_graphs(train) or not _has_scope(train, MIXERS):
        return parts
    if not any(part.group == "ep" for part in parts):
        return _launched_once(parts) if _has_scope(train, {"mlp"}) else parts
    # the router is the first part of the experts, and its norm the part before it
    names = [part.name for part in parts]
    index = names.index("moe")
    router = parts[index]
    if captures_router(train):
        router = replace(router, launches=GRAPH_LAUNCHES)
    norm = parts[index - 1]
    return [*_launched_once(parts[: index - 1]), norm, router, *parts[index + 1 :]]


def _launched_once(parts: Parts) -> Parts:
    """Parts in one graph."""
    captured: list[Part] = []
    for part in parts:
        launches = (0, 0, 0) if captured else GRAPH_LAUNCHES
        captured.append(replace(part, launches=launches, is_captured=True))
    return captured


def _has_scope(train: TrainConfig, names: set[str]) -> bool:
    scope = set(train.cuda_graph_scope) - {"full"}
    return not scope or bool(scope & names)

"""Launches of layers with CUDA graphs, by what is in them."""

from dataclasses import replace

from nanotrain.config.train import TrainConfig
from nanotrain.planner.graph_time import GRAPH_LAUNCHES, capture_layer, captures_router
from nanotrain.planner.parts import Part, Streams

LOCAL = TrainConfig(cuda_graph_impl="local")
ATTENTION = [Part("layernorm"), Part("core_attn", 1.0, group="tp", after=0.5), Part("add")]
DENSE = [*ATTENTION, Part("layernorm"), Part("mlp", 2.0), Part("add")]
DISPATCH = Part("moe", group="ep", before=0.1, launches=(4, 4, 0))
EXPERTS = [
    *ATTENTION,
    Part("layernorm"),
    Part("moe", launches=(20, 20, 0)),
    DISPATCH,
    Part("moe"),
    DISPATCH,
    Part("add"),
]


def streams_of(parts: list[Part]) -> Streams:
    """The streams of a forward and a backward."""
    streams = Streams()
    for part in parts:
        part.run_forward(streams)
    for part in reversed(parts):
        part.run_backward(streams)
    return streams


def test_a_dense_layer_is_launched_at_once_and_takes_as_long() -> None:
    plain = streams_of(DENSE)
    graphed = streams_of(capture_layer(DENSE, LOCAL))
    assert plain.launches == 12 and plain.collectives == 1
    assert graphed.launches == sum(GRAPH_LAUNCHES) and graphed.collectives == 0
    assert graphed.seconds == plain.seconds


def test_experts_are_launched_one_by_one() -> None:
    launches = [part.launches[0] for part in capture_layer(EXPERTS, LOCAL)]
    assert launches == [2, 0, 0, 1, 2, 4, 1, 4, 1]
    attention = replace(LOCAL, cuda_graph_scope=["attn"])
    assert [part.launches[0] for part in capture_layer(EXPERTS, attention)][4] == 20
    assert captures_router(LOCAL) and not captures_router(attention)


def test_without_graphs_of_attention_nothing_changes() -> None:
    for train in (TrainConfig(), replace(LOCAL, cuda_graph_scope=["mlp"])):
        assert capture_layer(DENSE, train) is DENSE
    assert capture_layer(DENSE, replace(LOCAL, cuda_graph_scope=["attn"])) is DENSE
    both = replace(LOCAL, cuda_graph_scope=["attn", "mlp"])
    assert capture_layer(DENSE, both) == capture_layer(DENSE, LOCAL)

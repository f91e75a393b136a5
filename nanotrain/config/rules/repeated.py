"""Rules of a layer of multi-token prediction that is applied several times."""

from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.errors import ConfigError

# balance losses over sums of several passes, which would count the tokens of every pass
OF_SEVERAL_PASSES = {"global_aux_loss", "quantile_balancing"}


def check_repeated_layer(c: Settings) -> Errors:
    """A layer that runs several times in a pass excludes some settings."""
    number = c.mtp.num_layers or 0
    if not c.mtp.use_repeated_layer or number < 2:
        return
    what = f"mtp_use_repeated_layer with mtp_num_layers {number}"
    if c.model.hidden_dropout > 0 or c.model.attention_dropout > 0:
        yield ConfigError(
            f"{what} and dropout",
            why="dropout is a function of the layer, so every prediction would drop the same "
            "elements",
            fix="set --hidden-dropout 0 --attention-dropout 0",
        )
    if c.train.cuda_graph_impl != "none":
        yield ConfigError(
            f"{what} and cuda_graph_impl {c.train.cuda_graph_impl}",
            why="a graph has one copy of its inputs, and the layer runs several times before its "
            "backward",
            fix="leave --cuda-graph-impl out",
        )
    kinds = set(c.moe.router_load_balancing_type) & OF_SEVERAL_PASSES
    if c.has_experts and kinds:
        yield ConfigError(
            f"{what} and moe_router_load_balancing_type {min(kinds)}",
            why="it would count the tokens of a step once per prediction",
            fix="set --moe-router-load-balancing-type seq_aux_loss or aux_loss",
        )

"""Rules between the kind of residual connections and the layers that have them."""

from nanotrain.config.layer_kinds import STREAMS, linear_attention_kind
from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.config.schema import typed
from nanotrain.errors import ConfigError


def check_parallel_residual(c: Settings) -> Errors:
    """Attention and MLP side by side: every layer has both, of one input."""
    if c.model.residual_type != "parallel":
        return
    if c.model.hybrid_layer_pattern is not None:
        yield ConfigError(
            f"residual_type parallel with hybrid_layer_pattern "
            f"{typed(c.model.hybrid_layer_pattern)}",
            why="every layer of a pattern is attention or an MLP alone",
            fix="leave --residual-type or --hybrid-layer-pattern out",
        )


def check_plain_layers(c: Settings) -> Errors:
    """Shortcuts, and factors of hidden states after a layer, are of plain residuals."""
    kind = c.model.residual_type
    if c.moe.shortcut and kind != "plain":
        yield ConfigError(
            f"residual_type {kind} with moe_shortcut",
            why="the experts of a shortcut read the sum of x and attention",
            fix="leave --residual-type or --moe-shortcut out",
        )
    if c.model.layer_scale and kind != "plain":
        yield ConfigError(
            f"layer_scale with residual_type {kind}",
            why="the factor follows an MLP that reads the output of attention",
            fix="leave --layer-scale or --residual-type out",
        )


def check_streams(c: Settings) -> Errors:
    """Check several residual streams."""
    kind = c.model.residual_type
    if kind not in STREAMS:
        return
    num_blocks = c.model.residual_streams - 1
    if kind == "attention" and num_blocks > c.model.num_layers:
        yield ConfigError(
            f"residual_streams {c.model.residual_streams} with num_layers {c.model.num_layers}",
            why="the streams of residual_type attention are the embedding and blocks of at least "
            "one layer each",
            fix=f"set --residual-streams {c.model.num_layers + 1} or less",
        )
    if c.mtp.num_layers:
        yield ConfigError(
            f"residual_type {kind} with mtp_num_layers {c.mtp.num_layers}",
            why="a layer of multi-token prediction reads one stream of hidden states",
            fix="leave --mtp-num-layers out, or set --residual-type plain",
        )


def check_shared_norm(c: Settings) -> Errors:
    """Check one norm of the inputs of attention and MLP."""
    model = c.model
    if model.residual_type != "parallel" or not model.parallel_shared_norm:
        return
    placements = [model.norm_placement]
    kind = linear_attention_kind(model.linear_attention_type)
    if kind is not None and kind.has_delta_rule and c.linear.norm_placement is not None:
        placements.append(c.linear.norm_placement)
    if "post" in placements:
        yield ConfigError(
            "parallel_shared_norm with norm_placement post",
            why="the inputs of attention and MLP have no norm that they could share",
            fix="leave --parallel-shared-norm out, or set the norms of all layers to pre",
        )

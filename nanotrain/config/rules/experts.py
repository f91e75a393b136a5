"""Rules of the model section for mixtures of experts: the router, its groups and its losses."""

from nanotrain.config.option import flag_of
from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.config.schema import typed
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of


def check_one_expert_per_token(c: Settings) -> Errors:
    """Settings that depend on whether a token is sent to one expert."""
    moe = c.moe
    is_softmax = moe.router_score_function == "softmax"
    if moe.router_topk == 1 and is_softmax and not moe.router_pre_softmax:
        yield ConfigError(
            "moe_router_topk is 1 and moe_router_pre_softmax is off",
            why="a softmax over one expert is always 1, so the router would get no gradient",
            fix="set --moe-router-pre-softmax or --moe-router-topk 2",
        )
    if moe.apply_probs_on_input and moe.router_topk > 1:
        yield ConfigError(
            f"moe_apply_probs_on_input with moe_router_topk {moe.router_topk}",
            why="a token is scaled once, before it is sent to its expert, as in Megatron-LM",
            fix="leave --moe-apply-probs-on-input out, or set --moe-router-topk 1",
        )


def check_group_settings(c: Settings) -> Errors:
    """Group-limited routing needs two numbers."""
    groups = c.moe.router_num_groups
    group_topk = c.moe.router_group_topk
    why = (
        "group-limited routing needs both: the number of groups, and of the groups that a token "
        "may use"
    )
    if groups is None and group_topk is not None:
        yield ConfigError(
            f"moe_router_group_topk is {group_topk} and moe_router_num_groups is unset",
            why=why,
            fix="set --moe-router-num-groups too, or leave both out",
        )
    if groups is not None and group_topk is None:
        yield ConfigError(
            f"moe_router_num_groups is {groups} and moe_router_group_topk is unset",
            why=why,
            fix="set --moe-router-group-topk too, or leave both out",
        )


def check_expert_layers(c: Settings) -> Errors:
    """Experts need a layer that has them."""
    if not c.has_experts or any(c.model.moe_layers):
        return
    pattern = c.model.hybrid_layer_pattern
    why = f"moe_layer_freq is {c.moe.layer_freq}"
    fix = "set --moe-layer-freq 1 or leave --num-experts out"
    if pattern:
        why = f"hybrid_layer_pattern {pattern} has no E"
        fix = "write an E into --hybrid-layer-pattern or leave --num-experts out"
    yield ConfigError(f"no layer has the {c.moe.num_experts} experts", why=why, fix=fix)


def check_number_of_experts(c: Settings) -> Errors:
    """A token is sent to experts that exist."""
    num_experts = c.moe.num_experts
    if c.has_experts and c.moe.router_topk > num_experts:
        yield ConfigError(
            f"a token cannot be sent to {c.moe.router_topk} of {count_of(num_experts, 'expert')}",
            why="moe_router_topk must be at most num_experts",
            fix=f"set --moe-router-topk to at most {num_experts} or raise --num-experts",
        )


def check_zero_experts(c: Settings) -> Errors:
    """Experts that return their input have neither groups nor a capacity."""
    moe = c.moe
    what = f"moe_num_zero_experts {moe.num_zero_experts}"
    if moe.num_zero_experts == 0:
        return
    if moe.router_num_groups is not None:
        yield ConfigError(
            f"{what} with moe_router_num_groups {moe.router_num_groups}",
            why="experts that return their input are on every rank and belong to no group",
            fix="leave out --moe-num-zero-experts or --moe-router-num-groups",
        )
    if moe.expert_capacity_factor is not None:
        yield ConfigError(
            f"{what} with moe_expert_capacity_factor {moe.expert_capacity_factor}",
            why="a capacity limits what an expert computes, and these experts compute nothing",
            fix="leave out --moe-num-zero-experts or --moe-expert-capacity-factor",
        )


def check_separate_norms(c: Settings) -> Errors:
    """Separate norms of shared and routed experts need both, and fit some models only."""
    if not c.moe.separate_norms:
        return
    if c.moe.shared_expert_intermediate_size is None:
        yield ConfigError(
            "moe_separate_norms is set and moe_shared_expert_intermediate_size is unset",
            why="the shared expert and the routed experts have norms of their own",
            fix="set --moe-shared-expert-intermediate-size or leave --moe-separate-norms out",
        )
    if c.model.norm_placement != "sandwich" or c.model.normalization == "L2Norm":
        yield ConfigError(
            f"moe_separate_norms with norm_placement {c.model.norm_placement} and normalization "
            f"{c.model.normalization}",
            why="the sum of both outputs has a norm with weights too",
            fix="set --norm-placement sandwich and --normalization RMSNorm, or leave "
            "--moe-separate-norms out",
        )
    has_others = c.moe.shortcut or c.moe.latent_size is not None or c.moe.apply_probs_on_input
    if has_others or c.model.residual_type != "plain":
        yield ConfigError(
            "moe_separate_norms with moe_shortcut, moe_latent_size, moe_apply_probs_on_input or "
            "another residual_type",
            why="they read the inputs of experts without norms of their own",
            fix="leave --moe-separate-norms out",
        )


def check_shortcut(c: Settings) -> Errors:
    """Errors for a shortcut layer whose shared expert or norms do not fit."""
    if not c.moe.shortcut:
        return
    if c.moe.shared_expert_intermediate_size is None:
        yield ConfigError(
            "moe_shortcut is set and moe_shared_expert_intermediate_size is unset",
            why="the shared expert is the MLP of the first block, and its width that of the second",
            fix="set --moe-shared-expert-intermediate-size or leave --moe-shortcut out",
        )
    if c.moe.shared_expert_gate:
        yield ConfigError(
            "moe_shortcut with moe_shared_expert_gate",
            why="the shared expert is the MLP of the first block, which has no gate",
            fix="leave out --moe-shortcut or --moe-shared-expert-gate",
        )
    if c.moe.output_norm or c.moe.shared_expert_average:
        yield ConfigError(
            "moe_shortcut with moe_output_norm or moe_shared_expert_average",
            why="the outputs of shared and routed experts are added at different places",
            fix="leave out --moe-shortcut, or --moe-output-norm and --moe-shared-expert-average",
        )
    has_output_norms = c.model.norm_placement != "pre"
    if has_output_norms or c.linear.norm_placement in ("post", "sandwich"):
        yield ConfigError(
            "moe_shortcut with norms of outputs",
            why="the outputs of shared and routed experts are added at different places",
            fix="leave --moe-shortcut out, or set the norms of all layers to pre",
        )


def check_shortcut_layers(c: Settings) -> Errors:
    """Check layers and dropout that a shortcut excludes."""
    if not c.moe.shortcut:
        return
    if c.model.hybrid_layer_pattern is not None:
        yield ConfigError(
            f"moe_shortcut with hybrid_layer_pattern {typed(c.model.hybrid_layer_pattern)}",
            why="a layer with a shortcut has attention and experts",
            fix="leave --moe-shortcut or --hybrid-layer-pattern out",
        )
    if c.model.has_dropout:
        yield ConfigError(
            "moe_shortcut with dropout",
            why="both blocks of a layer would drop the same numbers",
            fix="leave --moe-shortcut out, or set --hidden-dropout and --attention-dropout to 0",
        )


def check_balancing_losses(c: Settings) -> Errors:
    """Check load-balancing losses and their coefficients."""
    losses = c.moe.router_load_balancing_type
    num_coefficients = len(c.moe.aux_loss_coeff)
    if not c.has_experts:
        return
    if not losses or len(losses) > 1 and ("none" in losses or len(set(losses)) < len(losses)):
        yield ConfigError(
            f"moe_router_load_balancing_type is {typed(losses)}",
            why="it takes none, or different losses",
            fix="name every loss once",
        )
    if num_coefficients != len(losses):
        yield ConfigError(
            f"{count_of(num_coefficients, 'coefficient')} (moe_aux_loss_coeff) for "
            f"{count_of(len(losses), 'load-balancing loss')}",
            why="each loss has its own coefficient",
            fix=f"set --moe-aux-loss-coeff to {count_of(len(losses), 'number')}, in the order of "
            "--moe-router-load-balancing-type",
        )


def check_quantile_balancing(c: Settings) -> Errors:
    """Check biases that are quantiles of scores."""
    moe = c.moe
    if not c.has_experts or not moe.balances_quantiles:
        return
    coefficients = dict(zip(moe.router_load_balancing_type, moe.aux_loss_coeff, strict=False))
    if coefficients.get("quantile_balancing"):
        yield ConfigError(
            f"coefficient {coefficients['quantile_balancing']:g} of quantile_balancing",
            why="it is no loss",
            fix="set its --moe-aux-loss-coeff to 0",
        )
    if not moe.router_enable_expert_bias:
        yield ConfigError(
            "quantile_balancing without moe_router_enable_expert_bias",
            why="it sets the biases of experts",
            fix="set --moe-router-enable-expert-bias",
        )
    if moe.router_num_groups is not None:
        yield ConfigError(
            f"quantile_balancing with moe_router_num_groups {moe.router_num_groups}",
            why="a token cannot choose the experts of other groups, whatever their biases are",
            fix="leave out --moe-router-num-groups, or choose another "
            "--moe-router-load-balancing-type",
        )
    if moe.router_topk >= moe.num_choices:
        yield ConfigError(
            f"quantile_balancing with moe_router_topk {moe.router_topk} of {moe.num_choices}",
            why="every token chooses every expert",
            fix="lower --moe-router-topk, or set --moe-router-load-balancing-type none",
        )


def check_sinkhorn(c: Settings) -> Errors:
    """Check experts that Sinkhorn's algorithm chooses."""
    moe = c.moe
    if not c.has_experts or not moe.uses_sinkhorn:
        return
    others = [name for name in moe.router_load_balancing_type if name != "sinkhorn"]
    if others:
        yield ConfigError(
            f"sinkhorn with {typed(others)}",
            why="it balances the choice itself",
            fix="name the others neither in --moe-router-load-balancing-type nor in "
            "--moe-aux-loss-coeff",
        )
    if any(moe.aux_loss_coeff):
        yield ConfigError(
            f"coefficient {max(moe.aux_loss_coeff):g} of sinkhorn",
            why="it is no loss",
            fix="set its --moe-aux-loss-coeff to 0",
        )
    settings = {
        "moe_router_enable_expert_bias": moe.router_enable_expert_bias,
        "moe_router_num_groups": moe.router_num_groups is not None,
        "moe_router_force_load_balancing": moe.router_force_load_balancing,
    }
    for name, is_set in settings.items():
        if is_set:
            yield ConfigError(
                f"sinkhorn with {name}",
                why="both decide which experts a token has",
                fix=f"leave {flag_of(name)} out, or choose another "
                "--moe-router-load-balancing-type",
            )


def check_groups(c: Settings) -> Errors:
    """Groups of experts, and how many experts a token can reach."""
    moe = c.moe
    if not c.has_experts:
        return
    num_groups = moe.router_num_groups or 1
    groups = count_of(num_groups, "group")
    if moe.num_experts % num_groups != 0:
        yield ConfigError(
            f"{count_of(moe.num_experts, 'expert')} cannot form {groups}",
            why="moe_router_num_groups must divide num_experts",
            fix="set --moe-router-num-groups to a divisor",
        )
    group_topk = moe.router_group_topk or 1
    if moe.router_num_groups is not None and group_topk > num_groups:
        yield ConfigError(
            f"a token cannot use {group_topk} of {groups}",
            why="moe_router_group_topk must be at most moe_router_num_groups",
            fix=f"set --moe-router-group-topk to at most {num_groups}",
        )


def check_reachable_experts(c: Settings) -> Errors:
    """The groups of a token have enough experts."""
    num_experts = c.moe.num_experts
    topk = c.moe.router_topk
    group_topk = c.moe.router_group_topk
    if not c.has_experts or group_topk is None or num_experts < topk:
        return
    per_group = num_experts // (c.moe.router_num_groups or 1)
    reachable = group_topk * per_group
    if reachable < topk:
        groups_needed = -(-topk // max(1, per_group))
        yield ConfigError(
            f"a token cannot be sent to {count_of(topk, 'expert')}",
            why=f"it may use {count_of(group_topk, 'group')} of {per_group} = "
            f"{count_of(reachable, 'expert')}",
            fix=f"set --moe-router-group-topk {groups_needed} or lower --moe-router-topk",
        )

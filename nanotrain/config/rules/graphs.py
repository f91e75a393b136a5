"""Rules of CUDA graphs: parts of layers that can be captured, and settings that exclude graphs."""

from nanotrain.config.parallel import DEFERRING_SCHEDULES
from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.errors import ConfigError

# values of --cuda-graph-scope with which attention or a layer in its place is captured
MIXER_SCOPES = {"attn", "mamba"}
ROUTER_SCOPES = {"moe_router", "moe_preprocess"}
WITHOUT = "leave --cuda-graph-impl out"


def check_graph_values(c: Settings) -> Errors:
    """Values of Megatron-LM that graphs of parts of layers do not have."""
    scope = set(c.train.cuda_graph_scope)
    if "full_iteration" in scope:
        yield ConfigError(
            "cuda_graph_scope full_iteration",
            why="gradient reductions and pipeline messages stay outside of graphs",
            fix="leave --cuda-graph-scope out, which captures all parts of layers that can be",
        )
    if "moe" in scope:
        yield ConfigError(
            "cuda_graph_scope moe",
            why="numbers of tokens per expert change with every microbatch, and a graph has one",
            fix="set --cuda-graph-scope attn moe_router, with mlp where a layer is dense; experts "
            "run between the graphs",
        )
    if "full" in scope and len(scope) > 1:
        yield ConfigError(
            "cuda_graph_scope full with other parts",
            why="it captures all of them",
            fix="leave full or the other values out",
        )


def check_graph_parts(c: Settings) -> Errors:
    """A part that is named has to be in the model."""
    if not has_graphs(c):
        return
    scope = set(c.train.cuda_graph_scope)
    kinds = set(c.model.mixers) - {None}
    attention = {"attention", "mla", "dsa", "shared_dsa", "block_sparse"}
    has_attention = bool(kinds & attention)
    has_others = bool(kinds - attention)
    parts = {
        "attn": (has_attention, "no layer has attention"),
        "mamba": (has_others, "every layer has attention"),
        "mlp": (c.has_dense_layers, "no layer has a dense MLP"),
        "moe_router": (c.has_experts, "the model has no experts: num_experts is unset"),
        "moe_preprocess": (c.has_experts, "the model has no experts: num_experts is unset"),
    }
    for name, (is_present, why) in parts.items():
        if name in scope and not is_present:
            yield ConfigError(
                f"cuda_graph_scope {name} has no effect",
                why=why,
                fix=f"leave {name} out of --cuda-graph-scope",
            )


def check_graph_layout(c: Settings) -> Errors:
    """Settings whose work cannot be captured, or whose memory does not stay in its place."""
    if not has_graphs(c):
        return
    parallel = c.parallel
    if parallel.data_parallel_sharding_strategy == "optim_grads_params":
        yield excluded(
            "data_parallel_sharding_strategy optim_grads_params",
            why="gathered parameters are in other memory every time, and a graph reads one address",
            fix="set --data-parallel-sharding-strategy optim or optim_grads",
        )
    if parallel.pipeline_schedule in DEFERRING_SCHEDULES:
        yield excluded(
            f"pipeline_schedule {parallel.pipeline_schedule}",
            why="it computes weight gradients apart from the backward, and a graph has both",
            fix="set --pipeline-schedule 1f1b or interleaved",
        )
    if parallel.tp_comm_overlap:
        yield excluded(
            "tp_comm_overlap",
            why="its sends and receives run beside products, which was not tried in a graph",
            fix="leave --tp-comm-overlap out",
        )
    if parallel.overlap_moe_expert_parallel_comm:
        yield excluded(
            "overlap_moe_expert_parallel_comm",
            why="forwards and backwards run in turns on two threads, and a graph is one thread's",
            fix="leave --overlap-moe-expert-parallel-comm out",
        )
    if c.moe.shortcut:
        yield excluded(
            "moe_shortcut",
            why="the experts of a layer run beside its second block",
            fix="leave --moe-shortcut out",
        )
    if c.train.replay_interval:
        yield excluded(
            "replay_interval",
            why="a pass besides those of the step was never tried between captured ones",
            fix="leave --replay-interval or --cuda-graph-impl out",
        )


def check_graph_programs(c: Settings) -> Errors:
    """Other changes of blocks that graphs exclude."""
    if not has_graphs(c):
        return
    borrows = c.parallel.data_parallel_sharding_strategy == "optim_grads"
    if c.train.torch_compile and borrows:
        yield excluded(
            "torch_compile and data_parallel_sharding_strategy optim_grads",
            why="compiled layers write gradients to memory that buckets borrow, at an address that "
            "changes",
            fix="leave --torch-compile out, or set --data-parallel-sharding-strategy optim",
        )
    if c.train.debug_nan:
        yield excluded(
            "debug_nan",
            why="modules inside of a graph are not seen",
            fix="leave --debug-nan out, or --cuda-graph-impl for the search",
        )
    if c.has_fp8 and c.fp8.param_gather:
        yield excluded(
            "fp8_param_gather",
            why="weights in fp8 and their scales get other memory in every step, and a graph reads "
            "one address",
            fix="leave --fp8-param-gather out",
        )
    if c.model.residual_type != "plain":
        yield excluded(
            f"residual_type {c.model.residual_type}",
            why="graphs capture attention and MLP with the sums that follow them",
            fix="set --residual-type plain",
        )
    if c.memory.cpu_offloading:
        yield excluded(
            "cpu_offloading",
            why="what a graph saves stays at its address",
            fix="leave --cpu-offloading out",
        )
    if c.memory.recompute_granularity == "full":
        yield excluded(
            "recompute_granularity full",
            why="a layer that is recomputed as a whole would replay its forward twice, and a graph "
            "keeps what it saves",
            fix="set --recompute-granularity selective, whose modules are recomputed in the graph",
        )
    if "moe" in c.recomputed_modules and captures_router(c):
        yield excluded(
            "recompute_modules moe",
            why="the router would be recomputed around its graph",
            fix="leave moe out of --recompute-modules, or name parts without moe_router, such as "
            "--cuda-graph-scope attn",
        )


def check_graph_attention(c: Settings) -> Errors:
    """Attention that plans every microbatch on the host is not captured."""
    if not has_graphs(c) or not captures_mixers(c):
        return
    settings = {
        "context_parallel_size above 1": c.cp > 1,
        "reset_attention_mask": c.data.reset_attention_mask,
        "a window": any(c.model.window_layers),
        "sinks, soft-capped scores or attention dropout": c.model.has_score_options,
        "qk_clip": c.optim.qk_clip,
        "log_max_attention_logit": c.train.log_max_attention_logit,
        "sparse_attention_type": c.model.sparse_attention_type is not None,
        "num_kv_shared_layers": c.model.num_kv_shared_layers > 0,
    }
    names = [name for name, is_used in settings.items() if is_used]
    if not names:
        return
    others = [name for name, is_present in other_parts(c).items() if is_present]
    fix = f"set --cuda-graph-scope {' '.join(others)}" if others else WITHOUT
    yield excluded(
        ", ".join(names),
        why="the host plans attention for every microbatch, and sends or copies in between",
        fix=fix,
    )


def excluded(setting: str, *, why: str, fix: str) -> ConfigError:
    """The error for a setting that excludes CUDA graphs."""
    return ConfigError(f"cuda_graph_impl local with {setting}", why=why, fix=fix)


def has_graphs(c: Settings) -> bool:
    """Whether CUDA graphs are on."""
    implementation: str = c.train.cuda_graph_impl
    return implementation != "none"


def captures_mixers(c: Settings) -> bool:
    """Whether attention, or a layer in its place, is captured."""
    scope = set(c.train.cuda_graph_scope) - {"full"}
    return not scope or bool(scope & MIXER_SCOPES)


def captures_router(c: Settings) -> bool:
    """Whether routers are captured."""
    scope = set(c.train.cuda_graph_scope) - {"full"}
    return not scope or bool(scope & ROUTER_SCOPES)


def other_parts(c: Settings) -> dict[str, bool]:
    """Parts besides attention, and whether the model has them."""
    return {"mlp": c.has_dense_layers, "moe_router": c.has_experts}

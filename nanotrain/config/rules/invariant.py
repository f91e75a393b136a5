"""Rules of `--invariant`: settings without an invariant form, and layouts without whole blocks.

MODEL, EXPERTS and RUN list the settings, in the order of their messages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nanotrain.config.invariant import (
    num_expert_blocks,
    num_position_blocks,
    num_token_blocks,
    num_weight_blocks,
    sharded_sizes,
)
from nanotrain.config.optim import MUON_OPTIMIZERS
from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.config.schema import ENTRIES
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of


@dataclass(frozen=True)
class Unsupported:
    """A setting that `--invariant` does not go with."""

    name: str  # as a message names it
    is_set: Callable[[Settings], bool]
    why: str
    fix: str


def _leave_out(
    name: str, is_set: Callable[[Settings], bool], *, why: str, flag: str | None = None
) -> Unsupported:
    """A setting whose cure is to leave its flag out."""
    flag = flag or "--" + name.replace("_", "-")
    return Unsupported(name, is_set, why, fix=f"leave {flag} out, or --invariant")


OTHER_LAYERS = (
    "layers of attention, MLA, Mamba-2, gated DeltaNet, MLPs and experts have invariant forms, "
    "other kinds have none yet"
)
SCANS = {"mamba2", "gated_delta_net"}
IN_DTYPE = "its gradients are fp64, on a grid on which sums are exact"
ELEMENTWISE = "torch's kernels round the last elements of a tensor in another way than the others"
ORDER = "its sums follow the layout"

MODEL: tuple[Unsupported, ...] = (
    _leave_out(
        "mtp_use_repeated_layer",
        lambda c: c.mtp.use_repeated_layer,
        why="layers with weights of their own alone are compared over layouts",
    ),
    Unsupported(
        "linear attention",
        lambda c: not c.linear_kinds.keys() <= SCANS,
        why=OTHER_LAYERS,
        fix="use layers of mamba2 or gated_delta_net, or leave --invariant out",
    ),
    Unsupported(
        "context_parallel_size and linear attention",
        lambda c: c.cp > 1 and bool(c.linear_kinds),
        why="states that ranks pass on are composed in an order that follows from their number",
        fix="set --context-parallel-size 1, or leave --invariant out",
    ),
    _leave_out(
        "sparse_attention_type",
        lambda c: c.model.sparse_attention_type is not None,
        why=OTHER_LAYERS,
    ),
    _leave_out(
        "num_kv_shared_layers", lambda c: c.model.num_kv_shared_layers > 0, why=OTHER_LAYERS
    ),
    Unsupported(
        "residual_type",
        lambda c: c.model.residual_type != "plain",
        why=OTHER_LAYERS,
        fix="set --residual-type plain, or leave --invariant out",
    ),
    _leave_out("layer_input_size", lambda c: c.model.layer_input_size > 0, why=OTHER_LAYERS),
    _leave_out("layer_scale", lambda c: c.model.layer_scale, why=OTHER_LAYERS),
    _leave_out("add_head_bias", lambda c: c.model.add_head_bias, why=OTHER_LAYERS),
    _leave_out("qk_layernorm_across_heads", lambda c: c.model.qk_layernorm_across_heads, why=ORDER),
    _leave_out(
        "final_logit_softcapping",
        lambda c: c.model.final_logit_softcapping is not None,
        why=ELEMENTWISE,
    ),
    _leave_out("logits_scaling", lambda c: c.model.logits_scaling != 1.0, why=ELEMENTWISE),
    _leave_out("use_mup", lambda c: c.model.use_mup, why=ELEMENTWISE),
    _leave_out(
        "attn_logit_softcapping",
        lambda c: c.model.attn_logit_softcapping is not None,
        why=ELEMENTWISE,
    ),
    _leave_out("attention_dropout", lambda c: c.model.attention_dropout > 0, why=ELEMENTWISE),
    _leave_out("attention_output_gate", lambda c: c.model.attention_output_gate, why=ELEMENTWISE),
    Unsupported(
        "softmax_type",
        lambda c: c.model.softmax_type != "vanilla",
        why=OTHER_LAYERS,
        fix="set --softmax-type vanilla, or leave --invariant out",
    ),
    Unsupported(
        "activation xielu",
        lambda c: c.model.activation == "xielu",
        why="its weights are scalars, whose gradients are sums over all elements",
        fix="set another --activation, or leave --invariant out",
    ),
    _leave_out(
        "window_num_attention_heads",
        lambda c: bool(c.model.window_num_attention_heads or c.model.window_query_groups),
        why=OTHER_LAYERS,
    ),
    _leave_out("use_double_wide_mlp", lambda c: c.model.use_double_wide_mlp, why=OTHER_LAYERS),
)
# fields of the section of experts that may be set
EXPERT_FIELDS = {
    "num_experts",
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_norm_epsilon",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_load_balancing_type",
    "moe_router_force_load_balancing",
    "moe_aux_loss_coeff",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
}
NOT_COMPARED = "no layout was compared with it to the bit"


def _balances_microbatches(c: Settings) -> bool:
    """Whether loads are balanced over the tokens of several sequences."""
    if c.moe.uses_sinkhorn or c.moe.balances_quantiles:
        return True
    # numbers of kinds and coefficients that differ are another rule's error
    kinds = zip(c.moe.router_load_balancing_type, c.moe.aux_loss_coeff, strict=False)
    return any(kind not in ("none", "seq_aux_loss") and coeff > 0 for kind, coeff in kinds)


EXPERTS: tuple[Unsupported, ...] = (
    Unsupported(
        "moe_router_load_balancing_type",
        _balances_microbatches,
        why="it balances the tokens of a microbatch, which the layout chooses",
        fix="set --moe-router-load-balancing-type seq_aux_loss, or leave --invariant out",
    ),
    Unsupported(
        "moe_router_score_function",
        lambda c: c.moe.router_score_function not in ("softmax", "sigmoid"),
        why=NOT_COMPARED,
        fix="set --moe-router-score-function softmax or sigmoid, or leave --invariant out",
    ),
    _leave_out(
        "add_bias_linear",
        lambda c: c.model.add_bias_linear,
        why="biases of experts and routers have no invariant form",
    ),
    _leave_out(
        "moe_hierarchical_dispatch",
        lambda c: c.parallel.moe_hierarchical_dispatch is not None,
        why=NOT_COMPARED,
    ),
    _leave_out(
        "moe_flex_dispatcher_backend",
        lambda c: c.parallel.moe_flex_dispatcher_backend is not None,
        why=NOT_COMPARED,
    ),
    _leave_out(
        "moe_expert_rank_capacity_factor",
        lambda c: c.parallel.moe_expert_rank_capacity_factor is not None,
        why=NOT_COMPARED,
    ),
    _leave_out(
        "overlap_moe_expert_parallel_comm",
        lambda c: bool(c.parallel.overlap_moe_expert_parallel_comm),
        why=NOT_COMPARED,
    ),
)
OPTIMIZERS = ("adam", "sgd", "lion", "adam_h", *MUON_OPTIMIZERS)
RUN: tuple[Unsupported, ...] = (
    Unsupported(
        "params_dtype fp16",
        lambda c: c.precision.params_dtype == "fp16",
        why="the grid of the gradients would move with the loss scale",
        fix="set --bf16 or fp32, or leave --invariant out",
    ),
    _leave_out(
        "fp8_format", lambda c: c.has_fp8, why="scales follow from the tokens of a microbatch"
    ),
    _leave_out("grad_reduce_in_bf16", lambda c: c.precision.grad_reduce_in_bf16, why=IN_DTYPE),
    _leave_out(
        "accumulate_allreduce_grads_in_fp32",
        lambda c: c.precision.accumulate_allreduce_grads_in_fp32 is False,
        why=IN_DTYPE,
        flag="--no-accumulate-allreduce-grads-in-fp32",
    ),
    _leave_out(
        "use_precision_aware_optimizer",
        lambda c: c.precision.use_precision_aware_optimizer,
        why="blocks of one scale begin where a shard begins",
    ),
    _leave_out(
        "gradient_accumulation_fusion",
        lambda c: bool(c.parallel.gradient_accumulation_fusion),
        why=IN_DTYPE,
    ),
    _leave_out(
        "ddp_average_in_collective",
        lambda c: c.parallel.ddp_average_in_collective,
        why="gradients would be scaled by the number of ranks",
    ),
    _leave_out("tp_comm_overlap", lambda c: c.parallel.tp_comm_overlap, why=ORDER),
    _leave_out(
        "torch_compile",
        lambda c: bool(c.train.torch_compile),
        why="compiled kernels choose their own order",
    ),
    Unsupported(
        "cuda_graph_impl",
        lambda c: c.train.cuda_graph_impl != "none",
        why=ORDER,
        fix="set --cuda-graph-impl none, or leave --invariant out",
    ),
    _leave_out(
        "step_seq_length_schedule",
        lambda c: bool(c.train.step_seq_length_schedule),
        why="the blocks follow from one sequence length",
    ),
    Unsupported(
        "optimizer",
        lambda c: c.optim.optimizer not in OPTIMIZERS,
        why=NOT_COMPARED,
        fix=f"set --optimizer to one of {', '.join(OPTIMIZERS)}, or leave --invariant out",
    ),
    Unsupported(
        "muon_tp_mode blockwise",
        lambda c: c.optim.muon_tp_mode == "blockwise",
        why="the block of each tensor-parallel rank is a matrix of its own",
        fix="set --muon-tp-mode distributed, or leave --invariant out",
    ),
    _leave_out("qk_clip", lambda c: c.optim.qk_clip, why=ORDER),
    _leave_out(
        "log_max_attention_logit", lambda c: c.train.log_max_attention_logit, why=ELEMENTWISE
    ),
    _leave_out("ema_decay", lambda c: c.optim.ema_decay is not None, why=ELEMENTWISE),
    _leave_out("optimizer_cpu_offload", lambda c: c.optim.optimizer_cpu_offload, why=ELEMENTWISE),
)


def check_invariant_settings(c: Settings) -> Errors:
    """Settings without an invariant form."""
    if not c.precision.invariant:
        return
    rows = [*MODEL, *RUN]
    if c.has_experts:
        rows += [*EXPERTS, *_other_expert_fields(c)]
    for row in rows:
        if row.is_set(c):
            yield ConfigError(f"invariant with {row.name}", why=row.why, fix=row.fix)


def _other_expert_fields(c: Settings) -> Iterator[Unsupported]:
    """Fields of the section of experts that are set and are not of EXPERT_FIELDS."""
    for name, entry in ENTRIES.items():
        if entry.section != "model.moe" or name in EXPERT_FIELDS:
            continue
        field = entry.field
        if getattr(c.moe, field.name) != field.default:
            yield _leave_out(name, lambda _: True, why=NOT_COMPARED)


def check_invariant_blocks(c: Settings) -> Errors:
    """Ranks that own whole blocks."""
    if not c.precision.invariant or c.model.vocab_size is None:
        return
    num_blocks = num_weight_blocks(c.config)
    if num_blocks % c.tp != 0:
        sizes = ", ".join(f"{name} {size}" for name, size in sharded_sizes(c.config).items())
        yield ConfigError(
            f"invariant with tensor_model_parallel_size {c.tp}",
            why=f"products are computed in {count_of(num_blocks, 'block')}, the largest power of "
            f"two up to 8 that divides {sizes}; a rank owns whole blocks",
            fix=f"set --tensor-model-parallel-size to a divisor of {num_blocks}",
        )
    if c.has_experts:
        yield from _check_expert_blocks(c)
    has_replicated_weights = c.model.multi_latent_attention or bool(c.mtp.num_layers)
    if c.has_experts or (has_replicated_weights and c.parallel.sequence_parallel):
        yield from _check_token_blocks(c)
    num_blocks = num_position_blocks(c.config)
    if c.cp > 1 and num_blocks % (2 * c.cp) != 0:
        yield ConfigError(
            f"invariant with context_parallel_size {c.cp}",
            why=f"sequences are computed in {count_of(num_blocks, 'block')} of positions, the "
            f"largest power of two up to 4 that divides seq_length {c.data.seq_length}; a rank "
            "owns two chunks of whole blocks",
            fix=f"set --context-parallel-size to {max(1, num_blocks // 2)} or less",
        )


def _check_expert_blocks(c: Settings) -> Errors:
    """Ranks of etp that own whole blocks of the matrices of experts."""
    num_blocks = num_expert_blocks(c.config)
    if num_blocks % c.etp != 0:
        yield ConfigError(
            f"invariant with expert_tensor_parallel_size {c.etp}",
            why=f"products of experts are computed in {count_of(num_blocks, 'block')}, the largest "
            f"power of two up to 4 that divides moe_ffn_hidden_size {c.model.moe_ffn_size}; a rank "
            "owns whole blocks",
            fix=f"set --expert-tensor-parallel-size to a divisor of {num_blocks}",
        )


def _check_token_blocks(c: Settings) -> Errors:
    """Ranks that have whole token blocks where the sequence is sharded over tp."""
    num_blocks = num_token_blocks(c.config)
    kind = "experts" if c.has_experts else "sequence_parallel"
    if num_blocks % c.cp == 0 and num_blocks % (c.cp * c.tp) != 0:
        yield ConfigError(
            f"invariant with tensor_model_parallel_size {c.tp} and {kind}",
            why=f"a sequence has {count_of(num_blocks, 'block')} of tokens that are multiplied "
            f"together, from seq_length {c.data.seq_length}, and {c.tp * c.cp} ranks share it",
            fix=f"set --tensor-model-parallel-size to a divisor of {num_blocks // c.cp}",
        )

"""Rules between the model and its parallel layout, and those of recomputation and offloading.

Every axis splits its tensors evenly: tp splits heads, MLP width and vocabulary rows; cp the sequence into two chunks
per rank; pp the layers; ep the experts and etp the width of each. Modules that are recomputed have to exist.
"""

from collections.abc import Callable
from math import lcm

from nanotrain.config.config import NormPlacement
from nanotrain.config.option import flag_of
from nanotrain.config.rules.rule import Rule, Values
from nanotrain.config.suggest import nearest_choice
from nanotrain.quantities import count_of, round_up

END_FLAGS = "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
COUNTED = "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"
END_FIELDS = "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"


def split_by_tp(name: str, size: Callable[[Values], int]) -> Rule:
    """The rule that tp divides a size."""
    return Rule(
        lambda v: size(v) % v.tp,
        lambda v: f"{name} {size(v)} cannot be shared by tp={v.tp} ranks",
        "tensor_model_parallel_size must divide it",
        lambda v: f"set {flag_of(name)} {round_up(size(v), v.tp)} or another --tensor-model-parallel-size",
    )


def needs_experts(name: str) -> Rule:
    """The rule that an expert axis needs experts."""
    return Rule(
        lambda v: not v.has_experts and (v[name] or 1) > 1,
        f"{name} {{{name}}} has no effect",
        "the model has no experts: num_experts is unset",
        f"set --num-experts or leave {flag_of(name)} out",
    )


def stages_text(v: Values) -> str:
    """The number of stages, as a product with virtual stages."""
    return f"pp={v.pp}" if v.num_stages == v.pp else f"pp={v.pp} x {v.num_stages // v.pp} = {v.num_stages}"


def why_sequence_parts(v: Values) -> str:
    """The reasons for `Values.sequence_parts`."""
    reasons = [f"cp={v.cp} ranks have two chunks each"] if v.cp > 1 else []
    if v.splits_sequence_by_tp:
        what = "sequence_parallel" if v.sequence_parallel else "a layer with experts"
        reasons.append(f"{what} splits {'the two together' if v.cp > 1 else 'the sequence'} over tp={v.tp} ranks")
    return " and ".join(reasons)


# fmt: off
LAYOUT_RULES = (
    split_by_tp("num_attention_heads", lambda v: v.num_attention_heads),
    Rule(lambda v: not v.multi_latent_attention and v.query_groups % v.tp and v.tp % v.query_groups,
        lambda v: f"{count_of(v.query_groups, 'key/value head')} (num_query_groups) cannot be shared by "
        f"tp={v.tp} ranks",
        "a rank has several whole heads, or several ranks replicate one",
        "set --num-query-groups or --tensor-model-parallel-size so that one divides the other, "
        "as --num-query-groups {tp}"),
    split_by_tp("ffn_hidden_size", lambda v: 0 if all(v.moe_layers) else v.ffn_size),
    split_by_tp("moe_shared_expert_intermediate_size",
        lambda v: (v.moe_shared_expert_intermediate_size or 0) if any(v.moe_layers) else 0),
    Rule(lambda v: v.vocab_rows % v.tp,
        "a vocabulary padded to a multiple of {make_vocab_size_divisible_by} cannot be shared by tp={tp} ranks",
        lambda v: f"they would share {count_of(v.vocab_rows, 'row')}",
        lambda v: f"set --make-vocab-size-divisible-by {lcm(v.make_vocab_size_divisible_by, v.tp)}"),
    Rule(lambda v: v.seq_length % v.sequence_parts,
        "seq_length {seq_length} cannot be split into {sequence_parts} parts", why_sequence_parts,
        lambda v: f"set --seq-length {round_up(v.seq_length, v.sequence_parts)}"),
    Rule(lambda v: v.uneven_lengths,
        lambda v: f"the length {v.uneven_lengths[0]} of step_seq_length_schedule cannot be split into "
        f"{v.sequence_parts} parts",
        why_sequence_parts, "use lengths that are multiples of {sequence_parts} in --step-seq-length-schedule"),
    Rule(lambda v: v.cp_comm_type == "a2a" and v.num_attention_heads % (v.tp * v.cp),
        lambda v: f"{count_of(v.num_attention_heads, 'attention head')} cannot be shared by cp={v.cp} ranks",
        lambda v: f"cp_comm_type a2a needs tp*cp = {v.tp * v.cp} to divide num_attention_heads",
        lambda v: "set --cp-comm-type p2p or --num-attention-heads " f"{round_up(v.num_attention_heads, v.tp * v.cp)}"),
    Rule(lambda v: v.pipeline_model_parallel_layout is None and v.counted_layers < v.num_stages,
        lambda v: f"{count_of(v.num_layers, 'layer')} cannot fill {stages_text(v)} pipeline stages",
        "every stage has at least one layer",
        "set --num-layers {num_stages} or a smaller --pipeline-model-parallel-size"),
    Rule(lambda v: v.layout_lengths is not None and sum(v.layout_lengths) != v.num_layers,
        lambda v: f"pipeline_model_parallel_layout has {sum(v.layout_lengths or ())} of "
        f"{count_of(v.num_layers, 'layer')}",
        "every t of the layout is a layer", "change --pipeline-model-parallel-layout or --num-layers"),
    Rule(lambda v: v.layout_lengths is not None and len(v.layout_lengths) != v.num_stages,
        lambda v: f"pipeline_model_parallel_layout has {count_of(len(v.layout_lengths or ()), 'stage')} for "
        f"{stages_text(v)}",
        "stages are separated by |", "change --pipeline-model-parallel-layout, --pipeline-model-parallel-size or "
        "--num-virtual-stages-per-pipeline-rank"),
    Rule(lambda v: v.ranks_without_layers,
        lambda v: f"pipeline_model_parallel_layout leaves pipeline rank {v.ranks_without_layers[0]} without layers",
        "m, the layers of multi-token prediction, run on the stage of L",
        "write m right before L and give that stage a t, as |t|t|mL instead of |tt|m|L"),
    Rule(lambda v: (v.layout_mtp_layers or v.mtp_num_layers or 0) != (v.mtp_num_layers or 0),
        lambda v: f"pipeline_model_parallel_layout has {count_of(v.layout_mtp_layers or 0, 'layer')} of "
        "multi-token prediction",
        lambda v: f"mtp_num_layers is {v.mtp_num_layers or 'unset'}",
        "set --mtp-num-layers {layout_mtp_layers} or leave m out of --pipeline-model-parallel-layout"),
    Rule(lambda v: v.counted_layers > v.num_layers and v.counted_layers % v.num_stages,
        lambda v: f"{v.counted_layers} layers cannot be split evenly over {stages_text(v)} pipeline stages",
        lambda v: f"num_layers is {v.num_layers}, and embedding or loss count as a layer",
        "change --num-layers or the stages, or set --pipeline-model-parallel-layout instead"),
    Rule(lambda v: v.counted_layers > v.num_layers and (v.end_lengths or v.layout_lengths is not None),
        "account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split beside lengths of stages",
        "they change the even split, which is not used where lengths are set", "leave one of them out"),
    Rule(lambda v: any(length % v.num_virtual_stages_per_pipeline_rank for length in v.end_lengths),
        f"{END_FLAGS} with {{num_virtual_stages_per_pipeline_rank}} virtual stages per pipeline rank",
        "they are the layers of the first and last rank, which its virtual stages share evenly",
        f"set {END_FLAGS} to multiples of {{num_virtual_stages_per_pipeline_rank}}"),
    Rule(lambda v: v.end_lengths and (v.layers_between < v.stages_between if v.stages_between else v.layers_between),
        lambda v: f"{count_of(v.layers_between, 'layer', verb='is')} left for {v.stages_between} of {stages_text(v)} "
        "pipeline stages",
        lambda v: f"of {v.num_layers} layers the first and last rank have {' + '.join(map(str, v.end_lengths))}, "
        "and every other stage has at least one",
        lambda v: f"change {END_FLAGS} so that they leave "
        + (f"at least {v.stages_between}" if v.stages_between else "none")),
    needs_experts("expert_model_parallel_size"),
    needs_experts("expert_tensor_parallel_size"),
    Rule(lambda v: v.has_experts and v.num_experts % v.ep,
        lambda v: f"{count_of(v.num_experts, 'expert')} cannot be shared by ep={v.ep} ranks",
        "expert_model_parallel_size must divide num_experts",
        lambda v: f"set --num-experts {round_up(v.num_experts, v.ep)} or another --expert-model-parallel-size"),
    Rule(lambda v: v.has_experts and v.moe_ffn_size % v.etp,
        "an expert of width {moe_ffn_size} cannot be shared by etp={etp} ranks",
        "expert_tensor_parallel_size (unset: as tensor_model_parallel_size) must divide moe_ffn_hidden_size",
        lambda v: "set --expert-tensor-parallel-size 1 or --moe-ffn-hidden-size " f"{round_up(v.moe_ffn_size, v.etp)}"),
)
# fmt: on


# name -> whether the model has it, and what it needs otherwise
MODULES = {
    "core_attn": (lambda v: True, ""),
    "mlp": (lambda v: not all(v.moe_layers), "every layer has experts: moe_layer_freq is {moe_layer_freq}"),
    "moe": (lambda v: v.has_experts, "the model has no experts: num_experts is unset"),
    "layernorm": (
        lambda v: v.norm_placement is not NormPlacement.post,
        "norm_placement is post, and a residual sum keeps no output of a norm",
    ),
    "mla_up_proj": (lambda v: v.multi_latent_attention, "multi_latent_attention is off"),
    "moe_act": (lambda v: v.has_experts, "the model has no experts: num_experts is unset"),
}
# their outputs are discarded by saved-tensor hooks, which a compiled graph does not call
DISCARDED = {"layernorm", "mla_up_proj", "moe_act"}


def unknown_modules(v: Values) -> list[str]:
    """Names that are no module."""
    return [name for name in v.recomputed_modules if name not in MODULES]


def missing_modules(v: Values) -> list[str]:
    """Modules that the model does not have."""
    return [name for name in v.recomputed_modules if name in MODULES and not MODULES[name][0](v)]


def longest_stage(v: Values) -> int:
    """Layers of the longest pipeline stage, or virtual stage."""
    if v.layout_lengths is not None:
        return max(v.layout_lengths)
    per_rank = v.num_stages // v.pp
    between = [-(-v.layers_between // v.stages_between)] if v.stages_between > 0 else []
    return max(*(-(-length // per_rank) for length in v.end_lengths), *between, 1)


def most_offloaded(v: Values) -> str:
    """The cure for a number of offloaded layers that does not fit."""
    most = longest_stage(v) - 1
    return f"set --cpu-offloading-num-layers to at most {most}" if most else "leave --cpu-offloading out"


# fmt: off
MEMORY_RULES = (
    Rule(lambda v: (v.recompute_num_layers or 1) > longest_stage(v),
        "recompute_num_layers {recompute_num_layers} is above the layers of a stage",
        lambda v: f"the longest of {count_of(v.num_stages, 'pipeline stage')} has {longest_stage(v)} of "
        f"{count_of(v.num_layers, 'layer')}",
        lambda v: f"set --recompute-num-layers to at most {longest_stage(v)}"),
    Rule(unknown_modules, lambda v: f"recompute_modules names {', '.join(unknown_modules(v))}",
        f"the known modules are {', '.join(MODULES)}",
        lambda v: f"did you mean {near}?" if (near := nearest_choice(unknown_modules(v)[0], MODULES))
        else "name one of these, or leave it out"),
    Rule(missing_modules, lambda v: f"recompute_modules {' '.join(missing_modules(v))} has no effect",
        lambda v: MODULES[missing_modules(v)[0]][1].format_map(v),
        lambda v: f"leave {' '.join(missing_modules(v))} out of --recompute-modules"),
    Rule(lambda v: {"moe", "moe_act"} <= {*v.recomputed_modules},
        "recompute_modules moe_act has no effect", "moe recomputes the whole layer, its activation included",
        "leave moe or moe_act out of --recompute-modules"),
    Rule(lambda v: v.torch_compile and DISCARDED.intersection(v.recomputed_modules),
        lambda v: "torch_compile with recompute_modules "
        f"{' '.join(name for name in v.recomputed_modules if name in DISCARDED)}",
        "compiled code keeps its own choice of activations, and recomputes norms and activations by itself",
        "leave out --torch-compile, or these modules"),
    Rule(lambda v: v.cpu_offloading and v.cpu_offloading_num_layers == 0, "cpu_offloading without layers has no effect",
        "cpu_offloading_num_layers is 0", most_offloaded),
    Rule(lambda v: v.cpu_offloading and v.cpu_offloading_num_layers >= longest_stage(v),
        "cpu_offloading_num_layers {cpu_offloading_num_layers} is not below the layers of a stage",
        lambda v: f"the longest of {count_of(v.num_stages, 'pipeline stage')} has {longest_stage(v)} of "
        f"{count_of(v.num_layers, 'layer')}, "
        "and the backward needs the last one first",
        most_offloaded),
)
# fmt: on

"""Rules of recomputation: what is recomputed has to exist, and one granularity is chosen."""

from nanotrain.config.config import RecomputeGranularity
from nanotrain.config.derive import recomputed_modules
from nanotrain.config.rules.rule import Rule, Values
from nanotrain.config.suggest import did_you_mean

# name -> whether the model has it, and what it needs otherwise
MODULES = {
    "core_attn": (lambda v: True, ""),
    "mlp": (lambda v: not all(v.moe_layers), "every layer has experts: moe_layer_freq is {moe_layer_freq}"),
    "moe": (lambda v: v.has_experts, "the model has no experts: num_experts is unset"),
    "layernorm": (lambda v: True, ""),
    "mla_up_proj": (lambda v: v.multi_latent_attention, "multi_latent_attention is off"),
    "moe_act": (lambda v: v.has_experts, "the model has no experts: num_experts is unset"),
}
# their outputs are discarded by saved-tensor hooks, which a compiled graph does not call
DISCARDED = {"layernorm", "mla_up_proj", "moe_act"}


def unknown_modules(v: Values) -> list[str]:
    """Names that are no module."""
    return [name for name in recomputed_modules(v.config.memory) if name not in MODULES]


def missing_modules(v: Values) -> list[str]:
    """Modules that the model does not have."""
    return [name for name in recomputed_modules(v.config.memory) if name in MODULES and not MODULES[name][0](v)]


def longest_stage(v: Values) -> int:
    """Layers of the longest pipeline stage, or virtual stage."""
    per_rank = v.num_stages // v.pp
    between = [-(-v.layers_between // v.stages_between)] if v.stages_between > 0 else []
    return max(*(-(-length // per_rank) for length in v.end_lengths), *between, 1)


# fmt: off
MEMORY_RULES = (
    Rule("recompute_num_layers recompute_method",
        lambda v: v.recompute_granularity is RecomputeGranularity.full
        and v.recompute_num_layers is not None and v.recompute_method is None,
        "recompute_num_layers is {recompute_num_layers} and recompute_method is unset",
        "it is the size of a group with uniform, and the number of recomputed layers with block",
        "set --recompute-method uniform or --recompute-method block"),
    Rule("recompute_num_layers num_layers pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank",
        lambda v: (v.recompute_num_layers or 1) > longest_stage(v),
        "recompute_num_layers {recompute_num_layers} is above the layers of a stage",
        lambda v: f"the longest of {v.num_stages} pipeline stages has {longest_stage(v)} of {v.num_layers} layers",
        lambda v: f"set --recompute-num-layers to at most {longest_stage(v)}"),
    Rule("recompute_modules", unknown_modules,
        lambda v: f"recompute_modules names {', '.join(unknown_modules(v))}",
        f"the known modules are {', '.join(MODULES)}",
        lambda v: did_you_mean(unknown_modules(v)[0], MODULES)),
    Rule("recompute_modules num_experts moe_layer_freq multi_latent_attention", missing_modules,
        lambda v: f"recompute_modules {' '.join(missing_modules(v))} has no effect",
        lambda v: MODULES[missing_modules(v)[0]][1].format_map(v),
        lambda v: f"leave {' '.join(missing_modules(v))} out of --recompute-modules"),
    Rule("recompute_modules", lambda v: {"moe", "moe_act"} <= {*recomputed_modules(v.config.memory)},
        "recompute_modules moe_act has no effect", "moe recomputes the whole layer, its activation included",
        "leave moe or moe_act out of --recompute-modules"),
    Rule("torch_compile recompute_modules",
        lambda v: v.torch_compile and DISCARDED.intersection(recomputed_modules(v.config.memory)),
        lambda v: "torch_compile with recompute_modules "
        f"{' '.join(name for name in recomputed_modules(v.config.memory) if name in DISCARDED)}",
        "compiled code keeps its own choice of activations, and recomputes norms and activations by itself",
        "leave out --torch-compile, or these modules"),
)
# fmt: on

"""Rules of recomputation and offloading: what is named has to exist, and the choices must not contradict."""

from nanotrain.config.config import DeviceKind, NormPlacement, RecomputeGranularity
from nanotrain.config.rules.rule import Rule, Values
from nanotrain.config.suggest import nearest_choice
from nanotrain.quantities import count_of

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
    Rule(lambda v: v.recompute_granularity is RecomputeGranularity.full
        and v.recompute_num_layers is not None and v.recompute_method is None,
        "recompute_num_layers is {recompute_num_layers} and recompute_method is unset",
        "it is the size of a group with uniform, and the number of recomputed layers with block",
        "set --recompute-method uniform or --recompute-method block"),
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
    Rule(lambda v: v.cpu_offloading and v.recompute_granularity is not None,
        "cpu_offloading with recompute_granularity {recompute_granularity.value}",
        "an activation is either recomputed or kept in host memory",
        "leave out --cpu-offloading or --recompute-granularity"),
    Rule(lambda v: v.cpu_offloading and v.torch_compile, "cpu_offloading with torch_compile",
        "compiled code has its own choice of what it saves", "leave out --cpu-offloading or --torch-compile"),
    Rule(lambda v: v.cpu_offloading and v.device is DeviceKind.cpu, "cpu_offloading has no effect",
        "activations on a CPU are in host memory already", "leave --cpu-offloading out"),
)
# fmt: on

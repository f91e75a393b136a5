"""The arguments that exist, as tables: flags of fields, flags for one value; and those that choose a YAML file."""

from dataclasses import dataclass

from nanotrain.config.option import Entry
from nanotrain.config.schema import ENTRIES


@dataclass(frozen=True)
class Alias:
    """A flag for one value of a field; another argument may set the field to a value of `agrees` only."""

    name: str
    value: str
    agrees: tuple[str, ...]


ALIASES: dict[str, Alias] = {
    "--bf16": Alias("params_dtype", "bf16", agrees=("bf16",)),
    "--fp16": Alias("params_dtype", "fp16", agrees=("fp16",)),
    "--grad-reduce-in-fp32": Alias("accumulate_allreduce_grads_in_fp32", "true", agrees=("true",)),
    "--fp8": Alias("fp8_format", "hybrid", agrees=("hybrid",)),
    "--swiglu": Alias("activation", "swiglu", agrees=("swiglu",)),
    "--squared-relu": Alias("activation", "squared_relu", agrees=("squared_relu",)),
    "--quick-geglu": Alias("activation", "quick_geglu", agrees=("quick_geglu",)),
    "--cpu-optimizer": Alias("optimizer_cpu_offload", "true", agrees=("true",)),
    "--recompute-activations": Alias("recompute_granularity", "selective", agrees=("selective",)),
    "--use-distributed-optimizer": Alias(
        "data_parallel_sharding_strategy", "optim", agrees=("optim", "optim_grads", "optim_grads_params")
    ),
}
# Other spellings of a value, by unique name: Megatron-FSDP counts the strategies, -1 validation batches are none,
# Muon updates full matrices wherever they are computed, its state is sharded by the strategy and not by a name of its
# own, and some numbers ask for nothing.
VALUES: dict[str, dict[str, str]] = {
    "data_parallel_sharding_strategy": dict(
        zip("0123", ENTRIES["data_parallel_sharding_strategy"].choices, strict=True)
    ),
    "eval_iters": {"-1": "0"},
    "optimizer": {"dist_muon": "muon"},
    "muon_tp_mode": {"duplicated": "distributed"},
    "num_experts": {"0": "null"},
    "window_size": {"-1,0": "null", "(-1,0)": "null", "(-1, 0)": "null"},
    "moe_expert_capacity_factor": {"-1": "null", "-1.0": "null"},
}
FLAGS: dict[str, Entry] = {entry.flag: entry for entry in ENTRIES.values()}
NEGATIONS: dict[str, Entry] = {f"--no-{flag[2:]}": entry for flag, entry in FLAGS.items() if entry.kind is bool}
# Flags without a value that set no field, and the attribute of CommandLine that becomes true.
SWITCHES = {"--explain": "wants_explanation", "--megatron-defaults": "wants_megatron_defaults"}

# Arguments that set no field by themselves, as they are written, and what they do.
ARGUMENTS = {
    "+config=NAME": "a recipe of configs/config, or of config/ in your own --config-dir",
    "+config=FILE.yaml": "a configuration file, such as a run's config.yaml",
    "model=NAME": "a YAML file of a group (configs/model, ...)",
    "--config-dir DIR": "a folder of your own YAML files, may be repeated (also hydra.searchpath=[DIR,...])",
    "--config-name NAME": "compose NAME.yaml instead of train.yaml",
    "--cfg job": "print the resolved configuration and exit",
    "--explain": "print it with the origin of every value and exit",
    "--data-parallel-size N": "check that the run has N data-parallel ranks",
    "--megatron-defaults": "Megatron-LM's defaults where no file and no argument sets a value",
    "--help[=TOPIC]": "print this help, or that of all, megatron or a section, and exit; also -h",
}


def choice_of(group: str) -> str:
    """The argument before `=NAME` that chooses a YAML file of a group: `+config`, `model`."""
    return "+config" if group == "config" else group


def is_file(name: str) -> bool:
    """Whether the NAME of `+config=NAME` is a file and not one of the recipes."""
    return name.endswith((".yaml", ".yml"))

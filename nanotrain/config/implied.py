"""Settings that other settings imply, as in Megatron-LM.

virtual stages -> interleaved schedule      a layout -> virtual stages
a hybrid pattern -> layers and stages       MLA with a scaling factor -> YaRN
shares of Mamba-2 -> a hybrid pattern
wandb_project -> wandb                      --save and --load of one folder -> resume
sft -> whole conversations as samples
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from os.path import normpath
from typing import Any

from nanotrain.config.command_line import CommandLine
from nanotrain.config.config import Config
from nanotrain.config.hybrid_ratios import implied_pattern
from nanotrain.config.model import ModelConfig
from nanotrain.config.notation import read_pipeline_layout, write_pipeline_layout
from nanotrain.config.parallel import ParallelConfig
from nanotrain.config.schema import ENTRIES
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of
from nanotrain.storage.remote import is_address

LAYOUT = "pipeline_model_parallel_layout"
VIRTUAL_STAGES = "num_virtual_stages_per_pipeline_rank"
FSDP_FLAGS = frozenset({"--use-megatron-fsdp", "--use-custom-fsdp"})


@dataclass(frozen=True)
class Implied:
    """A field that another setting implies."""

    name: str  # unique name of the field
    value: Any
    why: str


def implied_settings(
    config: Config, explicit: frozenset[str], *, line: CommandLine
) -> list[Implied]:
    """The fields that other settings of a configuration imply.

    Args:
        config: configuration with the values of all fields that were set.
        explicit: keys set on the command line.
        line: the parsed command line.
    """
    return [
        *implied_hybrid(config.model, line),
        *implied_yarn(config.model, line),
        *implied_expert_bias(config.model, explicit),
        *implied_scores(config.model, explicit),
        *implied_precision(config, line),
        *implied_sharding(line),
        *implied_trackers(config, explicit),
        *implied_saving(config, explicit),
        *implied_pipeline(config, explicit),
        *implied_resume(config, line),
        *implied_fine_tuning(config, explicit),
        *implied_graphs(config),
        *implied_buffers(config, explicit, line=line),
    ]


def implied_hybrid(model_config: ModelConfig, line: CommandLine) -> Iterator[Implied]:
    """The pattern of layers that flags of Mamba-2 imply, where the command line has none."""
    implied = implied_pattern(model_config, line)
    if implied is not None:
        pattern, why = implied
        yield Implied("hybrid_layer_pattern", pattern, why)


def implied_expert_bias(model_config: ModelConfig, explicit: frozenset[str]) -> Iterator[Implied]:
    """Quantile balancing sets the biases of experts."""
    moe = model_config.moe
    if "model.moe.router_enable_expert_bias" in explicit:
        return
    if moe is not None and moe.balances_quantiles and not moe.router_enable_expert_bias:
        why = "quantile_balancing sets the biases of experts"
        yield Implied("moe_router_enable_expert_bias", True, why)


def implied_scores(model_config: ModelConfig, explicit: frozenset[str]) -> Iterator[Implied]:
    """Weights of experts that Sinkhorn's algorithm chooses, as in Megatron-LM.

    They are sigmoids with one expert per token, else a softmax over all experts.
    """
    moe = model_config.moe
    if moe is None or not moe.uses_sinkhorn:
        return
    if "model.moe.router_score_function" in explicit or "model.moe.router_pre_softmax" in explicit:
        return
    if moe.router_topk == 1 and moe.router_score_function != "sigmoid":
        yield Implied("moe_router_score_function", "sigmoid", "sinkhorn with one expert per token")
    if moe.router_topk > 1 and not moe.router_pre_softmax:
        yield Implied("moe_router_pre_softmax", True, "sinkhorn with several experts per token")


def implied_yarn(model_config: ModelConfig, line: CommandLine) -> Iterator[Implied]:
    """MLA rotates by YaRN unless `--rope-type rope` is set.

    Raises:
        ConfigError: YaRN is set for learned positions.
    """
    yarn = model_config.yarn
    if not model_config.multi_latent_attention or yarn is None:
        return
    is_plain = any(argument.text == "--rope-type rope" for argument in line.megatron)
    factor = yarn.rotary_scaling_factor
    has_learned = model_config.position_embedding_type == "learned_absolute"
    if has_learned and not is_plain and factor > 1:
        raise ConfigError(
            f"learned positions of multi_latent_attention with rotary_scaling_factor {factor:g}",
            why="with learned positions it rotates by RoPE without scaling",
            fix="set --position-embedding-type yarn, or leave --rotary-scaling-factor out",
        )
    if model_config.position_embedding_type == "rope" and not is_plain and factor > 1:
        why = f"MLA with rotary_scaling_factor {factor:g}"
        yield Implied("position_embedding_type", "yarn", why)


def implied_precision(config: Config, line: CommandLine) -> Iterator[Implied]:
    """Parameters of mxfp8 are gathered in bf16 where they reuse the gradient buffer."""
    flag = "--reuse-grad-buf-for-mxfp8-param-ag"
    fp8 = config.precision.fp8
    if fp8 is not None and fp8.param_gather and flag in line.megatron_rows:
        yield Implied("fp8_param_gather", False, f"{flag} gathers parameters in bf16")


def implied_sharding(line: CommandLine) -> Iterator[Implied]:
    """Megatron-FSDP shards parameters unless a strategy is set."""
    given_flags = [flag for flag in line.megatron_rows if flag in FSDP_FLAGS]
    strategy = ENTRIES["data_parallel_sharding_strategy"]
    texts = {setting.text for setting in line.settings if setting.key == strategy.key}
    is_set = bool(texts - {"--use-distributed-optimizer"})
    if given_flags and not is_set and not line.choices:
        why = f"{given_flags[0]} shards parameters unless it is set"
        yield Implied(strategy.name, "optim_grads_params", why)


def implied_trackers(config: Config, explicit: frozenset[str]) -> Iterator[Implied]:
    """Trackers that are named or have a setting are on."""
    train = config.train
    why = {name: f"trackers has {name}" for name in train.trackers}
    if "train.wandb_project" in explicit:
        why["wandb"] = "wandb_project is set"
    if train.tensorboard_dir is not None:
        why["tensorboard"] = "tensorboard_dir is set"
    for name in ("wandb", "tensorboard"):
        is_free = f"train.{name}" not in explicit and not getattr(train, name)
        if is_free and name in why:
            yield Implied(name, True, why[name])


def implied_fine_tuning(config: Config, explicit: frozenset[str]) -> Iterator[Implied]:
    """Samples of `sft` are whole conversations that do not see each other."""
    if not config.data.sft:
        return
    settings = {"packing": "best_fit", "reset_attention_mask": True, "reset_position_ids": True}
    for name, value in settings.items():
        if f"data.{name}" not in explicit and getattr(config.data, name) != value:
            yield Implied(name, value, "sft: a sample is whole conversations")


def implied_graphs(config: Config) -> Iterator[Implied]:
    """Megatron-LM's settings of CUDA graphs whose values have another name here."""
    if config.train.cuda_graph_impl == "transformer_engine":
        why = "cuda_graph_impl transformer_engine captures the same parts"
        yield Implied("cuda_graph_impl", "local", why)
    if config.train.cuda_graph_warmup_steps == 0:
        yield Implied("cuda_graph_warmup_steps", 1, "a part runs once before it is captured")


def implied_buffers(
    config: Config, explicit: frozenset[str], *, line: CommandLine
) -> Iterator[Implied]:
    """Megatron-FSDP gathers units into fixed memory if buffers are registered with NCCL."""
    parallel = config.parallel
    is_fsdp = not FSDP_FLAGS.isdisjoint(line.megatron_rows)
    is_set = "parallel.fsdp_double_buffer" in explicit or parallel.fsdp_double_buffer
    if parallel.nccl_ub and is_fsdp and not is_set:
        yield Implied("fsdp_double_buffer", True, "nccl_ub registers the memory of units")


def implied_saving(config: Config, explicit: frozenset[str]) -> Iterator[Implied]:
    """Saves into object storage are asynchronous."""
    saves = config.checkpoint.save and "checkpoint.async_save" not in explicit
    if saves and is_address(config.train.run_dir or ""):
        yield Implied("async_save", True, "run_dir is in object storage")


def implied_pipeline(config: Config, explicit: frozenset[str]) -> Iterator[Implied]:
    """Layers and stages of a hybrid pattern, virtual stages of a layout, and their schedule."""
    parallel = config.parallel
    for setting in implied_layers(config.model, parallel, explicit=explicit):
        yield setting
        if setting.name == LAYOUT:
            parallel = replace(parallel, pipeline_model_parallel_layout=setting.value)
    yield from implied_schedule(parallel, explicit)


def implied_layers(
    model_config: ModelConfig, parallel: ParallelConfig, *, explicit: frozenset[str]
) -> Iterator[Implied]:
    """The number of layers and the stages that a hybrid layer pattern implies."""
    if model_config.hybrid_layer_pattern is None:
        return
    pattern, slash, mtp = model_config.hybrid_layer_pattern.partition("/")
    letters = pattern.replace("|", "")
    why = "the layers of hybrid_layer_pattern"
    if slash and model_config.mtp.num_layers is None:
        yield Implied("mtp_num_layers", 1 + mtp.count("/"), why)
    is_default = model_config.num_layers == ENTRIES["num_layers"].default
    is_free = is_default and "model.num_layers" not in explicit
    if is_free and len(letters) != model_config.num_layers:
        yield Implied("num_layers", len(letters), why)
    if "|" not in pattern:
        return
    yield Implied("hybrid_layer_pattern", f"{letters}{slash}{mtp}", "its | are stages")
    if parallel.pipeline_model_parallel_size > 1:
        lengths = [len(stage) for stage in pattern.split("|")]
        yield Implied(LAYOUT, write_pipeline_layout(lengths), why)


def implied_schedule(parallel: ParallelConfig, explicit: frozenset[str]) -> Iterator[Implied]:
    """The virtual stages that a layout implies, and the schedule that virtual stages imply."""
    pp = parallel.pipeline_model_parallel_size
    if pp == 1:  # without a pipeline a layout is an error of its own
        return
    num_virtual = parallel.num_virtual_stages_per_pipeline_rank
    num_stages = 0
    if f"parallel.{VIRTUAL_STAGES}" not in explicit:
        num_stages = stages_of_layout(parallel.pipeline_model_parallel_layout)
    if num_stages > pp * num_virtual:
        num_virtual = -(-num_stages // pp)
        why = f"{LAYOUT} has {count_of(num_stages, 'stage')} for {pp} pipeline ranks"
        yield Implied(VIRTUAL_STAGES, num_virtual, why)
    is_default = parallel.pipeline_schedule == ENTRIES["pipeline_schedule"].default
    if num_virtual > 1 and is_default and "parallel.pipeline_schedule" not in explicit:
        why = f"there are {num_virtual} virtual stages per pipeline rank"
        yield Implied("pipeline_schedule", "interleaved", why)


def stages_of_layout(layout: str | None) -> int:
    """The number of stages of a layout; 0 without one, and for an invalid one."""
    if layout is None:
        return 0
    try:
        return len(read_pipeline_layout(layout))
    except ConfigError:
        return 0


def implied_resume(config: Config, line: CommandLine) -> Iterator[Implied]:
    """With Megatron-LM's `--save DIR`, `--load` of the same folder resumes, or starts if empty."""
    load = config.checkpoint.load
    run_dir = config.train.run_dir
    if load is None or run_dir is None or normpath(load) != normpath(run_dir):
        return
    saves_into = any(setting.text.startswith("--save ") for setting in line.settings)
    if saves_into and not config.checkpoint.finetune:
        yield Implied("load", None, f"a run resumes from its own folder {run_dir}")

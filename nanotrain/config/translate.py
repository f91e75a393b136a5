"""Apply Megatron-LM's flags to a configuration, and complete settings that imply others, as
Megatron-LM does.

check_flags       values of flags that only name nanotrain's fixed behaviour, and flags of missing features
convert_flag      renames and conversions -> values of fields
implied           settings that turn others on: wandb_project -> wandb, virtual stages -> interleaved, ...
notes             what a reader of the log should know: counted flags, implied values, defaults that differ
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os.path import normpath
from typing import Any

from nanotrain.config.arguments import choice_of, is_file
from nanotrain.config.config import Config
from nanotrain.config.flags import CommandLine, MegatronArgument
from nanotrain.config.megatron import megatron
from nanotrain.config.model import ModelConfig
from nanotrain.config.notation import read_pipeline_layout, write_pipeline_layout
from nanotrain.config.option import flag_of
from nanotrain.config.parallel import ParallelConfig
from nanotrain.config.references import as_written
from nanotrain.config.schema import ENTRIES, argument_of, convert, typed, value_of, with_values
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.quantities import count_of
from nanotrain.storage.remote import is_address

UNFUSED_GELU = "--no-bias-gelu-fusion"


@dataclass
class Translation:
    """A configuration that is being completed, with what was set and why."""

    config: Config
    explicit: frozenset[str]  # keys set on the command line
    origins: dict[str, str] = field(default_factory=dict)  # origins of the values set here, by key
    notes: list[str] = field(default_factory=list)  # lines for the log

    def set(self, name: str, value: Any, *, source: str) -> None:
        """Set a field by its unique name."""
        key = ENTRIES[name].key
        self.config = with_values(self.config, {key: convert(ENTRIES[name], value)})
        self.origins[key] = source


def translate(
    config: Config,
    line: CommandLine,
    *,
    errors: ErrorCollector,
    from_files: frozenset[str] = frozenset(),
) -> Translation:
    """Apply the Megatron-LM flags of a command line to the configuration of its other arguments.

    Args:
        config: configuration composed from the files and the fields' own flags.
        line: the parsed command line.
        errors: collects unsupported values, missing features and contradictions.
        from_files: keys set by YAML files.
    """
    result = Translation(config, line.explicit)
    check_flags(line.megatron, errors=errors)
    if line.wants_megatron_defaults:
        check_defaults(line, errors=errors)
        if "model.ffn_hidden_size" not in from_files:
            complete_width(result)
    for argument in sorted(line.megatron, key=lambda each: (each.row.is_check, each.row.overrules)):
        with errors:
            convert_flag(result, argument)
    for name, value, why in implied(result.config, result.explicit, line=line):
        result.set(name, value, source=why)
        result.notes.append(f"{argument_of(name, value)} is implied: {why}")
    if line.wants_megatron_defaults and not from_files & {"model.activation"}:
        complete_activation(result, line)
    result.notes += notes(line)
    model = result.config.model
    if line.wants_megatron_defaults and model.multi_latent_attention and not model.qk_layernorm:
        what = "MLA normalizes its compressed queries, keys and values"
        result.notes.append(f"{what}, as Megatron-LM with --qk-layernorm")
    return result


def check_flags(arguments: list[MegatronArgument], *, errors: ErrorCollector) -> None:
    """Check the values of flags that only name fixed behaviour; flags of missing features become
    one error.
    """
    missing: dict[str, list[str]] = {}  # cure -> flags
    for argument in arguments:
        row = argument.row
        is_accepted = any(is_same(text, argument.value) for text in row.accepts)
        if row.kind == "always" and row.accepts and not is_accepted:
            what, fix = (
                "contradicts what is always so",
                f"leave it out or write {argument.flag} {row.accepts[0]}",
            )
            errors.errors.append(ConfigError(f"{argument.text} {what}", why=row.meaning, fix=fix))
        elif row.kind == "not yet" and not is_accepted:
            missing.setdefault(row.meaning, []).append(argument.text)
    if missing:
        count = sum(map(len, missing.values()))
        what = f"{count_of(count, 'flag', verb='asks')} for what does not exist here"
        why = "; ".join(f"{', '.join(texts)} ({cure})" for cure, texts in missing.items())
        errors.errors.append(ConfigError(what, why=why))


def is_same(expected: str, text: str) -> bool:
    """Whether two texts are the same value: 0 and 0.0 are.

    >>> is_same("0", "0.00"), is_same("fp32", "fp64")
    (True, False)
    """
    try:
        return float(expected) == float(text)
    except ValueError:
        return expected == text


def convert_flag(result: Translation, argument: MegatronArgument) -> None:
    """Set the fields that a flag stands for.

    Raises:
        ConfigError: a field has another value on the command line.
    """
    row = argument.row
    known = row.choices or (
        () if row.kind in ("always", "not yet") else row.accepts
    )  # else `check_flags` has reported it
    if known and argument.value not in known:
        raise ConfigError(
            f"{argument.flag} is {argument.value!r}", why=f"it takes {' or '.join(known)}"
        )
    for name, value in row.values(result.config, argument.value).items():
        key = ENTRIES[name].key
        current, new = value_of(result.config, key), convert(ENTRIES[name], value)
        is_extended = isinstance(current, list) and set(current) <= set(new)
        if (
            not row.overrules
            and key in result.explicit
            and as_written(current) != as_written(new)
            and not is_extended
        ):
            raise ConfigError(
                f"{argument.text} contradicts {argument_of(name, current)}",
                why=f"it means {argument_of(name, new)}",
                fix="leave one of them out",
            )
        result.set(name, value, source=f"command line: {argument.text}")
        result.explicit |= {key}


def complete_width(result: Translation) -> None:
    """Set Megatron-LM's width of a gated MLP if no width is set."""
    model = result.config.model
    if model.activation == "swiglu" and model.ffn_hidden_size is None:
        width = 64 * max(1, int(4 * model.hidden_size * 2 / 3 / 64))
        result.set(
            "ffn_hidden_size",
            width,
            source="--megatron-defaults: 8/3 * hidden_size, a multiple of 64 below",
        )


def complete_activation(result: Translation, line: CommandLine) -> None:
    """Set Megatron-LM's GELU if no activation is set: its kernel of bias and GELU has the tanh
    approximation.

    Source: Megatron-LM, `fused_bias_gelu.py`; without biases, or with --no-bias-gelu-fusion, it
    calls the exact GELU.
    """
    model = result.config.model
    is_fused = model.add_bias_linear and UNFUSED_GELU not in line.megatron_rows
    if is_fused and model.activation == "gelu" and "model.activation" not in result.explicit:
        result.set(
            "activation",
            "gelu_tanh",
            source="--megatron-defaults: the formula of its kernel of bias and GELU",
        )


def check_defaults(line: CommandLine, *, errors: ErrorCollector) -> None:
    """Errors for recipes, which are differences from other defaults, and for fields that have no
    default there.
    """
    for group, name in line.choices.items():
        if group in ("config", "model", "optim") and not is_file(name):
            what = f"--megatron-defaults with {choice_of(group)}={name}"
            why = f"{group}/{name}.yaml is written for nanotrain's defaults: with Megatron-LM's it means something else"
            errors.errors.append(ConfigError(what, why=why, fix="leave one of them out"))
    has_pattern = "model.hybrid_layer_pattern" in line.explicit  # whose length is num_layers
    required = [name for name in megatron().required if not (has_pattern and name == "num_layers")]
    unset = [name for name in required if ENTRIES[name].key not in line.explicit]
    if unset and not line.choices and "checkpoint.use_checkpoint_args" not in line.explicit:
        flags = ", ".join(map(flag_of, unset))
        why = "Megatron-LM has no defaults for them"
        errors.errors.append(
            ConfigError(f"--megatron-defaults without {flags}", why=why, fix="set them")
        )


def implied(
    config: Config, explicit: frozenset[str], *, line: CommandLine
) -> Iterator[tuple[str, Any, str]]:
    """Name, value and reason of fields that other settings imply.

    With Megatron-LM's `--save DIR`, `--load` of the same folder resumes, or starts where it is
    empty. MLA rotates by YaRN unless `--rope-type rope` is set.
    """
    model, train, load, flags = (
        config.model,
        config.train,
        config.checkpoint.load,
        line.megatron_rows,
    )
    is_plain = any(argument.text == "--rope-type rope" for argument in line.megatron)
    is_rope = model.position_embedding_type == "rope" and not is_plain
    factor = model.yarn.rotary_scaling_factor if model.yarn is not None else 1.0
    if model.multi_latent_attention and is_rope and factor > 1:
        yield "position_embedding_type", "yarn", f"MLA with rotary_scaling_factor {factor:g}"
    fp8, reuses_buffer = config.precision.fp8, "--reuse-grad-buf-for-mxfp8-param-ag" in flags
    if fp8 is not None and fp8.param_gather and reuses_buffer:
        yield (
            "fp8_param_gather",
            False,
            "--reuse-grad-buf-for-mxfp8-param-ag gathers parameters in bf16",
        )
    fsdp = [flag for flag in flags if flag in ("--use-megatron-fsdp", "--use-custom-fsdp")]
    strategy = ENTRIES["data_parallel_sharding_strategy"]
    given = {setting.text for setting in line.settings if setting.key == strategy.key} - {
        "--use-distributed-optimizer"
    }
    if fsdp and not given and not line.choices:
        yield strategy.name, "optim_grads_params", f"{fsdp[0]} shards parameters unless it is set"
    if "train.wandb_project" in explicit and "train.wandb" not in explicit and not train.wandb:
        yield "wandb", True, "wandb_project is set"
    if (
        train.tensorboard_dir is not None
        and "train.tensorboard" not in explicit
        and not train.tensorboard
    ):
        yield "tensorboard", True, "tensorboard_dir is set"
    if (
        is_address(train.run_dir or "")
        and "checkpoint.async_save" not in explicit
        and config.checkpoint.save
    ):
        yield "async_save", True, "run_dir is in object storage"
    parallel = config.parallel
    for name, value, why in implied_layers(model, parallel, explicit=explicit):
        yield name, value, why
        if name == "pipeline_model_parallel_layout":
            parallel = replace(parallel, pipeline_model_parallel_layout=value)
    yield from implied_schedule(parallel, explicit)
    is_own = (
        load is not None and train.run_dir is not None and normpath(load) == normpath(train.run_dir)
    )
    saves_into = any(setting.text.startswith("--save ") for setting in line.settings)
    if saves_into and is_own and not config.checkpoint.finetune:
        yield "load", None, f"a run resumes from its own folder {train.run_dir}"


def implied_layers(
    model_config: ModelConfig, parallel: ParallelConfig, *, explicit: frozenset[str]
) -> Iterator[tuple[str, Any, str]]:
    """The number of layers and the stages that a hybrid layer pattern implies."""
    if model_config.hybrid_layer_pattern is None:
        return
    pattern, slash, mtp = model_config.hybrid_layer_pattern.partition("/")
    why = "the layers of hybrid_layer_pattern"
    num_layers, is_default = (
        len(pattern.replace("|", "")),
        model_config.num_layers == ENTRIES["num_layers"].default,
    )
    if slash and model_config.mtp.num_layers is None:
        yield "mtp_num_layers", 1 + mtp.count("/"), why
    if is_default and num_layers != model_config.num_layers and "model.num_layers" not in explicit:
        yield "num_layers", num_layers, why
    if "|" in pattern:
        yield "hybrid_layer_pattern", pattern.replace("|", "") + slash + mtp, "its | are stages"
        if parallel.pipeline_model_parallel_size > 1:
            yield (
                "pipeline_model_parallel_layout",
                write_pipeline_layout([*map(len, pattern.split("|"))]),
                why,
            )


def implied_schedule(
    parallel: ParallelConfig, explicit: frozenset[str]
) -> Iterator[tuple[str, Any, str]]:
    """The virtual stages that a pipeline layout implies, and the schedule that virtual stages
    imply.
    """
    count, pp = parallel.num_virtual_stages_per_pipeline_rank, parallel.pipeline_model_parallel_size
    layout, name = parallel.pipeline_model_parallel_layout, "num_virtual_stages_per_pipeline_rank"
    if pp == 1:  # without it a layout is an error of its own
        return
    stages = 0
    if layout is not None and f"parallel.{name}" not in explicit:
        with suppress(ConfigError):  # an invalid layout, which its rule reports
            stages = len(read_pipeline_layout(layout))
    if stages > pp * count:
        count = -(-stages // pp)
        why = f"pipeline_model_parallel_layout has {count_of(stages, 'stage')} for {pp} pipeline ranks"
        yield name, count, why
    is_default = parallel.pipeline_schedule == ENTRIES["pipeline_schedule"].default
    if count > 1 and is_default and "parallel.pipeline_schedule" not in explicit:
        yield (
            "pipeline_schedule",
            "interleaved",
            f"there are {count} virtual stages per pipeline rank",
        )


def notes(line: CommandLine) -> Iterator[str]:
    """Lines for the log: how many flags change nothing, and which settings of the model keep other
    defaults.
    """
    rows = line.megatron_rows
    if not rows:
        return
    kinds = [row.kind for row in rows.values()]
    if count := kinds.count("always"):
        yield f"{count_of(count, 'flag', verb='names')} what nanotrain always does (--help=megatron lists them)"
    if count := kinds.count("no effect"):
        yield f"{count_of(count, 'flag', verb='tunes')} parts of Megatron-LM that do not exist here"
    if saving := [f"{flag} ({row.meaning})" for flag, row in rows.items() if row.saves]:
        yield f"Megatron-LM saves time or memory by what is not here: {'; '.join(saving)}"
    if (
        line.choices
        or line.wants_megatron_defaults
        or "checkpoint.use_checkpoint_args" in line.explicit
    ):
        return  # a file, Megatron-LM's defaults or the checkpoint's model
    of_flags = {name for row in rows.values() for name in row.sets}
    left_out = [
        n for n in megatron().shaping if ENTRIES[n].key not in line.explicit and n not in of_flags
    ]
    if left_out:
        values = ", ".join(
            f"{name} {typed(ENTRIES[name].default)} (Megatron-LM: {typed(megatron().defaults[name])})"
            for name in left_out
        )
        yield f"settings left out whose defaults differ from Megatron-LM's: {values}; --megatron-defaults takes those"


def megatron_values() -> Mapping[str, Any]:
    """Megatron-LM's defaults by key."""
    return {ENTRIES[name].key: value for name, value in megatron().defaults.items()}

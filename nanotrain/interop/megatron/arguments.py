"""The stored arguments of a run of Megatron-LM as a configuration.

    config_of_arguments   the configuration, and lines for what is not taken as it is

An argument is named as the flag that sets it, with underscores; ours have the same names. So the
arguments become a command line, which the readers of launch scripts check and translate. Arguments
that ask for nothing here (paths, logging, layouts, kernels) are left out: any layout continues.
Others that are left out are named in one line, unless they have Megatron-LM's default.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from nanotrain.config.arguments import ALIASES
from nanotrain.config.command_line import CommandLine, MegatronArgument, Setting
from nanotrain.config.config import Config
from nanotrain.config.flags import apply_aliases
from nanotrain.config.hybrid_ratios import MAMBA_SPEC
from nanotrain.config.load import compose_values
from nanotrain.config.megatron import megatron, row_of
from nanotrain.config.option import Entry, flag_of
from nanotrain.config.rules.check import collect_errors
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import ENTRIES, KEYS, convert, read_config
from nanotrain.config.translate import megatron_values, translate
from nanotrain.config.user_paths import expand_path
from nanotrain.errors import CheckpointError, ConfigError, ErrorCollector
from nanotrain.quantities import count_of
from nanotrain.untrusted import plain_text, shown

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
PATTERNS = ("moe_layer_freq", "linear_attention_freq", "no_rope_freq", "window_attn_skip_freq")
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_NAMES = 20  # arguments that a line names
MAX_LIST = 10_000  # values of one argument


@dataclass
class ImportedConfig:
    """A configuration from arguments."""

    config: Config
    notes: list[str] = field(default_factory=list)  # lines for the user


def config_of_arguments(arguments: Mapping[str, Any], *, num_rows: int) -> ImportedConfig:
    """The configuration of stored arguments.

    Args:
        arguments: all arguments by name.
        num_rows: rows of the word embedding, padding included.

    Raises:
        CheckpointError: the arguments are missing, or describe a model or optimizer that does not
            exist here.
    """
    if not arguments:
        raise CheckpointError(
            "the checkpoint has no arguments",
            why="common.pt has no args, which describe the model",
            fix="save it with Megatron-LM's training program, which stores them",
        )
    refuse_unsupported(arguments)
    line = CommandLine(wants_megatron_defaults=True)
    names = set(arguments)
    if not arguments.get("group_query_attention"):
        names.discard("num_query_groups")  # it has a default then
    for name in sorted(names):
        add_argument(line, name, value=arguments[name])
    add_mamba(line, arguments)
    add_activation(line, arguments)
    add_setting(line, "vocab_size", value=num_rows)
    add_setting(line, "make_vocab_size_divisible_by", value=padding_multiple(arguments, num_rows))
    apply_aliases(line)
    result = compose(line)
    notes = result.notes
    vocab_size = arguments.get("vocab_size")
    if vocab_size != num_rows:
        notes.append(
            f"vocab_size is {num_rows:,}, the padded size: Megatron-LM's loss is over the logits "
            "of the padding too"
        )
    notes += left_out(arguments)
    return ImportedConfig(result.config, notes)


def padding_multiple(arguments: Mapping[str, Any], num_rows: int) -> int:
    """The multiple that the rows of the embedding are padded to; 1 if the rows are no multiple."""
    multiple = arguments.get("make_vocab_size_divisible_by")
    if not isinstance(multiple, int) or multiple < 1 or num_rows % multiple:
        return 1
    return multiple


def compose(line: CommandLine) -> ImportedConfig:
    """The checked configuration of a command line; settings without effect are reset.

    Raises:
        CheckpointError: all mistakes.
    """
    errors = ErrorCollector()
    try:
        composed = compose_values(line, errors=errors)
        config, bad_keys = read_config(composed.values, errors=errors, expand=expand_path)
        result = translate(config, line, errors=errors)
        unreadable = frozenset(KEYS[key].name for key in bad_keys)
        config, _ = reset_unused(
            result.config,
            explicit=frozenset(),
            errors=errors,
            defaults=frozenset(KEYS),
            unreadable=unreadable,
        )
        collect_errors(config, to_train=False, errors=errors, unreadable=unreadable)
        errors.raise_errors()
    except ConfigError as error:
        raise CheckpointError(
            "nanotrain cannot train what the arguments of the checkpoint describe",
            why=" ".join(str(error).split()),
            fix="import a checkpoint of another run",
        ) from None
    return ImportedConfig(config, result.notes)


def add_argument(line: CommandLine, name: str, *, value: Any) -> None:
    """Add an argument that sets a field, or that a flag of Megatron-LM stands for."""
    if name in TABLE["skipped"] or value is None:
        return
    if name in TABLE["zero_is_unset"] and value == 0:
        return
    flag = flag_of(name)
    if name in TABLE["renamed"]:
        add_setting(line, TABLE["renamed"][name], value=value)
    elif flag in ALIASES:
        if value is True:
            line.aliases.append(flag)
    elif name in ENTRIES:
        if is_taken(name):
            add_setting(line, name, value=value)
    else:
        add_flag(line, flag, value=value)


def is_taken(name: str) -> bool:
    """Whether the field of an argument is set from it."""
    section = ENTRIES[name].section.partition(".")[0]
    return section in TABLE["sections"] or name in TABLE["fields"]


def add_flag(line: CommandLine, flag: str, *, value: Any) -> None:
    """Add a flag that is no field: a switch that is True, or a flag of the table with its value."""
    row = row_of(flag)
    if row is None or row.kind in ("always", "no effect"):
        return
    if value is True and row.arity == 0:
        line.megatron.append(MegatronArgument(flag, row))
    elif flag in TABLE["valued"] and value not in (False, [], ""):
        line.megatron.append(MegatronArgument(flag, row, literal_text(value)))


def add_setting(line: CommandLine, name: str, *, value: Any) -> None:
    """Set a field, unless the value is its default or cannot be written as text."""
    entry = ENTRIES[name]
    text = text_of_value(entry, value)
    default = megatron_values().get(entry.key, entry.default)
    is_required = name in megatron().required
    if text is None or (text == text_of_value(entry, default) and not is_required):
        return
    shown = text if isinstance(text, str) else " ".join(text)
    line.settings.append(Setting(entry.key, text, f"{name}={shown}"))


def text_of_value(entry: Entry, value: Any) -> str | list[str] | None:
    """The value of an argument as the text of a flag; None without one."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, torch.dtype) and value in DTYPES:
        return DTYPES[value]
    if entry.name == "window_size" and isinstance(value, list | tuple) and value:
        return literal_text(value[0])  # keys before; there are none after
    if isinstance(value, list | tuple):
        texts = [literal_text(item) for item in value[:MAX_LIST]]
        if entry.name in PATTERNS:
            return f"[{','.join(texts)}]"
        return texts
    return [literal_text(value)] if entry.kind is list else literal_text(value)


def literal_text(value: Any) -> str:
    """The text of a value, in which nothing stands for something else.

    Raises:
        CheckpointError: it has a reference, which would read other fields or the environment.
    """
    text = plain_text(value)
    if "${" in text:
        raise CheckpointError(
            f"the checkpoint has the argument {shown(text)}",
            why="${...} would be replaced by a field or a variable of the environment",
            fix="use a checkpoint from a source that you trust",
        )
    return text


def add_mamba(line: CommandLine, arguments: Mapping[str, Any]) -> None:
    """Add --is-hybrid-model, by which layers without a pattern or shares are Mamba-2."""
    flag = "--is-hybrid-model"
    row = row_of(flag)
    spec = arguments.get("spec")
    is_mamba = isinstance(spec, list) and MAMBA_SPEC in spec
    if row is not None and (is_mamba or arguments.get("is_hybrid_model") is True):
        line.megatron.append(MegatronArgument(flag, row))


def add_activation(line: CommandLine, arguments: Mapping[str, Any]) -> None:
    """Set the activation, for each of which Megatron-LM has an argument."""
    for name, activation in TABLE["activations"].items():
        if arguments.get(name):
            add_setting(line, "activation", value=activation)
            return
    # the kernel of bias and GELU computes the tanh approximation (fused_bias_gelu.py)
    is_fused = arguments.get("bias_gelu_fusion", True) and arguments.get("add_bias_linear", True)
    exact = row_of("--no-bias-gelu-fusion")
    if not is_fused and exact is not None:
        line.megatron.append(MegatronArgument("--no-bias-gelu-fusion", exact))


def left_out(arguments: Mapping[str, Any]) -> list[str]:
    """One line that names the arguments that are not taken and have another value than usual."""
    names = []
    for name in sorted(arguments):
        if name in TABLE["unnamed"] or name.startswith(tuple(TABLE["unnamed_beginnings"])):
            continue
        if name not in TABLE["defaults"] and is_known_place(name):
            continue
        if not is_usual(name, arguments[name]):
            names.append(plain_text(name))
    if not names:
        return []
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    count = count_of(len(names), "argument")
    return [f"left out {count} with other values than Megatron-LM's defaults: {join(names)}{more}"]


def join(names: list[str]) -> str:
    """The first names of a list."""
    return ", ".join(names[:MAX_NAMES])


def is_known_place(name: str) -> bool:
    """Whether an argument is taken or refused elsewhere, or a run sets it anew."""
    tables = ("skipped", "renamed", "activations", "refused")
    if any(name in TABLE[table] for table in tables):
        return True
    flag = flag_of(name)
    if flag in ALIASES or flag in TABLE["valued"]:
        return True
    if name in ENTRIES:
        section = ENTRIES[name].section.partition(".")[0]
        return is_taken(name) or section not in ("data", "precision")
    row = row_of(flag)
    return row is not None and (row.arity == 0 or row.kind in ("always", "no effect"))


def is_usual(name: str, value: Any) -> bool:
    """Whether an argument that is not taken asks for nothing, or has Megatron-LM's default."""
    if value is False and default_of(name) is True:
        return False
    if value is None or value is False or value in ([], "", 0):
        return True
    if name in ENTRIES:
        return is_equal(ENTRIES[name], value, default=default_of(name))
    row = row_of(flag_of(name))
    text = plain_text(value)
    is_accepted = row is not None and row.kind == "not yet" and text in row.accepts
    return is_accepted or text == plain_text(default_of(name))


def default_of(name: str) -> Any:
    """Megatron-LM's default of an argument, if it is known."""
    if name in ENTRIES:
        entry = ENTRIES[name]
        return megatron_values().get(entry.key, entry.default)
    return TABLE["defaults"].get(name)


def is_equal(entry: Entry, value: Any, *, default: Any) -> bool:
    """Whether an argument has the value of a field: torch.float32 is fp32."""
    try:
        return bool(convert(entry, text_of_value(entry, value)) == convert(entry, default))
    except ConfigError:
        return False


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Check that no argument stands for weights or results that nanotrain lacks.

    Raises:
        CheckpointError: it names all arguments that do.
    """
    refused = []
    for name, row in TABLE["refused"].items():
        value = arguments.get(name)
        if value is not None and value not in row["accepts"]:
            refused.append(f"{name} {plain_text(value)} ({row['why']})")
    if refused:
        raise CheckpointError(
            f"{count_of(len(refused), 'argument')} of the checkpoint cannot be imported",
            why="; ".join(refused),
            fix="import a checkpoint of another run",
        )

"""Apply Megatron-LM's flags to a configuration, and complete settings that imply others.

check_flags       values of flags that only name fixed behaviour, and flags of missing features
convert_flag      renames and conversions -> values of fields
check_defaults, complete_width, complete_activation     --megatron-defaults
notes             lines for the log: counted flags, defaults that differ

`implied.py` has the settings that turn others on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanotrain.config.arguments import choice_of, is_file
from nanotrain.config.command_line import CommandLine, MegatronArgument
from nanotrain.config.config import Config
from nanotrain.config.implied import implied_settings
from nanotrain.config.megatron import MegatronFlag, megatron
from nanotrain.config.option import flag_of
from nanotrain.config.references import as_written
from nanotrain.config.schema import ENTRIES, argument_of, convert, typed, value_of, with_values
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.quantities import count_of

UNFUSED_GELU = "--no-bias-gelu-fusion"


@dataclass
class Translation:
    """A configuration that is being completed, with its new values and their reasons."""

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
    for argument in sorted(without_overruled_checks(line.megatron), key=order_of_conversion):
        with errors:
            convert_flag(result, argument)
    with errors:
        apply_implied(result, line)
    if line.wants_megatron_defaults and "model.activation" not in from_files:
        complete_activation(result, line)
    result.notes += notes(line)
    model = result.config.model
    if line.wants_megatron_defaults and model.multi_latent_attention and not model.qk_layernorm:
        result.notes.append(
            "MLA normalizes its compressed queries, keys and values, "
            "as Megatron-LM with --qk-layernorm"
        )
    return result


def apply_implied(result: Translation, line: CommandLine) -> None:
    """Set the fields that other settings imply."""
    for setting in implied_settings(result.config, result.explicit, line=line):
        result.set(setting.name, setting.value, source=setting.why)
        text = argument_of(setting.name, setting.value)
        result.notes.append(f"{text} is implied: {setting.why}")


def without_overruled_checks(arguments: list[MegatronArgument]) -> Iterator[MegatronArgument]:
    """The arguments without checks of values that a later occurrence of their flag replaces."""
    last = {argument.flag: argument for argument in arguments}
    for argument in arguments:
        if not argument.row.is_check or argument is last[argument.flag]:
            yield argument


def order_of_conversion(argument: MegatronArgument) -> tuple[bool, bool]:
    """A sort key: first flags that set a value, then flags that replace it, checks last."""
    return argument.row.is_check, argument.row.overrules


def check_flags(arguments: list[MegatronArgument], *, errors: ErrorCollector) -> None:
    """Check flags that only name fixed behaviour; flags of missing features become one error."""
    missing: dict[str, list[str]] = {}  # cure -> flags
    for argument in arguments:
        row = argument.row
        if any(is_same(text, argument.value) for text in row.accepts):
            continue
        if row.kind == "always" and row.accepts:
            error = ConfigError(
                f"{argument.text} contradicts what nanotrain always does",
                why=row.meaning,
                fix=f"leave it out or write {argument.flag} {row.accepts[0]}",
            )
            errors.errors.append(error)
        elif row.kind == "not yet":
            missing.setdefault(row.meaning, []).append(argument.text)
    if missing:
        count = sum(map(len, missing.values()))
        reasons = [f"{', '.join(texts)} ({cure})" for cure, texts in missing.items()]
        error = ConfigError(
            f"{count_of(count, 'flag', verb='asks')} for what does not exist here",
            why="; ".join(reasons),
        )
        errors.errors.append(error)


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
        ConfigError: a value that the flag does not take, or a field that has another value on the
            command line.
    """
    row = argument.row
    known = known_values(row)
    if known and argument.value not in known:
        raise ConfigError(
            f"{argument.flag} is {argument.value!r}", why=f"it takes {' or '.join(known)}"
        )
    for name, value in row.values(result.config, argument.value).items():
        key = ENTRIES[name].key
        if key in result.explicit and not row.overrules:
            require_agreement(result, argument, name=name, value=value)
        result.set(name, value, source=f"command line: {argument.text}")
        result.explicit |= {key}


def known_values(row: MegatronFlag) -> list[str]:
    """The values that a flag takes; empty if it takes any, or if `check_flags` has checked it."""
    if row.choices:
        return list(row.choices)
    return [] if row.kind in ("always", "not yet") else list(row.accepts)


def require_agreement(
    result: Translation, argument: MegatronArgument, *, name: str, value: Any
) -> None:
    """Check that a field which is set has the value that a flag stands for, or a list within it.

    Raises:
        ConfigError: it has another value.
    """
    current = value_of(result.config, ENTRIES[name].key)
    new = convert(ENTRIES[name], value)
    is_extended = isinstance(current, list) and set(current) <= set(new)
    if as_written(current) == as_written(new) or is_extended:
        return
    raise ConfigError(
        f"{argument.text} contradicts {argument_of(name, current)}",
        why=f"it means {argument_of(name, new)}",
        fix="leave one of them out",
    )


def complete_width(result: Translation) -> None:
    """Set Megatron-LM's width of a gated MLP if no width is set."""
    model = result.config.model
    if model.activation == "swiglu" and model.ffn_hidden_size is None:
        width = 64 * max(1, int(4 * model.hidden_size * 2 / 3 / 64))
        source = "--megatron-defaults: 8/3 * hidden_size, a multiple of 64 below"
        result.set("ffn_hidden_size", width, source=source)


def complete_activation(result: Translation, line: CommandLine) -> None:
    """Set Megatron-LM's GELU with the tanh approximation if no activation is set.

    Source: the kernel of bias and GELU, Megatron-LM, `fused_bias_gelu.py`. Without biases, or with
    --no-bias-gelu-fusion, it calls the exact GELU.
    """
    model = result.config.model
    is_fused = model.add_bias_linear and UNFUSED_GELU not in line.megatron_rows
    if is_fused and model.activation == "gelu" and "model.activation" not in result.explicit:
        source = "--megatron-defaults: the formula of its kernel of bias and GELU"
        result.set("activation", "gelu_tanh", source=source)


def check_defaults(line: CommandLine, *, errors: ErrorCollector) -> None:
    """Collect the errors of --megatron-defaults.

    They are for recipes, which are written for other defaults, and for fields that have no default
    in Megatron-LM.
    """
    for group, name in line.choices.items():
        if group in ("config", "model", "optim") and not is_file(name):
            error = ConfigError(
                f"--megatron-defaults with {choice_of(group)}={name}",
                why=f"{group}/{name}.yaml is written for nanotrain's defaults: with Megatron-LM's "
                "it means something else",
                fix="leave one of them out",
            )
            errors.errors.append(error)
    if line.choices or "checkpoint.use_checkpoint_args" in line.explicit:
        return
    unset = [name for name in megatron().required if ENTRIES[name].key not in line.explicit]
    if "model.hybrid_layer_pattern" in line.explicit and "num_layers" in unset:
        unset.remove("num_layers")  # it is the length of the pattern
    if unset:
        error = ConfigError(
            f"--megatron-defaults without {', '.join(map(flag_of, unset))}",
            why="Megatron-LM has no defaults for them",
            fix="set them",
        )
        errors.errors.append(error)


def notes(line: CommandLine) -> Iterator[str]:
    """Lines for the log: flags that change nothing, and settings with other defaults."""
    yield from line.overruled
    rows = line.megatron_rows
    if not rows:
        return
    kinds = [row.kind for row in rows.values()]
    num_always = kinds.count("always")
    if num_always:
        flags = count_of(num_always, "flag", verb="names")
        yield f"{flags} what nanotrain always does (--help=megatron lists them)"
    num_unused = kinds.count("no effect")
    if num_unused:
        flags = count_of(num_unused, "flag", verb="tunes")
        yield f"{flags} parts of Megatron-LM that do not exist here"
    saving = [f"{flag} ({row.meaning})" for flag, row in rows.items() if row.saves]
    if saving:
        yield (
            "features of Megatron-LM that save time or memory and do not exist here: "
            f"{'; '.join(saving)}"
        )
    differing = [f"{flag} ({row.meaning})" for flag, row in rows.items() if row.differs]
    if differing:
        yield f"files and logs that differ from Megatron-LM's: {'; '.join(differing)}"
    left_out = other_defaults(line)
    if left_out:
        yield (
            f"settings left out whose defaults differ from Megatron-LM's: {', '.join(left_out)}; "
            "--megatron-defaults takes Megatron-LM's"
        )


def other_defaults(line: CommandLine) -> list[str]:
    """Settings of the model that the line leaves out, with both defaults.

    Empty where a file, Megatron-LM's defaults or a checkpoint gives the model.
    """
    uses_checkpoint = "checkpoint.use_checkpoint_args" in line.explicit
    if line.choices or line.wants_megatron_defaults or uses_checkpoint:
        return []
    set_by_flags = set[str]()
    for row in line.megatron_rows.values():
        set_by_flags.update(row.sets)
    texts = []
    for name in megatron().shaping:
        if ENTRIES[name].key in line.explicit or name in set_by_flags:
            continue
        theirs = typed(megatron().defaults[name])
        texts.append(f"{name} {typed(ENTRIES[name].default)} (Megatron-LM: {theirs})")
    return texts


def megatron_values() -> Mapping[str, Any]:
    """Megatron-LM's defaults by key."""
    return {ENTRIES[name].key: value for name, value in megatron().defaults.items()}

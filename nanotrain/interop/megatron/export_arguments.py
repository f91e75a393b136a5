"""A configuration as the arguments of Megatron-LM's training program: `arguments.py`, back.

    arguments_of_config   the arguments by name
    lost_settings         the settings that the import would read in another way

Arguments have the names of our fields, which are those of Megatron-LM's flags. A field without such
a flag is stored under its own name: Megatron-LM does not look at it, and the import takes it back.
"""

import ast
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.notation import read_hybrid_pattern
from nanotrain.config.schema import ENTRIES, value_of
from nanotrain.interop.megatron.arguments import (
    PATTERNS,
    TABLE,
    config_of_arguments,
    is_taken,
)
from nanotrain.precision.dtypes import TORCH_DTYPES

LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
VOCABULARY = ("vocab_size", "make_vocab_size_divisible_by")


def arguments_of_config(config: Config, *, batch_size: int) -> dict[str, Any]:
    """The arguments of a configuration that change the model, the optimizer or the next step.

    Args:
        config: the configuration of a run.
        batch_size: its global batch size, where the configuration has none.
    """
    arguments: dict[str, Any] = dict(TABLE["exported"])
    for name, entry in ENTRIES.items():
        if is_taken(name) or name in LAYOUT:
            value = value_of(config, entry.key)
            if value is not None:
                arguments[name] = argument_value(name, value)
    for theirs, ours in TABLE["renamed"].items():
        arguments[theirs] = arguments[ours]
    for name, activation in TABLE["activations"].items():
        arguments[name] = config.model.activation == activation
    dtype = config.precision.params_dtype
    arguments["params_dtype"] = TORCH_DTYPES[dtype]
    arguments["bf16"] = dtype == "bf16"
    arguments["fp16"] = dtype == "fp16"
    arguments["bias_gelu_fusion"] = config.model.activation != "gelu"
    arguments["group_query_attention"] = config.model.num_query_groups is not None
    arguments["padded_vocab_size"] = config.model.padded_vocab_size
    arguments.setdefault("global_batch_size", batch_size)
    pattern = config.model.hybrid_layer_pattern
    if pattern is not None:
        arguments["is_hybrid_model"] = True
        arguments["hybrid_override_pattern"] = read_hybrid_pattern(pattern)
    return arguments


def argument_value(name: str, value: Any) -> Any:
    """The value of a field as Megatron-LM stores it.

    >>> argument_value("window_size", 128), argument_value("moe_layer_freq", "[0,1]")
    ((128, 0), [0, 1])
    """
    if name == "window_size":
        return value, 0  # keys before and after
    if name in PATTERNS:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value  # an expression, which both programs read
    if name.endswith("_dtype") and isinstance(value, str):
        return TORCH_DTYPES.get(value, value)
    return value


def lost_settings(config: Config, arguments: dict[str, Any]) -> list[str]:
    """The settings that the import of these arguments would not read as they are.

    Raises:
        CheckpointError: it would refuse them.
    """
    rows = config.model.padded_vocab_size
    imported = config_of_arguments(arguments, num_rows=rows).config
    names = []
    for name, entry in ENTRIES.items():
        if not is_taken(name) or name in VOCABULARY:
            continue
        value = value_of(config, entry.key)
        if name == "global_batch_size" and value is None:
            continue  # it has the one of the run
        if value_of(imported, entry.key) != value:
            names.append(name)
    return names

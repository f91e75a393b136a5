"""What a command line of Megatron-LM means here, in about eight lines."""

from collections.abc import Sequence

from nanotrain.config.command_line import CommandLine
from nanotrain.config.config import Config
from nanotrain.config.load import Loaded
from nanotrain.config.megatron import megatron
from nanotrain.config.schema import ENTRIES, typed, value_of
from nanotrain.quantities import count_of, describe_count
from nanotrain.spec.counts import num_active_parameters, num_parameters
from nanotrain.spec.shape import ModelShape

DEFAULTS = "--megatron-defaults"  # origin of a value that the line leaves out


def megatron_summary(loaded: Loaded, line: CommandLine) -> str:
    """Parameters, layout, batch, tokens, and what became of flags and of defaults.

    Args:
        loaded: the checked configuration of a line with --megatron-defaults.
        line: the parsed command line.
    """
    config = loaded.config
    rows = {
        "parameters": parameters_text(config),
        "layout": layout_text(config),
        "batch": batch_text(config),
        "tokens": tokens_text(config),
        "converted": counted_flags(argument_texts(line, kind="rename", with_meaning=True)),
        "always": counted_flags(argument_texts(line, kind="always")),
        "no effect": counted_flags(argument_texts(line, kind="no effect")),
        "defaults": defaults_text(loaded),
    }
    lines = [f"{name:<12}{text}" for name, text in rows.items()]
    return "\n".join([*lines, "--cfg job prints all settings, --explain with their origin"])


def parameters_text(config: Config) -> str:
    """Parameters and sizes of the model."""
    model = config.model
    sizes = f"{count_of(model.num_layers, 'layer')}, hidden size {model.hidden_size:,}"
    if model.vocab_size is None:
        return f"{sizes}; their number follows from the vocabulary (--vocab-size, or the tokenizer)"
    shape = ModelShape.of(model)
    total = num_parameters(shape)
    active = num_active_parameters(shape)
    text = f"{describe_count(total)}, {sizes}, vocabulary {model.vocab_size:,}"
    return f"{text}; {describe_count(active)} active per token" if active < total else text


def layout_text(config: Config) -> str:
    """Sizes of the groups that the line sets; data parallelism takes all other ranks."""
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "ep": parallel.expert_model_parallel_size,
    }
    axes = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    ranks = sizes["tp"] * sizes["cp"] * sizes["pp"]
    strategy = parallel.data_parallel_sharding_strategy
    return f"{', '.join([*axes, f'dp number of ranks / {ranks}'])} {strategy}"


def batch_text(config: Config) -> str:
    """Sizes of a batch."""
    train = config.train
    micro_batch = f"micro-batch {train.micro_batch_size}, sequences of {config.data.seq_length:,}"
    if train.global_batch_size is None:
        return f"{micro_batch}; global batch {train.micro_batch_size} x dp"
    return f"global batch {train.global_batch_size:,}, {micro_batch}"


def tokens_text(config: Config) -> str:
    """Steps and tokens of the training."""
    train = config.train
    steps = f"{train.train_iters:,} steps"
    is_constant = not (train.rampup_batch_size or train.step_batch_size_schedule)
    if train.global_batch_size is None or not is_constant:
        return steps
    tokens = train.train_iters * train.global_batch_size * config.data.seq_length
    return f"{describe_count(tokens)} in {steps}"


def argument_texts(line: CommandLine, *, kind: str, with_meaning: bool = False) -> list[str]:
    """Flags of Megatron-LM of a kind, on request each with its value and meaning."""
    texts: list[str] = []
    for argument in dict.fromkeys(line.megatron):
        if argument.row.kind == kind:
            meaning = f" ({argument.row.meaning})" if with_meaning else ""
            texts.append(f"{argument.text if with_meaning else argument.flag}{meaning}")
    return texts


def counted_flags(texts: Sequence[str]) -> str:
    """The number of flags and their list: "2 flags: --a, --b"."""
    return f"{count_of(len(texts), 'flag')}: {', '.join(texts)}" if texts else "none"


def defaults_text(loaded: Loaded) -> str:
    """Settings of the model whose value is Megatron-LM's default and not nanotrain's."""
    texts = []
    for name in megatron().shaping:
        entry = ENTRIES[name]
        if loaded.origins.get(entry.key) == DEFAULTS:
            value = typed(value_of(loaded.config, entry.key))
            texts.append(f"{name} {value} (nanotrain: {typed(entry.default)})")
    return f"of Megatron-LM: {', '.join(texts)}" if texts else "none of the model differs"

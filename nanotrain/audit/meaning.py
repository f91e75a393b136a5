"""What flags of Megatron-LM mean here: a configuration, what it leaves out, and its cost.

meaning_of_flags     the configuration of arguments, and the flags without a counterpart
meaning_of_stored    the same for the stored arguments of a checkpoint
figures_of           parameters, memory and time on a number of GPUs
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from nanotrain.audit.arguments import Argument, FlagValues
from nanotrain.audit.sources import is_known
from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS
from nanotrain.config.config import Config
from nanotrain.config.flags import OWN_FLAGS, parse
from nanotrain.config.hybrid_ratios import IS_HYBRID
from nanotrain.config.load import compose_line
from nanotrain.config.megatron import row_of
from nanotrain.config.rules.check import collect_errors, validate_for_world
from nanotrain.config.schema import ENTRIES, convert, with_values
from nanotrain.config.translate import is_same
from nanotrain.errors import ConfigError, ErrorCollector, NanotrainError
from nanotrain.interop.megatron.arguments import config_of_arguments
from nanotrain.plan.plan import check_names
from nanotrain.planner.hardware import GPU
from nanotrain.planner.limits import require_runnable
from nanotrain.planner.prediction import Prediction, predict
from nanotrain.planner.scenario import scenario_of
from nanotrain.spec.counts import num_active_parameters, num_parameters
from nanotrain.spec.shape import ModelShape

REFERENCE = re.compile(r"\$\{(\w+)\}")
ENGINES = ("megatron", "nanotrain")
# flags that take the model or its weights from a checkpoint, which is not read
OF_CHECKPOINT = (
    "--use-checkpoint-args",
    "--use-mp-args-from-checkpoint-args",
    "--pretrained-checkpoint",
)
# flags that take corpora from a file, which is not read
OF_FILE = ("--data-args-path", "--per-split-data-args-path")
# programs whose models are Mamba-2 without a flag that says so
MAMBA_PROGRAMS = ("pretrain_mamba", "pretrain_hybrid")
# flags that say so, or what every layer is; shares of layers may be 0
NAMES_LAYERS = frozenset(
    {IS_HYBRID, "--hybrid-layer-pattern", "--hybrid-override-pattern", "--spec"}
)
# beginnings of notes that say nothing about the model, its layout or its training
SILENT_NOTES = ("--tensorboard is implied", "--wandb is implied", "--load null is implied")
# ends of notes that count flags, which are listed here
COUNTS = ("(--help=megatron lists them)", "parts of Megatron-LM that do not exist here")
# programs whose models have no counterpart, by a part of the name of their file
OTHER_PROGRAMS = {
    "pretrain_t5": "an encoder and a decoder (T5)",
    "pretrain_bert": "an encoder (BERT)",
    "pretrain_retro": "retrieval (RETRO)",
    "pretrain_ict": "a retriever (ICT)",
    "pretrain_realm": "retrieval (REALM)",
    "pretrain_vision": "a model of images",
    "pretrain_vlm": "a model of images and text",
    "multimodal": "a model of images and text",
    "mimo": "a model of images, sound and text",
}
# flags of such models
OTHER_FLAGS = {
    "--decoder-num-layers": "an encoder and a decoder (T5)",
    "--language-model-type": "a model of images and text",
    "--vision-model-type": "a model of images and text",
    "--patch-dim": "a model of images",
    "--bert-no-binary-head": "an encoder (BERT)",
}
VOCABULARY = ENTRIES["vocab_size"]
ASSUMED_VOCABULARY = 50_257  # GPT-2's
# tokens of tokenizers, by a part of the value of a flag; the first that fits
VOCABULARIES = {
    "Llama2Tokenizer": 32_000,
    "GPT2BPETokenizer": 50_257,
    "DeepSeek-V3": 129_280,
    "DeepSeek-R1": 129_280,
    "Qwen": 151_936,
    "Llama-3": 128_256,
    "Mixtral": 32_000,
}
# fields that a checkpoint's own layout sets
LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "num_layers_per_virtual_pipeline_stage",
    "num_distributed_optimizer_instances",
)


@dataclass
class Meaning:
    """Arguments of Megatron-LM as a configuration of nanotrain, and the flags outside of it."""

    config: Config | None = None  # None: they describe no model
    # flags that were left out, by the text to write in their place
    without_counterpart: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)  # flags that Megatron-LM does not have either
    always: list[str] = field(default_factory=list)  # flags that nanotrain always follows
    # flags that tune parts which nanotrain lacks; they change no result
    without_effect: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # why nanotrain would not start the training
    notes: list[str] = field(default_factory=list)  # assumptions, and facts that were left out
    fits_other_ranks: bool = False  # it could run, on another number of ranks

    def add_notes(self, notes: Sequence[str]) -> None:
        """Add the notes on the model, its layout and its training."""
        for text in notes:
            if not text.startswith(SILENT_NOTES) and not text.endswith(COUNTS):
                self.notes.append(text)

    def refuse(self, errors: ErrorCollector) -> None:
        """Add collected errors to the reasons why a training would not start."""
        for error in errors.errors:
            self.refuse_text(str(error))

    def refuse_text(self, text: str) -> None:
        """Add a reason why a training would not start, once."""
        line = " ".join(text.split()).replace("--megatron-defaults without", "no flag sets")
        if line not in self.refused:
            self.refused.append(line)


def meaning_of_flags(arguments: Sequence[Argument], *, program: str = "") -> Meaning:
    """The configuration of arguments, without the flags that have no counterpart.

    Args:
        arguments: flags of Megatron-LM with their values.
        program: the Python file that is launched; empty if it is not known.
    """
    meaning = Meaning()
    other = other_model(arguments, program)
    if other:
        meaning.refused.append(f"it trains {other}: only decoders of text exist here")
        for argument in arguments:
            keep(argument, meaning)
        return meaning
    words: list[str] = []
    for argument in arguments:
        if keep(argument, meaning):
            words += [argument.flag, *map(without_references, argument.values)]
    if any(name in program for name in MAMBA_PROGRAMS) and NAMES_LAYERS.isdisjoint(words):
        words.append(IS_HYBRID)
        meaning.notes.append(f"{program} trains a model of Mamba-2: {IS_HYBRID} is added")
    errors = ErrorCollector()
    with errors:
        line = parse([*words, "--megatron-defaults"])
        loaded = compose_line(line, errors=errors)
        if has_sizes(loaded.explicit):
            meaning.config = loaded.config
        collect_errors(loaded.config, to_train=True, errors=errors, unreadable=loaded.unreadable)
        meaning.add_notes(loaded.notes)
    meaning.refuse(errors)
    complete_vocabulary(meaning, FlagValues.of(arguments))
    return meaning


def has_sizes(explicit: Collection[str]) -> bool:
    """Whether flags set the sizes of a model, by their keys; else those of a default would show."""
    has_layers = not {"model.num_layers", "model.hybrid_layer_pattern"}.isdisjoint(explicit)
    return has_layers and "model.hidden_size" in explicit


def without_references(text: str) -> str:
    """A value in which nothing stands for a variable or another setting.

    >>> without_references("${DATA}/x")
    'unset_DATA/x'
    """
    return REFERENCE.sub(r"unset_\1", text).replace("$", "unset_")


def other_model(arguments: Sequence[Argument], program: str) -> str:
    """The kind of a model without a counterpart here; empty for a decoder of text."""
    for name, kind in OTHER_PROGRAMS.items():
        if name in program:
            return kind
    kinds = [OTHER_FLAGS[item.flag] for item in arguments if item.flag in OTHER_FLAGS]
    return kinds[0] if kinds else ""


def keep(argument: Argument, meaning: Meaning) -> bool:
    """Whether an argument has a counterpart; if not, adds it to a list of `meaning`."""
    flag = argument.flag
    if flag in OF_CHECKPOINT:
        meaning.notes.append(f"{flag}: no checkpoint is read; the model is that of the flags")
        return False
    if flag in OF_FILE:
        meaning.notes.append(f"{argument.text}: the file is not read")
        return False
    if not is_known(flag):
        meaning.unknown.append(argument.text)
        return False
    row = None if flag in (FLAGS | NEGATIONS | ALIASES | OWN_FLAGS) else row_of(flag)
    if row is None:
        return True
    value = " ".join(argument.values)
    is_accepted = any(is_same(text, value) for text in row.accepts)
    is_other = row.kind == "always" and bool(row.accepts)
    if is_accepted or not (row.kind == "not yet" or is_other):
        if row.kind == "always":
            meaning.always.append(flag)
        if row.kind == "no effect":
            meaning.without_effect.append(flag)
        return True
    meaning.without_counterpart.setdefault(row.meaning, []).append(argument.text)
    return False


def meaning_of_stored(stored: Mapping[str, Any]) -> Meaning:
    """The configuration of the stored arguments of a run, in its own layout."""
    meaning = Meaning()
    num_rows = stored.get("padded_vocab_size")
    if type(num_rows) is not int or not 0 < num_rows < 10_000_000:
        meaning.refused.append("the checkpoint has no padded_vocab_size")
        return meaning
    try:
        imported = config_of_arguments(stored, num_rows=num_rows)
    except NanotrainError as error:
        meaning.refuse_text(str(error))
        return meaning
    meaning.notes += imported.notes
    errors = ErrorCollector()
    with errors:
        meaning.config = with_layout(imported.config, stored)
        collect_errors(meaning.config, to_train=True, errors=errors)
    meaning.refuse(errors)
    return meaning


def with_layout(config: Config, stored: Mapping[str, Any]) -> Config:
    """A configuration in the layout of the run that stored its arguments."""
    changed = {}
    for name in LAYOUT:
        entry = ENTRIES.get(name)
        value = stored.get(name)
        if entry is not None and value is not None:
            changed[entry.key] = convert(entry, str(value).lower())
    if stored.get("use_distributed_optimizer") is True:
        changed[ENTRIES["data_parallel_sharding_strategy"].key] = "optim"
    result: Config = with_values(config, changed)
    return result


def complete_vocabulary(meaning: Meaning, values: FlagValues) -> None:
    """Set the vocabulary size of a model whose tokenizer has it, and say so."""
    config = meaning.config
    if config is None or config.model.vocab_size is not None:
        return
    size = ASSUMED_VOCABULARY
    reason = "of GPT-2, since the flags do not say"
    named = [values.text("--tokenizer-type"), values.text("--tokenizer-model")]
    for name, number in VOCABULARIES.items():
        if any(name.lower() in (text or "").lower() for text in named):
            size = number
            reason = f"of {name}"
            break
    # rows are padded as in Megatron-LM, to a multiple for every tensor-parallel rank
    unit = config.model.make_vocab_size_divisible_by or 1
    multiple = unit * config.parallel.tensor_model_parallel_size
    meaning.config = with_values(
        config, {VOCABULARY.key: size, ENTRIES["make_vocab_size_divisible_by"].key: multiple}
    )
    meaning.notes.append(
        f"the vocabulary is assumed to have {size:,} tokens, {reason}: set --vocab-size N after "
        "the script"
    )


@dataclass(frozen=True)
class Figures:
    """Sizes and costs of a configuration on a number of GPUs."""

    total: int | None = None  # parameters
    active: int | None = None  # parameters that compute for one token
    ranks: int = 1
    predictions: tuple[Prediction, ...] = ()  # one per engine that can be planned


def figures_of(meaning: Meaning, ranks: int | None, *, gpu: GPU) -> Figures:
    """Parameters, memory and time; adds to `meaning` why a number cannot be planned.

    Args:
        meaning: the configuration.
        ranks: number of GPUs; None for the smallest number of the layout.
        gpu: GPU of every rank.
    """
    config = meaning.config
    if config is None:
        return Figures(ranks=ranks or 1)
    if ranks is None:
        ranks = smallest_ranks(config)
        meaning.notes.append(
            f"the number of GPUs is not known: {ranks:,} assumed, the smallest of this layout; "
            "set --world-size N"
        )
    total = number_or_none(meaning, lambda: num_parameters(ModelShape.of(config.model)))
    active = number_or_none(meaning, lambda: num_active_parameters(ModelShape.of(config.model)))
    ranks = fitting_ranks(meaning, config, ranks=ranks)
    can_run = not meaning.refused or meaning.fits_other_ranks
    errors = ErrorCollector()
    with errors:
        validate_for_world(config, ranks)
    with errors:
        check_names(config)
        require_runnable(config, gpu)
    meaning.refuse(errors)
    predictions = []
    if can_run and not errors.errors:
        predictions = predictions_of(meaning, config, ranks=ranks, gpu=gpu)
    return Figures(total, active, ranks, tuple(predictions))


def fitting_ranks(meaning: Meaning, config: Config, *, ranks: int) -> int:
    """The number of ranks for the plan: another one where a layout has no whole replica."""
    smallest = smallest_ranks(config)
    if ranks % smallest == 0:
        return ranks
    meaning.fits_other_ranks = not meaning.refused
    meaning.refuse_text(
        f"{ranks:,} GPUs hold no whole replica: this layout takes a multiple of {smallest:,} "
        "(tp x cp x pp, and etp x ep x pp)"
    )
    meaning.notes.append(f"planned on {smallest:,} GPUs, the smallest number of this layout")
    return smallest


def number_or_none(meaning: Meaning, count: Callable[[], int]) -> int | None:
    """A number of parameters; None, with the reason, for a model that cannot be built."""
    try:
        return count()
    except ConfigError as error:
        meaning.refuse_text(str(error))
    except (ValueError, ArithmeticError, TypeError):  # of sizes that the rules have refused
        meaning.refuse_text("the sizes of the model do not fit each other")
    return None


def predictions_of(meaning: Meaning, config: Config, *, ranks: int, gpu: GPU) -> list[Prediction]:
    """Memory and time by the engine of Megatron-LM and by ours."""
    predictions = []
    for engine in ENGINES:
        try:
            predictions.append(predict(scenario_of(config, ranks, gpu=gpu, engine=engine)))
        except ConfigError as error:
            meaning.refuse_text(str(error))
    return predictions


def smallest_ranks(config: Config) -> int:
    """The smallest number of ranks on which a layout has one replica."""
    parallel = config.parallel
    pipeline = parallel.pipeline_model_parallel_size
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size * pipeline
    tensor = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    experts = tensor * parallel.expert_model_parallel_size * pipeline
    return lcm(dense, experts)

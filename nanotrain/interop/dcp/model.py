"""The model of a training program's checkpoint, and the names of its tensors.

    find_model    from a config.json, or from settings and the shapes of tensors

Settings of the user come first. Without a config.json, what they leave out follows from the shapes
of tensors, and one line says what; another one names settings that no tensor shows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from nanotrain.checkpoint.plan import CHUNK_BYTES
from nanotrain.config.command_line import CommandLine
from nanotrain.config.config import Config
from nanotrain.config.load import Loaded, add_value, compose_values, load_line
from nanotrain.config.model import ModelConfig, MTPConfig
from nanotrain.config.schema import KEYS, convert, flat_values, typed, value_of, with_values
from nanotrain.errors import ErrorCollector
from nanotrain.interop.dcp.guess import Modules, guess_model
from nanotrain.interop.dcp.names import TABLE, TORCHTITAN, torchtitan_namings
from nanotrain.interop.dcp.stored import StoredRun
from nanotrain.interop.hf.families import (
    FAMILIES,
    Family,
    check_against,
    config_from_hf,
    family_of,
    read_config,
)
from nanotrain.interop.hf.names import Naming, mtp_copies
from nanotrain.spec.boxes import Box

# of the norms of compressed queries, keys and values, which its DeepSeek-V3 cannot set
EPSILON_OF_TRANSFORMERS = 1e-6
UNTIED = "model.untie_embeddings_and_output_weights"
GUESSED_FAMILY = "deepseek_v3"  # its names include the names of Llama and Qwen3
# settings of the model that no shape shows
UNSEEN = ("rotary_base", "use_rope_scaling", "norm_epsilon", "max_position_embeddings")
UNSEEN_OF_EXPERTS = ("moe.router_topk_scaling_factor", "moe.router_num_groups")
UNSEEN_OF_BIASES = ("moe.router_bias_update_rate",)


@dataclass(frozen=True)
class ImportedModel:
    """A model and the names of its tensors."""

    config: Config
    given: frozenset[str]  # keys that the user sets
    namings: Sequence[Naming]
    ignored: Sequence[str]  # patterns of names that are no weights of the model
    notes: list[str]

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor may be left out."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)

    def move_tied_state(self, run: StoredRun) -> None:
        """Take the state that a tied embedding has under the name of the head."""
        if self.config.model.untie_embeddings_and_output_weights:
            return
        for states in run.states.values():
            heads = [name for name in head_names(self.namings) if name in states]
            if run.embedding not in states and heads:
                states[run.embedding] = states[heads[0]]
            for name in heads:
                del states[name]


def find_model(run: StoredRun, *, line: CommandLine, model_folder: Path | None) -> ImportedModel:
    """The model of a checkpoint.

    Args:
        run: the checkpoint.
        line: the settings that the user gives.
        model_folder: folder with a config.json.

    Raises:
        CheckpointError: shapes that are no model, or a setting that is missing.
        ConfigError: settings that are wrong.
        HuggingFaceError: an unknown family, or a model that no family has.
    """
    notes: list[str] = []
    kind = None
    if model_folder is None:
        loaded = load_with_guesses(run, line, notes=notes)
        model_config = loaded.config.model
    else:
        raw = read_config(model_folder)
        kind = str(raw.get("model_type"))
        from_hf = config_from_hf(raw)
        explicit = line.explicit
        loaded = load_with_model(from_hf, line)
        model_config = check_against(from_hf, loaded.config.model, explicit=model_keys(explicit))
    model_config = with_known_parts(run, model_config, notes=notes)
    config = replace(loaded.config, model=model_config)
    ignored = list(TABLE["ignored"])
    if run.embedding == TORCHTITAN:
        namings: Sequence[Naming] = torchtitan_namings(model_config)
    else:
        family = FAMILIES[kind or family_of(model_config)]
        namings = family.namings
        ignored += [*family.ignored, *needless_names(model_config, family)]
    if not model_config.untie_embeddings_and_output_weights:
        ignored += head_names(namings)
    given = loaded.explicit | {key for key, file in loaded.origins.items() if file != "default"}
    return ImportedModel(config, frozenset(given), namings, ignored, notes)


def load_with_model(from_hf: ModelConfig, line: CommandLine) -> Loaded:
    """The settings of the user, completed by the model of a config.json."""
    for key, value in flat_values(from_hf, path="model.").items():
        if key not in line.explicit and value != KEYS[key].default:
            add_value(line, KEYS[key].name, value=value)
    return load_line(line, to_train=False)


def model_keys(keys: Collection[str]) -> frozenset[str]:
    """The keys of the model section among others, without its name."""
    names = set()
    for key in keys:
        section, _, name = key.partition(".")
        if section == "model":
            names.add(name)
    return frozenset(names)


def load_with_guesses(run: StoredRun, line: CommandLine, *, notes: list[str]) -> Loaded:
    """The settings of the user, completed by settings that follow from shapes of tensors."""
    given = given_values(line)
    guessed = []
    for key, value in guess_values(run, given).items():
        if key not in given and value != KEYS[key].default:
            add_value(line, KEYS[key].name, value=value)
            guessed.append(f"{KEYS[key].name} {typed(value)}")
    loaded = load_line(line, to_train=False)
    if guessed:
        notes.append(f"guessed from the shapes of tensors: {', '.join(guessed)}")
    unseen = []
    for name in unseen_settings(loaded.config.model):
        if f"model.{name}" not in given:
            value = typed(value_of(loaded.config.model, name))
            unseen.append(f"{KEYS[f'model.{name}'].flag} {value}")
    if unseen:
        notes.append(f"in no tensor, so the defaults are taken: {', '.join(unseen)}")
    return loaded


def guess_values(run: StoredRun, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the model section that the tensors and their names show, by key."""
    guesses = guess_model(Modules(run.weight_shapes, guessed_namings(run)), given)
    if UNTIED not in given:
        guesses[UNTIED] = other_head(run) is not None
    if "model.vocab_size" in given:
        del guesses["model.make_vocab_size_divisible_by"]
    has_mla = guesses.get("model.multi_latent_attention", False)
    if has_mla and run.embedding != TORCHTITAN:
        guesses["model.mla.compressed_norm_epsilon"] = EPSILON_OF_TRANSFORMERS
    return guesses


def unseen_settings(model_config: ModelConfig) -> list[str]:
    """The settings of a model that no shape shows."""
    names = list(UNSEEN)
    moe = model_config.moe
    if moe is not None:
        names += UNSEEN_OF_EXPERTS
        names += UNSEEN_OF_BIASES if moe.router_enable_expert_bias else ()
    return names


def given_values(line: CommandLine) -> dict[str, Any]:
    """The values that a command line and its recipe set, by key.

    Raises:
        ConfigError: one of another type.
    """
    composed = compose_values(line, errors=ErrorCollector())
    origins = composed.origins(line)
    given = {}
    for key, value in composed.values.items():
        if key in KEYS and origins[key] != "default":
            given[key] = convert(KEYS[key], value)
    return given


def guessed_namings(run: StoredRun) -> Sequence[Naming]:
    """The names by which the modules of a checkpoint are found."""
    if run.embedding == TORCHTITAN:
        return torchtitan_namings(ModelConfig())
    return FAMILIES[GUESSED_FAMILY].namings


def with_known_parts(run: StoredRun, model_config: ModelConfig, *, notes: list[str]) -> ModelConfig:
    """The model with a head, and without multi-token prediction, where the tensors say so."""
    if model_config.mtp.num_layers and not any(".eh_proj." in name for name in run.weights):
        model_config = replace(model_config, mtp=MTPConfig())
        notes.append(
            "multi-token prediction: the checkpoint has no such layers, so they are left out"
        )
    if model_config.untie_embeddings_and_output_weights:
        return model_config
    head = other_head(run)
    if head is not None:
        notes.append(f"{head} differs from the embedding, so it is not tied to it")
        return with_values(model_config, {"untie_embeddings_and_output_weights": True})
    return model_config


def other_head(run: StoredRun) -> str | None:
    """The name of a head that is not the embedding; None where there is none."""
    namings = guessed_namings(run)
    if run.embedding != TORCHTITAN:
        namings = [family for family in FAMILIES.values() if has_embedding(family, run.embedding)]
    head = next((name for name in head_names(namings) if name in run.weights), None)
    return head if head is not None and is_other_head(run, head) else None


def has_embedding(family: Family, name: str) -> bool:
    """Whether the word embedding of a family has a name."""
    return f"{family.ends['embedding.word']}.weight" == name


def head_names(namings: Sequence[Naming]) -> list[str]:
    """The names that the head may have."""
    names = {f"{naming.ends['head']}.weight" for naming in namings if "head" in naming.ends}
    return sorted(names)


def is_other_head(run: StoredRun, head: str) -> bool:
    """Whether the head has other values than the embedding, or another shape."""
    shapes = run.weight_shapes
    shape = shapes[head]
    if shapes[run.embedding] != shape or len(shape) != 2:
        return True
    num_rows = max(1, CHUNK_BYTES // (4 * shape[1]))  # compared at a time
    for first in range(0, shape[0], num_rows):
        rows = Box((first, 0), (min(first + num_rows, shape[0]), shape[1]))
        values = [run.folder.read(run.weights[name], rows) for name in (run.embedding, head)]
        if not torch.equal(*values):
            return True
    return False


def needless_names(model_config: ModelConfig, family: Family) -> list[str]:
    """Names of copies that files of a family may have."""
    copies = mtp_copies(model_config, family).values()
    return [name for names in copies for name in names]

"""From a configuration to what will be run, before any device is touched.

Opens the corpora, completes the model section (Hugging Face config, vocabulary), finds the checkpoint to start from
and checks that the run folder can be written. Every rank does all of it and meets the same errors; the quick-start
corpus alone is prepared by whichever rank comes first, while the others wait for its lock.
"""

import fcntl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nanotrain.checkpoint.store import find_checkpoint, newest_complete
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.layout_rules import check_layout
from nanotrain.config.load import Loaded
from nanotrain.config.model_rules import check_model
from nanotrain.data.build import DatasetSplits, build_data, tokenizer_of, uses_quickstart
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.errors import ConfigError
from nanotrain.hf.families import check_against, model_from_hf
from nanotrain.prepare.quickstart import prepare_quickstart
from nanotrain.runs.folder import RunFolder
from nanotrain.topology.topology import Topology


@dataclass(frozen=True)
class Plan:
    """What will be run.

    Attributes:
        config: the configuration with nothing left open.
        topology: the arrangement of the ranks.
        folder: the run folder; it exists and can be written.
        datasets: samples by split.
        tokenizer: in the form `load_tokenizer` takes; None where there is none.
        checkpoint: the step folder to start from; None for a new run.
        is_resumed: whether that checkpoint is the run's own.
    """

    config: Config
    topology: Topology
    folder: RunFolder
    datasets: DatasetSplits
    tokenizer: str | None
    checkpoint: Path | None
    is_resumed: bool


def resolve(loaded: Loaded, world_size: int) -> Plan:
    """Find out all that can be known without a device.

    Args:
        loaded: a validated configuration.
        world_size: ranks of the run.

    Raises:
        NanotrainError: whatever is wrong with data, model, folders or checkpoints.
    """
    config = loaded.config
    topology = Topology.of(config.parallel, world_size)
    if config.checkpoint.pretrained_checkpoint:
        config = with_pretrained_model(config, loaded.explicit)
    assert config.train.run_dir, "load gives every run a folder"
    folder = RunFolder(Path(config.train.run_dir))
    folder.require_writable()
    data = _with_quickstart(config.data, folder) if uses_quickstart(config.data) else config.data
    tokenizer = tokenizer_of(data)
    if tokenizer is not None and (data.tokenizer_model or config.train.generate_tokens):
        load_tokenizer(tokenizer)  # one that cannot be loaded would otherwise show when training ends
    config = _with_vocabulary(config, tokenizer)
    check_model(config)
    check_layout(config)
    required = {"train", "valid"} if config.train.eval_interval else {"train"}
    assert config.model.vocab_size, "the vocabulary is known by now"
    datasets = build_data(data, vocab_size=config.model.vocab_size, seed=config.train.seed, required=required)
    checkpoint = _start_of(config, folder)
    is_resumed = checkpoint is not None and config.checkpoint.load is None
    return Plan(config, topology, folder, datasets, tokenizer, checkpoint, is_resumed)


def with_pretrained_model(config: Config, explicit: frozenset[str]) -> Config:
    """The configuration with the model section that the pretrained checkpoint's config.json describes.

    Args:
        config: names a pretrained checkpoint.
        explicit: keys set on the command line, which must not contradict it.
    """
    assert config.checkpoint.pretrained_checkpoint, "only called with a folder"
    described = model_from_hf(Path(config.checkpoint.pretrained_checkpoint))
    asked = frozenset(key.removeprefix("model.") for key in explicit if key.startswith("model."))
    return replace(config, model=check_against(described, config.model, explicit=asked))


def _with_quickstart(data: DataConfig, folder: RunFolder) -> DataConfig:
    """The data section with the quick-start corpus in place; only for opening it, the configuration stays as asked."""

    def say(line: str) -> None:  # not a log line: the rank that builds it need not be the first
        print(line, file=sys.stderr, flush=True)

    with _only_one(folder.path / ".preparing"):
        corpus = prepare_quickstart(folder.data, data.quickstart_vocab_size, progress=say)
    return replace(data, data_path=[str(corpus.prefix)], tokenizer_model=str(corpus.tokenizer_path))


def _with_vocabulary(config: Config, tokenizer: str | None) -> Config:
    if config.model.vocab_size is not None:
        return config
    if tokenizer is None:
        raise ConfigError(
            "the vocabulary size is not known",
            why="neither vocab_size nor a tokenizer is set, and none was found beside the data",
            fix="set --vocab-size, or --tokenizer-model NAME_OR_FOLDER",
        )
    return replace(config, model=replace(config.model, vocab_size=load_tokenizer(tokenizer).vocab_size))


def _start_of(config: Config, folder: RunFolder) -> Path | None:
    """The checkpoint to start from: the one that was named, else the run's own newest."""
    if config.checkpoint.load is not None:
        return find_checkpoint(Path(config.checkpoint.load))
    return newest_complete(folder.checkpoints) if config.checkpoint.auto_resume else None


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold a lock that the ranks of this machine share."""
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""Open the inputs of a run on disk: corpora, tokenizer, run folder, checkpoint to start from.

    prepare the quick-start corpus, if used -> tokenizer -> complete the model section -> datasets
    -> checkpoint

No device is touched. Every rank opens everything and raises the same errors. The quick-start corpus
is written by one rank per machine, under a file lock; the others wait for it.

`--use-checkpoint-args` takes the model section from the checkpoint that a run starts from, as in
Megatron-LM. Every rank reads it, before process groups exist, since their layout and the memory of
a rank follow from it: but only the first lines of the manifest (`store.saved_config`). All ranks
read the same lines. A checkpoint that turns out to be damaged when it is loaded is replaced by an
older one of the same run, which has the same model.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanotrain.checkpoint.store import (
    checkpoint_to_resume,
    find_checkpoint,
    find_manifest,
    named_checkpoint,
    saved_config,
    step_entries,
)
from nanotrain.checkpoint.stored import fetched, mirror
from nanotrain.config.config import Config, DataConfig, TrainConfig
from nanotrain.config.load import Loaded
from nanotrain.config.references import as_written
from nanotrain.config.rules.check import check_layout, check_model
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import (
    KEYS,
    config_from_dict,
    flat_values,
    value_of,
    with_values,
)
from nanotrain.data.build import named_corpora
from nanotrain.data.corpus_info import recorded_tokenizer
from nanotrain.data.data_path import parse_data_path, split_documents
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.run_tokenizer import first_blend, remote_name_of, tokenizer_of, uses_quickstart
from nanotrain.data.same_tokenizer import require_run_tokenizer
from nanotrain.data.tasks import Task
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.interop.hf.canonical import changed_positions, free_keys
from nanotrain.log import get_logger
from nanotrain.paths import Address
from nanotrain.prepare.quickstart import prepare_quickstart, task_path, user_cache
from nanotrain.quantities import count_of
from nanotrain.runs.folder import RunFolder, within_timeout
from nanotrain.storage.remote import is_address, parse
from nanotrain.train.file_lock import file_lock
from nanotrain.train.moved_in import (
    check_megatron_source,
    find_megatron_source,
    with_imported_start,
)
from nanotrain.train.open_data import open_datasets, saved_start
from nanotrain.train.open_tasks import read_tasks
from nanotrain.train.run import RunInputs

log = get_logger(__name__)

# independent of the weights, but Megatron-LM takes them from the checkpoint
DROPOUT = ("attention_dropout", "hidden_dropout")


def open_inputs(loaded: Loaded, *, reads_checkpoint: bool = True) -> tuple[Config, RunInputs]:
    """Open the inputs of a run, and set the fields that follow from them.

    Args:
        loaded: a validated configuration.
        reads_checkpoint: look for the checkpoint to start from, and write a file to see that the
            run folder can be written; one rank per machine does, because manifests are long and
            file systems are shared.

    Returns:
        The configuration with model and vocabulary size set, and the open inputs.

    Raises:
        NanotrainError: invalid data, model, folder or checkpoint.
    """
    folder = RunFolder.of(loaded.config)
    _fetch(loaded.config, folder)
    config = _own_checkpoints_first(loaded.config, folder)
    config = with_imported_start(config, folder)
    _require_weights(config, folder)
    config = with_known_model(with_local_files(config), loaded.explicit)
    folder.require_writable(probes=reads_checkpoint)
    data = _prepare_quickstart(config.data, folder) if uses_quickstart(config.data) else config.data
    tokenizer = _find_tokenizer(data, config.train)
    if _goes_on(config, folder):
        require_run_tokenizer(folder.tokenizer, tokenizer)
    config = _with_vocabulary(config, tokenizer)
    check_model(config)
    check_layout(config)
    saved = _step_to_go_on_from(config)
    start = None
    if saved is not None and not config.checkpoint.finetune and not config.data.mock_data:
        start = saved_start(saved)
    config, opened = open_datasets(config, data, folder=folder, start=start)
    tasks = _open_tasks(config, data, tokenizer=tokenizer)
    checkpoint = _checkpoint_to_load(config, folder) if reads_checkpoint else None
    return config, RunInputs(
        folder=folder,
        datasets=opened.splits,
        data_origin=opened.origin,
        data_settings=opened.settings,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        is_resumed=checkpoint is not None and config.checkpoint.load is None,
        origins=loaded.origins,
        reads_checkpoint=reads_checkpoint,
        tasks=tasks,
    )


def _own_checkpoints_first(config: Config, folder: RunFolder) -> Config:
    """The configuration of a start: a fine-tuning that has checkpoints goes on from them."""
    options = config.checkpoint
    load = _load_path(config)
    entries = step_entries(folder.checkpoints)
    if load is None or not entries or not options.finetune or not options.auto_resume:
        return config
    if load.resolve().is_relative_to(folder.path.resolve()):
        return config  # it takes the weights of its own folder
    line = "the run goes on from its own %s; --no-auto-resume starts again from %s"
    log.info(line, entries[-1].name, load)
    return replace(config, checkpoint=replace(options, load=None, finetune=False))


def _require_weights(config: Config, folder: RunFolder) -> None:
    """Check that a fine-tuning has weights to start from.

    Raises:
        ConfigError: it would start with random ones.
    """
    options = config.checkpoint
    is_named = options.load is not None or options.pretrained_checkpoint is not None
    if not config.data.sft or is_named or _goes_on(config, folder):
        return
    why = f"{folder.path} has no checkpoint"
    if not options.auto_resume:
        why = f"--no-auto-resume goes on from no checkpoint of {folder.path}"
    raise ConfigError(
        "--sft without weights to start from",
        why=f"a new model has nothing to fine-tune, and {why}",
        fix="set --load RUN or --pretrained-checkpoint FOLDER",
    )


def _goes_on(config: Config, folder: RunFolder) -> bool:
    """Whether the start goes on from a checkpoint of the run folder; every rank finds the same."""
    options = config.checkpoint
    return options.auto_resume and options.load is None and bool(step_entries(folder.checkpoints))


def _may_go_on_from_storage(config: Config, folder: RunFolder) -> bool:
    """Whether the start goes on from the run's checkpoints in object storage if it has some.

    They are not known before the ranks have fetched them.
    """
    options = config.checkpoint
    is_own_first = options.load is None or options.finetune
    return folder.remote is not None and options.auto_resume and is_own_first


def check_local_files(loaded: Loaded) -> None:
    """Check the files of this machine that a run names, without writing one or loading weights.

    A launcher does so before it starts ranks. What is at an address is left to the ranks.

    Raises:
        NanotrainError: a corpus, a tokenizer, a checkpoint or a model folder that cannot be used,
            or a split without training documents.
    """
    folder = RunFolder.of(loaded.config)
    config = _own_checkpoints_first(loaded.config, folder)
    is_start_known = not _may_go_on_from_storage(config, folder)
    source = find_megatron_source(config, folder) if is_start_known else None
    if is_start_known and source is None:
        _require_weights(config, folder)
    data = config.data
    for entry in named_corpora(data):
        if isinstance(entry.prefix, Address):
            continue
        corpus = IndexedTokens(entry.prefix)
        if data.data_path and not split_documents(corpus.num_documents, data.split)[0]:
            raise ConfigError(
                f"--split {data.split} leaves no document of {entry.prefix} for training",
                why=f"it has {count_of(corpus.num_documents, 'document')}",
                fix="give the first part a larger share",
            )
    remote = remote_name_of(data)
    if remote is None or Path(remote).is_absolute():
        _find_tokenizer(data, config.train)
    pretrained = config.checkpoint.pretrained_checkpoint
    load = config.checkpoint.load if is_start_known else None
    if source is not None:
        check_megatron_source(config, source)
        return  # the ranks import it, and compare the model
    if load is not None and not is_address(load):
        named_checkpoint(Path(load))
    is_here = not is_address(pretrained or load or "")
    if is_here and (is_start_known or pretrained is not None):
        with_known_model(config, loaded.explicit)


def _find_tokenizer(data: DataConfig, train: TrainConfig) -> str | None:
    """The tokenizer of the data, loaded now if the end of training needs it."""
    tokenizer = tokenizer_of(data)
    is_needed = data.tokenizer_model or data.vocab_file or train.generate_tokens
    if tokenizer is not None and is_needed:
        load_tokenizer(tokenizer)
    return tokenizer


def _open_tasks(config: Config, data: DataConfig, *, tokenizer: str | None) -> tuple[Task, ...]:
    """The tasks that validations score; the quick-start corpus comes with one."""
    entries = config.train.eval_tasks
    if not entries and uses_quickstart(config.data):
        entries = [f"next-line={task_path(Path(data.data_path[0]))}"]
    if not entries or not config.evaluates:
        return ()
    named = replace(config.train, eval_tasks=entries)
    return read_tasks(
        named,
        None if tokenizer is None else load_tokenizer(tokenizer),
        is_pretrained=config.checkpoint.pretrained_checkpoint is not None,
        seq_length=config.data.seq_length,
    )


def with_known_model(config: Config, explicit: frozenset[str]) -> Config:
    """The configuration with the model of the folder or checkpoint that a run begins from, if any.

    Args:
        config: the configuration; files of a hub that it names are fetched.
        explicit: keys set on the command line.

    Raises:
        NanotrainError: there is no such folder, settings contradict it, or the layout does not fit
            its model.
    """
    if config.is_model_known:
        return config
    complete = _with_checkpoint_model
    if config.checkpoint.pretrained_checkpoint:
        complete = _with_pretrained_model
    config = complete(with_local_files(config), explicit)
    check_model(config)
    check_layout(config)
    return config


def _with_pretrained_model(config: Config, explicit: frozenset[str]) -> Config:
    """Replace the model section by the one in the pretrained checkpoint's config.json.

    Args:
        config: `checkpoint.pretrained_checkpoint` is set.
        explicit: keys set on the command line, which must agree with config.json.
    """
    from nanotrain.interop.hf.families import check_against, model_from_hf

    assert config.checkpoint.pretrained_checkpoint, "callers check it"
    described = model_from_hf(Path(config.checkpoint.pretrained_checkpoint))
    fields = frozenset(key.removeprefix("model.") for key in explicit if key.startswith("model."))
    return replace(config, model=check_against(described, config.model, explicit=fields))


def _with_checkpoint_model(config: Config, explicit: frozenset[str]) -> Config:
    """Replace the model section by the checkpoint's, if the run starts from one.

    Model settings of the command line that do not concern the weights stay (loss coefficients,
    capacity), and rotary positions. The others are replaced, and differences are logged. The
    sequence length is the checkpoint's unless the command line sets it.

    Args:
        config: `checkpoint.use_checkpoint_args` is set.
        explicit: keys set on the command line.

    Raises:
        CheckpointError: --load names no checkpoint.
        ConfigError: there is no checkpoint yet, and settings of the command line have no effect.
    """
    checkpoint = _checkpoint_config(config)
    if checkpoint is None:
        log.info(
            "use_checkpoint_args: there is no checkpoint yet, the model is that of the command line"
        )
        _require_effect(config, explicit)
        return config
    step, settings = checkpoint
    saved = config_from_dict(settings)
    free = [f"model.{key}" for key in free_keys(saved.model) if key not in DROPOUT]
    kept = {key: value_of(config, key) for key in free if key in explicit}
    fields = [key.removeprefix("model.") for key in explicit if key.startswith("model.")]
    positions = changed_positions(saved.model, config.model, explicit=fields)
    kept |= {f"model.{key}": value for key, value in positions.items()}
    completed = with_values(replace(config, model=saved.model), kept)
    if "data.seq_length" not in explicit:
        completed = with_values(completed, {"data.seq_length": saved.data.seq_length})
    log.info("use_checkpoint_args: the model is that of %s", step)
    before = flat_values(config)
    after = flat_values(completed)
    for key in sorted(explicit):
        if before[key] != after[key] and key.startswith("model."):
            log.info(
                "use_checkpoint_args: %s is the checkpoint's %s, not %s",
                KEYS[key].flag,
                as_written(after[key]),
                as_written(before[key]),
            )
    return completed


def _require_effect(config: Config, explicit: frozenset[str]) -> None:
    """Check the settings without effect on the model of the command line.

    `load` leaves them unchecked, as a checkpoint may have another model.
    """
    errors = ErrorCollector()
    reset_unused(
        with_values(config, {"checkpoint.use_checkpoint_args": False}),
        explicit=explicit,
        errors=errors,
    )
    errors.raise_errors()


def _checkpoint_config(config: Config) -> tuple[Path, Mapping[str, Any]] | None:
    """The checkpoint that a run starts from, and the configuration in it; None without one."""
    load = _load_path(config)
    if load is None and not config.checkpoint.auto_resume:
        return None
    folder = RunFolder.of(config).checkpoints
    step = _step_to_go_on_from(config)
    if step is not None:
        settings = saved_config(step)
        if settings is not None:
            return step, settings
    # its first lines are not enough: the whole manifest, or the error in it
    newest = load if load is not None else checkpoint_to_resume(folder)
    if newest is None:
        return None
    found, manifest = find_manifest(newest)
    return found, manifest.config


def _step_to_go_on_from(config: Config) -> Path | None:
    """The step folder that a run starts from unless it is damaged; every rank finds the same."""
    load = _load_path(config)
    if load is not None:
        return named_checkpoint(load)
    if not config.checkpoint.auto_resume:
        return None
    entries = step_entries(RunFolder.of(config).checkpoints)
    return entries[-1] if entries else None


def _prepare_quickstart(data: DataConfig, folder: RunFolder) -> DataConfig:
    """Put the quick-start corpus and its tokenizer into the run folder; returns its data section.

    The saved configuration keeps an empty `data_path`: the corpus belongs to the run folder.
    """
    with file_lock(folder.path / ".preparing", "write the quick-start corpus"):
        prefix = prepare_quickstart(
            folder.data, data.quickstart_vocab_size, cache=user_cache("quickstart")
        )
    return replace(data, data_path=[str(prefix)], tokenizer_model=recorded_tokenizer(prefix))


def _with_vocabulary(config: Config, tokenizer: str | None) -> Config:
    """Set the vocabulary size from the tokenizer, unless it is set."""
    if config.model.vocab_size is not None:
        return config
    if tokenizer is None:
        for entry in parse_data_path(first_blend(config.data)):
            # a corpus that does not exist is the likelier mistake, and raises
            IndexedTokens(entry.prefix)
        raise ConfigError(
            "the vocabulary size is not set",
            why="neither vocab_size nor a tokenizer is set, "
            "and there is no tokenizer beside the data",
            fix="set --vocab-size, or --tokenizer-model NAME_OR_FOLDER",
        )
    vocab_size = load_tokenizer(tokenizer).vocab_size
    return replace(config, model=replace(config.model, vocab_size=vocab_size))


def _checkpoint_to_load(config: Config, folder: RunFolder) -> Path | None:
    """The checkpoint of `--load`, otherwise the newest complete one of the run folder."""
    load = _load_path(config)
    if load is not None:
        return find_checkpoint(load)
    return checkpoint_to_resume(folder.checkpoints) if config.checkpoint.auto_resume else None


def _load_path(config: Config) -> Path | None:
    """The local path of `--load`; `_fetch` brings the files of an address there."""
    load = config.checkpoint.load
    if load is None:
        return None
    return _load_base(config) / parse(load).path if is_address(load) else Path(load)


def _load_base(config: Config) -> Path:
    return Path(config.checkpoint.staging_dir or "runs") / ".loaded"


def _fetch(config: Config, folder: RunFolder) -> None:
    """Bring small files of the run folder and of `--load` here; one rank at a time."""
    if folder.remote is not None:
        folder.path.mkdir(parents=True, exist_ok=True)
        with file_lock(folder.path / ".fetching", "fetch the files of the run"):
            mirror(folder.remote, folder.path)
    _local_copy(config.checkpoint.load, config)


def with_local_files(config: Config) -> Config:
    """The configuration with local copies of a tokenizer and Hugging Face folder at an address."""
    tokenizer = _local_copy(config.data.tokenizer_model, config)
    pretrained = _local_copy(config.checkpoint.pretrained_checkpoint, config)
    return replace(
        config,
        data=replace(config.data, tokenizer_model=tokenizer),
        checkpoint=replace(config.checkpoint, pretrained_checkpoint=pretrained),
    )


def _local_copy(text: str | None, config: Config) -> str | None:
    """The local path of an address, after a download by one rank at a time; or the text itself."""
    if text is None or not is_address(text):
        return text
    base = _load_base(config)
    base.mkdir(parents=True, exist_ok=True)
    with file_lock(base / ".fetching", "fetch the files"):
        return str(fetched(within_timeout(parse(text), config), base))

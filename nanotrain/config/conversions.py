"""Conversions of Megatron-LM's flags, named in `tables/megatron.yaml`.

A conversion is an exact function of the configuration and the text of a value; it returns values by
unique name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.data_stages import read_named
from nanotrain.config.schedules import batch_schedule, steps_of_samples
from nanotrain.config.user_paths import expand_path
from nanotrain.errors import ConfigError
from nanotrain.paths import local_path
from nanotrain.quantities import count_of, step_name
from nanotrain.untrusted import list_of, object_of, parse_json, read_file, text_of, unreadable

MLA_POSITIONS = ("rope", "learned_absolute")  # with either MLA rotates as --rope-type says
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"  # in a folder of Megatron-LM
LARGEST = 10**18  # the largest whole number of a flag, as of --train-samples


def whole_number(flag: str, text: str) -> int:
    """Parse a whole number of at least 1, also written as 1e9.

    Raises:
        ConfigError: anything else.
    """
    try:
        number = int(text) if text.isdecimal() else float(text)
        if 1 <= number <= LARGEST and number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise ConfigError(f"{flag} is {text!r}", why="it takes a whole number from 1 to 10^18")


def train_samples(config: Config, text: str) -> dict[str, Any]:
    """Steps from the number of training samples, counted as in Megatron-LM.

    It is also the length of the learning-rate schedule, unless the line sets one.
    """
    samples = whole_number("--train-samples", text)
    schedule = batch_schedule(config)
    batch_size = config.train.global_batch_size if schedule is None else schedule.size_at(0)
    if batch_size is None:
        raise ConfigError(
            f"--train-samples {text} has no number of steps",
            why="the number of steps is train_samples / global_batch_size, which is unset",
            fix="set --global-batch-size",
        )
    if samples < batch_size:
        why = f"the first step takes {count_of(batch_size, 'sample')}"
        raise ConfigError(f"--train-samples {text} is no whole step", why=why, fix="raise it")
    if schedule is None:
        steps = samples // batch_size
    else:
        steps = steps_of_samples(schedule, samples)
    values: dict[str, Any] = {"train_iters": steps}
    optim = config.optim
    has_length = optim.lr_decay_style != "constant" or optim.lr_warmup_fraction is not None
    if has_length and optim.lr_decay_iters is None and optim.lr_decay_samples is None:
        values["lr_decay_samples"] = samples
    return values


def eval_global_batch_size(config: Config, text: str) -> dict[str, Any]:
    """Batches of training's size with as many samples of validation.

    Raises:
        ConfigError: they are no whole number.
    """
    flag = "--eval-global-batch-size"
    size = whole_number(flag, text)
    schedule = batch_schedule(config)
    batch_size = config.train.global_batch_size if schedule is None else schedule.final
    if batch_size is None:
        raise ConfigError(
            f"{flag} {text} without --global-batch-size",
            why="validation takes global batches of training's size",
            fix="set --global-batch-size",
        )
    samples = size * config.train.eval_iters
    num_batches, rest = divmod(samples, batch_size)
    if rest:
        raise ConfigError(
            f"{flag} {text} with --eval-iters {config.train.eval_iters}",
            why=f"{count_of(samples, 'sample')} are no whole global batches of {batch_size}",
            fix="set --eval-iters to the number of global batches, and leave it out",
        )
    return {"eval_iters": num_batches}


def layers_per_virtual_stage(config: Config, text: str) -> dict[str, Any]:
    """Virtual stages per pipeline rank from the layers of one of them."""
    flag = "--num-layers-per-virtual-pipeline-stage"
    layers = whole_number(flag, text)
    parallel = config.parallel
    num_layers = config.model.num_layers + sum(parallel.counted_ends)
    pp = parallel.pipeline_model_parallel_size
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        raise ConfigError(
            f"{flag} {text}",
            why="with a first or last length the stages have different numbers of layers",
            fix="set --num-virtual-stages-per-pipeline-rank",
        )
    if num_layers % (pp * layers):
        raise ConfigError(
            f"{flag} {text} does not split the model evenly",
            why=f"{count_of(num_layers, 'layer', verb='is')} not a multiple of {pp} x {layers}",
            fix="set a number that divides num_layers / pipeline_model_parallel_size",
        )
    return {"num_virtual_stages_per_pipeline_rank": num_layers // pp // layers}


def padded_vocab_size(config: Config, text: str) -> dict[str, Any]:
    """The multiple that pads the vocabulary to exactly this size."""
    size = whole_number("--padded-vocab-size", text)
    vocab_size = config.model.vocab_size
    if vocab_size is not None and vocab_size > size:
        why = f"the vocabulary has {count_of(vocab_size, 'token')}"
        raise ConfigError(f"--padded-vocab-size is {text}", why=why, fix="raise it or leave it out")
    return {"make_vocab_size_divisible_by": size}


def group_query_attention(config: Config, text: str) -> dict[str, Any]:
    """One key/value head if their number is not set, Megatron-LM's default."""
    if config.model.num_query_groups is not None:
        return {}
    return {"num_query_groups": 1}


def no_position_embedding(config: Config, text: str) -> dict[str, Any]:
    """No values; Megatron-LM takes the flag with RoPE only."""
    if not config.model.has_rope:
        raise ConfigError(
            "--no-position-embedding",
            why=f"position_embedding_type is {config.model.position_embedding_type}",
            fix="set --position-embedding-type none instead",
        )
    return {}


def token_dispatcher_type(config: Config, text: str) -> dict[str, Any]:
    """No values; Megatron-LM has the backend in the dispatcher `flex` only."""
    backend = config.parallel.moe_flex_dispatcher_backend
    if text != "flex" and backend is not None:
        raise ConfigError(
            f"--moe-token-dispatcher-type {text} with --moe-flex-dispatcher-backend {backend}",
            why="the backend belongs to the dispatcher flex, and Megatron-LM would not use it",
            fix="set --moe-token-dispatcher-type flex, or leave the backend out",
        )
    return {}


def moe_layer_recompute(config: Config, text: str) -> dict[str, Any]:
    """Selective recomputation of MoE layers, in addition to modules that are already recomputed."""
    modules = config.memory.recompute_modules or config.memory.recomputed_modules
    with_moe = dict.fromkeys([*modules, "moe"])
    return {"recompute_granularity": "selective", "recompute_modules": list(with_moe)}


def record_memory_history(config: Config, text: str) -> dict[str, Any]:
    """Megatron-LM's default file, unless the line names another."""
    if config.train.memory_snapshot_path is not None:
        return {}
    return {"memory_snapshot_path": "snapshot.pickle"}


def rope_type(config: Config, text: str) -> dict[str, Any]:
    """The positions. For MLA that rotates nothing: `implied_yarn` decides by the scaling factor."""
    model = config.model
    if model.multi_latent_attention and model.position_embedding_type in MLA_POSITIONS:
        return {}
    return {"position_embedding_type": text}


def ckpt_step(config: Config, text: str) -> dict[str, Any]:
    """The step folder to load, within the run folder or folder of checkpoints of `--load`.

    In a folder of Megatron-LM it has the name that it has there.

    Raises:
        ConfigError: `--load` is unset, or names a step folder itself.
    """
    flag = "--ckpt-step"
    step = whole_number(flag, text)
    name = step_name(step)
    load = config.checkpoint.load
    if load is None:
        raise ConfigError(
            f"{flag} {text} without --load",
            why="it is a step of the run that --load names",
            fix="set --load RUN, also for the run's own folder",
        )
    folder = Path(load)
    if folder.name.startswith("step-"):
        raise ConfigError(
            f"{flag} {text} with --load {load}",
            why=f"{folder.name} is the checkpoint of one step",
            fix=f"leave {flag} out or set --load RUN",
        )
    if (folder / MEGATRON_TRACKER).is_file():
        return {"load": str(folder / f"iter_{step:07d}")}
    if folder.name != "checkpoints":
        folder = folder / "checkpoints"
    return {"load": str(folder / name)}


def checkpoint_activations(config: Config, text: str) -> dict[str, Any]:
    """Full recomputation, as in Megatron-LM's earlier versions; uniform unless a method is set."""
    values = {"recompute_granularity": "full"}
    if config.memory.recompute_method is None:
        values["recompute_method"] = "uniform"
    return values


def cuda_graph_modules(config: Config, text: str) -> dict[str, Any]:
    """The parts of layers that are captured, by the names of `--cuda-graph-scope`."""
    return {"cuda_graph_scope": text.split()}


def multiple_validation_sets(config: Config, text: str) -> dict[str, Any]:
    """Validation sets with numbers as names, unless they have names.

    Raises:
        ConfigError: there are no corpora of validation alone.
    """
    prefixes = validation_prefixes(config, "--multiple-validation-sets")
    if read_named(config.data.valid_data_path):
        return {}
    return {"valid_data_path": [f"{index}={prefix}" for index, prefix in enumerate(prefixes)]}


def validation_set_names(config: Config, text: str) -> dict[str, Any]:
    """Validation sets with names, in the order of the corpora.

    Raises:
        ConfigError: there are no corpora of validation alone, or another number of names.
    """
    flag = "--validation-set-names"
    prefixes = validation_prefixes(config, flag)
    names = text.split()
    if len(names) != len(prefixes):
        raise ConfigError(
            f"{flag} has {count_of(len(names), 'name')}",
            why=f"--valid-data-path names {len(prefixes)} corpora",
            fix="write one name for each",
        )
    pairs = zip(names, prefixes, strict=True)
    return {"valid_data_path": [f"{name}={prefix}" for name, prefix in pairs]}


def validation_prefixes(config: Config, flag: str) -> list[str]:
    """The corpora of `--valid-data-path`, without their weights and names.

    Raises:
        ConfigError: there are none.
    """
    entries = config.data.valid_data_path
    if not entries:
        raise ConfigError(
            f"{flag} without --valid-data-path",
            why="--split divides every corpus of --data-path, and their validation documents are "
            "one blend",
            fix="set --train-data-path, and --valid-data-path NAME=PREFIX for each set",
        )
    named = read_named(entries)
    if named:
        return list(named.values())
    return [word for entry in entries for word in entry.split() if not is_weight(word)]


def is_weight(word: str) -> bool:
    """Whether a word of `--data-path` is the weight of a corpus.

    >>> is_weight("0.7"), is_weight("data/web")
    (True, False)
    """
    try:
        float(word)
    except ValueError:
        return False
    return True


def data_args_path(config: Config, text: str) -> dict[str, Any]:
    """The prefixes and weights of `--data-path`, separated by white space in a file.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    flag = "--data-args-path"
    fix = "write what would follow --data-path into the file"
    try:
        words = read_file(local_path(text)).decode().split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {text} cannot be read", why=unreadable(error), fix=fix) from None
    if not words:
        raise ConfigError(f"{flag} {text} names no data", why="the file is empty", fix=fix)
    return {"data_path": expand_path(words)}


def per_split_data_args_path(config: Config, text: str) -> dict[str, Any]:
    """The prefixes and weights of each split, from a JSON file.

    The file has a text or a list of texts for train, valid and test.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    try:
        splits = object_of(parse_json(read_file(local_path(text))), "the file")
        return paths_of_splits(splits)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--per-split-data-args-path {text} cannot be read",
            why=unreadable(error),
            fix='write {"train": "0.7 a 0.3 b", "valid": "c", "test": "d"} into the file',
        ) from None


def paths_of_splits(splits: Mapping[str, Any]) -> dict[str, list[str]]:
    """The prefixes and weights of each split, by unique name.

    Raises:
        ValueError: another form.
    """
    unknown = splits.keys() - {"train", "valid", "test"}
    if unknown:
        raise ValueError(f"it has the key {min(unknown)!r}")
    if not splits.get("train"):
        raise ValueError("train has no data")
    values = {}
    for split, value in splits.items():
        if value is not None:
            values[f"{split}_data_path"] = expand_path(words_of(value, split))
    return values


def words_of(value: Any, name: str) -> list[str]:
    """The words of a text, or of a list of texts and numbers."""
    if isinstance(value, str):
        return value.split()
    words = []
    for word in list_of(value, name):
        words.append(str(word) if isinstance(word, int | float) else text_of(word, name))
    return words

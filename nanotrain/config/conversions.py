"""Conversions of Megatron-LM's flags, named in `tables/megatron.yaml`.

A conversion is an exact function of the configuration and the text of a value; it returns values by
unique name.
"""

from pathlib import Path
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.schedules import batch_schedule, steps_of_samples
from nanotrain.errors import ConfigError
from nanotrain.paths import local_path
from nanotrain.quantities import count_of, step_name
from nanotrain.untrusted import list_of, object_of, parse_json, read_file, text_of, unreadable

LARGEST = 10**18  # of whole numbers, as of samples


def whole_number(flag: str, text: str) -> int:
    """A value of at least 1, also written 1e9.

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
    """Steps from the number of training samples, counted as in Megatron-LM; also the end of the lr
    schedule.
    """
    samples, schedule = whole_number("--train-samples", text), batch_schedule(config)
    batch_size = schedule.size_at(0) if schedule else config.train.global_batch_size
    if batch_size is None:
        why = "the number of steps is train_samples / global_batch_size, which is unset"
        raise ConfigError(
            f"--train-samples {text} has no number of steps", why=why, fix="set --global-batch-size"
        )
    if samples < batch_size:
        why = f"the first step takes {count_of(batch_size, 'sample')}"
        raise ConfigError(f"--train-samples {text} is no whole step", why=why, fix="raise it")
    steps = steps_of_samples(schedule, samples) if schedule else samples // batch_size
    values: dict[str, Any] = {"train_iters": steps}
    optim = config.optim
    has_length = optim.lr_decay_style != "constant" or optim.lr_warmup_fraction is not None
    if has_length and optim.lr_decay_iters is None and optim.lr_decay_samples is None:
        values["lr_decay_samples"] = samples
    return values


def layers_per_virtual_stage(config: Config, text: str) -> dict[str, Any]:
    """Virtual stages per pipeline rank from the layers of one of them."""
    flag = "--num-layers-per-virtual-pipeline-stage"
    layers, parallel = whole_number(flag, text), config.parallel
    num_layers = config.model.num_layers + sum(parallel.counted_ends)
    pp = parallel.pipeline_model_parallel_size
    ends = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if ends != (None, None):
        why = "with a first or last length the stages have different numbers of layers"
        raise ConfigError(
            f"{flag} {text}", why=why, fix="set --num-virtual-stages-per-pipeline-rank"
        )
    if num_layers % (pp * layers):
        why = f"{count_of(num_layers, 'layer', verb='is')} not a multiple of {pp} x {layers}"
        fix = "set a number that divides num_layers / pipeline_model_parallel_size"
        raise ConfigError(f"{flag} {text} does not split the model evenly", why=why, fix=fix)
    return {"num_virtual_stages_per_pipeline_rank": num_layers // pp // layers}


def padded_vocab_size(config: Config, text: str) -> dict[str, Any]:
    """The multiple that pads the vocabulary to exactly this size."""
    size, vocab_size = whole_number("--padded-vocab-size", text), config.model.vocab_size
    if vocab_size is not None and vocab_size > size:
        why = f"the vocabulary has {count_of(vocab_size, 'token')}"
        raise ConfigError(f"--padded-vocab-size is {text}", why=why, fix="raise it or leave it out")
    return {"make_vocab_size_divisible_by": size}


def group_query_attention(config: Config, text: str) -> dict[str, Any]:
    """One key/value head if their number is not set, Megatron-LM's default."""
    return {} if config.model.num_query_groups is not None else {"num_query_groups": 1}


def no_position_embedding(config: Config, text: str) -> dict[str, Any]:
    """No values; Megatron-LM takes the flag with RoPE only."""
    if not config.model.has_rope:
        why = f"position_embedding_type is {config.model.position_embedding_type}"
        raise ConfigError(
            "--no-position-embedding", why=why, fix="set --position-embedding-type none instead"
        )
    return {}


def moe_layer_recompute(config: Config, text: str) -> dict[str, Any]:
    """Selective recomputation of MoE layers, in addition to modules that are already recomputed."""
    is_selective = config.memory.recompute_granularity == "selective"
    modules = config.memory.recompute_modules or (["core_attn"] if is_selective else [])
    return {
        "recompute_granularity": "selective",
        "recompute_modules": [*dict.fromkeys([*modules, "moe"])],
    }


def record_memory_history(config: Config, text: str) -> dict[str, Any]:
    """Megatron-LM's default file, unless the line names another."""
    return (
        {}
        if config.train.memory_snapshot_path is not None
        else {"memory_snapshot_path": "snapshot.pickle"}
    )


def rope_type(config: Config, text: str) -> dict[str, Any]:
    """The positions; of MLA with RoPE nothing: `translate.implied` takes YaRN for a scaling factor
    above 1.
    """
    model = config.model
    is_implied = model.multi_latent_attention and model.position_embedding_type == "rope"
    return {} if is_implied else {"position_embedding_type": text}


def ckpt_step(config: Config, text: str) -> dict[str, Any]:
    """The step folder of a run to load, from the run folder of `--load` or its folder of
    checkpoints.

    Raises:
        ConfigError: `--load` is unset, or names a step folder itself.
    """
    flag, load = "--ckpt-step", config.checkpoint.load
    name = step_name(whole_number(flag, text))
    if load is None:
        why = "it is a step of the run that --load names"
        raise ConfigError(
            f"{flag} {text} without --load",
            why=why,
            fix="set --load RUN, also for the run's own folder",
        )
    folder = Path(load)
    if folder.name.startswith("step-"):
        why = f"{folder.name} is the checkpoint of one step"
        raise ConfigError(
            f"{flag} {text} with --load {load}", why=why, fix=f"leave {flag} out or set --load RUN"
        )
    return {
        "load": str((folder if folder.name == "checkpoints" else folder / "checkpoints") / name)
    }


def checkpoint_activations(config: Config, text: str) -> dict[str, Any]:
    """Full recomputation, uniform as in Megatron-LM's earlier versions unless the line has a
    method.
    """
    values = {"recompute_granularity": "full"}
    return (
        values
        if config.memory.recompute_method is not None
        else values | {"recompute_method": "uniform"}
    )


def data_args_path(config: Config, text: str) -> dict[str, Any]:
    """The prefixes and weights of `--data-path`, separated by white space in a file.

    Raises:
        ConfigError: the file cannot be read, or holds none.
    """
    flag, fix = "--data-args-path", "write what would follow --data-path into the file"
    try:
        words = read_file(local_path(text)).decode().split()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {text} cannot be read", why=unreadable(error), fix=fix) from None
    if not words:
        raise ConfigError(f"{flag} {text} names no data", why="the file is empty", fix=fix)
    return {"data_path": words}


def per_split_data_args_path(config: Config, text: str) -> dict[str, Any]:
    """The prefixes and weights of each split, from a JSON file: a text or a list of texts for
    train, valid and test.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    flag, fix = (
        "--per-split-data-args-path",
        'write {"train": "0.7 a 0.3 b", "valid": "c", "test": "d"} into the file',
    )
    try:
        splits = object_of(parse_json(read_file(local_path(text))), "the file")
        if unknown := splits.keys() - {"train", "valid", "test"}:
            raise ValueError(f"it has the key {min(unknown)!r}")
        if not splits.get("train"):
            raise ValueError("train has no data")
        return {
            f"{split}_data_path": _words(value, split)
            for split, value in splits.items()
            if value is not None
        }
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {text} cannot be read", why=unreadable(error), fix=fix) from None


def _words(value: Any, name: str) -> list[str]:
    if isinstance(value, str):
        return value.split()
    return [
        str(word) if isinstance(word, int | float) else text_of(word, name)
        for word in list_of(value, name)
    ]

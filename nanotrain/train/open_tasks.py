"""Read the files of `--eval-tasks`: rows of questions, which validations score."""

from functools import partial
from pathlib import Path

from nanotrain.config.config import TrainConfig
from nanotrain.config.data_stages import read_named
from nanotrain.data.prompts import prompt_tokenizer
from nanotrain.data.tasks import ChatPrompt, Task, read_task
from nanotrain.data.tokenizer import Tokenizer
from nanotrain.errors import ConfigError
from nanotrain.log import get_logger
from nanotrain.paths import require_path
from nanotrain.quantities import count_of

log = get_logger(__name__)


def read_tasks(
    train: TrainConfig,
    tokenizer: Tokenizer | None,
    *,
    is_pretrained: bool = True,
    seq_length: int | None = None,
    chat: ChatPrompt | None = None,
) -> tuple[Task, ...]:
    """Read the tasks of `eval_tasks`, and say which rows are longer than a sequence.

    Args:
        train: settings of the tasks.
        tokenizer: tokenizer of the model; None if unknown.
        is_pretrained: as in `prompt_tokenizer`.
        seq_length: input tokens of a row at most; None for any number.
        chat: as in `read_task`.

    Raises:
        ConfigError: a task without a name, or without a tokenizer.
        DataError: a file is no task.
    """
    files = read_named(train.eval_tasks)
    if train.eval_tasks and not files:
        raise ConfigError(
            f"the task {train.eval_tasks[0]} has no name",
            why="scores are logged by name",
            fix="write NAME=FILE.jsonl",
        )
    if not files:
        return ()
    if tokenizer is None:
        raise ConfigError(
            "tasks need a tokenizer",
            why="the questions are text, and the model's tokenizer is unknown",
            fix="name it with --tokenizer-model, or --tokenizer",
        )
    read = partial(
        read_task,
        tokenizer=prompt_tokenizer(tokenizer, is_pretrained=is_pretrained),
        num_fewshot=train.eval_num_fewshot,
        limit=train.eval_task_limit,
        chat=chat,
    )
    for file in files.values():
        require_path(file)
    tasks = tuple(read(name, Path(file)) for name, file in files.items())
    if seq_length is not None:
        for task in tasks:
            _log_cut_rows(task, seq_length)
    return tasks


def _log_cut_rows(task: Task, seq_length: int) -> None:
    """Say how many rows of a task are longer than a sequence."""
    num_cut = task.count_longer(seq_length)
    if num_cut:
        log.info(
            "task %s: of %s of %s only the last %s tokens are read (seq_length)",
            task.name,
            num_cut,
            count_of(len(task.rows), "row"),
            seq_length,
        )

"""The model card of a published run: data, recipe, loss curve, tasks, license and checksums.

    PublishedModel     what is published: run, checkpoint, repository, weights, license
    publishing_card    the text of README.md
    draw_loss          the loss curve as a picture
    checksum_lines     the text of SHA256SUMS

Names of people and machines stay out: a path is reduced to its last part, and a setting that is
read from the environment is written as its reference.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, ModelCardData

from nanotrain.config.schema import KEYS
from nanotrain.interop.hf.hub import loading_code
from nanotrain.quantities import describe_count
from nanotrain.report.history import RunHistory
from nanotrain.report.tables import TASKS

CURVE_FILE = "loss.png"
CHECKSUM_FILE = "SHA256SUMS"
# Settings of one machine or of one start, which say nothing about the model.
NO_RECIPE = ("train.run_dir", "train.report", "checkpoint.load", "train.tensorboard_dir")
READ_BYTES = 1 << 22


@dataclass(frozen=True)
class PublishedModel:
    """A checkpoint of a run, and the repository that it is published in."""

    run: RunHistory
    step: int
    repository: str  # OWNER/NAME
    dtype: str  # dtype of the weights
    family: str  # Hugging Face model_type
    license: str | None  # identifier of the hub, as "apache-2.0"; None: not stated
    has_tokenizer: bool
    # corpus -> (tokens read up to the step, epochs); empty where unknown
    tokens_by_corpus: Mapping[str, tuple[int, float]]

    def value(self, name: str) -> float | None:
        """The newest finite value of a metric up to the published step."""
        values = self.run.column(name)[: self.num_rows]
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    @property
    def num_rows(self) -> int:
        """The number of metric rows up to the published step."""
        return int(np.searchsorted(self.run.column("step"), self.step, side="right"))


def publishing_card(model: PublishedModel) -> str:
    """The text of README.md: metadata of the hub, then one section per subject."""
    sections = [
        f"# {model.repository}",
        _introduction(model),
        loading_code(model.repository, has_tokenizer=model.has_tokenizer),
        "## Data\n\n" + _data_section(model),
        "## Recipe\n\n" + _recipe_section(model),
        "## Loss\n\n" + _loss_section(model),
    ]
    tasks = task_results(model)
    if tasks:
        sections.append("## Tasks\n\n" + _task_section(tasks))
    sections.append("## License\n\n" + _license_section(model))
    sections.append(
        f"## Checksums\n\n`{CHECKSUM_FILE}` has the SHA-256 of every file: "
        f"`sha256sum --check {CHECKSUM_FILE}`."
    )
    metadata = _metadata(model, tasks).to_yaml()
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(sections) + "\n"


@dataclass(frozen=True)
class TaskResult:
    """The right answers of a model on one task."""

    name: str
    accuracy: float
    questions: int | None
    chance: float | None = None  # expected accuracy of guesses; None for older runs

    @property
    def standard_error(self) -> float | None:
        """Standard error of the accuracy; None for an unknown number of questions."""
        if not self.questions:
            return None
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.questions)


def task_results(model: PublishedModel) -> list[TaskResult]:
    """The newest results of the tasks that were scored in training."""
    results = []
    for column in model.run.columns:
        match = TASKS.fullmatch(column)
        accuracy = model.value(column) if match else None
        if match is None or accuracy is None:
            continue
        questions = model.value(f"evaluation.task/{match[1]}/questions")
        num_questions = None if questions is None else int(questions)
        chance = model.value(f"evaluation.task/{match[1]}/chance")
        results.append(TaskResult(match[1], accuracy, num_questions, chance))
    return results


def _metadata(model: PublishedModel, tasks: Iterable[TaskResult]) -> ModelCardData:
    """The metadata that the hub reads, with the results of tasks."""
    results = []
    for task in tasks:
        result = EvalResult(
            task_type="text-generation",
            dataset_type=task.name,
            dataset_name=task.name,
            metric_type="accuracy",
            metric_value=round(task.accuracy, 4),
        )
        results.append(result)
    return ModelCardData(
        license=model.license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["nanotrain", model.family],
        model_name=model.repository.rpartition("/")[2],
        eval_results=results or None,
    )


def _introduction(model: PublishedModel) -> str:
    """The first sentences: parameters, steps, tokens and dtype."""
    environment = model.run.environment
    total = environment.get("parameters")
    active = environment.get("active_parameters")
    sizes = "A language model"
    if total is not None:
        sizes += f" of {int(total):,} parameters"
    if active is not None and active != total:
        sizes += f" ({int(active):,} active per token)"
    tokens = model.value("consumed_tokens")
    read = "" if tokens is None else f" on {describe_count(tokens)} tokens"
    return (
        f"{sizes}, trained with nanotrain for {model.step:,} steps{read}. "
        f"The weights are {model.dtype}, with the names of the family `{model.family}`."
    )


def _data_section(model: PublishedModel) -> str:
    """The corpora with the tokens that were read of them up to the published step."""
    if not model.tokens_by_corpus:
        return "The corpora of the run cannot be read, so the tokens per corpus are unknown."
    total = max(1, sum(tokens for tokens, _ in model.tokens_by_corpus.values()))
    rows = []
    for corpus, (tokens, epochs) in model.tokens_by_corpus.items():
        rows.append((Path(corpus).name, f"{tokens:,}", f"{tokens / total:.1%}", f"{epochs:.2f}"))
    return markdown_table(("corpus", "tokens read", "share", "epochs"), rows)


def _recipe_section(model: PublishedModel) -> str:
    """The settings of the recipe and the command line, and the hardware of the run."""
    environment = model.run.environment
    device = environment.get("device", "an unknown device")
    versions = []
    for name in ("nanotrain", "torch", "transformers"):
        if name in environment.get("packages", {}):
            versions.append(f"{name} {environment['packages'][name]}")
    revision = environment.get("git_revision")
    if revision:
        versions.append(f"revision {revision}")
    rows = [(f"`{key}`", f"`{value}`") for key, value in recipe_of(model.run).items()]
    table = markdown_table(("setting", "value"), rows)
    return f"Trained on {model.run.world_size:,} x {device} ({', '.join(versions)}).\n\n{table}"


def recipe_of(run: RunHistory) -> dict[str, str]:
    """The settings that are not defaults, by key; paths are reduced to their last part."""
    origins = run.environment.get("origins", {})
    recipe = {}
    for key, value in run.config.items():
        is_default = origins.get(key, "default") == "default"
        if is_default or key in NO_RECIPE or key not in KEYS:
            continue
        entry = KEYS[key]
        if entry.field.metadata["secret"]:
            continue
        if entry.is_path:
            value = _last_parts(value)
        recipe[key] = str(value)
    return recipe


def _last_parts(value: Any) -> Any:
    """A path, or every path of a list, without its folders."""
    if isinstance(value, list):
        return [_last_parts(item) for item in value]
    if isinstance(value, str) and "/" in value:
        return value.rstrip("/").rpartition("/")[2]
    return value


def _loss_section(model: PublishedModel) -> str:
    """The loss curve and a table of the final losses."""
    rows = []
    for name, label in (
        ("loss", "training loss, nats per token"),
        ("valid_loss", "validation loss, nats per token"),
        ("valid_bits_per_byte", "validation, bits per byte"),
    ):
        value = model.value(name)
        if value is not None:
            rows.append((label, f"{value:.4f}"))
    table = markdown_table((f"after step {model.step:,}", "value"), rows)
    return f"![Loss by tokens]({CURVE_FILE})\n\n{table}"


def _task_section(tasks: Iterable[TaskResult]) -> str:
    """The results of the tasks as a table."""
    rows = []
    for task in tasks:
        error = task.standard_error
        error_text = "" if error is None else f" ± {error:.1%}"
        questions = "" if task.questions is None else f"{task.questions:,}"
        chance = "" if task.chance is None else f"{task.chance:.1%}"
        rows.append((task.name, questions, f"{task.accuracy:.1%}{error_text}", chance))
    return markdown_table(("task", "questions", "accuracy ± standard error", "by chance"), rows)


def _license_section(model: PublishedModel) -> str:
    if model.license is None:
        return "No license was stated."
    return f"`{model.license}`"


def markdown_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [_table_line(header), _table_line("---" for _ in header)]
    lines += [_table_line(row) for row in rows]
    return "\n".join(lines)


def _table_line(cells: Iterable[str]) -> str:
    escaped = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def draw_loss(model: PublishedModel, file: Path) -> None:
    """Draw training and validation loss over tokens, up to the published step."""
    # matplotlib takes half a second to import
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tokens = model.run.column("consumed_tokens")[: model.num_rows]
    for name, label, marker in (("loss", "training", ""), ("valid_loss", "validation", "o")):
        values = model.run.column(name)[: model.num_rows]
        has_value = np.isfinite(values)
        if has_value.any():
            axes.plot(tokens[has_value], values[has_value], label=label, marker=marker)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(file, dpi=120, metadata={"Software": None})


def checksum_lines(folder: Path) -> str:
    """One line per file of a folder, as sha256sum writes them; SHA256SUMS itself is left out."""
    lines = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if name != CHECKSUM_FILE:
            lines.append(f"{_sha256(file)}  {name}\n")
    return "".join(lines)


def _sha256(file: Path) -> str:
    """The SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()

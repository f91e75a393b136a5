"""The audit of a command line of Megatron-LM, as text and as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import TextWrapper
from typing import Any

from nanotrain.audit.known_bugs import (
    Match,
    Version,
    matching_bugs,
    matching_refusals,
    newest_text,
    newest_version,
    version_text,
)
from nanotrain.audit.meaning import Figures, Meaning, figures_of
from nanotrain.audit.sources import Source
from nanotrain.config.arguments import cure_of_flag, unknown_flag
from nanotrain.config.flags import known_flags
from nanotrain.planner.hardware import GPU
from nanotrain.planner.prediction import Prediction
from nanotrain.planner.screen import as_values, layout_text
from nanotrain.quantities import count_of, describe_bytes, describe_count
from nanotrain.untrusted import plain_text

NAMES = {"megatron": "Megatron-LM", "nanotrain": "nanotrain"}
COLUMNS = 120
PLACEHOLDER = "unset_"  # in place of variables that are not set (sources.py)


@dataclass(frozen=True)
class Audit:
    """All results of an audit of a command line."""

    source: Source
    meaning: Meaning
    figures: Figures
    gpu: GPU
    version: Version
    bugs: tuple[Match, ...]
    refusals: tuple[Match, ...]


def audit(
    source: Source, meaning: Meaning, *, gpu: GPU, version: Version, ranks: int | None
) -> Audit:
    """The audit of arguments.

    Args:
        source: the arguments.
        meaning: what they mean here.
        gpu: GPU of every rank.
        version: version of Megatron-LM whose bugs are named.
        ranks: number of GPUs; None for the number of the source.
    """
    ranks = ranks or source.ranks
    figures = figures_of(meaning, ranks, gpu=gpu)
    values = source.values(ranks)
    return Audit(
        source=source,
        meaning=meaning,
        figures=figures,
        gpu=gpu,
        version=version,
        bugs=tuple(matching_bugs(values, version)),
        refusals=() if source.has_run else tuple(matching_refusals(values)),
    )


def audit_text(result: Audit) -> str:
    """The audit as text."""
    meaning = result.meaning
    lines = [*head_lines(result), ""]
    counterparts = []
    for what, flags in meaning.without_counterpart.items():
        counterparts.append(f"{', '.join(flags)}: {what}")
    refused = [match for match in result.refusals if not match.row.is_ignored]
    ignored = [match for match in result.refusals if match.row.is_ignored]
    sections = {
        "contradictions that Megatron-LM refuses": refusal_texts(refused),
        "flags that Megatron-LM ignores here": refusal_texts(ignored),
        "why it cannot run in nanotrain": meaning.refused,
        "flags without a counterpart in nanotrain": counterparts,
        "flags that are not known here": unknown_texts(meaning.unknown),
        "notes": notes_of(result),
    }
    for title, texts in sections.items():
        lines += section(title, texts)
    lines += bug_lines(result)
    return plain_text("\n".join(lines).rstrip().replace(PLACEHOLDER, "$"))


def unknown_texts(unknown: Sequence[str]) -> list[str]:
    """Unknown flags that resemble a known flag, each with its cure, and the rest in one line.

    >>> unknown_texts(["--zero-stage 3", "--mine 1"])[1]
    '--mine 1'
    """
    texts = []
    rest = []
    for text in unknown:
        flag = text.split()[0]
        if cure_of_flag(flag, known_flags()):
            texts.append(f"{text}: {unknown_flag(flag, known=known_flags()).fix}")
        else:
            rest.append(text)
    return [*texts, ", ".join(rest)] if rest else texts


def head_lines(result: Audit) -> list[str]:
    """The script, the model, the layout, and its cost on the GPU."""
    source = result.source
    launches = f", which launches {source.program}" if source.program else ""
    rows = [("script", f"{source.name}{launches}"), ("model", model_text(result))]
    predictions = result.figures.predictions
    if predictions:
        gpus = count_of(result.figures.ranks, "GPU")
        rows.append(("layout", f"{layout_text(predictions[0])}, on {gpus}"))
    for prediction in predictions:
        name = NAMES[prediction.scenario.engine.name]
        rows.append((f"on {result.gpu.name}", f"{name}: {cost_text(prediction)}"))
    if not predictions:
        rows.append((f"on {result.gpu.name}", "no plan: see below why it cannot run"))
    return [f"{name:<12}{text}" for name, text in rows]


def model_text(result: Audit) -> str:
    """Parameters and sizes of the model."""
    config = result.meaning.config
    figures = result.figures
    if config is None or figures.total is None:
        return "not known: see below"
    model = config.model
    parts = [
        f"{describe_count(figures.total)} parameters",
        count_of(model.num_layers, "layer"),
        f"hidden size {model.hidden_size:,}",
        f"vocabulary {model.vocab_size or 0:,}",
    ]
    if figures.active is not None and figures.active < figures.total:
        parts.insert(1, f"{describe_count(figures.active)} active per token")
    return ", ".join(parts)


def cost_text(prediction: Prediction) -> str:
    """Memory of the heaviest rank, and the time of a step."""
    memory = prediction.memory
    capacity = describe_bytes(prediction.scenario.gpu.memory_bytes)
    text = f"{describe_bytes(memory.reserved)} of {capacity}"
    if prediction.scenario.sizes["pp"] > 1:
        text += f" on pipeline rank {memory.pp_rank}"
    if prediction.headroom < 0:
        return f"DOES NOT FIT: {text}"
    time = prediction.time
    return f"{text}, step {time.total:.3f} s, MFU {time.mfu:.1%}"


def refusal_texts(matches: Sequence[Match]) -> list[str]:
    """Flags and why they contradict each other."""
    return [f"{match.since}: {match.row.why}" for match in matches]


def notes_of(result: Audit) -> list[str]:
    """Notes on assumptions, on parts that were left out, and on unset variables."""
    meaning = result.meaning
    notes = [*result.source.notes, *meaning.notes]
    if meaning.always:
        notes.append(f"{', '.join(meaning.always)}: always so in nanotrain")
    if meaning.without_effect:
        tuning = ", ".join(meaning.without_effect)
        notes.append(f"{tuning}: they tune parts that nanotrain lacks, and change no result")
    texts = []
    for name, flags in result.source.unset.items():
        texts.append(f"{name} ({', '.join(dict.fromkeys(flags))})")
    if texts:
        notes.append(f"not set in the script: {', '.join(texts)}; --set NAME=VALUE sets one")
    return list(dict.fromkeys(notes))


def section(title: str, texts: Sequence[str]) -> list[str]:
    """A title with its lines; nothing without lines."""
    if not texts:
        return []
    lines = [f"{title}:"]
    for text in texts:
        lines += wrapped(f"- {text}", indent="  ", following="    ")
    return [*lines, ""]


def wrapped(text: str, *, indent: str, following: str) -> list[str]:
    """A text in lines that break between words."""
    wrapper = TextWrapper(
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(" ".join(text.split()))


def bug_lines(result: Audit) -> list[str]:
    """The bugs that the version has in this configuration."""
    version = version_text(result.version)
    if result.version == newest_version():
        version += f" ({newest_text()})"
    certain = [match for match in result.bugs if not match.row.only_if]
    possible = [match for match in result.bugs if match.row.only_if]
    lines = [f"known bugs of Megatron-LM {version} in this configuration: {len(certain)}"]
    for match in certain:
        lines += lines_of_bug(match)
    if possible:
        lines.append(f"known bugs that depend on what no flag shows: {len(possible)}")
    for match in possible:
        lines += lines_of_bug(match)
    return lines


def lines_of_bug(match: Match) -> list[str]:
    """The lines on one bug."""
    bug = match.row
    rows = {
        "since": match.since,
        "only if": bug.only_if,
        "effect": bug.effect,
        "here": f"{bug.here} ({bug.held_by})",
        "link": bug.address,
    }
    lines = [f"  {bug.id} ({bug.reference}, {bug.versions})"]
    for name, text in rows.items():
        if text:
            lines += wrapped(f"{name}: {text}", indent="    ", following="      ")
    return lines


def audit_values(result: Audit) -> dict[str, Any]:
    """The audit as plain values."""
    config = result.meaning.config
    figures = result.figures
    sizes = None
    if config is not None:
        sizes = {
            "parameters": figures.total,
            "active_parameters": figures.active,
            "num_layers": config.model.num_layers,
            "hidden_size": config.model.hidden_size,
            "vocab_size": config.model.vocab_size,
        }
    return {
        "source": result.source.name,
        "program": result.source.program,
        "model": sizes,
        "world_size": figures.ranks,
        "plans": [as_values(prediction) for prediction in figures.predictions],
        "contradictions": [refusal_values(match) for match in result.refusals],
        "cannot_run": list(result.meaning.refused),
        "without_counterpart": counterpart_values(result.meaning),
        "without_effect": list(result.meaning.without_effect),
        "unknown_flags": list(result.meaning.unknown),
        "unset_variables": dict(result.source.unset),
        "notes": notes_of(result),
        "megatron_version": version_text(result.version),
        "known_bugs": [bug_values(match) for match in result.bugs],
    }


def counterpart_values(meaning: Meaning) -> dict[str, str]:
    """By flag without a counterpart, the text to write in its place."""
    values: dict[str, str] = {}
    for what, flags in meaning.without_counterpart.items():
        values |= dict.fromkeys(flags, what)
    return values


def refusal_values(match: Match) -> dict[str, Any]:
    """A contradiction as plain values."""
    return {"flags": match.since, "why": match.row.why, "ignored": match.row.is_ignored}


def bug_values(match: Match) -> dict[str, Any]:
    """A bug as plain values."""
    bug = match.row
    return {
        "id": bug.id,
        "link": bug.address,
        "finding": bug.finding,
        "also": list(bug.also),
        "versions": bug.versions,
        "flags": match.since,
        "only_if": bug.only_if,
        "effect": bug.effect,
        "here": bug.here,
        "held_by": bug.held_by,
    }

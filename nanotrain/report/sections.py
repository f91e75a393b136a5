"""The sections of a report: tables, texts and the places of its charts, as HTML."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby
from operator import itemgetter

from nanotrain.report import figures, tables, timeline
from nanotrain.report.history import RunHistory
from nanotrain.report.layout import layout_html

MAX_SAMPLES = 20  # newest generated texts of each run


def sections_of(
    runs: Sequence[RunHistory], charts: dict[str, figures.Figure]
) -> Iterable[tuple[str, str]]:
    """Titles and bodies; the figures that the bodies refer to are added to `charts`."""
    yield "Summary", f'<div id="headline">{tables.headline(runs)}</div>'
    over_steps = figures.step_figures(runs)
    for run in runs:
        over_steps["Experts"] += figures.expert_figures(run)
    for title, drawn in over_steps.items():
        yield title, _grid(drawn, charts)
    yield "Data", _for_each_run(runs, tables.stage_table)
    memory = figures.memory_figure(runs)
    yield "Memory", _grid([] if memory is None else [memory], charts)
    yield "Timeline", _grid(_timelines(runs), charts)
    yield "Layout", _for_each_run(runs, layout_html)
    yield "Samples", _for_each_run(runs, _samples)
    yield "Restarts", _for_each_run(runs, tables.starts_table)
    search = '<input type="search" id="filter" placeholder="filter settings">'
    yield "Settings", search + tables.config_table(runs)
    yield "Checkpoints", _for_each_run(runs, tables.checkpoint_table)
    yield "Environment", tables.environment_table(runs)


def _grid(drawn: Iterable[figures.Figure], charts: dict[str, figures.Figure]) -> str:
    """HTML with an empty place for every figure; "" without figures.

    The figures are added to `charts` by the ids of their places.
    """
    cells = []
    for figure in drawn:
        name = f"chart-{len(charts)}"
        charts[name] = figure
        meta = figure["layout"]["meta"]
        caption = f"{escape(meta['title'])} <span>{escape(meta['unit'])}</span>"
        chart = f'<div class="chart" id="{name}"></div>'
        cells.append(f"<figure><figcaption>{caption}</figcaption>{chart}</figure>")
    return f'<div class="grid">{"".join(cells)}</div>' if cells else ""


def _for_each_run(runs: Sequence[RunHistory], body: Callable[[RunHistory], str]) -> str:
    """The bodies of all runs, under the names of several."""
    parts = []
    for run in runs:
        text = body(run)
        if text and len(runs) > 1:
            parts.append(f"<h3>{escape(run.name)}</h3>")
        parts.append(text)
    return "".join(parts)


def _timelines(runs: Sequence[RunHistory]) -> Iterable[figures.Figure]:
    """The steps that `nanotrain timeline` drew last."""
    for run in runs:
        saved = timeline.load(run.folder)
        if saved is not None:
            yield timeline.figure_of(saved, name=run.name)


def _samples(run: RunHistory) -> str:
    """The newest generated texts of a run; steps in a row with one text share it."""
    texts = []
    newest = run.samples[-MAX_SAMPLES:]
    for text, samples in groupby(newest, key=itemgetter("text")):
        steps = ", ".join(f"{sample['step']:,}" for sample in samples)
        texts.append(f"<p>step {escape(steps)}</p><pre>{escape(text)}</pre>")
    return "".join(texts)

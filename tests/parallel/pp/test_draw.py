"""Drawings of schedules: every action is drawn at its simulated time."""

from pathlib import Path

import pytest
from hypothesis import given

from nanotrain.errors import EnvironmentFault
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.draw import draw_figure, draw_schedule, draw_timeline, labels
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.pp.simulate import simulate
from tests.parallel.pp.test_schedules import named_shapes


@given(named_shapes())
def test_every_action_is_drawn_at_its_time_on_its_rank(named) -> None:
    name, shape = named
    timeline = simulate(SCHEDULES[name](shape))
    _, *rows = draw_timeline(timeline, width=100_000).splitlines()
    names = labels(timeline)
    column, margin = 1 + max(map(len, names.values())), len(f"rank {shape.num_ranks - 1}") + 2

    for row, spans in zip(rows, timeline.spans, strict=True):
        for span in spans:
            assert row[margin + round(span.start) * column :].startswith(names[span.action])


def test_a_long_timeline_is_wrapped_with_its_ruler() -> None:
    text = draw_timeline(simulate(SCHEDULES["1f1b"](PipelineShape(2, 1, 12))), width=50)

    blocks = text.split("\n\n")
    assert [block.splitlines()[0].split()[1] for block in blocks] == ["0", "10", "20", "30"]
    assert all(len(line) <= 50 for line in text.splitlines())


def test_the_text_has_duration_bubble_and_memory() -> None:
    text = draw_schedule("zb-h1", PipelineShape(4, 1, 8))

    assert text.startswith("zb-h1: 4 ranks, 4 stages, 8 microbatches\n")
    assert "duration   27   (forward 1, backward 2 (1 for I and 1 for W))" in text
    assert "bubble     1/9 = 11.1%" in text
    assert "in flight  4 3 2 1" in text and "until W    4 4 4 4" in text


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_a_picture_is_written_to_the_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.png"
    text = draw_schedule(name, PipelineShape(2, 2 if name == "interleaved" else 1, 3), png=file)

    assert file.read_bytes().startswith(b"\x89PNG") and f"written to {file}" in text


def test_a_picture_that_cannot_be_written_is_an_error_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="choose another file for --png"):
        draw_schedule("1f1b", PipelineShape(2, 1, 3), png=tmp_path / "nowhere" / "schedule.png")


def test_the_legend_of_a_picture_is_as_near_for_many_ranks_and_explains_the_shades() -> None:
    gaps = []
    for num_ranks in (2, 16):
        figure = draw_figure(
            simulate(SCHEDULES["interleaved"](PipelineShape(num_ranks, 2, num_ranks))), title="x"
        )
        figure.canvas.draw()
        (axes,) = figure.axes
        legend = axes.get_legend()
        assert legend is not None and [text.get_text() for text in legend.get_texts()][
            -1
        ].startswith("the darker")
        label, box = axes.xaxis.label, legend.get_window_extent()
        gaps.append((label.get_window_extent().y0 - box.y1) / label.get_fontsize())
        assert axes.xaxis.get_ticklabels()[0].get_fontsize() < axes.title.get_fontsize()
    assert all(0 < gap < 3 for gap in gaps), "in heights of the axis label"

"""Pictures of schedules: the legend and the sizes of texts."""

from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.draw_png import draw_figure
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.pp.simulate import simulate


def test_the_legend_of_a_picture_is_as_near_for_many_ranks_and_explains_the_shades() -> None:
    gaps = []
    for num_ranks in (2, 16):
        figure = draw_figure(simulate(SCHEDULES["interleaved"](PipelineShape(num_ranks, 2, num_ranks))), title="x")
        figure.canvas.draw()
        (axes,) = figure.axes
        legend = axes.get_legend()
        assert legend is not None and [text.get_text() for text in legend.get_texts()][-1].startswith("the darker")
        label, box = axes.xaxis.label, legend.get_window_extent()
        gaps.append((label.get_window_extent().y0 - box.y1) / label.get_fontsize())
        assert axes.xaxis.get_ticklabels()[0].get_fontsize() < axes.title.get_fontsize()
    assert all(0 < gap < 3 for gap in gaps), "in heights of the axis label"

"""Short convolutions in front of a scan or between gates."""

from collections.abc import Mapping

from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Convolution, Saved
from nanotrain.spec.over_cp import halo


def short_convolutions(
    s: LayerSizes, widths: Mapping[str, int], *, kernel_size: int, num_saved: int
) -> Convolution:
    """Convolutions of every channel by itself.

    Args:
        s: sizes of the layer.
        widths: local channels by the name of the convolution.
        kernel_size: tokens that a convolution sees.
        num_saved: tensors that each convolution keeps.
    """
    channels = sum(widths.values())
    kept = Saved(num_saved * s.tokens * channels * s.itemsize)
    return Convolution(
        name="conv",
        weights=tuple(f"{name}.weight" for name in widths),
        rows=s.tokens,
        channels=channels,
        kernel_size=kernel_size,
        saves=(kept,),
        over_cp=halo(s, channels=channels, kernel_size=kernel_size),
    )

"""Short convolutions in front of a scan or between gates.

short_convolutions   the operator
scan_modules         recompute modules that run it again
"""

from collections.abc import Mapping

from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import POINTWISE, Convolution, Saved
from nanotrain.spec.over_cp import halo


def scan_modules(s: LayerSizes) -> tuple[str, ...]:
    """Recompute modules that run convolutions again: over cp they communicate."""
    return (POINTWISE,) if s.cp == 1 else ()


def short_convolutions(
    s: LayerSizes,
    widths: Mapping[str, int],
    *,
    kernel_size: int,
    num_saved: int,
    num_projected: int | None = None,
) -> Convolution:
    """Convolutions of every channel by itself.

    Args:
        s: sizes of the layer.
        widths: local channels by the name of the convolution.
        kernel_size: tokens that a convolution sees.
        num_saved: tensors that each convolution keeps.
        num_projected: channels that a scan reads without a convolution; None without a scan.
    """
    channels = sum(widths.values())
    modules = scan_modules(s)
    saves = [Saved(num_saved * s.tokens * channels * s.itemsize, dropped_by=modules)]
    if num_projected is not None and modules:  # recomputation keeps what was projected
        projected = s.tokens * (channels + num_projected) * s.itemsize
        saves.append(Saved(projected, only_with=POINTWISE))
    return Convolution(
        name="conv",
        weights=tuple(f"{name}.weight" for name in widths),
        rows=s.tokens,
        channels=channels,
        kernel_size=kernel_size,
        recomputed_by=modules,
        saves=tuple(saves),
        over_cp=halo(s, channels=channels, kernel_size=kernel_size),
    )

"""Parts of layers and their time on the streams of one rank.

    Part      a linear layer, attention, a memory-bound operator, the dispatch to experts
    Streams   a clock on which parts compute and communicate

Forward runs parts in order, backward in reverse. A collective is exposed as far as operators do not
hide it.
"""

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Streams:
    """Seconds of the compute stream and of waiting for collectives on a rank, added up."""

    # seconds that operators take longer per second of an overlapped collective
    contention: float = 0.0
    factor: float = 1.0  # multiplies the time of operators
    compute: float = 0.0  # seconds in which operators run
    products: float = 0.0  # seconds of `compute` in matrix products and attention
    # seconds of waiting, by group
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    launches: int = 0  # operators that the host launches
    collectives: int = 0  # collectives that the host launches

    @property
    def seconds(self) -> float:
        """Time on the device."""
        return self.compute + sum(self.exposed.values())

    def run(self, seconds: float, *, launches: int = 1, is_product: bool = False) -> None:
        """Add an operator of `seconds`."""
        self.compute += self.factor * seconds
        if is_product:
            self.products += self.factor * seconds
        self.launches += launches

    def wait(
        self, group: str, seconds: float, *, overlapped_s: float = 0.0, is_captured: bool = False
    ) -> None:
        """Wait for a collective that overlaps operators of `overlapped_s` seconds."""
        if seconds > 0:
            self.collectives += 0 if is_captured else 1
            hidden = min(seconds, self.factor * overlapped_s)
            self.exposed[group] += seconds - hidden + self.contention * hidden

    def add(self, other: "Streams") -> None:
        """Add the times and launches of other streams."""
        self.compute += other.compute
        self.products += other.products
        self.launches += other.launches
        self.collectives += other.collectives
        for group, seconds in other.exposed.items():
            self.exposed[group] += seconds


@dataclass(frozen=True)
class Part:
    """A part of a layer; times in seconds."""

    name: str
    forward: float = 0.0  # forward
    dgrad: float = 0.0  # backward for the input
    wgrad: float = 0.0  # backward for the weights
    launches: tuple[int, int, int] = (1, 1, 0)  # operators of forward, dgrad and wgrad
    group: str = ""  # group of the collectives
    before: float = 0.0  # collective of the input, forward
    after: float = 0.0  # collective of the output, forward
    first: float = 0.0  # collective of the output's gradient, backward
    again: float = 0.0  # collective of the input for the gradient of the weights
    last: float = 0.0  # collective of the input's gradient, backward
    sizes: tuple[int, ...] = ()  # tokens, outputs and inputs of a product
    flops: float = 0.0  # forward
    num_bytes: float = 0.0  # read and written by the forward of a memory-bound operator
    # overlap: none, wgrad (backward collectives with products), tiles (all, piece by piece) or
    # forward tiles (piece by piece in the forward, otherwise as wgrad)
    hides: str = "none"
    pieces: int = 1  # pieces of tiles
    recomputed_by: tuple[str, ...] = ()  # recompute modules that run it again
    is_captured: bool = False  # a CUDA graph launches its collectives

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product or attention; others read and write memory."""
        return self.flops > 0

    def run_forward(self, streams: Streams) -> None:
        """Add the forward pass to the streams."""
        num_launches, _, _ = self.launches
        tiled = self._time_in_pieces(self.forward, also="forward tiles")
        self._wait(streams, self.before, overlapped_s=tiled)
        streams.run(self.forward, launches=num_launches, is_product=self.is_product)
        self._wait(streams, self.after, overlapped_s=tiled)

    def run_backward(self, streams: Streams, *, dgrad: bool = True, wgrad: bool = True) -> None:
        """Add the backward pass to the streams, or only dgrad or wgrad."""
        _, dgrad_launches, wgrad_launches = self.launches
        tiled = self._time_in_pieces(self.dgrad)
        overlaps = self.hides != "none"
        next_product_s = self.wgrad if overlaps and wgrad else 0.0
        if dgrad:
            self._wait(streams, self.first, overlapped_s=tiled)
            streams.run(self.dgrad, launches=dgrad_launches, is_product=self.is_product)
            self._wait(streams, self.again, overlapped_s=self.dgrad if overlaps else 0.0)
            self._wait(streams, self.last, overlapped_s=max(tiled, next_product_s))
        if wgrad:
            streams.run(self.wgrad, launches=wgrad_launches, is_product=self.is_product)

    def _wait(self, streams: Streams, seconds: float, *, overlapped_s: float) -> None:
        streams.wait(self.group, seconds, overlapped_s=overlapped_s, is_captured=self.is_captured)

    def _time_in_pieces(self, seconds: float, *, also: str = "tiles") -> float:
        """The time of a product that runs beside its transfers."""
        if self.hides not in ("tiles", also):
            return 0.0
        return seconds * (1 - 1 / self.pieces)


Parts = list[Part]

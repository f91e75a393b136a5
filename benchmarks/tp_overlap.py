"""Tensor parallelism with and without products in pieces (--tp-comm-overlap): exposed transfers.

    python benchmarks/tp_overlap.py

Three tables, all counted on a CPU: predicted steps of recipes on H100; the linear layers of one
transformer block of llama70b_512 on two simulated streams, piece by piece; waits of a step that
recorded ranks of a small model have, with no product since the start of the transfer.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanotrain.cli.dry_run import complete
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.config.schema import with_values
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.operator_time import OperatorTimes
from nanotrain.planner.parts import Part
from nanotrain.planner.prediction import Prediction, predict
from nanotrain.planner.scenario import Scenario, scenario_of
from nanotrain.spec.kinds.block import block_operators

# recipes with tensor parallelism, their ranks and the GPU
RECIPES = (("llama70b_512", 512, "h100"), ("llama70b", 64, "h100"), ("qwen3_5_27b", 64, "h100"))


@dataclass(frozen=True)
class Pieces:
    """Products in pieces, and the transfers of all pieces but one, in seconds."""

    num_pieces: int
    product_s: float  # of all pieces
    transfer_s: float  # of all pieces that are sent


def exposed_gather_s(pieces: Pieces) -> float:
    """Waiting of the products of an all-gather: a product begins when its piece has arrived."""
    product_s = pieces.product_s / pieces.num_pieces
    transfer_s = pieces.transfer_s / (pieces.num_pieces - 1)
    products_end = product_s  # the piece of this rank
    for index in range(1, pieces.num_pieces):
        arrival = index * transfer_s
        products_end = max(products_end, arrival) + product_s
    return products_end - pieces.product_s


def exposed_scatter_s(pieces: Pieces) -> float:
    """Waiting of the products of a reduce-scatter: a piece is sent when it is computed."""
    product_s = pieces.product_s / pieces.num_pieces
    transfer_s = pieces.transfer_s / (pieces.num_pieces - 1)
    transfers_end = 0.0
    for index in range(1, pieces.num_pieces):
        transfers_end = max(transfers_end, index * product_s) + transfer_s
    return max(transfers_end - pieces.product_s, 0.0)


def scenario(recipe: str, world_size: int, gpu: str, *, overlaps: bool) -> Scenario:
    """A recipe on a number of GPUs."""
    loaded = load_line(parse([f"+config={recipe}"]))
    config = with_values(complete(loaded), {"parallel.tp_comm_overlap": overlaps})
    return scenario_of(config, world_size, gpu=gpu_of(gpu), engine="nanotrain")


def both(recipe: str, world_size: int, gpu: str) -> tuple[Prediction, Prediction]:
    """The predictions without and with products in pieces."""
    before = predict(scenario(recipe, world_size, gpu, overlaps=False))
    return before, predict(scenario(recipe, world_size, gpu, overlaps=True))


def exposed_share(prediction: Prediction) -> float:
    """Exposed transfers of tensor parallelism, as a share of the step."""
    return prediction.time.exposed.get("tp", 0.0) / prediction.time.total


def products_of_block() -> Iterator[Part]:
    """The linear layers of a transformer block of llama70b_512."""
    times = OperatorTimes(scenario("llama70b_512", 512, "h100", overlaps=True))
    for part in times.parts(block_operators(times.sizes, 1)):
        if part.group == "tp":
            yield part


def print_recipes() -> None:
    """Predicted steps."""
    print("| recipe | GPUs | exposed tp | with pieces | tokens/s per GPU | with pieces |")
    print("|---|---|---|---|---|---|")
    for recipe, world_size, gpu in RECIPES:
        before, after = both(recipe, world_size, gpu)
        shares = f"{exposed_share(before):.1%} | {exposed_share(after):.1%}"
        rates = [f"{one.time.tokens_per_s_per_gpu:,.0f}" for one in (before, after)]
        print(f"| {recipe} | {world_size} {gpu} | {shares} | {rates[0]} | {rates[1]} |")


def print_block() -> None:
    """The streams of the linear layers of a block, forward."""
    print("| linear layer | product ms | transfer ms | exposed whole ms | in pieces ms |")
    print("|---|---|---|---|---|")
    for part in products_of_block():
        transfer_s = part.before or part.after
        pieces = Pieces(part.pieces, part.forward, transfer_s)
        exposed = exposed_gather_s(pieces) if part.before else exposed_scatter_s(pieces)
        numbers = [part.forward, transfer_s, transfer_s, exposed]
        cells = " | ".join(f"{1000 * number:.3f}" for number in numbers)
        print(f"| {part.name} {part.sizes[1]} x {part.sizes[2]} | {cells} |")


def exposed_waits(*, overlaps: bool) -> int:
    """Waits of a recorded rank for transfers with no product since their start, in two steps."""
    from tests.laws.test_happens_before import Row, trains

    options = {"sequence_parallel": True, "tp_comm_overlap": overlaps}
    with tempfile.TemporaryDirectory() as folder:
        recorder = trains(Row(2, "no_shard", {"tp": 2}, options), Path(folder))
    return sum(not products for _, products in recorder.hidden_by)


def main() -> None:
    """Print the tables."""
    print_recipes()
    print()
    print_block()
    print()
    whole, pieces = (exposed_waits(overlaps=overlaps) for overlaps in (False, True))
    print(f"waits with no product beside: {whole} whole, {pieces} in pieces")
    print("predicted and counted on a CPU; not measured")


if __name__ == "__main__":
    main()

"""The moving average of the weights of one part."""

import torch

from nanotrain.optim.average import WeightAverage
from nanotrain.optim.state import CHUNK_NUMEL, PartState, ShardPart
from nanotrain.optim.stored import StoredTensor
from nanotrain.parallel.dp.layout import FlatRange
from nanotrain.spec.params import Constant, LocalParam, ParamSpec


def flat_range(name: str, start: int, numel: int) -> FlatRange:
    spec = ParamSpec(name, (numel,), dtype="fp32", init=Constant(0.0), weight_decay=False)
    return FlatRange(LocalParam.unsharded(spec), start, 0, numel)


def test_the_average_of_chosen_parameters_begins_again() -> None:
    lengths = {"a": 70, "b": CHUNK_NUMEL, "c": 30}  # b is in two chunks
    ranges = []
    start = 0
    for name, numel in lengths.items():
        ranges.append(flat_range(name, start, numel))
        start += numel
    main = torch.zeros(start)
    part = PartState(
        ShardPart(0, start, tuple(ranges)),
        main=StoredTensor(main),
        state={},
        grad=main,
        model_params=main,
    )
    average = WeightAverage([part], decay=0.75)
    main.fill_(4.0)
    average.update(torch.tensor(False))
    assert part.ema is not None
    assert part.ema.values.unique().tolist() == [1.0]
    average.update(torch.tensor(True))
    assert part.ema.values.unique().tolist() == [1.0]
    average.restart_params({"b"})
    expected = [1.0] * 70 + [4.0] * CHUNK_NUMEL + [1.0] * 30
    assert part.ema.values.tolist() == expected
    average.restart()
    assert part.ema.values.unique().tolist() == [4.0]

"""The seams of a step: a mistake that is planted in a run is found."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from nanotrain.cli.dry_run import complete
from nanotrain.comm.work import Work
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.optim import distributed
from nanotrain.optim.state import BucketState
from nanotrain.parallel.dp.bucket import Reduction
from nanotrain.parallel.dp.param_buffer import ParamBuffer
from nanotrain.parallel.tp.region import TensorParallel
from nanotrain.prove.check import prove
from nanotrain.train import step

DENSE = "+config=tiny --vocab-size 512"
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
OPTIM = "--data-parallel-sharding-strategy optim"


Bug = tuple[object, str, Any]


def replaced(owner: object, name: str, bug: Callable[..., Any]) -> Bug:
    return owner, name, partial(bug, getattr(owner, name))


def not_called(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The call is missing."""


def completed(original: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Work[Any]:
    """The collective is missing."""
    return Work.completed(tensor)


def twice(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    original(*args, **kwargs)
    return original(*args, **kwargs)


def halved(original: Callable[..., Any], reduction: Reduction, full: Tensor) -> Any:
    return original(reduction, full.mul_(0.5))


BUGS = {
    "the sums over tp are missing": (
        f"{DENSE} {SP}",
        replaced(step, "all_reduce_coalesced", not_called),
        "the gradient of final_norm.weight is not summed over tp",
    ),
    "the sums over tp are taken twice": (
        f"{DENSE} {SP}",
        replaced(step, "all_reduce_coalesced", twice),
        "summed already, is summed again over tp",
    ),
    "the reduction across instances is missing": (
        f"{DENSE} {OPTIM} --num-distributed-optimizer-instances 2",
        (Reduction, "start_across", lambda reduction, shard: Work.completed(shard)),
        "is not summed over dp",
    ),
    "a factor of the reduction": (
        f"{DENSE} {OPTIM}",
        (Reduction, "start_inside", lambda *args: halved(START_INSIDE, *args)),
        "is multiplied by 0.5 when it is reduced, where the loss expects 1",
    ),
    "the norm is not reduced": (
        f"{DENSE} {OPTIM}",
        replaced(distributed, "all_reduce", not_called),
        "the factor that clips gradients is not equal over dp",
    ),
    "replicas are counted in the norm": (
        f"{DENSE} {TP}",
        (BucketState, "grads_for_norm", lambda state: iter([state.grads])),
        "the norm counts the gradient of final_norm.weight once per rank of tp",
    ),
    "updated shards are not gathered": (
        f"{DENSE} {OPTIM}",
        (ParamBuffer, "_all_gather_shards", lambda buffer: None),
        "is not equal over dp: its shards are not gathered",
    ),
    "the loss counts per tensor-parallel rank": (
        f"{DENSE} {TP}",
        (step, "_once_per_tp_group", lambda loss_sum, context: loss_sum.double()[None]),
        "values that are equal already are summed over tp",
    ),
    "the backward of a region is no sum": (
        f"{DENSE} {TP}",
        (TensorParallel, "start_leave", lambda region, partial_sum: Work.completed(partial_sum)),
        "is not summed over tp",
    ),
}
START_INSIDE = Reduction.start_inside


@pytest.mark.parametrize("name", BUGS)
def test_a_mistake_is_found(name: str) -> None:
    line, (owner, attribute, bug), message = BUGS[name]
    with patch.object(owner, attribute, bug):
        faults = prove(complete(load_line(parse(line.split()))), 4).faults
    assert any(message in fault for fault in faults), faults

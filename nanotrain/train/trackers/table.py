"""Experiment trackers by name."""

from collections.abc import Callable
from dataclasses import dataclass

from nanotrain.config.train import TrainConfig
from nanotrain.train.run import Run
from nanotrain.train.trackers.mlflow import MlflowTracker
from nanotrain.train.trackers.prometheus import PrometheusTracker
from nanotrain.train.trackers.tensorboard import TensorBoardTracker
from nanotrain.train.trackers.tracker import Tracker
from nanotrain.train.trackers.wandb import WandbTracker


@dataclass(frozen=True)
class TrackerRow:
    """A tracker, which `--trackers NAME` enables."""

    open: Callable[[Run], Tracker]
    """opens it on the first rank, before the first step of a start"""
    setting: str | None = None
    """name of the field of the `train` section that enables it as well"""
    module: str | None = None
    """module that it imports and that nanotrain does not require; None: no such module"""
    requirement: str | None = None
    """what pip installs to get the module; None: a package of the same name"""


TRACKERS = {
    "tensorboard": TrackerRow(TensorBoardTracker, setting="tensorboard"),
    "wandb": TrackerRow(WandbTracker, setting="wandb"),
    "prometheus": TrackerRow(
        PrometheusTracker,
        setting="prometheus_port",
        module="prometheus_client",
        requirement="'nanotrain[prometheus]'",
    ),
    "mlflow": TrackerRow(MlflowTracker, module="mlflow"),
}


def enabled_trackers(train: TrainConfig) -> list[str]:
    """Names of the trackers that the settings enable, in the order of the table."""
    return [name for name in TRACKERS if is_enabled(name, train)]


def is_enabled(name: str, train: TrainConfig) -> bool:
    """Whether `trackers` names a tracker, or its own setting enables it."""
    setting = TRACKERS[name].setting
    if name in train.trackers or setting is None:
        return name in train.trackers
    return bool(getattr(train, setting))

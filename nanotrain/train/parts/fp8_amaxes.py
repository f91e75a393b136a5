"""fp8 between steps: forget the casts of weights, append amaxes to the histories.

Delayed scaling has a history of amaxes per layer, which checkpoints keep.
"""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.kernels.fp8.layer import Fp8Layer
from nanotrain.log import get_logger
from nanotrain.optim.distributed import Update
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.parts.part import BuiltModel, StepPart

log = get_logger(__name__)

PREFIX = "fp8/"  # names of the histories in a checkpoint begin with it


class Fp8Amaxes(StepPart):
    """Updates and saves the amax histories of this rank's stages, equal on all ranks of a stage."""

    def __init__(self, model: BuiltModel) -> None:
        self._stages = model.stages
        groups = model.context.groups
        self._groups = (groups["tp"], groups["dp_cp"])  # together all ranks of a stage

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return model.config.precision.fp8 is not None

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        self._forget_weights()
        for stage in self._stages.values():
            update_amax_histories(stage, self._groups)
        return sums

    def take_back(self) -> None:
        for layer in self._layers().values():
            layer.take_back()

    def _forget_weights(self) -> None:
        for stage in self._stages.values():
            for module in stage.modules():
                if isinstance(module, Fp8Layer):
                    module.kept = None

    def tensors(self) -> dict[TensorBox, Tensor]:
        """The histories by their names in checkpoints."""
        tensors = {}
        for name, layer in self._layers().items():
            if layer.history is not None:
                box = TensorBox.full(f"{PREFIX}{name}.amax_history", layer.history.shape)
                tensors[box] = layer.history
        return tensors

    def missing(
        self, targets: Collection[TensorBox], manifest: Manifest, *, weights_alone: bool
    ) -> Collection[TensorBox]:
        """Histories that the checkpoint lacks, as after a run in bf16 or with another length."""
        missing = []
        for box in self.tensors():
            saved = manifest.tensors.get(box.name)
            if saved is None or saved.shape != box.shape:
                missing.append(box)
        return missing

    def restored(self, missing: Collection[TensorBox], *, checkpoint: Path | None) -> None:
        """Empty the histories that were not read; layers check whether their history is empty."""
        self._forget_weights()
        histories = self.tensors()
        new = [history for box, history in histories.items() if box in missing]
        for history in new:
            # after a rollback, or the load of a damaged checkpoint, it has amaxes of later steps
            history.zero_()
        if new:
            log.info(
                "%d of %d fp8 layers start with an empty amax history", len(new), len(histories)
            )
        for layer in self._layers().values():
            layer.restored()

    def _layers(self) -> dict[str, Fp8Layer]:
        """The fp8 layers of this rank's stages, by name."""
        layers = {}
        for stage in self._stages.values():
            layers.update(fp8_layers(stage))
        return layers


def fp8_layers(stage: nn.Module) -> dict[str, Fp8Layer]:
    """The layers of a stage with an amax history, by name ("layers.3.mlp.up.fp8"), in order."""
    return {
        name: module
        for name, module in stage.named_modules()
        if isinstance(module, Fp8Layer) and module.history is not None
    }


def update_amax_histories(stage: nn.Module, groups: tuple[Group, ...]) -> None:
    """Append the amaxes of a step to the histories of a stage; one collective per group.

    Args:
        stage: stage with the same layers on every rank of the groups.
        groups: groups that are reduced over one after the other.
    """
    layers = list(fp8_layers(stage).values())
    if not layers:
        return
    amaxes = [layer.step_amax for layer in layers if layer.step_amax is not None]
    total = torch.cat([amax.flatten() for amax in amaxes])
    for group in groups:
        all_reduce(total, group, op="max")
    reduced = total.split([amax.numel() for amax in amaxes])
    for layer, amax in zip(layers, reduced, strict=True):
        layer.update(amax.view(3, -1))

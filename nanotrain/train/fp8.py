"""fp8 in a run: the amax histories of delayed scaling, appended once per step and kept in checkpoints."""

from collections.abc import Mapping

import torch

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.model.fp8 import fp8_layers, update_amax_histories
from nanotrain.model.transformer import Stage
from nanotrain.spec.boxes import TensorBox

HISTORY = "fp8/"  # of the names of the histories in a checkpoint


def finish_fp8_step(stages: Mapping[int, Stage], context: ParallelContext) -> None:
    """Append the amaxes of this step, over all ranks of a stage, to the histories."""
    for stage in stages.values():
        update_amax_histories(stage, (context.group("tp"), context.group("dp_cp")))


def amax_histories(stages: Mapping[int, Stage]) -> dict[TensorBox, torch.Tensor]:
    """The histories of this rank's stages by their names in a checkpoint; replicated over all ranks of a stage."""
    return {
        TensorBox.full(f"{HISTORY}{name}.amax_history", layer.history.shape): layer.history
        for stage in stages.values()
        for name, layer in fp8_layers(stage).items()
        if layer.history is not None
    }


def amax_histories_to_save(stages: Mapping[int, Stage], context: ParallelContext) -> dict[TensorBox, torch.Tensor]:
    """The histories that this rank saves: all of them on the first rank of a stage, none elsewhere."""
    is_first = context.group("tp").is_first and context.group("dp_cp").is_first
    return amax_histories(stages) if is_first else {}


def is_new_history(box: TensorBox, manifest: Manifest) -> bool:
    """Whether a tensor is a history that the checkpoint lacks, as after a run in bf16 or with another length."""
    saved = manifest.tensors.get(box.name)
    return box.name.startswith(HISTORY) and (saved is None or saved.shape != box.shape)


def finish_fp8_restore(stages: Mapping[int, Stage]) -> None:
    """Let every fp8 layer check whether the history read from a checkpoint has values."""
    for stage in stages.values():
        for layer in fp8_layers(stage).values():
            layer.restored()

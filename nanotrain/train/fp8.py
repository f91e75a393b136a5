"""fp8 in a run: the devices that have its products, and the amax histories of delayed scaling.

The histories are appended once per step and kept in checkpoints.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Fp8Format, PrecisionConfig
from nanotrain.errors import EnvironmentFault
from nanotrain.model.fp8 import fp8_layers, update_amax_histories
from nanotrain.model.transformer import Stage
from nanotrain.precision.fp8 import RECIPES
from nanotrain.spec.boxes import TensorBox

HISTORY = "fp8/"  # of the names of the histories in a checkpoint


def require_fp8(precision: PrecisionConfig, capability: tuple[int, int] | None) -> None:
    """Check that a device has the matrix products of the recipe.

    Args:
        precision: section of the configuration.
        capability: CUDA compute capability; None on a CPU, which emulates every recipe.

    Raises:
        EnvironmentFault: the GPU or torch lacks them.
    """
    if precision.fp8_format is None or capability is None:
        return
    if not hasattr(F, "scaled_mm"):
        raise EnvironmentFault(
            f"torch {torch.__version__} has no torch.nn.functional.scaled_mm",
            why="fp8 products on GPUs are torch's",
            fix="install torch 2.10 or newer, or leave out --fp8-format",
        )
    recipe, found = RECIPES[precision.fp8_recipe], ".".join(map(str, capability))
    if recipe.capability <= capability <= (recipe.last_capability or capability):
        return
    first = ".".join(map(str, recipe.capability))
    needed = f"{first} or newer" if recipe.last_capability is None else f"{recipe.capability[0]}.x"
    fitting = [
        name
        for name, row in RECIPES.items()
        if row.capability <= capability <= (row.last_capability or capability)
        and (precision.fp8_format is Fp8Format.e4m3 or not row.e4m3_only)
    ]
    raise EnvironmentFault(
        f"fp8_recipe {precision.fp8_recipe} on a GPU of compute capability {found}",
        why=f"its products need compute capability {needed}",
        fix=f"set --fp8-recipe {' or '.join(fitting)}" if fitting else "leave out --fp8-format",
    )


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

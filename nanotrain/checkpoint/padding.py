"""Tables whose rows are padded to another number than in a checkpoint.

    vocabulary_rows   the tables with padding, and their tokens
    fit_padding       load them

The embedding and the head have one row per token, padded to a multiple of `--make-vocab-size-divisible-by`. Padding is
not part of the softmax and gets no gradient, so its values never matter: rows that the checkpoint lacks become zero,
rows that the run lacks are not read.

        checkpoint [128, H]      run [192, H]
        0 .. 99    tokens   -->  0 .. 99
        100 .. 127 padding       100 .. 191   zero
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.config.model import ModelConfig
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape


def vocabulary_rows(model_config: ModelConfig) -> dict[str, int]:
    """The number of tokens by the name of every parameter with one row per token of the padded vocabulary."""
    shape = ModelShape.of(model_config)
    longer = declare_model(replace(shape, padded_vocab_size=shape.padded_vocab_size + 1))
    return {
        spec.name: shape.vocab_size
        for spec, other in zip(declare_model(shape), longer, strict=True)
        if spec.shape != other.shape
    }


def fit_padding(
    manifest: Manifest, targets: Mapping[TensorBox, torch.Tensor], *, rows: Mapping[str, int]
) -> dict[TensorBox, torch.Tensor]:
    """The targets with the padding of the checkpoint, as views; rows beyond the tokens are set to zero.

    Args:
        manifest: of the checkpoint.
        targets: box -> tensor of the box's shape.
        rows: number of tokens of every padded table, by the name of the parameter.
    """
    model = manifest.config.get("model")
    vocab_size = model.get("vocab_size") if isinstance(model, Mapping) else None
    fitted: dict[TensorBox, torch.Tensor] = {}
    for box, tensor in targets.items():
        entry, tokens = manifest.tensors.get(box.name), rows.get(box.name.rpartition("/")[2], -1)
        if tokens != vocab_size or entry is None or not _differs_in_padding(entry.shape, box.shape, tokens=tokens):
            fitted[box] = tensor
            continue
        tensor.zero_()
        shared = box.box.intersect(Box.full((tokens, *box.shape[1:])))
        if shared is not None:
            fitted[TensorBox(box.name, entry.shape, shared)] = tensor[shared.within(box.box).slices()]
    return fitted


def _differs_in_padding(there: tuple[int, ...], here: tuple[int, ...], *, tokens: int) -> bool:
    is_padded = len(there) == len(here) > 0 and min(there[0], here[0]) >= tokens
    return is_padded and there[0] != here[0] and there[1:] == here[1:]

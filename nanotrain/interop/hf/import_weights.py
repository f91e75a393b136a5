"""Read weights from a Hugging Face folder; each rank reads only the boxes of its shards.

import_weights   fill boxes of parameters from slices of the files, transposed, offset or per expert, after a check that
                 the files contain exactly the tensors of the model, with their shapes
import_hf        write a folder as a checkpoint of step 0, which `generate`, `diff`, `average` and `export-hf` read
"""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.rewrite import write_checkpoint
from nanotrain.checkpoint.write import ChunkWrite
from nanotrain.config.config import CheckpointConfig, Config, DataConfig
from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import to_dict
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import FAMILIES, Family, model_from_hf, read_config
from nanotrain.interop.hf.names import (
    TensorMapping,
    constants_of,
    expert_bias_shapes,
    map_parameters,
    mtp_copies,
    tensor_shapes,
)
from nanotrain.interop.hf.weights import WeightFiles, fp8_block_size
from nanotrain.log import progress
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape

# How many names an error lists.
SHOWN = 5


def import_weights(
    folder: Path, model_config: ModelConfig, *, wanted: Mapping[TensorBox, Tensor]
) -> None:
    """Read boxes of parameters from a Hugging Face folder.

    Args:
        model_config: configuration of the model, as `model_from_hf` reads it.
        wanted: boxes of parameters -> tensors of the same shapes, any dtype or device; filled in
            place. Rows of the vocabulary's padding become zero.

    Raises:
        HuggingFaceError: a missing, superfluous or mis-shaped tensor, a damaged file.
    """
    reader = WeightReader(folder, model_config)
    for tensor_box, target in wanted.items():
        reader.fill(target.detach(), tensor_box)


class WeightReader:
    """The weights of a Hugging Face folder, opened and checked once; arguments and errors as for
    `import_weights`.
    """

    def __init__(self, folder: Path, model_config: ModelConfig) -> None:
        raw = read_config(folder)
        family = FAMILIES[raw["model_type"]]
        self._files = WeightFiles(folder, prefix=family.prefix, block_size=fp8_block_size(raw))
        candidates = [map_parameters(model_config, naming) for naming in family.namings]
        present = self._files.shapes.keys()
        self._mappings = {
            name: max(
                (each[name] for each in candidates),
                key=lambda mapping: mapping.tensor_shapes.keys() <= present,
            )
            for name in candidates[0]
        }
        copies = {copy for names in mtp_copies(model_config, family).values() for copy in names}
        constants = constants_of(model_config, family)
        _check(self._files, self._mappings, family=family, needless={*copies, *constants})
        scalars = {name: value for name, (value, shape) in constants.items() if shape == ()}
        for name in scalars.keys() & self._files.shapes.keys():
            stored = self._files.read(name, Box((), ()))
            if stored.item() != torch.tensor(scalars[name], dtype=stored.dtype).item():
                what, why = f"{name} is {stored.item()}", f"nanotrain computes with {scalars[name]}"
                raise HuggingFaceError(
                    what, why=why, fix="choose a checkpoint of a published model of this family"
                )

    def fill(self, target: Tensor, wanted: TensorBox) -> None:
        """Read one box of a parameter into a tensor of its shape."""
        assert wanted.name in self._mappings, (
            f"{wanted.name} is not a parameter of this model and would stay unset"
        )
        mapping = self._mappings[wanted.name]
        unpadded = wanted.box.intersect(Box.full(mapping.shape))
        if unpadded != wanted.box:
            target.zero_()
        for part in mapping.slices(unpadded) if unpadded is not None else ():
            stored = self._files.read(part.tensor, part.stored)
            target[part.box.within(wanted.box).slices()].copy_(part.as_parameter(stored))


@progress("importing")
def import_hf(folder: Path, output: Path) -> str:
    """Write the weights of a Hugging Face folder in fp32 as a checkpoint; returns a summary line.

    Args:
        folder: the folder with config.json and weights.
        output: the step folder to write; must not exist or be empty.

    Raises:
        HuggingFaceError: an unsupported model, or damaged files.
        CheckpointError: `output` has files.
    """
    model_config = model_from_hf(folder)
    shapes = {
        f"model/{spec.name}": spec.shape for spec in declare_model(ModelShape.of(model_config))
    }
    shapes |= {f"router/{name}": shape for name, shape in expert_bias_shapes(model_config).items()}
    reader = WeightReader(folder, model_config)

    def read(chunk: ChunkWrite) -> Tensor:
        name, values = chunk.source.name, torch.empty(chunk.box.shape)
        reader.fill(values, TensorBox(name.partition("/")[2], shapes[name], chunk.box))
        return values

    tokenizer = str(folder.resolve()) if (folder / "tokenizer.json").exists() else None
    # whose other files an export copies
    origin = CheckpointConfig(pretrained_checkpoint=str(folder.resolve()))
    config = Config(
        model=model_config, data=DataConfig(tokenizer_model=tokenizer), checkpoint=origin
    )
    manifest = Manifest(0, {}, {}, objects={}, config=to_dict(config), topology={})
    write_checkpoint(
        output,
        {name: (shape, "fp32") for name, shape in shapes.items()},
        read=read,
        manifest=manifest,
    )
    return f"{output}: {len(shapes)} tensors in fp32, from {folder}"


def _check(
    files: WeightFiles,
    mappings: Mapping[str, TensorMapping],
    *,
    family: Family,
    needless: Collection[str],
) -> None:
    expected = tensor_shapes(mappings)
    # Files often contain a tied head as well.
    needless = {*needless, *(["lm_head.weight"] if "head.weight" not in mappings else [])}
    present = {
        name: shape
        for name, shape in files.shapes.items()
        if name in expected
        or name not in needless
        and not any(fnmatchcase(name, each) for each in family.ignored)
    }
    if family.ignores_later_layers:
        present = {
            name: shape for name, shape in present.items() if not _is_later_layer(name, expected)
        }
    complaints = []
    for label, shapes, others in (("missing", expected, present), ("unknown", present, expected)):
        if names := sorted(shapes.keys() - others.keys()):
            complaints.append(
                f"{label}: {_listed([f'{name} {list(shapes[name])}' for name in names])}"
            )
    wrong = [
        name for name in sorted(expected.keys() & present.keys()) if expected[name] != present[name]
    ]
    if wrong:
        texts = [
            f"{name} is {list(present[name])} and should be {list(expected[name])}"
            for name in wrong
        ]
        complaints.append(f"mis-shaped: {_listed(texts)}")
    if complaints:
        raise HuggingFaceError(
            f"the weights in {files.folder} are not those its config.json describes",
            why="; ".join(complaints),
            fix="use a folder whose config.json and weights were saved together",
        )


def _is_later_layer(name: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a tensor belongs to a layer, and the model has none of this number."""
    layer = re.match(r"(.*\.layers\.\d+\.)", name)
    return layer is not None and not any(other.startswith(layer[1]) for other in expected)


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more

"""Read weights from a Hugging Face folder; each rank reads only the boxes of its shards.

import_weights   fill boxes of parameters from slices of the files: transposed, offset or per
                 expert; first the files must have exactly the tensors of the model
WeightReader     the same, for several calls
import_hf        write a folder as a checkpoint of step 0, which `generate`, `diff`, `average`
                 and `export-hf` read
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.rewrite import write_checkpoint
from nanotrain.checkpoint.write import ChunkWrite
from nanotrain.config.config import CheckpointConfig, Config, DataConfig
from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import to_dict
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import (
    FAMILIES,
    FOLDER_ROWS,
    Family,
    model_from_hf,
    read_config,
)
from nanotrain.interop.hf.folder_row import ROW_FILE
from nanotrain.interop.hf.names import (
    TOKEN_EXPERTS,
    Constant,
    checkpoint_shapes,
    constant_tensors,
    map_parameters,
    mtp_copies,
    tensor_shapes,
)
from nanotrain.interop.hf.tensor_mapping import Shape, TensorMapping
from nanotrain.interop.hf.weights import WeightFiles, fp8_block_size
from nanotrain.log import log_once, progress
from nanotrain.precision.dtypes import torch_name
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.untrusted import plain_text, shown

SHOWN = 5  # number of names that an error lists


def import_weights(
    folder: Path, model_config: ModelConfig, *, wanted: Mapping[TensorBox, Tensor]
) -> None:
    """Read boxes of parameters from a Hugging Face folder.

    Args:
        folder: the folder with config.json and weights.
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
    """The weights of a Hugging Face folder, opened and checked once.

    For arguments and errors see `import_weights`.
    """

    def __init__(self, folder: Path, model_config: ModelConfig) -> None:
        raw = read_config(folder)
        family = FAMILIES[raw["model_type"]]
        self._files = WeightFiles(folder, prefix=family.prefix, block_size=fp8_block_size(raw))
        try:
            present_names = self._files.shapes.keys()
            self._mappings = _choose_mappings(model_config, family, present=present_names)
        except (AssertionError, ArithmeticError, LookupError) as error:
            if raw["model_type"] not in FOLDER_ROWS:
                raise
            raise _incomplete_row(raw["model_type"], error) from None
        constants = constant_tensors(model_config, family)
        needless = set(constants)
        for copies in mtp_copies(model_config, family).values():
            needless.update(copies)
        if "head.weight" not in self._mappings:
            # files often have a tied head as well
            needless.update(("lm_head.weight", f"{family.ends['head']}.weight"))
        present = _relevant_shapes(self._files, self._mappings, family=family, needless=needless)
        _check_shapes(folder, tensor_shapes(self._mappings), present=present)
        _check_constants(self._files, constants)
        read = tensor_shapes(self._mappings).keys()
        dtypes = [dtype for name, dtype in self.dtypes.items() if name in read]
        _log_other_dtype(folder, raw, dtypes=dtypes)

    @property
    def dtypes(self) -> dict[str, str]:
        """The data types of the tensors in the files by name; not of quantized ones."""
        return self._files.dtypes

    def fill(self, target: Tensor, wanted: TensorBox) -> None:
        """Read one box of a parameter into a tensor of its shape."""
        assert wanted.name in self._mappings, (
            f"{wanted.name} is not a parameter of this model and would stay unset"
        )
        mapping = self._mappings[wanted.name]
        unpadded = wanted.box.intersect(Box.full(mapping.shape))
        if unpadded != wanted.box:
            target.zero_()
        if unpadded is None:
            return
        is_whole = wanted.name.endswith(TOKEN_EXPERTS)
        for part in mapping.slices(unpadded):
            stored = self._files.read(part.tensor, part.stored, is_whole=is_whole)
            target[part.box.within(wanted.box).slices()].copy_(part.as_parameter(stored))


def _incomplete_row(kind: str, error: Exception) -> HuggingFaceError:
    """The error for a row of a folder that lacks names of the model."""
    return HuggingFaceError(
        f"the row of {kind} does not name the tensors of the model",
        why=plain_text(f"{type(error).__name__}: {error}")[:200],
        fix=f"complete its {ROW_FILE}, or derive it anew: nanotrain family add DIR",
    )


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
    shapes = checkpoint_shapes(model_config)
    reader = WeightReader(folder, model_config)

    def read(chunk: ChunkWrite) -> Tensor:
        name = chunk.source.name
        values = torch.empty(chunk.box.shape)
        reader.fill(values, TensorBox(name.partition("/")[2], shapes[name], chunk.box))
        return values

    source = str(folder.resolve())
    tokenizer = source if (folder / "tokenizer.json").exists() else None
    config = Config(
        model=model_config,
        data=DataConfig(tokenizer_model=tokenizer),
        # an export copies its other files
        checkpoint=CheckpointConfig(pretrained_checkpoint=source),
    )
    write_checkpoint(
        output,
        {name: (shape, "fp32") for name, shape in shapes.items()},
        read=read,
        manifest=Manifest(0, {}, {}, objects={}, config=to_dict(config), topology={}),
    )
    dtypes = _count_dtypes(reader.dtypes.values())
    return f"{output}: {len(shapes)} tensors in fp32, from {folder} (tensors there: {dtypes})"


def _log_other_dtype(folder: Path, raw: Mapping[str, Any], *, dtypes: Collection[str]) -> None:
    """Log one line where config.json names another dtype than tensors of the files have."""
    named = raw.get("dtype")
    if named is None:  # of both entries, transformers takes this one last
        named = raw.get("torch_dtype")
    if named is None:
        return
    if all(torch_name(dtype) == str(named).removeprefix("torch.") for dtype in dtypes):
        return
    log_once(
        f"{folder}: config.json names the dtype {shown(named)}, and not all tensors have it "
        f"({_count_dtypes(dtypes)}): values are read as the files have them"
    )


def _count_dtypes(dtypes: Iterable[str]) -> str:
    """The numbers of tensors by dtype, the most frequent first."""
    counts = Counter(dtypes).most_common()
    return ", ".join(f"{count} in {dtype}" for dtype, count in counts)


def _choose_mappings(
    model_config: ModelConfig, family: Family, *, present: Set[str]
) -> dict[str, TensorMapping]:
    """The tensors of every parameter, with the first of the family's names that the files have."""
    candidates = [map_parameters(model_config, naming) for naming in family.namings]
    chosen = {}
    for name in candidates[0]:
        mappings = [candidate[name] for candidate in candidates]
        complete = [mapping for mapping in mappings if mapping.tensor_shapes.keys() <= present]
        chosen[name] = (complete or mappings)[0]
    return chosen


def _relevant_shapes(
    files: WeightFiles,
    mappings: Mapping[str, TensorMapping],
    *,
    family: Family,
    needless: Collection[str],
) -> dict[str, Shape]:
    """Shapes of the tensors in the files, without the ones that the model may lack."""
    expected = tensor_shapes(mappings)
    shapes = {}
    for name, shape in files.shapes.items():
        if name not in expected:
            is_ignored = any(fnmatchcase(name, pattern) for pattern in family.ignored)
            is_later = family.ignores_later_layers and _is_later_layer(name, expected)
            if name in needless or is_ignored or is_later:
                continue
        shapes[name] = shape
    return shapes


def _is_later_layer(name: str, expected: Mapping[str, Shape]) -> bool:
    """Whether a tensor belongs to a layer with a number that the model does not have."""
    layer = re.match(r"(.*\.layers\.\d+\.)", name)
    return layer is not None and not any(other.startswith(layer[1]) for other in expected)


def _check_shapes(
    folder: Path, expected: Mapping[str, Shape], *, present: Mapping[str, Shape]
) -> None:
    """Check that the files have the tensors of the model, in their shapes."""
    complaints = describe_differences(expected, present)
    if complaints:
        raise HuggingFaceError(
            f"the weights in {folder} are not those its config.json describes",
            why="; ".join(complaints),
            fix="use a folder whose config.json and weights were saved together",
        )


def describe_differences(expected: Mapping[str, Shape], present: Mapping[str, Shape]) -> list[str]:
    """Text on missing, unknown and mis-shaped tensors.

    Args:
        expected: shapes of the model's tensors by name.
        present: shapes of the tensors that are there.
    """
    missing = sorted(expected.keys() - present.keys())
    unknown = sorted(present.keys() - expected.keys())
    wrong = [
        name for name in sorted(expected) if present.get(name, expected[name]) != expected[name]
    ]
    complaints = []
    if missing:
        texts = [f"{name} {list(expected[name])}" for name in missing]
        complaints.append(f"missing: {_list_some(texts)}")
    if unknown:
        texts = [f"{plain_text(name)} {list(present[name])}" for name in unknown]
        complaints.append(f"unknown: {_list_some(texts)}")
    if wrong:
        texts = []
        for name in wrong:
            texts.append(f"{name} is {list(present[name])} and should be {list(expected[name])}")
        complaints.append(f"mis-shaped: {_list_some(texts)}")
    return complaints


def _check_constants(files: WeightFiles, constants: Mapping[str, Constant]) -> None:
    """Check that the scalars in the files have the values that nanotrain computes with."""
    for name, constant in constants.items():
        if constant.shape != () or name not in files.shapes:
            continue
        stored = files.read(name, Box((), ()))
        if stored.item() != torch.tensor(constant.value, dtype=stored.dtype).item():
            raise HuggingFaceError(
                f"{name} is {stored.item()}",
                why=f"nanotrain computes with {constant.value}",
                fix="choose a checkpoint of a published model of this family",
            )


def _list_some(items: list[str]) -> str:
    """The first items, and the number of the others."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more

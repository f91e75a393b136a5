"""Weights from a Hugging Face folder: each rank reads the boxes it holds and no more.

check       the files hold exactly the tensors the model has, in their shapes
fill        every wanted box: slices of the files, transposed, offset or by expert as the family's table says
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from nanotrain.config.config import ModelConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.hf.families import FAMILIES, Family, read_config
from nanotrain.hf.place import Place
from nanotrain.hf.weights import WeightFiles
from nanotrain.topology.boxes import Box, TensorBox

# How many names an error lists.
SHOWN = 5


def import_weights(folder: Path, model_config: ModelConfig, *, wanted: Mapping[TensorBox, Tensor]) -> None:
    """Fill tensors with their pieces of a Hugging Face checkpoint.

    Args:
        folder: the Hugging Face folder.
        model_config: what `model_from_hf` said about it.
        wanted: pieces of parameters, under their own names, -> tensors of the pieces' shapes, any dtype or
            device; filled in place. Rows of the padded vocabulary become zero.

    Raises:
        HuggingFaceError: a missing, superfluous or mis-shaped tensor, a damaged file.
    """
    raw = read_config(folder)
    family = FAMILIES[raw["model_type"]]
    files = WeightFiles(folder, prefix=family.prefix)
    places = _places_in(files, family, model_config=model_config)
    _check(files, places, family=family, folder=folder)
    for piece, target in wanted.items():
        assert piece.name in places, f"{piece.name} is no parameter of this model: it would stay unfilled"
        _fill(target.detach(), piece, place=places[piece.name], files=files)


def _fill(target: Tensor, piece: TensorBox, *, place: Place, files: WeightFiles) -> None:
    real = piece.box.intersect(Box.full(place.shape))
    if real != piece.box:
        target.zero_()
    if real is None:
        return
    for part in place.pieces(real):
        stored = files.read(part.tensor, part.stored)
        target[part.box.within(piece.box).slices()].copy_(part.as_parameter(stored))


def _places_in(files: WeightFiles, family: Family, *, model_config: ModelConfig) -> dict[str, Place]:
    """The layout of these files: the family's own, or the other one that more of them follow."""
    layouts = [places(model_config) for places in (family.places, *family.other_places)]
    return max(layouts, key=lambda places: len(_tensors(places).keys() & files.shapes.keys()))


def _tensors(places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    return {name: shape for place in places.values() for name, shape in place.tensor_shapes.items()}


def _check(files: WeightFiles, places: Mapping[str, Place], *, family: Family, folder: Path) -> None:
    expected = _tensors(places)
    # A tied head is often stored all the same.
    needless = {"lm_head.weight"} if "head.weight" not in places else set()
    found = {
        name: shape
        for name, shape in files.shapes.items()
        if not name.endswith(family.ignored) and name not in needless - expected.keys()
    }
    complaints = []
    for label, names in (("missing", expected.keys() - found.keys()), ("unknown", found.keys() - expected.keys())):
        if names:
            shapes = expected if label == "missing" else found
            complaints.append(f"{label}: {_listed([f'{name} {list(shapes[name])}' for name in sorted(names)])}")
    wrong = [name for name in sorted(expected.keys() & found.keys()) if expected[name] != found[name]]
    if wrong:
        texts = [f"{name} is {list(found[name])} and should be {list(expected[name])}" for name in wrong]
        complaints.append(f"mis-shaped: {_listed(texts)}")
    if complaints:
        raise HuggingFaceError(
            f"the weights in {folder} are not those its config.json describes",
            why="; ".join(complaints),
            fix="use a folder whose config.json and weights were saved together",
        )


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more

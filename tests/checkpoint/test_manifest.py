"""The manifest and the files have the format of docs/checkpoint.md, whose reader and safetensors
read them.
"""

import hashlib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.manifest import (
    ChunkEntry,
    DamagedCheckpoint,
    Manifest,
    NewerFormat,
    TensorEntry,
    from_json,
    to_json,
)
from nanotrain.checkpoint.store import read_manifest
from nanotrain.comm.group import Group
from nanotrain.errors import CheckpointError
from nanotrain.spec.boxes import Box, TensorBox

DOC = Path(__file__).parents[2] / "docs" / "checkpoint.md"
SHAPE = (5, 4)


def save(folder: Path) -> Path:
    tensor = torch.arange(20.0).reshape(SHAPE)
    boxes = [Box((0, 0), (2, 4)), Box((2, 0), (5, 1)), Box((2, 1), (5, 4))]
    tensors = {TensorBox("model/a.weight", SHAPE, box): tensor[box.slices()] for box in boxes}
    tensors[TensorBox.full("model/scalar", ())] = torch.tensor(2.5)
    checkpointer = Checkpointer(folder, group=Group.single_rank("world"))
    return checkpointer.save(
        5, tensors, objects={"seen": (1, 2)}, config={"grün": 0.1}, topology={}
    )


def test_the_reader_in_docs_checkpoint_reads_what_is_written(tmp_path: Path) -> None:
    match = re.search(
        r"<!-- reader -->\n```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL
    )
    assert match is not None
    reader: dict[str, Any] = {}
    exec(match.group(1), reader)
    path = save(tmp_path)

    assert (
        reader["read_tensor"](path, "model/a.weight").tolist()
        == torch.arange(20.0).reshape(SHAPE).tolist()
    )
    assert reader["read_tensor"](path, "model/scalar") == 2.5


def test_shards_are_ordinary_safetensors_with_aligned_bytes(tmp_path: Path) -> None:
    path = save(tmp_path)
    (file,) = read_manifest(path).files

    with safe_open(path / file, framework="pt") as shard:
        keys = set(shard.keys())
        chunk = shard.get_tensor("model/a.weight@2:5,1:4")

    assert keys == {
        "model/a.weight@0:2,0:4",
        "model/a.weight@2:5,0:1",
        "model/a.weight@2:5,1:4",
        "model/scalar@",
    }
    assert torch.equal(chunk, torch.arange(20.0).reshape(SHAPE)[2:, 1:])
    assert int.from_bytes((path / file).read_bytes()[:8], "little") % 8 == 0


def test_a_manifest_survives_json_and_re_indenting(tmp_path: Path) -> None:
    manifest = read_manifest(save(tmp_path))
    text = to_json(manifest)

    assert from_json(text) == manifest
    assert from_json(json.dumps(json.loads(text), indent=4)) == manifest
    assert manifest.objects == {"seen": [1, 2]}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text[: len(text) // 2], "it is no JSON"),
        (lambda text: text.replace('"step": 5', '"step": 6'), "its content has"),
        (lambda text: text[: text.rindex(',\n"sha256"')] + "}", "its field sha256 is None"),
        (lambda text: text.replace("nanotrain-checkpoint", "other"), 'it has no "format"'),
        (lambda text: "[]", "it is a list of 0 items, it must be an object"),
        (lambda text: "", "it is no JSON"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    text = to_json(read_manifest(save(tmp_path)))

    with pytest.raises(CheckpointError, match=message):
        from_json(change(text))


def test_a_later_format_is_named_with_both_versions(tmp_path: Path) -> None:
    text = signed(json.loads(to_json(read_manifest(save(tmp_path)))) | {"version": 3})

    with pytest.raises(
        NewerFormat, match="format version 3: this nanotrain reads versions up to 2"
    ):
        from_json(text)


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    manifest = read_manifest(save(tmp_path))
    forged = to_json(type(manifest)(**(vars(manifest) | {"files": {"../secret.safetensors": 3}})))

    with pytest.raises(CheckpointError, match=r"must be a plain file name"):
        from_json(forged)


def change_piece(body: dict[str, Any], **fields: Any) -> None:
    body["tensors"]["model/a.weight"]["pieces"][0] |= fields


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda body: change_piece(body, nbytes=33),
            "nbytes is 33, its box has 8 elements of 4 bytes",
        ),
        (
            lambda body: change_piece(body, box=[[3, 0], [2, 4]]),
            "which is no box of a tensor of shape",
        ),
        (
            lambda body: body["tensors"]["model/a.weight"].update(shape=[1] * 17),
            "has 17 dims, at most 16",
        ),
        (
            lambda body: body["tensors"]["model/a.weight"]["pieces"].pop(),
            "has 20 elements, its pieces hold 11",
        ),
        (
            lambda body: body["files"].update({next(iter(body["files"])): 83}),
            "is 83 bytes, its chunks need 84",
        ),
        (lambda body: change_piece(body, file="other.safetensors"), "which files does not list"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(
    tmp_path: Path, change: Any, message: str
) -> None:
    body = json.loads(to_json(read_manifest(save(tmp_path))))
    change(body)
    with pytest.raises(DamagedCheckpoint, match=message):
        from_json(signed(body))


def test_a_tensor_that_is_covered_twice_is_refused(tmp_path: Path) -> None:
    body = json.loads(to_json(read_manifest(save(tmp_path))))
    pieces = body["tensors"]["model/a.weight"]["pieces"]
    pieces.append(pieces[-1])
    with pytest.raises(DamagedCheckpoint, match="has 20 elements, its pieces hold 29"):
        from_json(signed(body))


def test_a_flat_model_section_of_format_1_is_nested(tmp_path: Path) -> None:
    manifest = read_manifest(save(tmp_path))
    flat = {
        "model": {"num_layers": 2, "num_experts": 4, "moe_router_topk": 2, "kv_lora_rank": 8},
        "train": {},
    }
    text = signed(
        json.loads(to_json(type(manifest)(**(vars(manifest) | {"config": flat})))) | {"version": 1}
    )

    model = {
        "num_layers": 2,
        "moe": {"num_experts": 4, "router_topk": 2},
        "mla": {"kv_lora_rank": 8},
    }
    assert from_json(text).config == {"model": model, "train": {}}


def signed(body: dict[str, Any]) -> str:
    """The text of a manifest with the checksum of its content."""
    rest = {key: value for key, value in body.items() if key != "sha256"}
    content = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(rest | {"sha256": hashlib.sha256(content).hexdigest()})


@pytest.mark.parametrize("not_finite", [None, (), ("a", "b")])
def test_every_field_of_a_manifest_is_read_back(not_finite: tuple[str, ...] | None) -> None:
    boxes = [Box((0, 0), (2, 5)), Box((2, 0), (3, 5))]
    chunks = tuple(
        ChunkEntry(box, f"file-{n}", f"key {n}", f"{n:08x}", 2 * box.numel)
        for n, box in enumerate(boxes)
    )
    manifest = Manifest(
        step=7,
        files={"file-0": 20, "file-1": 99},
        tensors={"a": TensorEntry((3, 5), "bf16", chunks), "b": TensorEntry((0,), "int64", ())},
        objects={"o": {"x": [1, None]}},
        config={"train": {"seed": 3}},
        topology={"tp": 2},
        not_finite=not_finite,
    )
    read = from_json(to_json(manifest))
    assert read == manifest
    assert {field.name: getattr(read, field.name) for field in fields(Manifest)} == vars(manifest)

"""The configuration is read from the first lines of a manifest, and from nothing that could be
wrong.
"""

import json
import re
from pathlib import Path

import pytest

from nanotrain.checkpoint.manifest import ChunkEntry, Manifest, TensorEntry, to_json
from nanotrain.checkpoint.store import saved_config
from nanotrain.spec.boxes import Box
from nanotrain.untrusted import BLOCK_BYTES, read_file

MARK = '"tensors": {\n'
CONFIG = {"model": {"hidden_size": 8, "name": f"x,\n{MARK}" + "é"}, "train": {"seed": 3}}


def written(folder: Path, *, config=CONFIG, num_chunks: int = 2000) -> Path:
    """A step folder with a manifest alone."""
    chunks = tuple(
        ChunkEntry(Box((i,), (i + 1,)), "s", f"k{i}", "00000000", 4) for i in range(num_chunks)
    )
    tensors = {"model/a": TensorEntry((num_chunks,), "fp32", chunks)}
    folder.mkdir(exist_ok=True)
    text = to_json(
        Manifest(5, {"s": 4 * num_chunks}, tensors, objects={}, config=config, topology={})
    )
    (folder / "manifest.json").write_text(text)
    return folder


@pytest.mark.parametrize("size", [1, BLOCK_BYTES, 3 * BLOCK_BYTES])
def test_it_is_the_configuration_and_the_records_are_not_read(tmp_path, monkeypatch, size):
    config = CONFIG | {"padding": "p" * size}
    path = written(tmp_path, config=config, num_chunks=3 + 5 * BLOCK_BYTES // 80)
    head, whole = (
        (path / "manifest.json").read_text().rindex(MARK),
        (path / "manifest.json").stat().st_size,
    )

    assert saved_config(path) == config
    # what is behind the first lines may be anything
    (path / "manifest.json").write_text(
        json.dumps(json.loads((path / "manifest.json").read_text()), indent=2)
    )
    assert saved_config(path) == config, "other spaces are the same manifest"
    written(path, config=config)
    with open(path / "manifest.json", "r+") as file:
        file.truncate(head + len(MARK))
    assert saved_config(path) == config and head + 4 * BLOCK_BYTES < whole


@pytest.mark.parametrize("shift", range(-16, 3))
def test_the_end_of_the_first_lines_may_lie_across_two_blocks(tmp_path, shift):
    written(tmp_path)
    head = (tmp_path / "manifest.json").read_text().rindex(MARK)
    config = CONFIG | {"padding": "p" * (BLOCK_BYTES - head - 15 + shift)}
    path = written(tmp_path, config=config)
    assert abs((path / "manifest.json").read_text().rindex(MARK) - BLOCK_BYTES) < 20
    assert saved_config(path) == config
    with open(path / "manifest.json", "ab") as file:
        file.write(bytes(4 * BLOCK_BYTES))
    mark = re.compile(re.escape(MARK).encode())
    assert len(read_file(path / "manifest.json", until=mark)) <= 2 * BLOCK_BYTES, (
        "the records are not read"
    )


def change(path: Path, name: str) -> None:
    manifest = path / "manifest.json"
    text = manifest.read_text()
    if name == "missing":
        manifest.unlink()
    elif name == "compact":
        manifest.write_text(json.dumps(json.loads(text)))
    elif name == "version":
        manifest.write_text(text.replace('"version": 2', '"version": 3'))
    elif name == "format":
        manifest.write_text(text.replace("nanotrain-checkpoint", "another"))
    elif name == "cut":
        manifest.write_text(text[:100])
    elif name == "list":
        manifest.write_text(
            text.replace('"config": {', '"config": [{').replace("}},\n", "}}],\n", 1)
        )
    elif name == "link":
        manifest.rename(path / "other")
        manifest.symlink_to(path / "other")


@pytest.mark.parametrize("name", ["missing", "compact", "version", "format", "cut", "list", "link"])
def test_a_manifest_of_any_other_kind_is_left_to_who_reads_all_of_it(tmp_path, name):
    path = written(tmp_path)
    change(path, name)
    assert saved_config(path) is None

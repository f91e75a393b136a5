"""Every damaged byte has a name: thousands of mutated files, each refused with an error of ours or
harmless.

A mutation is harmless if what is read equals what was written. A Hugging Face file has no checksum
of its values, and an `.idx` none of its document borders, so there only tracebacks are looked for
in these parts.
"""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.group import Group
from nanotrain.config.model import ModelConfig
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.errors import NanotrainError
from nanotrain.interop.hf.families import config_to_hf, model_from_hf
from nanotrain.interop.hf.weights import WeightFiles
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.untrusted import (
    depth_of,
    finite_number,
    parse_json,
    plain_file_name,
    read_file,
    shown,
    text_of,
    unreadable,
    whole_number,
)
from tests.checkpoint.test_manifest import signed
from tests.laws.megatron_file import write_tokens

BOMBS = ("[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900)
HOSTILE: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        2**31,
        2**63,
        10**400,
        0.5,
        1e308,
        "",
        "x",
        "../../etc/passwd",
        "/dev/zero",
        "a\0b",
        "\ud800",
    ),
    *([], {}, [-1], [[]], {"": None}, [2**40, 2**40], ["x"] * 3),
)


@pytest.mark.parametrize("bomb", BOMBS, ids=["lists", "objects", "below the limit of Python"])
def test_deep_nesting_is_an_error_of_one_line(bomb: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply|Expecting"):
        parse_json(bomb)
    assert depth_of([[], {"a": [1]}]) == 3


def test_pipes_folders_and_huge_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)
    (tmp_path / "link").symlink_to("huge")
    for name, why in (
        ("folder", "Is a directory"),
        ("pipe", "it is no regular file"),
        ("huge", "it has 1,099,511,627,776 bytes, and at most 1,073,741,824 are read"),
        ("link", "it is a symbolic link"),
        ("none", "it does not exist"),
        ("huge/none", "no folder"),
    ):
        with pytest.raises((OSError, ValueError)) as error:
            read_file(tmp_path / name, follows_links=False)
        assert unreadable(error.value) == why
    (tmp_path / "huge").write_bytes(b"{}")
    assert read_file(tmp_path / "link", most=2) == b"{}"


@pytest.mark.parametrize(
    ("check", "good"),
    [
        (lambda value: whole_number(value, "size", high=100), 0),
        (lambda value: finite_number(value, "rate"), 0.5),
        (lambda value: text_of(value, "name"), "x"),
        (lambda value: plain_file_name(value, "file"), "x"),
    ],
)
def test_values_of_another_kind_are_refused_with_the_name_of_the_field(
    check: Callable[[Any], Any], good: Any
) -> None:
    assert check(good) == good
    refused = 0
    for value in HOSTILE:
        try:
            check(value)
        except ValueError as error:
            refused += 1
            assert "it must be" in str(error) or "no valid text" in str(error)
            assert len(str(error)) < 150 and shown(value).isprintable()
    assert refused > 10


def flips(content: bytes, count: int, *, draw: random.Random) -> Iterator[bytes]:
    """The content with one bit flipped, cut, with a part removed, doubled or replaced."""
    for number in range(count):
        changed = bytearray(content)
        start = draw.randrange(len(content))
        stop = min(len(content), start + draw.randint(1, 9))
        if number % 8:
            changed[start] ^= 1 << draw.randrange(8)
        else:
            part = draw.choice(
                [b"", bytes(changed[start:stop]) * 2, draw.randbytes(stop - start), b"[" * 3000]
            )
            changed[start : draw.choice([stop, stop, len(content)])] = part
        yield bytes(changed)


def rewrites(value: Any, count: int, *, draw: random.Random) -> Iterator[Any]:
    """The JSON with one value, chosen anywhere in it, replaced, removed or renamed."""
    for _ in range(count):
        changed = json.loads(json.dumps(value))
        spot = changed
        while True:
            keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
            key = draw.choice(keys)
            inner = spot[key]
            if isinstance(inner, dict | list) and inner and draw.random() < 0.85:
                spot = inner
                continue
            break
        if draw.random() < 0.2:
            del spot[key]
        elif isinstance(inner, str | int) and draw.random() < 0.3:
            spot[key] = inner + (
                type(inner)(draw.choice((1, 4, 64))) if isinstance(inner, int) else "x"
            )
        else:
            spot[key] = draw.choice(HOSTILE)
        yield changed


def tries(attempt: Callable[[], bool]) -> str:
    """How an attempt to read a mutated file ends; anything but an error of ours fails the test by
    its traceback.
    """
    try:
        return "harmless" if attempt() else "silent"
    except NanotrainError as error:
        text = str(error)
        assert len(text) < 3000 and error.why + error.fix, text
        return "refused"


def expect(ends: list[str], *, refused: float, silent: bool = False) -> None:
    share = ends.count("refused") / len(ends)
    assert share >= refused, f"only {share:.0%} were refused"
    assert silent or "silent" not in ends, (
        f"{ends.count('silent')} of {len(ends)} loaded other values in silence"
    )


class Saved:
    """A checkpoint of two tensors in several chunks, and how it is read back."""

    def __init__(self, folder: Path) -> None:
        self.writer = Checkpointer(folder / "checkpoints", group=Group.single_rank("world"))
        shape, box = (6, 4), Box((0, 0), (3, 4))
        self.truth = {
            TensorBox("model/w", shape, box): torch.randn(3, 4),
            TensorBox("model/w", shape, Box((3, 0), shape)): torch.randn(3, 4),
            TensorBox.full("optimizer/exp_avg/w", (2, 3)): torch.randn(2, 3).to(torch.bfloat16),
            TensorBox.full("model/scalar", ()): torch.tensor(2.5),
        }
        self.objects = {"train": {"step": 7, "consumed_samples": 9}}
        config = {"model": {"vocab_size": 6, "moe": {"num_experts": None}}, "optim": {"lr": 0.1}}
        self.path = self.writer.save(
            7, self.truth, objects=self.objects, config=config, topology={"dp": 1}
        )
        self.manifest, self.shard = (
            self.path / "manifest.json",
            next(self.path.glob("*.safetensors")),
        )

    def is_read_back(self) -> bool:
        targets = {box: torch.zeros_like(tensor) for box, tensor in self.truth.items()}
        manifest = self.writer.restore(self.path, targets, padded_rows={"w": 6})
        same = all(torch.equal(targets[box], tensor) for box, tensor in self.truth.items())
        return same and manifest.objects == self.objects


def test_a_mutated_manifest_never_loads_other_values(tmp_path: Path) -> None:
    saved, draw, ends = Saved(tmp_path), random.Random(1), []
    content = saved.manifest.read_bytes()
    for changed in flips(content, 1200, draw=draw):
        saved.manifest.write_bytes(changed)
        ends.append(tries(saved.is_read_back))
    expect(ends, refused=0.95)  # the rest changes spaces only


def test_a_manifest_that_is_signed_anew_is_checked_field_by_field(tmp_path: Path) -> None:
    saved, draw, ends = Saved(tmp_path), random.Random(2), []
    body = json.loads(saved.manifest.read_text())
    for changed in rewrites(body, 1200, draw=draw):
        saved.manifest.write_text(signed(changed))
        ends.append(tries(saved.is_read_back))
    expect(ends, refused=0.5, silent=True)  # a forged counter or setting is what its author says


def test_a_mutated_shard_never_loads_other_values(tmp_path: Path) -> None:
    saved, draw, ends = Saved(tmp_path), random.Random(3), []
    content = saved.shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), json.loads(saved.manifest.read_text())
    forged = (json.dumps(rewritten).encode() for rewritten in rewrites(header, 400, draw=draw))
    files = (len(text).to_bytes(8, "little") + text + content[8 + length :] for text in forged)
    for changed in (*flips(content, 800, draw=draw), *files):
        saved.shard.write_bytes(changed)
        if len(changed) != len(content):  # a size that fits must not hide the damage
            saved.manifest.write_text(signed(body | {"files": {saved.shard.name: len(changed)}}))
        ends.append(tries(saved.is_read_back))
        if len(changed) != len(content):
            saved.manifest.write_text(signed(body))
    expect(ends, refused=0.9)


def test_a_mutated_token_index_reads_the_same_tokens_or_is_refused(tmp_path: Path) -> None:
    tokens, draw, ends = np.arange(40), random.Random(4), []
    write_tokens(tmp_path / "corpus", tokens, document_length=5)
    file = tmp_path / "corpus.idx"
    before = IndexedTokens(tmp_path / "corpus").read(0, 40).tolist()

    def is_same() -> bool:
        corpus = IndexedTokens(tmp_path / "corpus")
        corpus.document_starts(0, corpus.num_tokens)
        return corpus.read(0, corpus.num_tokens).tolist() == before

    content = file.read_bytes()
    for changed in flips(content, 800, draw=draw):
        file.write_bytes(changed)
        ends.append(tries(is_same))
    expect(ends, refused=0.8)


def test_a_mutated_tokenizer_is_refused_or_encodes(tmp_path: Path) -> None:
    draw, ends = random.Random(5), []
    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    file = tmp_path / "tokenizer.json"
    body = json.loads(backend.to_str())
    contents = [json.dumps(rewritten).encode() for rewritten in rewrites(body, 150, draw=draw)]
    for changed in (
        *flips(json.dumps(body).encode(), 150, draw=draw),
        *contents,
        BOMBS[0].encode(),
    ):
        file.write_bytes(changed)
        ends.append(tries(lambda: bool(load_tokenizer(str(file)).encode("a b") or True)))
    expect(ends, refused=0.3)


def test_a_mutated_hugging_face_config_is_refused_or_describes_a_model(tmp_path: Path) -> None:
    draw, ends, file = random.Random(6), [], tmp_path / "config.json"
    for family in ("llama", "qwen3_moe"):
        model_config = ModelConfig(vocab_size=64)
        if family == "qwen3_moe":
            body = {
                "model_type": family,
                "num_experts": 4,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "vocab_size": 9,
            }
        else:
            body = config_to_hf(model_config, family="gpt2") | {
                "model_type": family,
                "rope_scaling": {"rope_theta": 2},
            }
        contents = [json.dumps(rewritten).encode() for rewritten in rewrites(body, 250, draw=draw)]
        for changed in (
            *flips(json.dumps(body).encode(), 250, draw=draw),
            *contents,
            *map(str.encode, BOMBS),
        ):
            file.write_bytes(changed)
            ends.append(tries(lambda: model_from_hf(tmp_path).hidden_size >= 0))
    expect(ends, refused=0.2)


def test_mutated_hugging_face_weights_are_refused_or_have_their_shapes(tmp_path: Path) -> None:
    draw, ends = random.Random(7), []
    weights, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    save_file({"model.norm.weight": torch.ones(8), "lm_head.weight": torch.ones(4, 8)}, weights)

    def is_read() -> bool:
        files = WeightFiles(tmp_path, prefix="model.")
        return all(
            files.read(name, Box.full(shape)).shape == shape for name, shape in files.shapes.items()
        )

    content = weights.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    for changed in flips(content[:header_end], 300, draw=draw):
        weights.write_bytes(changed + content[header_end:])
        ends.append(tries(is_read))
    weights.write_bytes(content)
    table = {
        "metadata": {},
        "weight_map": {"model.norm.weight": weights.name, "lm_head.weight": weights.name},
    }
    contents = [json.dumps(rewritten).encode() for rewritten in rewrites(table, 100, draw=draw)]
    for changed in (
        *flips(json.dumps(table).encode(), 200, draw=draw),
        *contents,
        *map(str.encode, BOMBS),
    ):
        index.write_bytes(changed)
        ends.append(tries(is_read))
    expect(ends, refused=0.4)

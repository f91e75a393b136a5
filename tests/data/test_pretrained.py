"""AutoTokenizer's tokenizer is described by one tokenizer.json and its settings."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nanotrain.data.pretrained import ANY_CLASS, load_pretrained, resolved_settings
from nanotrain.errors import DataError
from tests.data.tokenizer_kinds import write_kind


def test_settings_name_what_the_class_decided(tmp_path: Path) -> None:
    folder = write_kind("llama", tmp_path / "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    resolved = resolved_settings(load_pretrained(str(folder)), settings)
    assert resolved["tokenizer_class"] == ANY_CLASS and "add_bos_token" not in resolved
    assert (resolved["bos_token"], resolved["eos_token"]) == ("<s>", "</s>")
    assert {"<unk>", "<s>", "</s>"} == {
        token["content"] for token in resolved["added_tokens_decoder"].values()
    }


def test_tokens_of_every_file_are_found_as_transformers_finds_them(tmp_path: Path) -> None:
    for name in ("special_tokens_map", "added_tokens", "added_tokens_decoder"):
        folder = write_kind(name, tmp_path / name)
        theirs = AutoTokenizer.from_pretrained(str(folder))
        resolved = resolved_settings(load_pretrained(str(folder)), {})
        assert resolved["eos_token"] == theirs.eos_token
        assert set(resolved["added_tokens_decoder"]) == set(map(str, theirs.added_tokens_decoder))


def test_files_that_transformers_cannot_read_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match="transformers cannot read, and Hugging Face reports: "):
        load_pretrained(str(tmp_path))

"""Tokenizers give back the text they were given and are found again where they were saved."""

import json
import os
import socket
from pathlib import Path

import pytest
import tokenizers
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.data.pretrained import first_line, go_offline_if_unreachable
from nanotrain.data.tokenizer import (
    ByteTokenizer,
    FastTokenizer,
    Tokenizer,
    load_tokenizer,
)
from nanotrain.errors import DataError
from nanotrain.prepare.bpe import EOD_TEXT, train_bpe
from nanotrain.untrusted import MAX_TOKENIZER_BYTES

TRAINED = train_bpe(["def f(x):\n    return x + 1\n", "größer als – 日本語\n"] * 20, 290)


@settings(deadline=None)
@given(text=st.text())
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TRAINED], ids=["bytes", "bpe"])
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.eod not in ids


def test_a_trained_bpe_has_its_size_and_an_end() -> None:
    assert TRAINED.vocab_size == 290
    assert TRAINED.backend.id_to_token(TRAINED.eod) == EOD_TEXT
    assert len(TRAINED.encode("return x + 1")) < 12
    assert TRAINED.decode([*TRAINED.encode("x"), TRAINED.eod]) == "x"
    assert TRAINED.encode_batch(["x", "return"]) == [TRAINED.encode("x"), TRAINED.encode("return")]


def test_training_again_gives_the_same_tokenizer() -> None:
    again = train_bpe(["def f(x):\n    return x + 1\n", "größer als – 日本語\n"] * 20, 290)
    assert again.backend.to_str() == TRAINED.backend.to_str()


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="BPE vocabulary of 100 is too small.*257"):
        train_bpe(["text"], 100)


def test_a_saved_tokenizer_loads_from_its_folder_its_file_and_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    assert TRAINED.save(tmp_path / "kept") == "kept"
    text = "größer als 日本語"
    for name in ("kept", "kept/tokenizer.json"):
        loaded = load_tokenizer(str(tmp_path / name))
        assert (loaded.encode(text), loaded.eod, loaded.vocab_size) == (
            TRAINED.encode(text),
            TRAINED.eod,
            290,
        )
    theirs = AutoTokenizer.from_pretrained(tmp_path / "kept")
    assert isinstance(theirs, PreTrainedTokenizerFast)
    assert (theirs.encode(text), theirs.eos_token_id) == (TRAINED.encode(text), TRAINED.eod)


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    TRAINED.save(tmp_path / "kept")
    PreTrainedTokenizerFast(tokenizer_object=TRAINED.backend, eos_token=EOD_TEXT).save_pretrained(
        tmp_path / "theirs"
    )
    loaded = load_tokenizer(str(tmp_path / "theirs"))
    assert isinstance(loaded, FastTokenizer)
    assert loaded.eod == TRAINED.eod


def test_stored_truncation_and_padding_are_ignored(tmp_path: Path) -> None:
    TRAINED.save(tmp_path / "kept")
    settings = json.loads((tmp_path / "kept" / "tokenizer.json").read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    settings["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    }  # fmt: skip
    (tmp_path / "kept" / "tokenizer.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(str(tmp_path / "kept"))
    text = "größer als – 日本語"
    assert loaded.encode(text) == TRAINED.encode(text)
    assert loaded.encode_batch(["x", text]) == TRAINED.encode_batch(["x", text])


def test_code_of_a_repository_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a folder whose tokenizer is Python code, and a user who would answer "y"
    (tmp_path / "code.py").write_text("open('ran', 'w')\nclass Coded: pass\n")
    config = {"auto_map": {"AutoTokenizer": ["code.Coded", None]}, "tokenizer_class": "Coded"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_bare_tokenizer_json_names_its_end_as_usual(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 5}, unk_token="a"))
    backend.save(str(tmp_path / "words.json"))
    loaded = load_tokenizer(str(tmp_path / "words.json"))
    assert (loaded.eod, loaded.vocab_size) == (5, 6)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_huge_files_and_devices_are_not_read(tmp_path: Path) -> None:
    huge = tmp_path / "tokenizer.json"
    huge.touch()
    os.truncate(huge, MAX_TOKENIZER_BYTES + 1)  # takes no space
    with pytest.raises(
        DataError, match="it has 268,435,457 bytes, and at most 268,435,456 are read"
    ):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="are no tokenizer: it has 268,435,457 bytes"):
        load_tokenizer(f"{huge},/dev/zero")
    with pytest.raises(DataError, match="are no tokenizer: it is no regular file"):
        load_tokenizer(f"/dev/zero,{huge}")


def test_an_unknown_name_without_a_network_is_refused_with_a_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"tokenizer no/such cannot be loaded.*bytes"):
        load_tokenizer("no/such")


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"[1]",
        b"{",
        b'{"eos_token": 3}',
        b'{"eos_token": {"content": [1]}}',
        b"[" * 100_000,
    ],
)
def test_odd_settings_are_one_error(tmp_path: Path, content: bytes) -> None:
    train_bpe(["some text"], 270).save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(DataError, match="tokenizer_config.json.*correct or remove it"):
        load_tokenizer(str(tmp_path))


def test_gpt2_s_two_files_make_the_same_tokenizer(tmp_path: Path) -> None:
    TRAINED.backend.model.save(str(tmp_path))
    loaded = load_tokenizer(f"{tmp_path}/vocab.json,{tmp_path}/merges.txt")
    for text in ("def f(x):\n    return x + 1\n", " größer – 日本語"):
        assert (
            loaded.encode(text) == TRAINED.encode(text)
            and loaded.decode(loaded.encode(text)) == text
        )
    assert (loaded.vocab_size, loaded.eod) == (TRAINED.vocab_size, TRAINED.eod)
    with pytest.raises(DataError, match="are no tokenizer"):
        load_tokenizer(f"{tmp_path}/vocab.json,{tmp_path}/none.txt")


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)


@pytest.mark.usefixtures("online")
def test_a_refused_connection_switches_the_client_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int], timeout: float) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    go_offline_if_unreachable()
    assert constants.HF_HUB_OFFLINE


@pytest.mark.usefixtures("online")
def test_behind_a_proxy_the_client_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy"})
    monkeypatch.setattr(
        socket, "create_connection", lambda *a, **k: pytest.fail("no direct connection")
    )
    go_offline_if_unreachable()
    assert not constants.HF_HUB_OFFLINE


def test_an_error_without_a_message_has_its_type() -> None:
    assert first_line(ValueError("  one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"

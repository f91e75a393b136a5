"""The tokenizer of a run reaches its folder and every export, with equal ids and special tokens,
from any folder.
"""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nanotrain.data.build import DatasetSplits
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.errors import DataError, HuggingFaceError
from nanotrain.inference.checkpoint import (
    export_checkpoint,
    load_checkpoint,
    open_checkpoint,
    tokenizer_name,
)
from nanotrain.runs.folder import RunFolder
from nanotrain.train.hooks.description import keep_tokenizer
from nanotrain.train.run import RunInputs
from tests.inference.test_checkpoint import write_run
from tests.interop.hf.tiny_tokenizers import KINDS, TEXTS, write_tokenizer


def run_with(tokenizer: str, folder: Path) -> Path:
    """The folder of a run that has trained with a tokenizer."""
    write_run(folder, tokenizer=tokenizer)
    keep_tokenizer(RunInputs(RunFolder(folder), DatasetSplits(None, None, None), tokenizer), None)
    return folder


def source_of(kind: str, folder: Path) -> str:
    """A tokenizer of a kind as a run names it."""
    if kind == "bytes":
        return kind
    name = write_tokenizer("byte-level" if kind == "two files" else kind, folder)
    if kind != "two files":
        return name
    load_tokenizer(name).backend.model.save(str(folder))
    return f"{folder}/vocab.json,{folder}/merges.txt"


@pytest.mark.parametrize("kind", ["bytes", "two files", *KINDS])
def test_ids_and_end_are_those_of_the_training(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a run whose tokenizer is gone, and another working folder
    name = source_of(kind, tmp_path / "given")
    tokenizer, run = load_tokenizer(name), run_with(name, tmp_path / "run")
    shutil.rmtree(tmp_path / "given", ignore_errors=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    # when it is exported, then transformers loads the same tokenizer from the export
    export_checkpoint(Path("../run"), Path("out"))
    theirs, ours = AutoTokenizer.from_pretrained("out"), load_checkpoint("../run").tokenizer
    special = [] if kind == "bytes" else [f"a{token} b" for token in theirs.added_tokens_encoder]
    for text in (*TEXTS, *special):
        ids = tokenizer.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text) == ids, text
    assert theirs.eos_token_id == ours.eod == tokenizer.eod is not None
    # and everything else that belongs to it is there
    settings = KINDS.get(kind, ("", None))[1] or {}
    config, generation = (
        json.loads(Path("out", f"{name}.json").read_text())
        for name in ("config", "generation_config")
    )
    assert (config["bos_token_id"], config["eos_token_id"]) == (theirs.bos_token_id, tokenizer.eod)
    assert (theirs.bos_token_id is not None) == bool(settings.get("bos_token"))
    assert theirs.chat_template == settings.get("chat_template")
    assert generation == ({"temperature": 0.25} if settings else {"eos_token_id": tokenizer.eod})
    if kind == "two files":
        assert {"vocab.json", "merges.txt"} < {path.name for path in (run / "tokenizer").iterdir()}


def test_what_auto_tokenizer_cannot_load_alike_is_one_error(tmp_path: Path) -> None:
    # given a family whose class transformers always takes, and which builds other tokens from the
    # vocabulary
    run = run_with(write_tokenizer("gpt-oss", tmp_path / "given"), tmp_path / "run")
    qkv = {"add_qkv_bias": True, "add_bias_linear": False}
    write_run(tmp_path / "qwen2", tokenizer=str(run / "tokenizer"), **qkv)
    with pytest.raises(HuggingFaceError, match="Qwen2Tokenizer encodes .*--tokenizer none"):
        export_checkpoint(tmp_path / "qwen2", tmp_path / "out", family="qwen2")
    assert not (tmp_path / "out").exists()
    export_checkpoint(tmp_path / "qwen2", tmp_path / "out", family="qwen2", tokenizer="none")
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_the_run_folder_follows_the_run_and_keeps_what_is_not_ours(tmp_path: Path) -> None:
    run = run_with(write_tokenizer("llama3", tmp_path / "first"), tmp_path / "run")
    keep_tokenizer(
        RunInputs(RunFolder(run), DatasetSplits(None, None, None), str(tmp_path / "gone")), None
    )
    # a tokenizer that is gone leaves it
    assert load_tokenizer(tokenizer_name(open_checkpoint(run)) or "").eod == 1
    run_with(write_tokenizer("words", tmp_path / "second"), run)
    assert not (run / "tokenizer" / "generation_config.json").exists()


@pytest.mark.parametrize("name", ["tokenizer.model", "special_tokens_map.json"])
def test_links_out_of_the_folder_are_refused_but_those_of_the_hub_s_cache(
    name: str, tmp_path: Path
) -> None:
    folder = Path(write_tokenizer("llama3", tmp_path / "snapshots" / "0"))
    for store, is_read in (("blobs", True), ("secrets", False)):
        (tmp_path / store).mkdir()
        (tmp_path / store / "x").write_text("{}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(f"../../{store}/x")
        if is_read:
            assert load_tokenizer(str(folder)).files[name] == b"{}"
            continue
        with pytest.raises(DataError, match=f"{name} cannot be read: it is a link to .*secrets/x"):
            load_tokenizer(str(folder))


def test_a_run_without_a_tokenizer_folder_names_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokenizer("words", tmp_path / "words")
    write_run(tmp_path / "run", tokenizer="words")  # as older versions left it
    assert load_checkpoint("run").tokenizer.eod == 1
    export_checkpoint(Path("run"), Path("out"))
    assert AutoTokenizer.from_pretrained("out").eos_token_id == 1
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(
        DataError, match="tokenizer words cannot be loaded: it is no file or folder here"
    ):
        export_checkpoint(Path("../run"), Path("out"))

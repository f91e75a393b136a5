"""Files beside exported weights: of the model's origin, as far as they hold for what is exported."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from nanotrain.data.same_tokenizer import is_same_tokenizer
from nanotrain.inference import checkpoint as checkpoint_module
from nanotrain.inference.checkpoint import export_checkpoint
from nanotrain.interop.hf.companions import SPECIAL_TOKENS, Companions, fullest_tokenizer
from nanotrain.interop.hf.import_weights import import_hf
from tests.interop.hf.test_round_trip import write_source
from tests.interop.hf.tiny_tokenizers import write_tokenizer


def test_another_model_or_tokenizer_keeps_what_still_holds(tmp_path: Path) -> None:
    source, checkpoint = write_source("llama", tmp_path / "in"), tmp_path / "step-00000000"
    raw = json.loads((source / "config.json").read_text())
    raw |= {
        "pad_token_id": 7,
        "quantization_config": {"quant_method": "mxfp4"},
        "auto_map": {"AutoConfig": "mine.Config"},
    }
    (source / "config.json").write_text(json.dumps(raw))
    import_hf(source, checkpoint)

    export_checkpoint(checkpoint, tmp_path / "half", dtype="fp16")
    written = json.loads((tmp_path / "half" / "config.json").read_text())
    left = {
        key: value for key, value in raw.items() if key not in ("quantization_config", "auto_map")
    }
    assert written == left | {"dtype": "float16"}  # no code is copied, and nothing is quantized

    other = Path(write_tokenizer("wordpiece", tmp_path / "other"))
    export_checkpoint(checkpoint, tmp_path / "retokenized", tokenizer=other)
    written = json.loads((tmp_path / "retokenized" / "config.json").read_text())
    assert written["eos_token_id"] == 2 and "pad_token_id" not in written
    assert json.loads((tmp_path / "retokenized" / "generation_config.json").read_text()) == {
        "eos_token_id": 2
    }

    # no longer the model of the checkpoint
    longer = raw | {"max_position_embeddings": 4096, "pad_token_id": 8}
    (source / "config.json").write_text(json.dumps(longer))
    export_checkpoint(checkpoint, tmp_path / "changed")
    written = json.loads((tmp_path / "changed" / "config.json").read_text())
    assert (written["max_position_embeddings"], written["pad_token_id"]) == (
        raw["max_position_embeddings"],
        8,
    )

    shutil.rmtree(source)
    export_checkpoint(checkpoint, tmp_path / "lost", tokenizer=other)
    written = json.loads((tmp_path / "lost" / "config.json").read_text())
    assert written["eos_token_id"] == 2 and "pad_token_id" not in written


def test_a_copy_of_the_tokenizer_beside_a_corpus_is_the_one_of_the_origin(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 5}, unk_token="a"))
    for name in ("origin", "copy"):
        (tmp_path / name).mkdir()
    backend.save(str(tmp_path / "copy" / "tokenizer.json"), pretty=False)
    backend.enable_truncation(8)  # not used in training
    backend.save(str(tmp_path / "origin" / "tokenizer.json"))
    assert is_same_tokenizer(str(tmp_path / "copy" / "tokenizer.json"), str(tmp_path / "origin"))
    assert Companions(str(tmp_path / "copy"), tmp_path / "origin").has_own_tokenizer
    assert fullest_tokenizer(str(tmp_path / "copy"), tmp_path / "origin") == str(
        tmp_path / "origin"
    )
    for name in ("chat_template.jinja", "generation_config.json"):  # of conversations since
        (tmp_path / "copy" / name).write_text("{}")
        assert fullest_tokenizer(str(tmp_path / "copy"), tmp_path / "origin") == str(
            tmp_path / "copy"
        )
        (tmp_path / "origin" / name).write_text("{}")
        assert fullest_tokenizer(str(tmp_path / "copy"), tmp_path / "origin") == str(
            tmp_path / "origin"
        )
    backend.add_tokens(["b"])
    backend.save(str(tmp_path / "copy" / "tokenizer.json"))
    assert not Companions(str(tmp_path / "copy"), tmp_path / "origin").has_own_tokenizer
    assert fullest_tokenizer(str(tmp_path / "copy"), tmp_path / "origin") == str(tmp_path / "copy")


def test_a_model_trained_with_another_tokenizer_gets_none_of_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source("llama", tmp_path / "in")
    import_hf(source, tmp_path / "step-00000000")
    monkeypatch.setattr(checkpoint_module, "tokenizer_name", lambda checkpoint: "bytes")
    export_checkpoint(tmp_path / "step-00000000", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {name: written.get(name) for name in SPECIAL_TOKENS} == dict.fromkeys(SPECIAL_TOKENS) | {
        "eos_token_id": 256
    }
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": 256
    }
    assert not (tmp_path / "out" / "chat_template.jinja").exists()

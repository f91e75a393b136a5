"""Files beside exported weights: of the model's origin, as far as they hold for what is exported."""

import json
import shutil
from pathlib import Path

from nanotrain.inference.checkpoint import export_checkpoint
from nanotrain.inference.import_hf import import_hf
from tests.hf.test_round_trip import write_source


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
    found = json.loads((tmp_path / "half" / "config.json").read_text())
    left = {key: value for key, value in raw.items() if key not in ("quantization_config", "auto_map")}
    assert found == left | {"dtype": "float16"}  # no code is copied, and nothing is quantized

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text('{"added_tokens": [{"id": 9, "content": "<stop>"}]}')
    (tmp_path / "other" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    export_checkpoint(checkpoint, tmp_path / "retokenized", tokenizer=tmp_path / "other")
    found = json.loads((tmp_path / "retokenized" / "config.json").read_text())
    assert (found["eos_token_id"], found["pad_token_id"]) == (9, 7)

    longer = raw | {"max_position_embeddings": 4096, "pad_token_id": 8}  # no longer the model of the checkpoint
    (source / "config.json").write_text(json.dumps(longer))
    export_checkpoint(checkpoint, tmp_path / "changed")
    found = json.loads((tmp_path / "changed" / "config.json").read_text())
    assert (found["max_position_embeddings"], found["pad_token_id"]) == (raw["max_position_embeddings"], 8)

    shutil.rmtree(source)
    export_checkpoint(checkpoint, tmp_path / "lost", tokenizer=tmp_path / "other")
    found = json.loads((tmp_path / "lost" / "config.json").read_text())
    assert found["eos_token_id"] == 9 and "pad_token_id" not in found

"""Data types of tensors and heads over an import and an export."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanotrain.inference.checkpoint import export_checkpoint, load_stage, open_model
from nanotrain.interop.hf.families import model_from_hf
from nanotrain.interop.hf.import_weights import import_hf
from tests.interop.hf.reference import reference

WEIGHTS = "model.safetensors"


def write_mixed(folder: Path, name: str = "llama") -> dict[str, torch.Tensor]:
    """Write a folder whose norms are fp32 and whose other tensors are bf16."""
    reference(name).save_pretrained(folder)
    tensors = {}
    for key, tensor in load_file(folder / WEIGHTS).items():
        tensors[key] = tensor if "norm" in key else tensor.bfloat16()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("name", ["llama", "dots1"])
def test_each_tensor_comes_back_in_its_own_dtype(name: str, tmp_path: Path) -> None:
    tensors = write_mixed(tmp_path / "origin", name)
    summary = import_hf(tmp_path / "origin", tmp_path / "checkpoint")
    num_norms = sum("norm" in key for key in tensors)
    assert f"{len(tensors) - num_norms} in bf16, {num_norms} in fp32" in summary
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "back", dtype="auto", tokenizer="none")
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert back[key].dtype == tensor.dtype and torch.equal(back[key], tensor), key
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))


def test_a_line_says_which_tensors_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = write_mixed(tmp_path / "origin")
    import_hf(tmp_path / "origin", tmp_path / "checkpoint")
    caplog.set_level("INFO", logger="nanotrain")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "back", dtype="bf16", tokenizer="none")
    num_norms = sum("norm" in key for key in tensors)
    expected = f"{num_norms} tensors that the pretrained checkpoint has in fp32: written in bf16"
    assert [expected in line for line in caplog.messages].count(True) == 1
    assert not any("has in bf16" in line for line in caplog.messages)


@pytest.mark.parametrize("entry", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("named", "counts"),
    [
        ("bfloat16", "{others} in bf16, {norms} in fp32"),
        ("float16", "{others} in bf16, {norms} in fp32"),
        ("float64", "{others} in bf16, {norms} in fp32"),
        (None, ""),
    ],
)
def test_a_line_says_that_config_json_names_another_dtype(
    named: str | None, counts: str, entry: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = write_mixed(tmp_path)
    write_dtype(tmp_path, {entry: named})
    num_norms = sum("norm" in key for key in tensors)
    caplog.set_level("INFO", logger="nanotrain")
    load_stage(open_model(tmp_path))  # as evaluate, generate and train do
    lines = [line for line in caplog.messages if "config.json names the dtype" in line]
    assert len(lines) == (named is not None)
    for line in lines:
        assert f"names the dtype {named!r}" in line
        assert counts.format(norms=num_norms, others=len(tensors) - num_norms) in line


def test_no_line_where_config_json_names_the_dtype_of_all_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference("llama").save_pretrained(tmp_path)
    caplog.set_level("INFO", logger="nanotrain")
    for entries in ({"dtype": "float32"}, {"dtype": "torch.float32", "torch_dtype": "bfloat16"}):
        write_dtype(tmp_path, entries)
        load_stage(open_model(tmp_path))
    assert "config.json names the dtype" not in caplog.text


def write_dtype(folder: Path, entries: dict[str, str | None]) -> None:
    """Write a config.json whose entries of dtypes are these alone."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    path.write_text(json.dumps(config | entries))


def test_a_head_that_config_json_denies_comes_back_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin = tmp_path / "origin"
    reference("llama-tied").save_pretrained(origin)
    tensors = load_file(origin / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, origin / WEIGHTS, metadata={"format": "pt"})
    caplog.set_level("INFO", logger="nanotrain")
    assert model_from_hf(origin).untie_embeddings_and_output_weights
    assert "so it is not tied, as in transformers" in caplog.text
    import_hf(origin, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "back", tokenizer="none")
    assert (
        json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(origin)(tokens).logits
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")(tokens).logits
    assert torch.equal(theirs, again)

"""Writing a folder: shards, dtypes, tokenizers, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from transformers import GenerationConfig

from nanotrain.errors import CheckpointError, DataError, EnvironmentFault, HuggingFaceError
from nanotrain.interop.hf import export
from nanotrain.interop.hf.companions import Companions
from nanotrain.interop.hf.export import export_weights
from nanotrain.model.transformer import Stage
from nanotrain.spec.counts import num_parameters
from nanotrain.spec.shape import ModelShape
from tests.interop.hf.reference import load
from tests.interop.hf.tiny_tokenizers import write_tokenizer
from tests.model.building import LLAMA, MODELS, build, random_batch, randomize
from tests.runs.test_metrics_file import file_size_limit


def tensors_of(stage: Stage) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in stage.named_parameters()]


@pytest.mark.parametrize("name", ["llama-untied", "gpt2"])
def test_shards_hold_what_one_file_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = randomize(build(MODELS[name]))
    export_weights(tmp_path / "one", stage.model_config, tensors=tensors_of(stage))
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 20_000)
    # The order of the stream is free.
    export_weights(tmp_path / "many", stage.model_config, tensors=reversed(tensors_of(stage)))
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.name.endswith(f"-of-{len(files):05d}.safetensors") for file in files)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    expected = load_file(tmp_path / "one" / "model.safetensors")
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    for key, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "many" / file)[key], expected[key])
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    tokens = random_batch().tokens
    torch.testing.assert_close(back(tokens).logits, stage.logits(tokens), rtol=1e-4, atol=1e-4)


def test_bf16_weights_are_the_rounded_ones(tmp_path: Path) -> None:
    stage = build(LLAMA)
    export_weights(tmp_path, LLAMA, tensors=tensors_of(stage), dtype="bf16")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert back.dtype is torch.bfloat16
    loaded = dict(load(tmp_path).named_parameters())
    for name, tensor in tensors_of(stage):
        real = tensor[:131] if name == "embedding.word.weight" else tensor
        assert torch.equal(loaded[name][: len(real)], real.bfloat16().float())


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    export_weights(tmp_path, LLAMA, tensors=tensors_of(build(LLAMA)))
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_padding_is_never_exported(tmp_path: Path) -> None:
    stage = build(MODELS["llama-untied"])
    for name, tensor in tensors_of(stage):
        if name in ("embedding.word.weight", "head.weight"):
            assert len(tensor) == 256
    export_weights(tmp_path, stage.model_config, tensors=tensors_of(stage))
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.embed_tokens.weight"].shape == stored["lm_head.weight"].shape == (131, 32)


def test_tokenizer_files_are_copied_and_name_the_special_tokens(tmp_path: Path) -> None:
    tokenizer = write_tokenizer("gpt-oss", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "generation_config.json").unlink()
    (tmp_path / "tokenizer" / "notes.txt").write_text("not a tokenizer file")
    export_weights(
        tmp_path / "out", LLAMA, tensors=tensors_of(build(LLAMA)), companions=Companions(tokenizer)
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    files = {"tokenizer.json", "tokenizer_config.json"}
    assert (
        names == {"config.json", "generation_config.json", "model.safetensors", "README.md"} | files
    )
    config, generation = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("config.json", "generation_config.json")
    )
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 2)
    assert generation == {"bos_token_id": 0, "eos_token_id": 2}


def test_generation_config_and_model_card_travel(tmp_path: Path) -> None:
    tokenizer = write_tokenizer("llama3", tmp_path / "tokenizer")
    inherited = '{"eos_token_id": [0, 1], "temperature": 0.6}'
    (tmp_path / "tokenizer" / "generation_config.json").write_text(inherited)
    export_weights(
        tmp_path / "my_model",
        LLAMA,
        tensors=tensors_of(build(LLAMA)),
        companions=Companions(tokenizer),
    )
    assert (tmp_path / "my_model" / "generation_config.json").read_text() == inherited
    card = (tmp_path / "my_model" / "README.md").read_text()
    _, header, text = card.split("---\n")
    assert header.splitlines()[:2] == [
        "library_name: transformers",
        "pipeline_tag: text-generation",
    ]
    assert "# my_model" in text and f"{num_parameters(ModelShape.of(LLAMA)):,} parameters" in text
    assert (
        text.count('.from_pretrained("my_model")') == 2
        and "import AutoModelForCausalLM, AutoTokenizer\n" in text
    )
    assert GenerationConfig.from_pretrained(tmp_path / "my_model").temperature == 0.6


def test_a_single_tokenizer_file_is_copied_under_its_usual_name(tmp_path: Path) -> None:
    tokenizer = Path(write_tokenizer("bpe", tmp_path / "tokenizer")).rename(tmp_path / "bpe.json")
    export_weights(
        tmp_path / "out",
        LLAMA,
        tensors=tensors_of(build(LLAMA)),
        companions=Companions(str(tokenizer)),
    )
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        tmp_path / "bpe.json"
    ).read_bytes()


def test_bad_targets_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(build(LLAMA))
    export_weights(tmp_path / "out", LLAMA, tensors=tensors)
    with pytest.raises(CheckpointError, match="out is not empty: it contains README.md"):
        export_weights(tmp_path / "out", LLAMA, tensors=tensors)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write"):
        export_weights(tmp_path / "file", LLAMA, tensors=tensors)
    (tmp_path / "no").mkdir()
    with pytest.raises(
        DataError, match="no cannot be loaded: it is a folder without tokenizer.json"
    ):
        export_weights(
            tmp_path / "second", LLAMA, tensors=tensors, companions=Companions(str(tmp_path / "no"))
        )
    with pytest.raises(HuggingFaceError, match="bloom is not supported"):
        export_weights(tmp_path / "third", LLAMA, tensors=tensors, family="bloom")


def test_an_incomplete_stream_writes_no_config(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"final_norm\.weight"):
        export_weights(
            tmp_path,
            LLAMA,
            tensors=[t for t in tensors_of(build(LLAMA)) if t[0] != "final_norm.weight"],
        )
    assert not (tmp_path / "config.json").exists()


def test_a_folder_with_content_of_others_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    with pytest.raises(
        CheckpointError, match="out is not empty: it contains config.json.*choose a new folder"
    ):
        export_weights(tmp_path / "out", LLAMA, tensors=tensors_of(build(LLAMA)))
    assert (tmp_path / "out" / "config.json").read_text() == "mine"


def test_a_failed_export_removes_its_own_files_only(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        (tmp_path / "notes.txt").write_text("mine")
        yield from list(tensors_of(build(LLAMA)))[:-1]

    with pytest.raises(AssertionError, match="not in the stream"):
        export_weights(tmp_path, LLAMA, tensors=broken())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_exports_into_one_folder_are_an_error_of_the_second(tmp_path: Path) -> None:
    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        (tmp_path / "model.safetensors").write_text("of the first")
        yield from tensors_of(build(LLAMA))

    with pytest.raises(EnvironmentFault, match="File exists"):
        export_weights(tmp_path, LLAMA, tensors=interrupted())
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of the first"]


@pytest.mark.parametrize("limit", [1000, 500_000])
def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, limit: int) -> None:
    # The second limit holds the weights of the model but not the tokenizer.
    tokenizer = Path(write_tokenizer("bpe", tmp_path / "bpe"))
    large = tokenizers.Tokenizer.from_file(str(tokenizer))
    large.add_tokens([f"<{number}>" for number in range(10_000)])
    large.save(str(tokenizer))
    options = {"companions": Companions(str(tokenizer))} if limit > 1000 else {}
    with file_size_limit(limit), pytest.raises(EnvironmentFault, match="out.* bytes free"):
        export_weights(tmp_path / "out", LLAMA, tensors=tensors_of(build(LLAMA)), **options)
    assert not (tmp_path / "out").exists()


def test_space_is_checked_before_a_tensor_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_weights(tmp_path / "fits", LLAMA, tensors=tensors_of(build(LLAMA)), dtype="bf16")
    needed = sum(
        tensor.nbytes for tensor in load_file(tmp_path / "fits" / "model.safetensors").values()
    )
    usage = shutil.disk_usage(tmp_path)
    for free in (needed - 1, needed):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _path, free=free: usage._replace(free=free)
        )
        folder = tmp_path / str(free)
        if free == needed:
            export_weights(folder, LLAMA, tensors=tensors_of(build(LLAMA)), dtype="bf16")
            continue
        with pytest.raises(EnvironmentFault, match=f"{needed:,} bytes needed, .* bytes free in"):
            export_weights(
                folder,
                LLAMA,
                tensors=iter(lambda: pytest.fail("a tensor was read"), None),
                dtype="bf16",
            )
        assert not folder.exists()

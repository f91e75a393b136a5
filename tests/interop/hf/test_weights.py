"""Weight files: one or several, safetensors or torch, with the prefix or without, read by box."""

import json
import pickle
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import nanotrain
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf import weights
from nanotrain.interop.hf.families import read_config
from nanotrain.interop.hf.mxfp4 import Mxfp4Tensor, dequantized
from nanotrain.interop.hf.weights import BlockSize, WeightFiles, has_other_head
from nanotrain.spec.boxes import Box
from tests.interop.hf.reference import load, reference

MATRIX, HEAD = torch.arange(12.0).reshape(3, 4), torch.ones(2, 4)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_box_is_read_by_the_name_with_the_prefix(prefix: str, tmp_path: Path) -> None:
    tensors = {f"{prefix}norm.weight": MATRIX, "lm_head.weight": HEAD}
    save_file(tensors, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, prefix="model.")
    assert files.shapes == {"model.norm.weight": (3, 4), "lm_head.weight": (2, 4)}
    assert torch.equal(files.read("model.norm.weight", Box((1, 2), (3, 4))), MATRIX[1:, 2:])


def test_an_index_names_the_files_and_a_single_one_comes_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"model.a": MATRIX}, tmp_path / "first.safetensors")
    save_file({"model.b": HEAD}, tmp_path / "second.safetensors")
    save_file({"model.z": HEAD}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"model.a": "first.safetensors", "model.b": "second.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = WeightFiles(tmp_path, prefix="model.")
    assert files.shapes == {"model.a": (3, 4), "model.b": (2, 4)}
    assert torch.equal(files.read("model.b", Box((0, 0), (2, 4))), HEAD)
    save_file({"model.c": HEAD}, tmp_path / "model.safetensors")
    caplog.set_level("INFO", logger="nanotrain")
    assert WeightFiles(tmp_path, prefix="model.").shapes == {"model.c": (2, 4)}
    assert "model.safetensors is read, and not the files of" in caplog.text


def test_a_tensor_in_two_files_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"model.a": MATRIX}, tmp_path / "first.safetensors")
    save_file({"a": MATRIX}, tmp_path / "second.safetensors")
    index = {"weight_map": {"model.a": "first.safetensors", "a": "second.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HuggingFaceError, match="model.a is stored twice.*second.safetensors"):
        WeightFiles(tmp_path, prefix="model.")


@pytest.mark.parametrize(
    ("head", "is_other"),
    [(MATRIX, False), (MATRIX.double(), False), (MATRIX + 1, True), (MATRIX[1:], True)],
)
def test_a_head_is_compared_with_the_embedding(
    head: torch.Tensor, is_other: bool, tmp_path: Path
) -> None:
    names: dict[str, str] = {"embedding": "model.embed.weight", "head": "lm_head.weight"}
    assert not has_other_head(tmp_path, prefix="model.", **names)
    tensors = {"embed.weight": MATRIX, "lm_head.weight": head.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert has_other_head(tmp_path, prefix="model.", **names) == is_other


def test_a_folder_without_weights_lists_the_names_that_it_could_have(tmp_path: Path) -> None:
    with pytest.raises(
        HuggingFaceError, match=r"contains no weights: neither model\.safetensors nor .* exists"
    ):
        WeightFiles(tmp_path, prefix="")


class Touch:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_a_pickle_is_refused_unread_with_the_command_that_converts_it(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "it's").mkdir()
    (tmp_path / "it's" / name).write_bytes(pickle.dumps(Touch(tmp_path / "run")))
    with pytest.raises(HuggingFaceError, match=f"{name} is not read: it is a pickle") as error:
        WeightFiles(tmp_path / "it's", prefix="")
    assert not (tmp_path / "run").exists()
    *python, program = shlex.split(error.value.fix.partition(": ")[2])
    assert python == ["python", "-c"] and f'from_pretrained("{tmp_path}/it\'s", ' in program
    compile(program, "fix", "exec")
    save_file({"norm.weight": MATRIX}, tmp_path / "it's" / "model.safetensors")
    assert WeightFiles(tmp_path / "it's", prefix="").shapes  # the pickle beside it is left alone


def test_no_file_of_the_product_calls_a_reader_of_pickles() -> None:
    readers = re.compile(r"torch\.load\(|np\.load\(|pickle\.load\(|allow_pickle=True|read_pickle")
    sources = list(Path(nanotrain.__file__).parent.rglob("*.py"))
    assert len(sources) > 200
    calling = {path.name: path for path in sources if readers.search(path.read_text())}
    assert calling.keys() == {"pickles.py", "tensors.py"}  # of torch's checkpoints
    for path in calling.values():
        text = path.read_text()
        assert path.parent.name == "dcp"
        assert len(readers.findall(text)) == text.count("weights_only=True")


def random_packed(experts: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(
        0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
    )
    scales = torch.randint(
        118, 124, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8
    )
    return blocks, scales


def test_every_box_is_that_of_transformers() -> None:
    blocks, scales = random_packed(3, 96, 10)
    expected = convert_moe_packed_tensors(blocks, scales)
    tensor = Mxfp4Tensor("w", blocks, scales=scales)
    assert tensor.get_shape() == [3, 96, 10] == list(expected.shape)
    for box in [
        (slice(0, 3), slice(0, 96), slice(0, 10)),
        (slice(1, 2), slice(5, 70), slice(3, 9)),
    ]:
        assert torch.equal(tensor[box], expected[box])


def test_blocks_and_scales_that_do_not_fit_are_one_error() -> None:
    blocks, scales = random_packed(3, 96, 10)
    with pytest.raises(HuggingFaceError, match="w_scales is"):
        dequantized({"w_blocks": blocks, "w_scales": scales[:, :5]})
    assert dequantized({"w_blocks": blocks}) == {"w_blocks": blocks}  # a name like any other


def test_a_folder_in_mxfp4_has_the_logits_of_its_dequantized_weights(tmp_path: Path) -> None:
    theirs = reference("gpt_oss")
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for layer, block in enumerate(theirs.model.layers):
            for name in ("gate_up_proj",):
                weight = getattr(block.mlp.experts, name)
                blocks, scales = random_packed(*weight.shape)
                weight.copy_(convert_moe_packed_tensors(blocks, scales))
                key = f"model.layers.{layer}.mlp.experts.{name}"
                del stored[key]
                stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    tokens = torch.randint(0, 100, (2, 20), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        load(tmp_path).logits(tokens), theirs(tokens).logits, rtol=1e-4, atol=2e-5
    )


def test_any_box_of_fp8_weights_has_the_factors_of_its_blocks(tmp_path: Path) -> None:
    """Blocks of two sizes, of which the last ones are cut."""
    low = torch.arange(1.0, 71.0).reshape(7, 10).to(torch.float8_e4m3fn)
    factors = torch.arange(1.0, 13.0).reshape(4, 3)
    save_file({"a.weight": low, "a.weight_scale_inv": factors}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, prefix="", block_size=BlockSize(2, 4))
    assert files.shapes == {"a.weight": (7, 10)}
    by_element = factors.repeat_interleave(2, 0)[:7].repeat_interleave(4, 1)[:, :10]
    whole = low.float() * by_element
    for start in ((0, 0), (1, 3), (2, 4), (5, 9)):
        for stop in ((7, 10), (6, 10)):
            box = Box(start, stop)
            assert torch.equal(files.read("a.weight", box), whole[box.slices()]), box


@pytest.mark.parametrize("other", [None, *range(10)])
def test_a_head_differs_from_the_embedding_if_any_of_its_rows_does(
    tmp_path: Path, other: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "ROWS_COMPARED", 4)
    embedding = torch.arange(30.0).reshape(10, 3)
    head = embedding.clone()
    if other is not None:
        head[other, 2] += 1
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(tensors, tmp_path / "model.safetensors")
    names = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    differs = weights.has_other_head(tmp_path, prefix="model.", **names)
    assert differs is (other is not None)


def test_a_folder_with_an_adapter_is_refused_with_how_to_merge_it(tmp_path: Path) -> None:
    """Also beside all weights of a model, to which transformers adds it."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for content in (None, '{"model_type": "llama"}'):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(HuggingFaceError, match="has an adapter.*merge_and_unload"):
            read_config(tmp_path)

"""Reading weights by the box, and saying what is wrong with a folder."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import model_from_hf
from nanotrain.interop.hf.import_weights import import_weights
from nanotrain.spec.boxes import TensorBox, flat_range_to_boxes
from tests.interop.hf.reference import load, reference


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    reference("gpt2").save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    reference("llama").save_pretrained(tmp_path)
    return tmp_path


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_flat_range_of_any_parameter_is_read_as_its_boxes(
    gpt2: Path, data: st.DataObject
) -> None:
    # Given a parameter and a range of it, as a shard of a flat buffer holds it.
    parameters = dict(load(gpt2).named_parameters())
    name = data.draw(st.sampled_from(sorted(parameters)))
    whole = parameters[name].detach()
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    # When its boxes are read, into tensors that hold something else.
    boxes = flat_range_to_boxes(whole.shape, start=start, stop=stop)
    wanted = {
        TensorBox(name, tuple(whole.shape), box): torch.full(box.shape, float("nan"))
        for box in boxes
    }
    import_weights(gpt2, model_from_hf(gpt2), wanted=wanted)
    # Then they are that range; the rows that pad the vocabulary are zero.
    values = (
        torch.cat([tensor.flatten() for tensor in wanted.values()]) if wanted else torch.empty(0)
    )
    assert torch.equal(values, whole.flatten()[start:stop])
    assert name != "embedding.word.weight" or not whole[131:].any()


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        path,
        metadata={"format": "pt"},
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model.norm.weight": None}, r"missing: model\.norm\.weight \[32\]"),
        ({"lm_head.weight": None}, r"missing: lm_head\.weight \[131, 32\]"),
        (
            {"model.layers.7.mlp.up_proj.weight": torch.ones(2, 3)},
            r"unknown: .*layers\.7.* \[2, 3\]",
        ),
        ({"model.norm.weight": torch.ones(5)}, r"mis-shaped: .*is \[5\] and should be \[32\]"),
    ],
)
def test_wrong_tensors_are_named_with_their_shapes(
    llama: Path, changes: dict[str, torch.Tensor | None], named: str
) -> None:
    change(llama, changes)
    with pytest.raises(HuggingFaceError, match=named):
        load(llama)


def test_many_wrong_tensors_are_counted_not_listed(llama: Path) -> None:
    change(
        llama, {name: None for name in load_file(llama / "model.safetensors") if "layers" in name}
    )
    with pytest.raises(HuggingFaceError, match="and 13 more"):
        load(llama)


def test_a_needless_tied_head_is_passed_over(tmp_path: Path) -> None:
    reference("llama-tied").save_pretrained(tmp_path)
    before = load(tmp_path)
    change(tmp_path, {"lm_head.weight": torch.zeros(131, 32)})
    after = dict(load(tmp_path).named_parameters())
    assert all(torch.equal(after[name], parameter) for name, parameter in before.named_parameters())


def test_a_truncated_file_is_refused(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(HuggingFaceError, match=r"cannot read .*model\.safetensors"):
        load(llama)


def test_a_missing_shard_and_a_folder_without_weights_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(HuggingFaceError, match="contains no weights"):
        load(llama)
    (llama / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(HuggingFaceError, match="no index of weights"):
        load(llama)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HuggingFaceError, match="model-00001-of-00002"):
        load(llama)

"""A checkpoint of another model or precision is refused, with names, shapes and options of both sides."""

from dataclasses import replace

import pytest

from nanotrain.checkpoint.compatibility import check_all_loaded, check_compatible, loads
from nanotrain.checkpoint.manifest import Manifest, TensorEntry
from nanotrain.errors import CheckpointError
from nanotrain.spec.boxes import Box, TensorBox

SHAPES = {"model/a": (4, 2), "model/b": (3,), "optimizer/exp_avg/a": (4, 2), "optimizer/exp_avg/b": (3,)}
MANIFEST = Manifest(
    7,
    files={},
    tensors={name: TensorEntry(shape, "fp32", ()) for name, shape in SHAPES.items()},
    objects={},
    config={"model": {"hidden_size": 4, "moe": {"router_topk": 1, "num_experts": 2}}},
    topology={},
)


def full(name: str, *shape: int) -> TensorBox:
    return TensorBox.full(name, shape or SHAPES[name])


def test_shards_with_the_shapes_and_dtypes_of_the_checkpoint_are_compatible() -> None:
    half = TensorBox("model/a", (4, 2), Box((0, 0), (2, 2)))
    check_compatible(MANIFEST, {half: "fp32", full("optimizer/exp_avg/b"): "fp32"})


def test_only_float_tensors_are_cast() -> None:
    check_compatible(MANIFEST, {full("model/a"): "bf16", full("optimizer/exp_avg/a"): "fp16"})
    with pytest.raises(CheckpointError, match="another dtype in 1 tensor .*: opt.*a is fp32 there, int32 here"):
        check_compatible(MANIFEST, {full("model/b"): "fp16", full("optimizer/exp_avg/a"): "int32"})
    with pytest.raises(CheckpointError, match="model/a is fp32 there, int32 here"):
        check_compatible(MANIFEST, {full("model/a"): "int32"})


def test_another_model_is_refused_with_both_shapes_and_the_options_of_all_sections() -> None:
    config = {"model": {"hidden_size": 5, "moe": {"router_topk": 1, "num_experts": 3}, "new_option": 1}}
    with pytest.raises(CheckpointError) as caught:
        check_compatible(MANIFEST, {full("model/a", 4, 3): "fp32", full("model/c", 2): "fp32"}, config=config)
    assert "2 tensors differ: model/a is [4, 2] there, [4, 3] here; model/c is missing there, [2] here" in str(
        caught.value
    )
    assert "options differ: model.hidden_size 4 there, 5 here; model.moe.num_experts 2 there, 3 here;" in str(
        caught.value
    )


def test_the_state_of_another_optimizer_is_named() -> None:
    manifest = replace(MANIFEST, config={"optim": {"optimizer": "adam"}})
    wanted = {full("model/a"): "fp32", full("optimizer/momentum_buffer/a", 4, 2): "fp32"}
    with pytest.raises(CheckpointError, match="the state of --optimizer adam, not of muon"):
        check_compatible(manifest, wanted, config={"optim": {"optimizer": "muon"}})
    with pytest.raises(CheckpointError, match="is of another model"):
        check_compatible(manifest, wanted, config={"optim": {"optimizer": "adam"}})


@pytest.mark.parametrize(("objects", "fix"), [({}, "weights$"), ({"train": {"step": 7}}, "or --no-load-optim")])
def test_weights_alone_are_no_other_model(objects: dict[str, object], fix: str) -> None:
    weights = {name: entry for name, entry in MANIFEST.tensors.items() if name.startswith("model/")}
    manifest = replace(MANIFEST, tensors=weights, objects=objects)
    with pytest.raises(CheckpointError, match=f"step 7 has weights alone: .* add --finetune to start at step 0.*{fix}"):
        check_compatible(manifest, {full(name): "fp32" for name in SHAPES})
    with pytest.raises(CheckpointError, match="is of another model"):
        check_compatible(manifest, {full("model/c", 2): "fp32", full("optimizer/exp_avg/a"): "fp32"})


def test_at_most_four_differences_are_listed() -> None:
    targets = {full(f"model/x{i}", 1): "fp32" for i in range(6)}
    with pytest.raises(CheckpointError, match=r"6 tensors differ: (.*; ){4}and 2 more: names and shapes"):
        check_compatible(MANIFEST, targets)


def test_of_a_loaded_kind_the_ranks_together_load_every_tensor() -> None:
    first, second = (loads(MANIFEST, [full(name)]) for name in ("model/a", "model/b"))
    assert (first[:2], second[:2]) == ([1, 0], [0, 1])
    both = list(map(max, first, second))
    check_all_loaded(MANIFEST, both)  # weights without optimizer state
    with pytest.raises(CheckpointError, match=r"1 tensor differs: model/b is \[3\] there, missing here"):
        check_all_loaded(MANIFEST, first)
    with pytest.raises(CheckpointError, match="optimizer/exp_avg/b"):
        check_all_loaded(MANIFEST, list(map(max, both, loads(MANIFEST, [full("optimizer/exp_avg/a")]))))

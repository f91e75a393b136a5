"""A checkpoint of another model or precision is refused, with names, shapes and options of both
sides.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint.compatibility import (
    check_all_loaded,
    check_compatible,
    config_of,
    fit_padding,
    loads,
    require_model,
    vocabulary_rows,
)
from nanotrain.checkpoint.manifest import Manifest, TensorEntry
from nanotrain.config.config import Config
from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import to_dict
from nanotrain.errors import CheckpointError
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape

SHAPES = {
    "model/a": (4, 2),
    "model/b": (3,),
    "optimizer/exp_avg/a": (4, 2),
    "optimizer/exp_avg/b": (3,),
}
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
    with pytest.raises(
        CheckpointError, match="another dtype in 1 tensor .*: opt.*a is fp32 there, int32 here"
    ):
        check_compatible(MANIFEST, {full("model/b"): "fp16", full("optimizer/exp_avg/a"): "int32"})
    with pytest.raises(CheckpointError, match="model/a is fp32 there, int32 here"):
        check_compatible(MANIFEST, {full("model/a"): "int32"})


def test_another_model_is_refused_with_both_shapes_and_the_options_of_all_sections() -> None:
    config = {
        "model": {"hidden_size": 5, "moe": {"router_topk": 1, "num_experts": 3}, "new_option": 1}
    }
    with pytest.raises(CheckpointError) as caught:
        check_compatible(
            MANIFEST, {full("model/a", 4, 3): "fp32", full("model/c", 2): "fp32"}, config=config
        )
    assert (
        "2 tensors differ: model/a is [4, 2] there, [4, 3] here; model/c is missing there, [2] here"
        in str(caught.value)
    )
    assert (
        "options differ: model.hidden_size 4 there, 5 here; model.moe.num_experts 2 there, 3 here;"
        in str(caught.value)
    )


def test_the_state_of_another_optimizer_is_named() -> None:
    manifest = replace(MANIFEST, config={"optim": {"optimizer": "adam"}})
    wanted = {full("model/a"): "fp32", full("optimizer/momentum_buffer/a", 4, 2): "fp32"}
    with pytest.raises(CheckpointError, match="the state of --optimizer adam, not of muon"):
        check_compatible(manifest, wanted, config={"optim": {"optimizer": "muon"}})
    with pytest.raises(CheckpointError, match="is of another model"):
        check_compatible(manifest, wanted, config={"optim": {"optimizer": "adam"}})


@pytest.mark.parametrize(
    ("objects", "fix"), [({}, "weights$"), ({"train": {"step": 7}}, "or --no-load-optim")]
)
def test_weights_alone_are_no_other_model(objects: dict[str, object], fix: str) -> None:
    weights = {name: entry for name, entry in MANIFEST.tensors.items() if name.startswith("model/")}
    manifest = replace(MANIFEST, tensors=weights, objects=objects)
    with pytest.raises(
        CheckpointError,
        match=f"step 7 has weights alone: .* add --finetune to start at step 0.*{fix}",
    ):
        check_compatible(manifest, {full(name): "fp32" for name in SHAPES})
    with pytest.raises(CheckpointError, match="is of another model"):
        check_compatible(
            manifest, {full("model/c", 2): "fp32", full("optimizer/exp_avg/a"): "fp32"}
        )


def test_at_most_four_differences_are_listed() -> None:
    targets = {full(f"model/x{i}", 1): "fp32" for i in range(6)}
    with pytest.raises(
        CheckpointError, match=r"6 tensors differ: (.*; ){4}and 2 more: names and shapes"
    ):
        check_compatible(MANIFEST, targets)


def test_of_a_loaded_kind_the_ranks_together_load_every_tensor() -> None:
    first, second = (loads(MANIFEST, [name]) for name in ("model/a", "model/b"))
    assert (first[:2], second[:2]) == ([1, 0], [0, 1])
    both = list(map(max, first, second))
    check_all_loaded(MANIFEST, both)  # weights without optimizer state
    with pytest.raises(
        CheckpointError, match=r"1 tensor differs: model/b is \[3\] there, missing here"
    ):
        check_all_loaded(MANIFEST, first)
    with pytest.raises(CheckpointError, match="optimizer/exp_avg/b"):
        check_all_loaded(MANIFEST, list(map(max, both, loads(MANIFEST, ["optimizer/exp_avg/a"]))))


NAME = "model/embedding.word.weight"


def manifest(rows: int, tokens: int) -> Manifest:
    return Manifest(
        1, {}, {NAME: TensorEntry((rows, 2), "fp32", ())}, {}, {"model": {"vocab_size": tokens}}, {}
    )


def test_tables_of_the_vocabulary_are_the_embedding_and_a_head_of_its_own() -> None:
    tied, untied = (
        vocabulary_rows(
            ModelShape.of(
                ModelConfig(vocab_size=100, untie_embeddings_and_output_weights=is_untied)
            )
        )
        for is_untied in (False, True)
    )
    assert tied == {"embedding.word.weight": 100}
    assert len(untied) == 2 and set(untied.values()) == {100} and tied.items() <= untied.items()


def test_rows_that_the_checkpoint_lacks_are_zero_and_its_own_are_read_into_views() -> None:
    rows = {"embedding.word.weight": 5}
    target = torch.ones(4, 2)  # rows 4 to 7 of 8: token 4, and padding
    box = TensorBox(NAME, (8, 2), Box((4, 0), (8, 2)))
    fitted = fit_padding(manifest(6, 5), {box: target}, rows=rows)
    ((read, view),) = fitted.items()
    assert read == TensorBox(NAME, (6, 2), Box((4, 0), (5, 2)))
    view.fill_(7.0)
    assert target.tolist() == [[7.0, 7.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    padding = TensorBox(NAME, (8, 2), Box((6, 0), (8, 2)))
    assert fit_padding(manifest(6, 5), {padding: torch.ones(2, 2)}, rows=rows) == {}


def test_the_same_padding_and_another_vocabulary_are_left_to_the_comparison_of_shapes() -> None:
    rows, target = {"embedding.word.weight": 5}, torch.ones(8, 2)
    for there in (manifest(8, 5), manifest(6, 6)):
        fitted = fit_padding(there, {TensorBox.full(NAME, (8, 2)): target}, rows=rows)
        assert list(fitted) == [TensorBox.full(NAME, (8, 2))] and target.eq(1).all()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("hidden_size", 10**5, "its tensors have"),
        ("num_layers", 10**4, "its tensors have"),
        ("vocab_size", 10**7, "its tensors have"),
        ("num_attention_heads", 3, "is of no model"),
    ],
)
def test_a_configuration_of_a_larger_model_is_refused_before_anything_is_allocated(
    field: str, value: int, why: str, tmp_path: Path
) -> None:
    model = ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=1, vocab_size=64)
    specs = declare_model(ModelShape.of(model))
    tensors = {f"model/{spec.name}": TensorEntry(spec.shape, "fp32", ()) for spec in specs}
    manifest = Manifest(
        1, {}, tensors, {}, {"model": vars_of(replace(model, **{field: value}))}, {}
    )
    with pytest.raises(CheckpointError, match=why):
        config = config_of(manifest, path=tmp_path)
        require_model(manifest, config.model, path=tmp_path)


def vars_of(model: ModelConfig) -> dict[str, object]:
    """The section of a model as in a manifest."""
    section: dict[str, object] = to_dict(Config(model=model))["model"]
    return section

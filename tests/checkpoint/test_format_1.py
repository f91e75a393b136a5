"""Checkpoints of format 1 load: two that commit 0b608be wrote on two ranks with ZeRO, dense and MLA
with experts.

They were written by `nanotrain.train` with the arguments below and `--exit-interval 2`; `LOSSES`
are those of the same commit resumed on one rank. Model keys in their manifests are flat
(`model.moe_router_topk`).
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.inference.checkpoint import load_stage, open_checkpoint
from nanotrain.spec.boxes import TensorBox, flat_range_to_boxes
from tests.harness import run_ranks
from tests.laws.command_line import run_command_lines, steps_of

FORMAT_1 = Path(__file__).parent / "format_1"
TRAIN = """--mock-data --vocab-size 64 --make-vocab-size-divisible-by 1 --seq-length 8 --micro-batch-size 2
    --global-batch-size 4 --lr 1e-2 --lr-warmup-iters 0 --params-dtype fp32 --eval-interval 0 --generate-tokens 0
    --data-parallel-sharding-strategy optim --no-tensorboard --seed 7 --train-iters 4 --num-layers 1
    --num-attention-heads 2"""
MODELS = {
    "dense": "--hidden-size 8 --ffn-hidden-size 8 --num-query-groups 1",
    "moe": """--hidden-size 4 --multi-latent-attention --q-lora-rank 4 --kv-lora-rank 4 --qk-head-dim 4
        --qk-pos-emb-head-dim 2 --v-head-dim 4 --num-experts 2 --moe-layer-freq [1] --moe-ffn-hidden-size 4
        --moe-router-topk 1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias""",
}
LOSSES = {
    "dense": [4.1693830490112305, 4.174344539642334],
    "moe": [4.164868354797363, 4.15546989440918],
}


def global_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read with safetensors and json alone."""
    tensors = {}
    for name, entry in json.loads((folder / "manifest.json").read_text())["tensors"].items():
        tensors[name] = torch.full(entry["shape"], float("nan"))
        for chunk in entry["pieces"]:
            with safe_open(folder / chunk["file"], framework="pt") as shard:
                box = tuple(slice(start, stop) for start, stop in zip(*chunk["box"], strict=True))
                tensors[name][box] = shard.get_tensor(chunk["key"])
    return tensors


def restore(ctx: ParallelContext, folder: Path) -> bool:
    """Read this rank's flat range of every tensor; whether it equals the global tensor's."""
    expected, size = global_tensors(folder), ctx.topology.world_size
    targets = {
        TensorBox(name, tuple(tensor.shape), box): torch.full(box.shape, float("nan"))
        for name, tensor in expected.items()
        for box in flat_range_to_boxes(
            tensor.shape,
            start=tensor.numel() * ctx.rank // size,
            stop=tensor.numel() * (ctx.rank + 1) // size,
        )
    }
    manifest = Checkpointer(folder.parent, group=ctx.control).restore(folder, targets)
    assert manifest.step == 2
    return all(
        torch.equal(tensor, expected[box.name][box.box.slices()]) for box, tensor in targets.items()
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_its_tensors_are_read_on_any_number_of_ranks(model: str, num_ranks: int) -> None:
    assert all(run_ranks(num_ranks, restore, FORMAT_1 / model))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_training_resumes_from_it_with_the_losses_of_its_writer(
    model: str, num_ranks: int, tmp_path: Path
) -> None:
    expert_parallel = (
        f"--expert-model-parallel-size {num_ranks}" if model == "moe" and num_ranks > 1 else ""
    )
    line = f"{TRAIN} {MODELS[model]} {expert_parallel} --load {FORMAT_1 / model} train.run_dir={tmp_path / 'run'}"

    run_ranks(num_ranks, run_command_lines, line.split(), strategy="optim")

    steps = steps_of(tmp_path / "run")
    assert [step["step"] for step in steps] == [3, 4]
    assert [step["loss"] for step in steps] == pytest.approx(LOSSES[model], rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_its_manifest_gives_the_model(model: str) -> None:
    stage = load_stage(open_checkpoint(FORMAT_1 / model))

    expected = global_tensors(FORMAT_1 / model)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter.detach(), expected[f"model/{name}"]), name

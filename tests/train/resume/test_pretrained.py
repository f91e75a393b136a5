"""A run starts from a Hugging Face folder with all its digits, on every rank and in every
precision.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanotrain.cli.main import main
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.schema import to_dict
from nanotrain.data.corpus_info import CorpusInfo, write_info
from nanotrain.prepare.bpe import train_bpe
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.resume import restore
from nanotrain.train.resume.restore import warn_after_import, warn_after_restore
from tests.harness import run_ranks
from tests.train.small_run import small_run, train

UNPADDED = ("--make-vocab-size-divisible-by", "4")  # the rows of the padding are no weights
LOW = (*UNPADDED, "--bf16", "--use-precision-aware-optimizer")


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A Hugging Face folder in fp32, and the main params it was written from."""
    with small_run(tmp_path / "source", "--train-iters", "1", *UNPADDED) as run:
        train(run, CheckpointHook())
        saved = {box.name: tensor.clone() for box, tensor in run.optimizer.state_tensors().items()}
    assert main(["checkpoint", "export-hf", str(tmp_path / "source"), str(tmp_path / "hf")]) == 0
    return tmp_path / "hf", saved


@pytest.mark.parametrize("main_params", ["fp32", "fp16"])
def test_main_params_have_the_digits_of_the_files(exported, tmp_path, main_params):
    folder, saved = exported
    start = (
        "--pretrained-checkpoint",
        str(folder),
        *LOW,
        "--main-params-dtype",
        main_params,
        "--ema-decay",
        "0.5",
    )
    with small_run(tmp_path / "low", *start) as run:
        loaded = {box.name: tensor for box, tensor in run.optimizer.state_tensors().items()}
        for name, weight in run.stages[0].named_parameters():
            expected = saved[f"model/{name}"]
            error = (loaded[f"model/{name}"] - expected).abs()
            # fp16 with a scale per block: Megatron-LM's precision-aware optimizer
            assert torch.all(
                error <= (0 if main_params == "fp32" else 2**-11) * expected.abs().max()
            ), name
            assert torch.equal(loaded[f"ema/{name}"], loaded[f"model/{name}"])
            assert torch.equal(weight, loaded[f"model/{name}"].bfloat16()), name


def _held(ctx: ParallelContext, folder: Path, pretrained: Path) -> dict[TensorBox, Tensor]:
    strategy = (
        "--data-parallel-sharding-strategy",
        "optim_grads_params",
        "--global-batch-size",
        "2",
    )
    with small_run(
        folder, "--pretrained-checkpoint", str(pretrained), *LOW, *strategy, context=ctx
    ) as run:
        return {box: tensor.clone() for box, tensor in run.optimizer.state_tensors().items()}


def test_every_rank_reads_its_shard(exported, tmp_path):
    folder, saved = exported
    shards = run_ranks(2, _held, tmp_path / "two", folder, strategy="optim_grads_params")
    parts = [
        (box, tensor)
        for shard in shards
        for box, tensor in shard.items()
        if box.name.startswith("model/")
    ]
    assert sum(tensor.numel() for _, tensor in parts) == sum(
        saved[n].numel() for n in saved if n.startswith("model/")
    )
    assert all(torch.equal(tensor, saved[box.name][box.box.slices()]) for box, tensor in parts)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged, whatever an entry point of another test did to the loggers."""
    lines: list[str] = []
    monkeypatch.setattr(restore.log, "info", lambda text, *args: lines.append(text % args))
    return lines


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Infos of four corpora: two of one BPE, one of another with as many tokens, one of an unknown
    tokenizer.
    """
    first, second = (
        train_bpe([text] * 9, 262) for text in ("low lower lowest", "new newer newest")
    )
    for name, tokenizer in (("a", first), ("b", first), ("c", second)):
        tokenizer.save(tmp_path / f"{name}.tokenizer")
        write_info(tmp_path / name, CorpusInfo(f"{name}.tokenizer", 262))
    write_info(tmp_path / "unknown", CorpusInfo())
    return tmp_path


def _data(corpora: Path, name: str) -> DataConfig:
    return DataConfig(data_path=[str(corpora / name)])


@pytest.mark.parametrize(
    ("weights", "corpus", "warns"),
    [
        ("a", "b", False),
        ("a", "c", True),
        ("a", "unknown", False),
        ("unknown", "a", False),
        ("gone", "a", False),
    ],
)
def test_a_checkpoint_of_another_tokenizer_is_named(corpora, weights, corpus, warns, logged):
    class Saved:
        config = to_dict(replace(Config(), data=_data(corpora, weights)))

    warn_after_restore(Saved(), _data(corpora, corpus), path=corpora / "step-00000001")
    assert ("in which the same id is" in "".join(logged)) == warns
    assert (f"--tokenizer {corpora / 'a.tokenizer'}" in "".join(logged)) == warns


def test_a_hugging_face_folder_of_another_tokenizer_is_named(corpora, logged):
    for folder, corpus, warns in (("a.tokenizer", "b", 0), ("c.tokenizer", "b", 1), (".", "b", 1)):
        warn_after_import(corpora / folder, _data(corpora, corpus))
        assert "".join(logged).count("in which the same id") == warns, folder

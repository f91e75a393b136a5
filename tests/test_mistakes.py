"""Mistakes of a first hour, as typed: each is one message with the cure, exit code 2, and leaves
nothing behind.

Flags that are misspelt or named as elsewhere are in tests/config/test_suggest.py, damaged files in
tests/laws/test_bad_input.py.
"""

import shlex

import pytest

from nanotrain.cli.main import main
from tests.train.conftest import logging_as_before  # noqa: F401

pytestmark = pytest.mark.usefixtures("logging_as_before")

# a command of nanotrain | what the message must contain | what it must not contain
MISTAKES = [
    ("trian +config=tiny", "did you mean nanotrain train?", "Traceback"),
    ("train tiny", "write +config=tiny for the recipe of that name", "did you mean"),
    ("train --config tiny", "write +config=NAME for a recipe", "did you mean"),
    ("train +config=tyni", "config=tiny?", "tiny_moe?"),
    ("train config=tyni", "did you mean +config=tiny?", "tiny_moe?"),
    ("train +config=tiny --train-iters -1", "it must be at least 0", "Traceback"),
    ("train +config=tiny --skip-train", "nanotrain evaluate RUN", "--train-iters"),
    ("train +config tiny", "write +config=tiny", "mistakes"),
    ("train +config=tiny,tiny_moe", "nanotrain sweep --over +config=tiny,tiny_moe", "did you mean"),
    ("train +config=tiny optim.lr = 1e-3", "write optim.lr=1e-3", "mistakes"),
    ("train +config=tiny --nproc-per-nod 2", "did you mean --nproc-per-node?", "--help"),
    ("train +config=tiny --learning-rate 1", "did you mean --lr?", "--outer"),
    ("train +config=tiny --tp 2", "did you mean --tensor-model-parallel-size?", "--help"),
    (
        "train +config=tiny --tensor-model-parallel-size 2",
        "run on 2 ranks (nanotrain train --nproc-per-node 2",
        "3 ranks",
    ),
    (
        "train --nproc-per-node 3 +config=tiny --tensor-model-parallel-size 2",
        "3 ranks cannot form tp=2",
        "torchrun",
    ),
    (
        "train --nproc-per-node two +config=tiny",
        "give the number of ranks of this machine",
        "Traceback",
    ),
    ("train +config=tiny --nproc-per-node", "--nproc-per-node has no value", "unknown"),
    ("train --nproc-per-node 2 --max-restarts x +config=tiny", "invalid int value: 'x'", "usage"),
    ("train +config=tiny --device gpu", "write --device cuda", "cpu?"),
    ("train +config=tiny --bf16 true", "--bf16 takes no more values", "--lr"),
    ("train +config=tiny --batch-size 8", "--micro-batch-size (samples per rank", "did you mean"),
    (
        "train +config=tiny --epochs 3",
        "steps = epochs x samples / global_batch_size",
        "did you mean",
    ),
    ("train +config=tiny --data-path nowhere", "nowhere.bin is missing too", "vocabulary size"),
    (
        "train +config=tiny --seq-length 4096",
        "set --seq-length 1024 or raise --max-position",
        "Traceback",
    ),
    ("train +config=tiny --hidden-size 100", "set --kv-channels 26", "mistakes"),
    ("train +config=tiny --hidden-size 130", "set --hidden-size 128 or 136", "132"),
    ("config +config=tiny --hidden-size 1e9", "at least 1 and at most 200000", "Traceback"),
    ("config +config=tiny --vocab-size 1e12", "at most 1000000000", "Traceback"),
    ("train '+config=tiny --train-iters 3'", "leave out the quotes", "there are"),
    ("train '--lr=1 --bf16'", "leave out the quotes", "takes a number"),
    ("train --lr '1e-3 +config=tiny'", "leave out the quotes", "takes a number"),
    (
        "train --mock-data --pretrained-checkpoint org/gpt2",
        "hf download org/gpt2 --local-dir gpt2 fetches a model of that name",
        "Traceback",
    ),
    ("config '+config=[tiny,llama1b]'", "name both in the defaults list of a recipe", "sweep"),
    ("config '~model' +config=tiny", "none is removed", "did you mean"),
    ("config -cn tiny", "write --config-name NAME", "--help"),
    ("config -cd configs", "did you mean --config-dir?", "--help"),
    ("config -m optim.lr=1,2", "nanotrain sweep --over lr=1,2", "optimizer steps"),
    ("config hydra.run.dir=x", "only hydra.searchpath is used here", "did you mean"),
    (
        "config --num-experts 4 --moe-router-load-balancing-type quantile",
        "write quantile_balancing",
        "NAME",
    ),
    ("train -c tiny", "write +config=NAME for a recipe", "--help"),
    (
        "train +config=tiny --device mps",
        "Apple (mps) are not supported; write --device cpu",
        "NAME",
    ),
    ("train +config=tiny --device npu", "write --device cpu", "NAME"),
    ("train +config=tiny --mlflow", "write --trackers mlflow", "--help"),
    ("train +config=tiny --push-to-hub", "checkpoint publish RUN OWNER/NAME", "--help"),
    ("train +config=tiny --enable-memory-snapshot", "write --memory-snapshot-path FILE", "leave"),
    ("train +config=tiny --full-determinism", "--deterministic-mode", "leave it out"),
    ("train +config=tiny --lora-r 8", "every parameter is trained", "--help"),
    ("train +config=tiny --train-iters 1k", "write --train-iters 1000", "optimizer steps"),
    ("train +config=tiny --lr 1.5m", "write --lr 1500000", "mistakes"),
    ("train +config=tiny --optimizer adamw_torch", "write --optimizer adam", "NAME"),
    (
        "train +config=tiny --router-bias-foo 1",
        "flags of that kind are --moe-router",
        "did you mean",
    ),
    ("train +config=llama_7b", "'llama_7b'; did you mean +config=llama7b? There are", "write"),
    ("train +config=/", "ends in .yaml or .yml; write --config-dir / +config=NAME", "no file"),
    ("checkpoint export runs/a", "write nanotrain checkpoint export-hf or", "takes inspect"),
    ("checkpoint verfy runs/a", "'verfy'; did you mean nanotrain checkpoint verify?", "takes"),
    ("train +config=tiny --global-batch-size 7", "set --global-batch-size 8", "Traceback"),
    (
        "train +config=tiny --run-dir /proc/none",
        "choose another folder with --run-dir",
        "train.run_dir",
    ),
    (
        "train +config=tiny --mock-data --vocab-size 64 --load nowhere",
        "nowhere is not a checkpoint",
        "Traceback",
    ),
    (
        "train +config=tiny --pretrained-checkpoint nowhere",
        "give a folder as `save_pretrained` writes it",
        "Traceback",
    ),
    ("train +config=tiny --gpus 8", "nanotrain train --nproc-per-node N", "did you mean"),
    ("train +config=tiny --resume", "the same --run-dir resumes by itself", "did you mean"),
    ("train +config=tiny --zero 3", "optim_grads_params (ZeRO-3)", "did you mean"),
    ("train +config=tiny --lr", "--lr has no value", "unknown"),
    ("train +config=tiny --prometheus-port 99999", "at least 1 and at most 65535", "Traceback"),
    (
        "train +config=tiny --notify hooks.example/x",
        "must begin with http:// or https://",
        "Traceback",
    ),
    ("generate nowhere", "name a run folder", "Traceback"),
    ("generate /etc/passwd", "/etc/passwd is not a checkpoint: it is a file", "no such folder"),
    (
        "generate --run-dir nowhere",
        "unknown --run-dir (write the folder without a flag)",
        "has no value",
    ),
    ("generate nowhere hello", "nanotrain generate --help lists them", "+config"),
    (
        "generate --tensor-model-parallel-size 2 nowhere",
        "nowhere is not a checkpoint",
        "there is no folder 2",
    ),
    ("generate", "the following arguments are required: path", "usage"),
    ("report nowhere", "nowhere is not a run folder", "Traceback"),
    (
        "prepare --input x.txt --output x --tokenizer bpe:many",
        "write for example bpe:8192",
        "Traceback",
    ),
    ("topology", "give --world-size N, --schedule NAME or both", "usage"),
    ("topology --world-size 6 --tensor-model-parallel-size 4", "run on 8 ranks", "mistakes"),
    ("topology --schedule 1f1", "did you mean --pipeline-schedule 1f1b?", "gpipe?"),
    ("checkpoint inpsect x", "did you mean nanotrain checkpoint inspect?", "nanotrain train"),
    ("checkpoint export-hf nowhere out", "nowhere is not a checkpoint", "Traceback"),
    ("compare one", "name at least two run folders", "usage"),
    ("parity +config=tiny", "required: --world-size", "usage"),
    (
        "topology --world-size 8 --data-parallel-size 4",
        "--data-parallel-size is 4, the run has 8",
        "ranks =",
    ),
    (
        "train --standalone --nnodes 2 +config=tiny",
        "--standalone starts a job of one machine",
        "Traceback",
    ),
    ("config --optimizer adams", "did you mean --optimizer adam?", "Traceback"),
    (
        "sweep --print --over optimizer=adam,adams +config=tiny",
        "run optimizer=adams: optim.optimizer is",
        "--run-dir",
    ),
    ("config --explian", "did you mean --explain?", "--help"),
]


@pytest.mark.parametrize(("command", "has", "has_not"), MISTAKES)
def test_a_mistake_is_one_message_with_the_cure(
    command, has, has_not, tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert main(shlex.split(command)) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and has in err and has_not not in err, err
    assert not [path for path in tmp_path.rglob("*.*") if path.suffix in (".jsonl", ".bin")]


def test_there_are_at_least_thirty():
    assert len({command for command, _, _ in MISTAKES}) >= 30

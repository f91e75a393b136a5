"""Where arguments come from: scripts, files of arguments, YAML files, checkpoints."""

from pathlib import Path

import pytest

from nanotrain.audit.arguments import Argument
from nanotrain.audit.sources import (
    MAX_BYTES,
    read_source,
    source_of_stored,
    source_of_words,
)
from nanotrain.errors import ConfigError

SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
TP=${TP:-2}
MODEL=(--num-layers 4 --hidden-size 64 --num-attention-heads 4)
torchrun --nproc_per_node $GPUS --nnodes ${NODES:-2} pretrain_gpt.py ${MODEL[@]} \\
    --tensor-model-parallel-size $TP --lr $LR --save $DIR/ck --data-path $DATA
"""
LAYOUT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --context-parallel-size 2 "
)


def read(tmp_path: Path, text: str | bytes, name: str = "a.sh", **variables: str):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_source(path, variables=variables)


def flags(source) -> list[str]:
    return [argument.text for argument in source.arguments]


def test_a_script_has_arguments_a_program_and_ranks(tmp_path):
    source = read(tmp_path, SCRIPT)
    assert source.program == "pretrain_gpt.py" and source.ranks == 16
    assert flags(source)[:4] == [
        "--num-layers 4",
        "--hidden-size 64",
        "--num-attention-heads 4",
        "--tensor-model-parallel-size 2",
    ]
    assert source.variables == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert source.values(16).text("--data-parallel-size") == "8"


def test_a_number_that_is_not_set_is_left_out_and_a_path_is_kept(tmp_path):
    source = read(tmp_path, SCRIPT)
    assert source.unset == {"$LR": ["--lr"], "$DIR": ["--save"], "$DATA": ["--data-path"]}
    assert "--save unset_DIR/ck" in flags(source) and "--lr" not in " ".join(flags(source))
    given = read(tmp_path, SCRIPT, LR="1e-4", TP="8", NODES="1")
    assert given.ranks == 8 and "--tensor-model-parallel-size 8" in flags(given)
    assert "--lr 1e-4" in flags(given)


def test_the_data_parallel_size_is_what_tp_pp_and_cp_leave():
    source = source_of_words(LAYOUT.split())
    assert source.values(32).text("--data-parallel-size") == "2"
    assert source.values(None).text("--data-parallel-size") is None


def test_a_size_of_an_unset_variable_leaves_the_data_parallel_sizes_unknown(tmp_path):
    line = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --num-experts 8"
    values = read(tmp_path, f"{line} --tensor-model-parallel-size $SIZE").values(8)
    assert values.text("--data-parallel-size") is None
    assert values.text("data-parallel size of experts") is None
    values = read(tmp_path, f"{line} --expert-model-parallel-size $SIZE").values(8)
    assert values.text("--data-parallel-size") == "8"
    assert values.text("data-parallel size of experts") is None
    assert read(tmp_path, line).values(8).text("data-parallel size of experts") == "8"


def test_ranks_are_those_of_slurm_where_the_launch_has_none(tmp_path):
    direct = SCRIPT.replace("torchrun --nproc_per_node $GPUS --nnodes ${NODES:-2}", "srun python")
    assert read(tmp_path, direct).ranks == 32
    assert read(tmp_path, SCRIPT.replace("--nproc_per_node $GPUS", "")).ranks is None


@pytest.mark.parametrize(
    ("options", "launch", "ranks"),
    [
        # tasks are no ranks where each starts several
        ("--nodes=16 --ntasks=16", "srun torchrun --nproc_per_node $SLURM_GPUS_ON_NODE", None),
        ("--nodes=16 --ntasks-per-node=1", "srun torchrun --nproc-per-node=gpu", None),
        ("--nodes=16 --ntasks=16", "srun python -m torch.distributed.run", None),
        ("-n 16", "srun accelerate launch --num_processes $RANKS", None),
        ("--ntasks=16", "srun $LAUNCHER", None),
        ("--nodes=16 --ntasks=16 --gres=gpu:8", "srun torchrun --nproc_per_node $GPUS", 128),
        ("--nodes=16\n#SBATCH --gres=gpu:h100:4", "srun torchrun --nproc_per_node $GPUS", 64),
        ("--nodes=16 --ntasks=16", "srun torchrun --nproc_per_node 8 --nnodes $NODES", 128),
        ("--nodes=16 --gpus-per-node=8", "srun python", 128),
        ("--nodes=2 --ntasks=16  # all", "srun python", 16),
    ],
)
def test_tasks_of_slurm_are_ranks_where_they_start_python(tmp_path, options, launch, ranks):
    script = f"#!/bin/bash\n#SBATCH {options}\n{launch} pretrain_gpt.py --num-layers 4\n"
    assert read(tmp_path, script).ranks == ranks


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("deepspeed --num_gpus 8 --num_nodes 2", 16),
        ("accelerate launch --num_processes 12", 12),
        ("mpirun -np 24 python", 24),
        ("srun --ntasks=32 python", 32),
        ("srun -N 2 --ntasks-per-node=4 -n 8 python", 8),
        ("python -m torch.distributed.launch --nproc_per_node=4", 4),
        ("mpirun -np 99999999 python", None),
    ],
)
def test_ranks_are_those_of_the_launcher(tmp_path, launcher, ranks):
    assert read(tmp_path, f"{launcher} pretrain_gpt.py --num-layers 4").ranks == ranks


@pytest.mark.parametrize(
    "text",
    [
        "--num-layers 4 \\\n  --hidden-size 64",
        "--num-layers 4\n--hidden-size=64  # comment",
        'ARGS="--num-layers 4 --hidden-size 64"',
        "ARGS=(\n --num-layers 4\n --hidden-size 64\n)",
    ],
)
def test_a_file_of_arguments_needs_no_launch(tmp_path, text):
    assert flags(read(tmp_path, text)) == ["--num-layers 4", "--hidden-size 64"]


def test_the_launch_with_the_most_flags_is_read(tmp_path):
    text = "python tools/preprocess.py --workers 2\npython p.py --num-layers 4 --hidden-size 64"
    source = read(tmp_path, text)
    assert source.program == "p.py" and "2 launches" in source.notes[0]


def test_a_yaml_file_has_model_args(tmp_path):
    text = """
ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 4
  --bf16: true
  --swiglu: false
  --data-path: ${DATA}/x
  --moe-layer-freq: ([0]*1+[1]*3)
  --split: "'99,1,0'"
  --recompute-modules: "[layernorm moe_act]"
"""
    source = read(tmp_path, text, "model_config.yaml")
    expected = [
        "--num-layers 4",
        "--bf16",
        "--data-path ${DATA}/x",
        "--moe-layer-freq ([0]*1+[1]*3)",
        "--split 99,1,0",
        "--recompute-modules layernorm moe_act",
    ]
    assert flags(source) == expected and source.variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"echo hello", "a.sh", "no flags of Megatron-LM"),
        (b"", "a.sh", "no flags of Megatron-LM"),
        (b"python p.py --epochs 3 --model x", "a.sh", "no flags of Megatron-LM"),
        (b"\x7fELF\x00\x01\xff\xfe", "a.sh", "no text"),
        (b"--num-layers 4\0", "a.sh", "no text"),
        (b"--num-layers 4 " * (MAX_BYTES // 10), "a.sh", "at most"),
        (b"--num-layers 4 " * 5_000, "a.sh", "words of arguments"),
        (b"python p.py --save 'x", "a.sh", "not closed"),
        (b"a: [", "a.yaml", "cannot be read"),
        (b"[1, 2]", "a.yaml", "no flags of Megatron-LM"),
        (b"a: &a [1]\nb: *a", "a.yaml", "alias"),
        (b"MODEL_ARGS: 3", "a.yaml", "no flags of Megatron-LM"),
    ],
)
def test_bad_input_is_one_error(tmp_path, content, name, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, content, name)


def test_a_missing_file_and_a_pipe_are_errors(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")
    for name in ("none.sh", "pipe"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_source(tmp_path / name, variables={})


def test_words_of_the_command_line():
    source = source_of_words(["--num-layers", "4", "--bf16"])
    assert source.arguments == [Argument("--num-layers", ("4",)), Argument("--bf16")]
    for words in (["x"], ["--nothing"], ["x", "--num-layers", "4"]):
        with pytest.raises(ConfigError):
            source_of_words(words)


def test_stored_arguments_become_flags():
    stored = {
        "num_layers": 4,
        "bf16": True,
        "fp16": False,
        "load": None,
        "world_size": 8,
        "add_bias_linear": False,
        "betas": [0.9, 0.95],
        "not a name": 1,
    }
    source = source_of_stored("ck", stored)
    assert source.ranks == 8
    assert flags(source) == [
        "--betas 0.9 0.95",
        "--bf16",
        "--num-layers 4",
        "--world-size 8",
        "--disable-bias-linear",
    ]

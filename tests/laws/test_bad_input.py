"""Every mistake a user can make is one message: what, why and how to fix it; once over all ranks,
exit code 2, soon.

Nearly all are tried on one rank through `main`, which is what every rank runs; on processes stand
those where ranks meet a mistake apart from each other, or where a rank could be left waiting.
"""

import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.errors import EnvironmentFault
from nanotrain.plan.plan import plan_run
from nanotrain.train.inputs import open_inputs
from nanotrain.train.main import main
from nanotrain.train.same_start import require_same_start
from tests.harness import ranks, run_ranks
from tests.laws.command_line import (
    GLOBAL_BATCH,
    SEQ_LENGTH,
    VOCAB_SIZE,
    ForkedRanks,
    arguments,
    random_tokens,
    run_command_lines,
    steps_of,
)
from tests.laws.megatron_file import write_tokens

SOON_S = 60.0  # CPU time, which a busy machine hardly lengthens
MESSAGE = re.compile(r"^error: (.+(?:\n  - .+)*)$", re.MULTILINE)

MISTAKEN_WORDS = {
    # what is typed -> what the message must say
    "--hiden-size 64": "unknown flag --hiden-size; did you mean --hidden-size?",
    "optim.lrr=3": "unknown key optim.lrr; did you mean optim.lr?",
    "optm.lr=3": "did you mean optim.lr?",
    "lr=3": "unknown key lr: a key names its section; did you mean optim.lr?",
    "+config=tyni": "there is no recipe 'tyni'.*did you mean \\+config=tiny?",
    "--bf16=yes": "--bf16=yes gives --bf16 a value: it takes none; write --bf16 alone",
    "--lr": "--lr has no value: it takes one; --lr is peak learning rate",
    "tiny": "unexpected argument 'tiny': it is neither a flag nor key=value",
    "--lr fast": "optim.lr is 'fast': it takes a number; --lr is peak learning rate",
    "--num-layers 1.5": "model.num_layers is '1.5': it takes a whole number",
    "--adam-beta1 1.5": "optim.adam_beta1 is 1.5: it must be at least 0 and below 1",
    "--data-parallel-sharding-strategy zero2": "it takes one of no_shard, optim, optim_grads",
    "--outer-dp-sharding-strategy optim": "num_distributed_optimizer_instances is 1, so there is nothing to shard",
    "--grad-reduce-in-bf16": "grad_reduce_in_bf16 with params_dtype fp32: .*set --bf16",
    "--num-distributed-optimizer-instances 2": "2 optimizer instances cannot share dp*cp = 1 rank:",
    "--num-distributed-optimizer-instances 3 --data-parallel-sharding-strategy no_shard": "3 has no effect with",
    "--hidden-size 25": "hidden_size 25 cannot be split into 2 heads.*set --hidden-size 24 or 28, --num-attention-heads to a divisor",
    "--num-query-groups 3": "2 query heads cannot share 3 key/value heads",
    "--global-batch-size 13 --micro-batch-size 2": "batch of 13 samples cannot be split.*set --global-batch-size 14",
    "--data-parallel-size 2": "--data-parallel-size is 2, the run has 1",
    "--tensor-model-parallel-size 3": "tensor_model_parallel_size|tp=3",
    "--seq-length 2000": "seq_length 2000 is longer than max_position_embeddings 1024.*set --seq-length 1024",
    "--split 0,1,0": "split is '0,1,0'.*training needs some",
    "--lr-wsd-decay-iters 4": "optim.lr_wsd_decay_iters = 4 has no effect.*leave --lr-wsd-decay-iters out",
    "--lr-warmup-init 1e-5 --lr-warmup-iters 0": "optim.lr_warmup_init = 1e-05 has no effect: there is no warmup",
    "--loss-scale-window 4": "precision.loss_scale_window = 4 has no effect: only params_dtype fp16 scales the loss",
    "--load nowhere": "nowhere is not a checkpoint: there is no such folder; name a run folder",
    "--pretrained-checkpoint nowhere": "cannot read nowhere/config.json.*give a folder as `save_pretrained` writes it",
    "--tokenizer-model nowhere": "nowhere.*give a folder with a tokenizer.json",
    "--data-path nowhere": "nowhere.idx does not exist.*nowhere.bin is missing too.*nanotrain prepare",
    "--eval-interval 2 --split 99,1,0": "the valid split of .* has 0 tokens, too few for one sample.*--eval-interval 0",
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("mistake", MISTAKEN_WORDS)
def test_mistaken_words_are_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mistake: str
) -> None:
    message = refused(arguments(tmp_path / "run", "--num-workers 0", mistake), capfd)
    assert re.search(MISTAKEN_WORDS[mistake], message) or MISTAKEN_WORDS[mistake] in message, (
        message
    )


def cut_bin(prefix: Path) -> None:
    file = prefix.with_suffix(".bin")
    file.write_bytes(file.read_bytes()[:-100])


def cut_idx(prefix: Path) -> None:
    file = prefix.with_suffix(".idx")
    file.write_bytes(file.read_bytes()[:-3])


def swap_idx(prefix: Path) -> None:
    other = prefix.with_name("other")
    write_tokens(other, random_tokens()[:900])
    shutil.copy(other.with_suffix(".idx"), prefix.with_suffix(".idx"))


def remove_idx(prefix: Path) -> None:
    prefix.with_suffix(".idx").unlink()


def remove_bin(prefix: Path) -> None:
    prefix.with_suffix(".bin").unlink()


def write_text_into_idx(prefix: Path) -> None:
    prefix.with_suffix(".idx").write_text(
        "once upon a time there was a text that was no index at all"
    )


def empty_it(prefix: Path) -> None:
    prefix.with_suffix(".bin").write_bytes(b"")
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQq", 1, 8, 0, 1, 0)
    )


def shorten(prefix: Path) -> None:
    write_tokens(prefix, random_tokens()[:SEQ_LENGTH])


def put_a_large_id_first(prefix: Path) -> None:
    tokens = random_tokens()
    tokens[3] = VOCAB_SIZE
    write_tokens(prefix, tokens)


def name_floats(prefix: Path) -> None:
    file = prefix.with_suffix(".idx")
    file.write_bytes(file.read_bytes()[:17] + b"\x06" + file.read_bytes()[18:])


@pytest.mark.parametrize(
    ("damage", "stated"),
    [
        (
            cut_bin,
            "tokens.bin has 2900 bytes where its index asks for 3000.*copy or prepare the corpus again",
        ),
        (
            cut_idx,
            "tokens.idx has .* bytes where its header asks for .*copy or prepare the corpus again",
        ),
        (
            swap_idx,
            "tokens.bin has 3000 bytes where its index asks for 1800.*the .idx belongs to another .bin",
        ),
        (remove_idx, "tokens.idx does not exist.*tokens.bin is there; check the path"),
        (remove_bin, "tokens.bin does not exist.*tokens.idx is there; check the path"),
        (write_text_into_idx, "tokens.idx is no Megatron-LM index"),
        (
            empty_it,
            "tokens is an empty corpus: it has 0 sequences.*prepare it from files that contain text",
        ),
        (
            shorten,
            "the train split of .*tokens has 16 tokens, too few for one sample.*seq_length \\+ 1 = 17",
        ),
        (
            put_a_large_id_first,
            "token id 100 at position 3 of .*tokens.bin: the model's vocabulary has ids 0 to 99",
        ),
        (name_floats, "tokens.idx has tokens of dtype code 6 .float64."),
    ],
)
def test_a_damaged_corpus_is_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None], stated: str
) -> None:
    line = arguments(tmp_path / "run", "data.shuffle=false --num-workers 0")
    damage(tmp_path / "tokens")
    message = refused(line, capfd)
    assert re.search(stated, message), message


@pytest.mark.parametrize("place", ["file", "below a file"])
def test_a_run_folder_that_cannot_be_written_is_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "taken").write_text("")
    folder = tmp_path / "taken" / "run" if place == "below a file" else tmp_path / "taken"
    message = refused([*arguments(tmp_path / "run"), f"train.run_dir={folder}"], capfd)
    assert re.search(
        "the run folder .*taken.* cannot be written.*choose another folder with --run-dir", message
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints of steps 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    run_ranks(
        2,
        run_command_lines,
        arguments(run_dir, "--train-iters 6 --save-interval 2 --micro-batch-size 2"),
    )
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    shutil.copytree(trained.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def cut_shard(folder: Path) -> None:
    shard = folder / "shard-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])


def lose_shard(folder: Path) -> None:
    (folder / "shard-00000-of-00002.safetensors").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_manifest(folder: Path) -> None:
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text()[:1000])


@pytest.mark.parametrize("damage", [cut_shard, lose_shard, lose_manifest, cut_manifest])
def test_a_half_written_checkpoint_is_passed_over_and_refused_by_name(
    run_dir: Path, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    newest = checkpoint(run_dir, 6)
    damage(newest)

    message = refused(arguments(run_dir, "--num-workers 0 --load", str(newest)), capfd)
    assert "step-00000006" in message and "load an older checkpoint of the run" in message

    assert main(arguments(run_dir, "--num-workers 0 --train-iters 5")) == 0
    reply = capfd.readouterr().err
    skipped = "^skipped unusable checkpoints in .*step-00000006 .*; using step-00000004$"
    assert len(re.findall(skipped, reply, re.M)) == 1
    assert "step 4, 48 samples consumed" in reply and "error" not in reply
    assert [step["step"] for step in steps_of(run_dir)] == [1, 2, 3, 4, 5]


def test_a_flipped_bit_is_noticed_and_the_older_checkpoint_taken(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shard = checkpoint(run_dir, 6) / "shard-00000-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(bytes(content))
    message = refused(
        arguments(run_dir, "--num-workers 0 --train-iters 8 --load", str(checkpoint(run_dir, 6))),
        capfd,
    )
    assert re.search(
        "is damaged.*shard-00000-of-00002.safetensors have crc32 .*load an older checkpoint",
        message,
    )

    ended = ForkedRanks(
        arguments(run_dir, "--train-iters 5 --micro-batch-size 2"), folder=run_dir.parent
    ).wait()
    assert ended.exit_code == 0, ended.output
    line = (
        "step-00000006 cannot be loaded and will be renamed .*crc32.*; resuming from step-00000004$"
    )
    assert len(re.findall(line, ended.output, re.M)) == 1, ended.output
    assert (run_dir / "checkpoints" / "step-00000006.superseded-1").is_dir()
    assert [step["step"] for step in steps_of(run_dir)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("model", "stated"),
    [
        ("--hidden-size 32", "model options differ: model.hidden_size 24 there, 32 here"),
        ("--num-layers 3", "model/layers.2.*is missing there.*model.num_layers 2 there, 3 here"),
        ("--num-layers 1", "model.num_layers 2 there, 1 here"),
        ("--vocab-size 300", "model.vocab_size 100 there, 300 here"),
    ],
)
def test_a_checkpoint_of_another_model_is_one_message(
    run_dir: Path, capfd: pytest.CaptureFixture[str], model: str, stated: str
) -> None:
    message = refused(arguments(run_dir, "--num-workers 0 --train-iters 8", model), capfd)
    assert re.search(
        f"the checkpoint of step 6 is of another model, .*{stated}.*or another --load", message
    ), message


def late_large_id(prefix: Path, *, step: int) -> int:
    """Put an id outside the vocabulary into one sample of a step; its place."""
    tokens = random_tokens()
    place = ((step - 1) * GLOBAL_BATCH + 5) * SEQ_LENGTH + 7
    tokens[place] = VOCAB_SIZE
    write_tokens(prefix, tokens)
    return place


def test_a_large_token_id_that_one_rank_meets_late_ends_all_with_one_message(
    tmp_path: Path,
) -> None:
    line = arguments(
        tmp_path / "run",
        "data.shuffle=false --train-iters 9 --micro-batch-size 2 --save-interval 3",
    )
    place = late_large_id(tmp_path / "tokens", step=5)

    output = refused_by_all(line, tmp_path)

    assert MESSAGE.findall(output) == [
        f"token id 100 at position {place} of {tmp_path}/tokens.bin: the model's vocabulary has ids 0 to 99; "
        "set --vocab-size to the tokenizer's, or prepare the corpus with the model's tokenizer"
    ]
    assert [step["step"] for step in steps_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert checkpoint(tmp_path / "run", 3).exists()


def test_words_that_are_wrong_only_for_the_world_are_one_message_of_all_ranks(
    tmp_path: Path,
) -> None:
    ended = ForkedRanks(
        arguments(tmp_path / "run", "--micro-batch-size 12"), folder=tmp_path
    ).wait()
    assert ended.exit_code == 2 and "Traceback" not in ended.output
    assert MESSAGE.findall(ended.output) == [
        "a global batch of 12 samples has less than one microbatch per rank: micro_batch_size 12 x data-parallel size "
        "2 = 24; set --global-batch-size 24 or another --micro-batch-size"
    ]


def test_all_ranks_together_warn_once_of_a_checkpoint_they_pass_over(run_dir: Path) -> None:
    cut_shard(checkpoint(run_dir, 6))
    ended = ForkedRanks(
        arguments(run_dir, "--train-iters 5 --micro-batch-size 2"), folder=run_dir.parent
    ).wait()
    assert ended.exit_code == 0, ended.output
    assert ended.output.count("skipped unusable checkpoints") == 1
    assert "step 5/5" in ended.output


@ranks(2, threads=False)
def test_ranks_that_would_start_from_different_checkpoints_say_so(
    ctx: ParallelContext, run_dir: Path
) -> None:
    if ctx.rank == 1:  # a machine without the folder of the others
        run_dir = run_dir.with_name("elsewhere")
    line = [*arguments(run_dir), f"--data-path={run_dir.parent / 'tokens'}", "--num-workers", "0"]
    config, inputs = open_inputs(load(line))
    with pytest.raises(
        EnvironmentFault, match="rank 0 starts from step-00000006, rank 1 from no checkpoint"
    ):
        require_same_start(plan_run(config, 2, rank=ctx.rank), inputs, context=ctx)


@ranks(2, threads=False)
def test_a_rank_that_reads_no_manifest_starts_from_the_checkpoint_of_the_first(
    ctx: ParallelContext, run_dir: Path
) -> None:
    line = [*arguments(run_dir), f"--data-path={run_dir.parent / 'tokens'}", "--num-workers", "0"]
    config, inputs = open_inputs(load(line), reads_checkpoint=ctx.rank == 0)
    assert (inputs.checkpoint is None) == (ctx.rank == 1)
    agreed = require_same_start(plan_run(config, 2, rank=ctx.rank), inputs, context=ctx)
    assert agreed.checkpoint == checkpoint(run_dir, 6) and agreed.is_resumed


def refused(line: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one message with which a command line is refused."""
    capfd.readouterr()
    started = time.process_time()
    assert main(line) == 2
    assert time.process_time() - started < SOON_S
    reply = capfd.readouterr()
    assert "Traceback" not in reply.err + reply.out
    messages = MESSAGE.findall(reply.err)
    assert len(messages) == 1 and "error:" not in reply.out, reply
    return str(messages[0])


def refused_by_all(line: list[str], tmp_path: Path) -> str:
    """What two ranks say when their run is refused, as torchrun starts them."""
    ended = ForkedRanks(line, folder=tmp_path).wait()
    assert ended.exit_code == 2 and "Traceback" not in ended.output, ended.output
    return ended.output


def test_tokens_of_the_tests_lie_inside_the_vocabulary() -> None:
    assert int(np.max(random_tokens())) < VOCAB_SIZE

"""Flags of Megatron-LM for what nanotrain has under another name, or in another form."""

import pytest

from nanotrain.config.load import Loaded, load
from nanotrain.errors import ConfigError

SIZES = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--attention-dropout 0 --hidden-dropout 0 --megatron-defaults"
)
SPLITS = "--train-data-path web --valid-data-path"


def loaded(arguments: str) -> Loaded:
    return load([*arguments.split(), *SIZES.split()])


@pytest.mark.parametrize(
    ("arguments", "sets"),
    [
        ("--multiple-validation-sets", ["0=code", "1=math"]),
        ("--multiple-validation-sets --validation-set-names C M", ["C=code", "M=math"]),
        ("--validation-set-names C M --multiple-validation-sets", ["C=code", "M=math"]),
    ],
)
@pytest.mark.parametrize("corpora", ["code math", "0.3 code 0.7 math"])
def test_validation_sets_have_a_loss_each(arguments, sets, corpora):
    data = loaded(f"{SPLITS} {corpora} {arguments}").config.data
    assert data.valid_data_path == sets


def test_validation_sets_that_have_names_keep_them():
    data = loaded(f"{SPLITS} C=code M=math --multiple-validation-sets").config.data
    assert data.valid_data_path == ["C=code", "M=math"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{SPLITS} code math --validation-set-names C", "has 1 name: --valid-data-path names 2"),
        ("--data-path web --multiple-validation-sets", "validation documents are one blend"),
        (
            "--micro-batch-size 1 --global-batch-size 8 --eval-iters 1 --eval-global-batch-size 4",
            "4 samples are no whole global batches of 8",
        ),
        ("--ckpt-format tar", "it takes torch or torch_dist or zarr"),
        (
            "--outer-dp-sharding-strategy optim_grads",
            "--num-distributed-optimizer-instances to shard",
        ),
        ("--fake-process-group", "nanotrain dry-run --world-size N takes a step"),
        ("--fine-grained-activation-offloading --offload-modules moe_act", "by whole layers"),
        ("--activation-offload-fraction 0.5", "by whole layers"),
        ("--sft --sft-tokenizer-prompt-format identity", "has its template already"),
        ("--sft --chat-template chat.jinja", "has its template already"),
    ],
)
def test_what_has_no_counterpart_names_what_to_write(arguments, message):
    with pytest.raises(ConfigError, match=message):
        loaded(arguments)


BATCHES = "--micro-batch-size 1 --global-batch-size 8 --eval-iters 6"


@pytest.mark.parametrize(
    ("arguments", "eval_iters"),
    [
        (f"{BATCHES} --eval-global-batch-size 8 --eval-micro-batch-size 2", 6),
        (f"{BATCHES} --eval-global-batch-size 4", 3),
        ("--step-batch-size-schedule 0:4 1M:8 --eval-iters 6 --eval-global-batch-size 16", 12),
    ],
)
def test_validation_takes_as_many_samples(arguments, eval_iters):
    assert loaded(arguments).config.train.eval_iters == eval_iters


def test_files_in_another_form_are_named_in_the_log():
    notes = loaded("--ckpt-format torch_dist --log-energy --dist-ckpt-workers 2").notes
    (note,) = [note for note in notes if note.startswith("files and logs that differ from")]
    assert "--ckpt-format (checkpoints are a manifest" in note
    assert "--log-energy (energy is not measured)" in note
    assert "--dist-ckpt-workers" not in note


def test_graphs_of_transformer_engine_are_captured_here():
    line = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp --cuda-graph-warmup-steps 0"
    result = loaded(line)
    train = result.config.train
    assert (train.cuda_graph_impl, train.cuda_graph_warmup_steps) == ("local", 1)
    assert train.cuda_graph_scope == ["attn", "mlp"]
    assert any("captures the same parts" in note for note in result.notes)


def test_buffers_of_nccl_are_fixed_memory_with_megatron_fsdp():
    assert loaded("--nccl-ub --use-megatron-fsdp").config.parallel.fsdp_double_buffer
    assert not loaded("--nccl-ub").config.parallel.fsdp_double_buffer


def test_what_only_tunes_is_accepted():
    loaded("--disable-bucketing --sync-model-each-microbatch --disable-mamba-mem-eff-path")


def test_settings_of_an_absent_part_are_reset():
    config = loaded(
        "--lr-decay-style cosine --lr-wsd-decay-style minus_sqrt --first-last-layers-bf16"
    ).config
    assert config.precision.fp8 is None
    assert config.optim.lr_wsd_decay_style != "minus_sqrt"

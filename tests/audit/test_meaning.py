"""What flags of Megatron-LM mean here: the model, what is left out, and the cost."""

import shlex

import pytest

from nanotrain.audit.arguments import read_arguments
from nanotrain.audit.meaning import (
    Meaning,
    figures_of,
    meaning_of_flags,
    meaning_of_stored,
    without_references,
)
from nanotrain.planner.hardware import gpu_of
from tests.config.launch_scripts import SCRIPTS

TINY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 "
    "--vocab-size 128 --lr 1e-4 --bf16"
)
# parameters in billions, as their publishers state them
SIZES = {"llama3_8b_fp8": 8.03, "mixtral_8x7b": 46.7, "deepseek_v3_fsdp": 683}


def meaning_of(text: str, program: str = "") -> Meaning:
    return meaning_of_flags(read_arguments(shlex.split(text))[0], program=program)


@pytest.mark.parametrize("name", SIZES)
def test_the_model_has_the_published_size(name):
    ranks, arguments = SCRIPTS[name]
    meaning = meaning_of(arguments)
    figures = figures_of(meaning, ranks, gpu=gpu_of("h100"))
    assert figures.total / 1e9 == pytest.approx(SIZES[name], rel=0.005)
    engines = [prediction.scenario.engine.name for prediction in figures.predictions]
    assert engines == ["megatron", "nanotrain"] and meaning.refused == []


def test_flags_without_a_counterpart_are_named_and_left_out():
    meaning = meaning_of(f"{TINY} --fp32-residual-connection --no-such-flag 3 --rotary-base 10")
    assert list(meaning.without_counterpart.values()) == [["--fp32-residual-connection"]]
    assert meaning.unknown == ["--no-such-flag 3"]
    assert meaning.config is not None and meaning.config.model.rotary_base == 10


@pytest.mark.parametrize(
    ("flags", "program", "letters"),
    [
        ("--hybrid-attention-ratio 0.5", "pretrain_mamba.py", "M**M"),
        ("", "../pretrain_mamba.py", "MMMM"),
        ("--hybrid-attention-ratio 0.0", "pretrain_mamba.py", "MMMM"),
        ("--hybrid-attention-ratio 0.0", "pretrain_gpt.py", None),
        ("--hybrid-override-pattern M-M*", "pretrain_hybrid.py", "M-M*"),
        ("", "pretrain_gpt.py", None),
    ],
)
def test_a_program_of_mamba_trains_mamba(flags, program, letters):
    meaning = meaning_of(f"{TINY} {flags}", program=program)
    assert meaning.config is not None and meaning.config.model.hybrid_layer_pattern == letters


def test_a_file_of_corpora_is_not_read():
    meaning = meaning_of(f"{TINY} --per-split-data-args-path none.json --data-args-path none.txt")
    assert meaning.refused == [] and len([n for n in meaning.notes if "is not read" in n]) == 2


def test_a_model_without_sizes_is_not_that_of_a_default():
    for flags in ("--num-layers 4 --bf16", "--hidden-size 64 --num-attention-heads 4"):
        meaning = meaning_of(flags)
        assert meaning.config is None
        assert any("no flag sets" in reason for reason in meaning.refused)
    sized = meaning_of(f"{TINY.replace('--num-layers 4', '')} --hybrid-layer-pattern M-M*")
    assert sized.config is not None and sized.config.model.num_layers == 4


def test_a_flag_that_makes_every_layer_mamba_is_not_always_so():
    meaning = meaning_of(f"{TINY} --is-hybrid-model")
    assert meaning.config is not None and meaning.config.model.hybrid_layer_pattern == "MMMM"
    assert meaning.always == []


def test_another_value_of_what_is_always_so_has_no_counterpart():
    meaning = meaning_of(f"{TINY} --distributed-backend mpi")
    assert list(meaning.without_counterpart.values()) == [["--distributed-backend mpi"]]
    assert meaning.refused == []


def test_what_is_accepted_stays():
    meaning = meaning_of(f"{TINY} --distributed-backend nccl --moe-grouped-gemm --swiglu")
    assert meaning.without_counterpart == {} and meaning.config.model.activation == "swiglu"
    assert meaning.always == ["--distributed-backend", "--moe-grouped-gemm"]


@pytest.mark.parametrize(
    ("text", "program", "kind"),
    [
        (TINY, "examples/bert/pretrain_bert.py", "BERT"),
        (TINY, "pretrain_t5.py", "T5"),
        (f"{TINY} --decoder-num-layers 4", "", "T5"),
        (f"{TINY} --language-model-type llama3", "", "images and text"),
        (TINY, "examples/multimodal/train.py", "images and text"),
    ],
)
def test_other_models_have_no_counterpart(text, program, kind):
    meaning = meaning_of(text, program)
    assert meaning.config is None and kind in meaning.refused[0] and len(meaning.refused) == 1


def test_a_vocabulary_that_is_not_named_is_assumed_and_said():
    text = TINY.replace("--vocab-size 128", "") + " --tensor-model-parallel-size 2"
    meaning = meaning_of(text)
    assert meaning.config.model.vocab_size == 50_257
    assert meaning.config.model.make_vocab_size_divisible_by == 2 * 128
    assert any("50,257 tokens, of GPT-2" in note for note in meaning.notes)
    named = meaning_of(
        f"{text} --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-8B"
    )
    assert any("151,936 tokens, of Qwen" in note for note in named.notes)


def test_a_layout_that_does_not_fit_the_ranks_is_planned_on_others():
    meaning = meaning_of(f"{TINY} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")
    figures = figures_of(meaning, 6, gpu=gpu_of("h100"))
    assert figures.ranks == 4 and len(figures.predictions) == 2
    assert "6 GPUs hold no whole replica" in meaning.refused[0]


def test_a_recipe_that_the_gpu_lacks_is_a_reason():
    meaning = meaning_of(f"{TINY} --fp8-format e4m3 --fp8-recipe mxfp8")
    figures = figures_of(meaning, 8, gpu=gpu_of("h100"))
    assert figures.predictions == () and "mxfp8" in " ".join(meaning.refused)


@pytest.mark.parametrize(
    "change",
    [
        "--num-attention-heads 0",
        "--num-attention-heads 7",
        "--hidden-size -1",
        "--num-layers many",
        "--num-layers 0",
        "--seq-length 0",
        "--num-layers",
        "--tensor-model-parallel-size 3",
        "--micro-batch-size 0",
        "--global-batch-size 7 --micro-batch-size 2",
        "--lr nan",
        "--vocab-size 0",
        "--num-experts 3 --expert-model-parallel-size 2",
        "--data-path ${oc.env:HOME}",
        "--hybrid-layer-pattern QQQ",
        "--fp8-format hybrid --fp8-recipe custom",
        "--optimizer lookahead",
    ],
)
def test_wrong_values_are_reasons_and_never_a_traceback(change):
    meaning = meaning_of(f"{TINY} {change}")
    figures_of(meaning, None, gpu=gpu_of("h100"))
    if "oc.env" not in change:
        assert meaning.refused


def test_values_refer_to_nothing(monkeypatch):
    monkeypatch.setenv("HIDDEN", "secret")
    meaning = meaning_of(f"{TINY} --save '${{oc.env:HIDDEN}}' --data-path '$HIDDEN' x")
    assert "secret" not in repr(meaning)
    assert without_references("$A") == "unset_A"


def test_stored_arguments_keep_their_layout():
    stored = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "train_iters": 10,
        "padded_vocab_size": 128,
        "vocab_size": 100,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "position_embedding_type": "rope",
        "lr": 1e-4,
    }
    meaning = meaning_of_stored(stored)
    assert meaning.refused == []
    parallel = meaning.config.parallel
    assert parallel.tensor_model_parallel_size == parallel.pipeline_model_parallel_size == 2
    assert parallel.data_parallel_sharding_strategy == "optim"
    assert figures_of(meaning, 8, gpu=gpu_of("h100")).predictions


@pytest.mark.parametrize(
    "stored",
    [{}, {"padded_vocab_size": "x"}, {"padded_vocab_size": 128, "num_layers": "${a}"}],
)
def test_stored_arguments_that_describe_nothing_are_reasons(stored):
    meaning = meaning_of_stored(stored)
    assert meaning.config is None and meaning.refused

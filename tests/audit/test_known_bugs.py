"""The table of known bugs of Megatron-LM: what flags a bug, and what does not."""

import shlex
from pathlib import Path

import pytest

from nanotrain.audit.known_bugs import (
    FOLDER,
    known_bugs,
    matching_bugs,
    matching_refusals,
    newest_version,
    read_version,
    refusals,
)
from nanotrain.audit.sources import source_of_words
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError
from tests.config.launch_scripts import SCRIPTS

ROOT = Path(__file__).parents[2]
TABLE = read_table("known_bugs", folder=FOLDER)
LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 "
    "--max-position-embeddings 4096 --position-embedding-type rope --hidden-dropout 0.0 "
    "--global-batch-size 128"
)
TP, EXPERTS = "--tensor-model-parallel-size 2", "--num-experts 8"
MTP, TOKENS = "--mtp-num-layers 1", "--calculate-per-token-loss"
CP, PP = "--context-parallel-size 2", "--pipeline-model-parallel-size 2"
EP, SP = "--expert-model-parallel-size 2", "--sequence-parallel"
FSDP, ZERO3 = "--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"
FULL = "--recompute-granularity full"
# id -> the arguments that are all needed; without any of them there is no such bug
TRIGGERS: dict[str, tuple[str, ...]] = {
    "label-smoothing-of-a-shard": ("--label-smoothing 0.1", TP),
    "mtp-loss-of-own-tokens": (MTP, TOKENS, "--eod-mask-loss", CP),
    "mtp-recompute-over-other-ranks": (MTP, "--distribute-saved-activations", FULL, TP),
    "padding-mask-of-other-ranks": (EXPERTS, SP, TP, "--sft"),
    "cross-attention-over-other-ranks": (
        "--encoder-num-layers 4",
        "--decoder-num-layers 4",
        SP,
        TP,
    ),
    "image-embeddings-over-other-ranks": ("--language-model-type llama3", SP, TP),
    "sinks-not-in-the-norm": ("--softmax-type learnable", TP),
    "masked-loss-of-context-parallel-ranks": (CP, "--eod-mask-loss"),
    "balance-loss-of-all-ranks-tokens": (EXPERTS, "--moe-aux-loss-coeff 1e-2", TOKENS, "--sft", CP),
    "output-norm-of-linear-attention-not-summed": (
        TP,
        "--experimental-attention-variant gated_delta_net",
    ),
    "fsdp-checkpoint-of-another-pipeline-size": (
        "--use-megatron-fsdp",
        "--ckpt-format fsdp_dtensor",
        "--load ck",
        PP,
    ),
    "rotary-key-of-mla-not-summed": ("--multi-latent-attention", TP),
    "experts-not-in-the-norm": (EXPERTS, EP, TP, "--moe-grouped-gemm"),
    "gradients-of-experts-over-other-ranks": (EXPERTS, "--expert-tensor-parallel-size 1", TP),
    "expert-biases-not-in-the-norm": (
        EXPERTS,
        "--optimizer muon",
        EP,
        TP,
        "--expert-tensor-parallel-size 1",
    ),
    "balance-losses-divided-by-ranks": (EXPERTS, TOKENS, "--moe-z-loss-coeff 1e-3", TP),
    "balance-losses-divided-by-cp": (EXPERTS, "--moe-aux-loss-coeff 1e-2", CP),
    "sequence-balance-loss-divided-by-the-micro-batch": (
        EXPERTS,
        TOKENS,
        "--moe-aux-loss-coeff 1e-2",
        "--moe-router-load-balancing-type seq_aux_loss",
        "--micro-batch-size 4",
    ),
    "gradients-begin-with-gathered-parameters": ("--optimizer dist_muon", "--overlap-param-gather"),
    "muon-mixes-queries-and-gates": ("--optimizer muon", "--attention-output-gate"),
    "indexer-loss-of-every-microbatch": (
        "--experimental-attention-variant dsa",
        "--dsa-indexer-loss-coeff 0.1",
    ),
    "mtp-gradients-lost-in-fp8-recompute": (MTP, FULL, "--fp8-format hybrid"),
    "sharded-gradients-not-averaged": (FSDP, ZERO3, "--grad-reduce-in-bf16"),
    "gradients-of-one-rank-doubled": (FSDP, ZERO3, "--data-parallel-size 1"),
    "dropout-of-sequence-parallel-ranks": (SP, TP, "--hidden-dropout 0.1"),
}
# other arguments with which a bug is there, and one beside which it is not
OTHERS: dict[str, tuple[tuple[str, ...], str]] = {
    "sinks-not-in-the-norm": (("--enable-gpt-oss", TP), ""),
    "masked-loss-of-context-parallel-ranks": (("--sft", CP), TOKENS),
    "output-norm-of-linear-attention-not-summed": (("--hybrid-layer-pattern G-*-", TP), SP),
    "rotary-key-of-mla-not-summed": (("--multi-latent-attention", TP), SP),
    "expert-biases-not-in-the-norm": (
        (*TRIGGERS["expert-biases-not-in-the-norm"], "--optimizer dist_muon"),
        "--disable-bias-linear",
    ),
    "gradients-of-experts-over-other-ranks": (
        (EXPERTS, "--expert-tensor-parallel-size 4", TP),
        EP,
    ),
    "balance-losses-divided-by-ranks": (
        (EXPERTS, TOKENS, "--moe-aux-loss-coeff 1e-2", CP),
        "--moe-router-load-balancing-type none",
    ),
    "sharded-gradients-not-averaged": (
        ("--use-custom-fsdp", ZERO3, "--no-gradient-reduce-div-fusion"),
        TOKENS,
    ),
    "gradients-of-one-rank-doubled": ((FSDP, ZERO3, EXPERTS, EP, "--data-parallel-size 2"), ""),
    "muon-mixes-queries-and-gates": (
        ("--optimizer dist_muon", "--attention-output-gate"),
        "--muon-no-split-qkv",
    ),
}
VERSIONS = {
    "core_v0.9.0": (0, 9, 0),
    "0.16": (0, 16, 0),
    "0.16.1": (0, 16, 1),
    "v0.19.0": (0, 19, 0),
}


def bugs_of(*texts: str, version: str = "main", ranks: int | None = None) -> list[str]:
    source = source_of_words(shlex.split(" ".join([LLAMA, *texts])))
    matches = matching_bugs(source.values(ranks), read_version(version))
    return [match.row.id for match in matches]


def version_with(name: str) -> str:
    """A version that has a bug."""
    (bug,) = [bug for bug in known_bugs() if bug.id == name]
    versions = [f"0.{minor}.0" for minor in range(4, 21)]
    return [each for each in versions if bug.is_in(read_version(each))][-1]


def test_every_bug_has_a_trigger_here():
    assert len(TRIGGERS) == 25 and len(SCRIPTS) == 30  # numbers of docs/status.md
    assert set(TRIGGERS) == {bug.id for bug in known_bugs()} and set(OTHERS) < set(TRIGGERS)


@pytest.mark.parametrize("name", TRIGGERS)
def test_a_bug_is_flagged_by_its_arguments_alone(name):
    version = version_with(name)
    assert name in bugs_of(*TRIGGERS[name], version=version)
    for argument in TRIGGERS[name]:
        others = [other for other in TRIGGERS[name] if other != argument]
        others += ["--hidden-dropout 0"] if argument.startswith("--hidden-dropout") else []
        assert name not in bugs_of(*others, version=version), argument


@pytest.mark.parametrize("name", OTHERS)
def test_other_spellings_and_what_prevents_a_bug(name):
    others, prevented_by = OTHERS[name]
    version = version_with(name)
    assert name in bugs_of(*others, version=version)
    if prevented_by:
        assert name not in bugs_of(*others, prevented_by, version=version)


def test_at_least_nine_findings_are_flagged_from_flags_alone():
    findings = {bug.finding for bug in known_bugs() if bug.finding}
    unseen = {row["finding"] for row in TABLE["without_flags"]}
    assert len(findings) == 11 and findings | unseen == set(range(1, 14))
    assert not findings & unseen


def test_near_misses_are_clean():
    """One argument short of each bug: more than 30 command lines without any bug of main."""
    lines = set()
    for triggers in TRIGGERS.values():
        for argument in triggers:
            others = tuple(other for other in triggers if other != argument)
            if not bugs_of(*others):
                lines.add(others)
    clean = {line for line in lines if line}
    assert len(clean) >= 30


@pytest.mark.parametrize("name", SCRIPTS)
def test_published_scripts_are_clean_on_main(name):
    ranks, arguments = SCRIPTS[name]
    source = source_of_words(shlex.split(arguments))
    assert matching_bugs(source.values(ranks), newest_version()) == []


def test_published_scripts_with_experts_and_tp_had_a_bug_before_it_was_fixed():
    ranks, arguments = SCRIPTS["kimi_k2"]
    values = source_of_words(shlex.split(arguments)).values(ranks)
    found = [matching_bugs(values, read_version(version)) for version in ("0.18.2", "0.19.0")]
    assert "experts-not-in-the-norm" in [match.row.id for match in found[0]]
    assert found[1] == []


def test_the_data_parallel_size_counts_where_it_is_known():
    line = (MTP, TOKENS, "--eod-mask-loss")
    assert "mtp-loss-of-own-tokens" in bugs_of(*line, ranks=8)
    assert bugs_of(*line, ranks=1) == []


@pytest.mark.parametrize("text", VERSIONS)
def test_a_version_is_read(text):
    assert read_version(text) == VERSIONS[text]
    assert read_version("main") == newest_version()


@pytest.mark.parametrize("text", ["", "1", "0.99.0", "0.3.0", "x", "0.16.1.1", "9.0"])
def test_an_unknown_version_is_an_error(text):
    with pytest.raises(ConfigError, match="--megatron-version is"):
        read_version(text)


@pytest.mark.parametrize("bug", known_bugs(), ids=lambda bug: bug.id)
def test_a_row_names_a_test_and_an_issue(bug):
    assert (ROOT / bug.held_by).is_file()
    assert bug.address.startswith("https://github.com/NVIDIA/Megatron-LM/issues/")
    assert bug.effect and bug.here
    assert not bug.fixed or bug.first < bug.fixed
    page = " ".join((ROOT / "docs" / "audit.md").read_text().split())
    assert f"`{bug.id}`" in page and bug.effect in page and bug.held_by in page
    assert f"| {bug.versions} | {str(bug.conditions).replace('|', ' or ')}" in page


def test_a_script_is_refused_for_each_contradiction():
    lines = {
        "--fp16 --bf16": "one data type",
        "--train-iters 1 --train-samples 1": "in steps or in samples",
        f"{EXPERTS} {TP}": "sequence parallelism alone",
        "--overlap-param-gather --overlap-grad-reduce": "distributed optimizer",
        "--num-layers 12 --pipeline-model-parallel-size 8": "divided evenly",
        "--max-position-embeddings 1024 --seq-length 2048": "end of a sequence",
        "--sequence-parallel": "switched off",
    }
    for line, why in lines.items():
        values = source_of_words(line.split()).values(None)
        assert any(why in match.row.why for match in matching_refusals(values)), line


def test_what_agrees_is_no_contradiction():
    line = f"{LLAMA} {EXPERTS} {TP} {SP} --use-distributed-optimizer --overlap-param-gather"
    line += " --overlap-grad-reduce --train-iters 10 --lr-warmup-iters 2 --lr 1e-4 --min-lr 1e-5"
    values = source_of_words(line.split()).values(None)
    assert matching_refusals(values) == [] and len(refusals()) > 25


def test_published_scripts_do_not_contradict_themselves_but_one():
    refused = {}
    for name, (ranks, arguments) in SCRIPTS.items():
        values = source_of_words(shlex.split(arguments)).values(ranks)
        texts = [match.since for match in matching_refusals(values) if not match.row.is_ignored]
        if texts:
            refused[name] = texts
    assert refused == {"gpt_oss_20b": ["--num-layers 12 with --pipeline-model-parallel-size 8"]}


@pytest.mark.parametrize(
    ("flags", "ranks", "is_hit"),
    [
        ("", None, False),  # any number of GPUs
        (EXPERTS, None, False),
        (f"{EXPERTS} {EP}", None, False),
        (f"{EXPERTS} --expert-model-parallel-size 1", None, False),
        (f"{EXPERTS} {EP}", 2, True),
        (f"{EXPERTS} {EP}", 4, False),
        # as many ranks of ep as of dp; experts are not sharded over tp, so they have two replicas
        (f"{EXPERTS} {EP} {TP} --expert-tensor-parallel-size 1", 4, False),
        (f"{EXPERTS} {EP} {TP}", 4, True),
        (f"{EXPERTS} {EP} --expert-tensor-parallel-size 0", 2, True),
        (f"{EXPERTS} {EP} {CP}", 4, False),
        # fewer ranks of ep than of dp and cp together, and one replica
        (f"{EXPERTS} --expert-model-parallel-size 4 {CP}", 4, True),
    ],
)
def test_gradients_are_doubled_where_experts_have_one_replica(flags, ranks, is_hit):
    found = bugs_of(FSDP, ZERO3, flags, version="0.16.0", ranks=ranks)
    assert ("gradients-of-one-rank-doubled" in found) == is_hit

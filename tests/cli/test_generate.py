"""What `nanotrain generate` takes from its command line, and the texts of its ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.cli.generate import generate, generation_config, print_pieces
from nanotrain.cli.main import main
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import ConfigError, DataError, TopologyError
from nanotrain.inference.checkpoint import load_checkpoint, load_model, open_model
from nanotrain.inference.generate import Sampling
from nanotrain.launch import start_ranks
from nanotrain.topology.topology import Topology
from tests.harness import run_ranks
from tests.inference.test_checkpoint import EXPERTS, write_run

DENSE = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=257)
MOE = replace(DENSE, moe=MoEConfig(num_experts=4))
PROMPTS = ["abc", "a longer one"]
SAMPLINGS = (Sampling(temperature=0), Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=3))


def config_of(*flags: str, model: ModelConfig = DENSE, world_size: int = 1) -> Config:
    return generation_config(
        Config(model=model), load_line(parse(flags), to_train=False), world_size=world_size
    )


def test_sizes_of_the_shards_device_and_dtype_are_the_command_lines() -> None:
    flags = (
        "--tensor-model-parallel-size",
        "2",
        "--bf16",
        "--device",
        "cpu",
        "--pipeline-model-parallel-size",
        "1",
    )
    config = config_of(*flags, world_size=2)
    assert (config.precision.params_dtype, config.train.device) == ("bf16", "cpu")
    expert = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
    assert (
        config_of("--tensor-model-parallel-size", "4", *expert, model=MOE, world_size=4).model
        == MOE
    )


def test_stages_and_shares_of_a_sequence_have_lengths_that_the_rules_accept() -> None:
    sizes = ("--pipeline-model-parallel-size", "2", "--context-parallel-size", "2")
    config = config_of(*sizes, world_size=4)
    assert (config.data.seq_length, config.train.global_batch_size) == (4, 1)
    with_experts = config_of(*sizes, "--expert-model-parallel-size", "4", model=MOE, world_size=8)
    assert with_experts.train.global_batch_size == 2, "one microbatch per data-parallel rank"
    with pytest.raises(TopologyError, match=r"pp=2 and cp=2(.|\n)*on 4 ranks"):
        config_of(*sizes, world_size=8)


def test_ranks_beyond_the_shards_or_too_few_are_refused() -> None:
    with pytest.raises(
        TopologyError, match=r"on 2 ranks with tp=1(.|\n)*set --tensor-model-parallel-size 2"
    ):
        config_of(world_size=2)
    with pytest.raises(
        TopologyError, match=r"on 1 rank with tp=1 and ep=2(.|\n)*generate --nproc-per-node 2"
    ):
        config_of("--expert-model-parallel-size", "2", model=MOE)


@pytest.mark.parametrize("flags", [["--sequence-parallel"], ["--seq-length", "8"], ["--lr", "1"]])
def test_settings_of_training_are_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{flags[0]} has no effect on generation"):
        config_of(*flags)


@pytest.mark.parametrize(
    "flag", ["--max-new-tokens", "--max_new_tokens", "--generate-tokens", "--max-tokens"]
)
def test_names_of_the_number_of_tokens_elsewhere_lead_to_its_flag(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown {flag} .write --num-tokens."):
        generate(["runs/a", flag, "5"])


def test_a_model_that_the_size_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be shared by tp=8"):
        config_of("--tensor-model-parallel-size", "8", world_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    # logits far apart: a text that is all noise would be the same after any mistake
    options = {"init_method_std": 0.3, "untie_embeddings_and_output_weights": True}
    write_run(folder / "dense", **options)
    write_run(folder / "moe", moe=EXPERTS | {"router_enable_expert_bias": True}, **options)
    return folder


def text_of_shards(ctx: ParallelContext, path: Path) -> str:
    """A greedy text on tensor-parallel ranks, as the command starts them."""
    opened, size = open_model(path), ctx.topology.world_size
    flags = load_line(parse(["--tensor-model-parallel-size", str(size)]), to_train=False)
    config = generation_config(opened.config, flags, world_size=size)
    model = load_model(opened.with_model(config.model), context=ctx)
    return model.generate("abc", num_tokens=6, sampling=SAMPLINGS[0])


def test_more_ranks_than_the_padding_was_made_for_share_the_vocabulary(tmp_path: Path) -> None:
    write_run(tmp_path / "a", init_method_std=0.3, make_vocab_size_divisible_by=1)
    expected = load_checkpoint(tmp_path / "a").generate("abc", num_tokens=6, sampling=SAMPLINGS[0])
    assert run_ranks(2, text_of_shards, tmp_path / "a", tp=2) == [expected] * 2


def texts_here(ctx: ParallelContext, path: Path) -> tuple[Tensor, list[str]]:
    """The logits of a batch; greedy and sampled texts of two prompts with and without the cache,
    one with a stop.
    """
    model = load_model(open_model(path), context=ctx)
    logits, texts = model.model.logits(torch.arange(14).view(2, 7)).detach(), []
    for sampling in SAMPLINGS:
        # another draw, but the first rank's tokens count
        sampling = replace(sampling, seed=sampling.seed + ctx.rank)
        for use_cache in (True, False):
            pieces = list(
                model.stream(PROMPTS, num_tokens=6, sampling=sampling, use_cache=use_cache)
            )
            texts += ["".join(piece for row, piece in pieces if row == index) for index in range(2)]
    texts.append(model.generate("abc", num_tokens=6, sampling=SAMPLINGS[1], stops=[texts[4][2:4]]))
    with pytest.raises(DataError, match="positions"):
        model.stream(["x" * 5000])
    return logits, texts


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dense", {"tp": 2}),
        ("moe", {"ep": 2}),
        ("moe", {"tp": 2}),
        ("moe", {"tp": 2, "ep": 2, "etp": 1}),
    ],
)
def test_every_rank_of_the_shards_writes_the_text_of_one_rank(
    folder: Path, name: str, sizes: dict[str, int]
) -> None:
    logits, expected = texts_here(
        ParallelContext.attach(Topology.of(ParallelConfig(), 1)), folder / name
    )
    assert expected[:2] == expected[2:4] != expected[4:6] and len(set(expected)) > 3
    for sharded_logits, texts in run_ranks(2, texts_here, folder / name, **sizes):
        torch.testing.assert_close(sharded_logits, logits, rtol=1e-5, atol=2e-5)
        assert texts == expected


def test_the_command_writes_the_text_of_the_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "generate",
        str(folder / "dense"),
        "--prompt",
        "abc",
        "--num-tokens",
        "5",
        "--device",
        "cpu",
    ]
    assert main([*line, "--temperature", "0"]) == 0
    expected = load_checkpoint(folder / "dense").generate(
        "abc", num_tokens=5, sampling=SAMPLINGS[0]
    )
    assert capsys.readouterr().out == expected + "\n"


def test_with_ranks_the_command_is_checked_once_and_started_on_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []

    def start(
        program: list[str], *, options: list[str], environment: Any, check: Callable[[int], object]
    ) -> int:
        check(int(options[0].partition("=")[2]))
        started.append(program)
        return 0

    monkeypatch.setattr(start_ranks, "start_ranks", start)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    line = ["generate", "--nproc_per_node", "2", str(folder / "dense"), "--prompt", "a b"]
    assert main([*line, "--tensor-model-parallel-size", "2"]) == 0
    assert started == [["nanotrain", "generate", *line[3:], "--tensor-model-parallel-size", "2"]]
    assert main(line) == 2 and "generation on 2 ranks with tp=1" in capsys.readouterr().err
    evaluation = ["evaluate", "--nproc-per-node", "2", str(folder / "dense"), "--data", "corpus"]
    assert main([*evaluation, "--pipeline-model-parallel-size", "2"]) == 0
    assert started[1] == [
        "nanotrain",
        "evaluate",
        *evaluation[3:],
        "--pipeline-model-parallel-size",
        "2",
    ]
    assert main([*evaluation, "--tensor-model-parallel-size", "3"]) == 2
    assert "tp=3" in capsys.readouterr().err and len(started) == 2
    assert (
        main([*evaluation[:4], "--tasks", "x"]) == 2 and "with --tasks" in capsys.readouterr().err
    )


def test_only_the_first_rank_prints_and_a_closed_pipe_holds_up_no_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [(0, "b"), (0, "c")]

    def pieces() -> Iterator[tuple[int, str]]:
        while left:
            yield left.pop(0)

    print_pieces(["a"], pieces(), is_first=False, is_alone=False)
    assert capsys.readouterr().out == "" and not left

    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError

    left += [(0, "b"), (0, "c")]
    monkeypatch.setattr("nanotrain.inference.generate.print_texts", closed)
    with pytest.raises(BrokenPipeError):
        print_pieces(["a"], pieces(), is_first=True, is_alone=False)
    assert not left

"""What a parsed command line holds, from arguments as users write them."""

import pytest

from nanotrain.config.command_line import CommandLine, MegatronArgument, Setting
from nanotrain.config.flags import parse


def test_settings_keep_their_order_and_text() -> None:
    line = parse(["--lr", "1e-3", "optim.lr=2e-3", "--num-layers", "4"])
    assert [setting.key for setting in line.settings] == [
        "optim.lr",
        "optim.lr",
        "model.num_layers",
    ]
    assert [setting.value for setting in line.settings] == ["1e-3", "2e-3", "4"]
    assert line.explicit == {"optim.lr", "model.num_layers"}
    first, second, _ = line.settings
    assert (first.text, first.is_hydra) == ("--lr 1e-3", False)
    assert (second.text, second.is_hydra) == ("optim.lr=2e-3", True)


def test_choices_and_the_size_of_data_parallelism_are_no_settings() -> None:
    line = parse(["+config=tiny", "--data-parallel-size", "8"])
    assert line.choices == {"config": "tiny"} and line.data_parallel_size == 8
    assert line.settings == [] and line.explicit == frozenset()
    assert line.config_name == "train" and line.help_topic is None


@pytest.mark.parametrize(("words", "topic"), [(["--help"], ""), (["--help=optim"], "optim")])
def test_help_has_a_topic_or_none(words: list[str], topic: str) -> None:
    assert parse(words).help_topic == topic


def test_flags_of_megatron_that_are_no_fields_keep_their_values() -> None:
    line = parse(["--distributed-backend", "nccl", "--use-flash-attn"])
    texts = [argument.text for argument in line.megatron]
    assert texts == ["--distributed-backend nccl", "--use-flash-attn"]
    rows = line.megatron_rows
    assert list(rows) == ["--distributed-backend", "--use-flash-attn"]
    first = line.megatron[0]
    other = MegatronArgument(first.flag, rows["--use-flash-attn"], first.value)
    assert first == other, "two arguments are equal by what is written"


def test_mistakes_are_collected_and_no_two_lines_share_them() -> None:
    wrong = parse(["--num-layerz", "4", "--lr"])
    assert len(wrong.errors.errors) == 2
    assert CommandLine().errors.errors == [] and CommandLine().settings == []
    assert Setting("a.b", "1", "--b 1") == Setting("a.b", "1", "--b 1")

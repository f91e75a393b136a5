"""`nanotrain dry-run`: what it refuses before it builds anything, and what it prints."""

import pytest

from nanotrain.cli.dry_run import complete
from nanotrain.cli.main import main
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.errors import ConfigError

TINY = ["+config=tiny", "--vocab-size", "512"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "2", "--rank", "2"], "there is no rank 2: the run has ranks 0 to 1"),
        (["--world-size", "3", "--tensor-model-parallel-size", "2"], "3 ranks"),
        (["--world-size", "2", "--data-parallel-size", "4"], "data"),
        (["--world-size", "2", "--attention-backend", "flesh"], "flash"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dry-run", *TINY, *words]) == 2
    output = capsys.readouterr()
    assert message in output.err and "Traceback" not in output.err and not output.out


def test_one_rank_of_a_run_is_checked_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "dry-run",
        *TINY,
        "--world-size",
        "4",
        "--tensor-model-parallel-size",
        "2",
        "--rank",
        "3",
    ]
    assert main(line) == 0
    output = capsys.readouterr().out
    assert "rank 3" in output and "rank 0" not in output


def test_a_vocabulary_is_that_of_the_quick_start_or_named() -> None:
    quick = complete(load_line(parse(["+config=tiny"])))
    assert quick.model.vocab_size == quick.data.quickstart_vocab_size
    assert complete(load_line(parse(TINY))).model.vocab_size == 512
    words = ["--num-layers", "2", "--data-path", "somewhere"]
    with pytest.raises(ConfigError, match="the vocabulary has no size.*set --vocab-size"):
        complete(load_line(parse(words), to_train=False))

"""Arguments and names of commands, and how a mistake in them is answered."""

import pytest

from nanotrain.cli.main import COMMANDS
from nanotrain.cli.parity import parity_parser
from nanotrain.cli.parser import CommandParser, run_command, usage
from nanotrain.cli.prepare import prepare_parser
from nanotrain.errors import ConfigError


def test_a_mistake_in_the_arguments_is_a_config_error():
    def command(argv):
        """Do something."""

    with pytest.raises(ConfigError, match="nanotrain x: .*required.*--help lists the arguments"):
        parser = CommandParser("x", command)
        parser.add_argument("path")
        parser.parse_args([])


def test_a_command_is_found_by_its_name(capsys):
    def sing(argv):
        """Sing."""
        return len(argv)

    assert run_command("nanotrain", ["sing", "a", "b"], commands={"sing": sing}) == 2
    assert run_command("nanotrain", [], commands={"sing": sing}) == 0
    assert "sing        Sing." in capsys.readouterr().out
    with pytest.raises(ConfigError, match="unknown command 'sign'"):
        run_command("nanotrain", ["sign"], commands={"sing": sing})


def test_a_misspelled_flag_of_the_command_is_named_before_what_is_missing():
    def command(argv):
        """Do something."""

    parser = CommandParser("x", command)
    parser.add_argument("--prompt", required=True)
    for wrong in ("--promt", "--prompts=hi"):
        with pytest.raises(
            ConfigError, match=rf"unknown {wrong.partition('=')[0]} \(write --prompt\)"
        ):
            parser.parse_known_args([wrong])
    for flag in ("--lr", "--seq-lenght"):  # of a training, or misspelled so
        assert parser.parse_known_args(["--prompt", "a", flag])[1] == [flag], flag


def test_a_misspelled_option_in_place_of_a_command():
    with pytest.raises(ConfigError, match="did you mean nanotrain --version"):
        run_command("nanotrain", ["--verison"], commands={})


SCREENS = {
    80: """\
usage: prog COMMAND ...

  sing        Sing a song of sixpence, a pocket full of rye, four and twenty
              blackbirds, baked in a pie.
  hum         Hum.

prog COMMAND --help lists its arguments, nanotrain --version prints the version""",
    100: """\
usage: prog COMMAND ...

  sing        Sing a song of sixpence, a pocket full of rye, four and twenty blackbirds, baked in a
              pie.
  hum         Hum.

prog COMMAND --help lists its arguments, nanotrain --version prints the version""",
    120: """\
usage: prog COMMAND ...

  sing        Sing a song of sixpence, a pocket full of rye, four and twenty blackbirds, baked in a pie.
  hum         Hum.

prog COMMAND --help lists its arguments, nanotrain --version prints the version""",
}


@pytest.mark.parametrize("width", SCREENS)
def test_the_list_of_commands_at_the_width_of_the_terminal(width):
    def sing(argv):
        """Sing a song of sixpence, a pocket full of rye, four and twenty blackbirds, baked in a
        pie.
        """

    def hum(argv):
        """Hum."""

    assert usage("prog", {"sing": sing, "hum": hum}, width=width) == SCREENS[width]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_commands_of_nanotrain_fit(width):
    assert max(map(len, usage("nanotrain", COMMANDS, width=width).splitlines())) <= width


@pytest.mark.parametrize(
    "argv",
    [["--output-prefix", "a", "--json-keys=text"], ["--json-key=text", "--output-prefix", "a"]],
)
def test_flags_of_other_programs_are_one_error_that_says_what_to_write(argv):
    parser = prepare_parser()
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(argv)
    assert "--output-prefix (write --output PREFIX)" in str(caught.value)
    assert "(write --text-column NAME)" in str(caught.value)
    assert (
        parser.parse_args(["--input", "b", "--output", "a", "--tokenizer", "bytes"]).output == "a"
    )


@pytest.mark.parametrize(
    "flags", [["--seq-length", "8"], ["--bf16"], ["--num-layers=2"], ["train.seed=1"]]
)
def test_settings_may_stand_before_the_arguments_of_a_command(flags):
    def command(argv):
        """Do something."""

    parser = CommandParser("x", command)
    parser.add_argument("path")
    parser.add_argument("--prompt")
    parser.add_argument("--seed")
    words = ["lr=1,seed=2", "--prompt", "train.seed=3", "--seed=4"]
    for argv in ([*flags, *words], [*words, *flags]):
        args, rest = parser.parse_known_args(argv)
        assert (args.path, args.prompt, args.seed, rest) == (
            "lr=1,seed=2",
            "train.seed=3",
            "4",
            flags,
        ), argv


def test_a_value_of_a_flag_that_takes_none_stays_behind_it():
    line = ["--bf16", "true", "--lr", "1e-3", "--qk-layernorm"]
    assert parity_parser().parse_known_args([*line, "--world-size", "2"])[1] == line

"""The texts of --help: every flag once, with its default, wrapped at words; and the tables of
docs/config.md.
"""

import re
from collections import Counter
from io import BytesIO, TextIOWrapper

import pytest

from nanotrain.config.flags import parse
from nanotrain.config.help import HELP, describe, help_text
from nanotrain.config.load import reply
from nanotrain.config.megatron import megatron
from nanotrain.config.schema import ENTRIES, SECTIONS, typed
from nanotrain.errors import ConfigError
from scripts.config_page import document
from tests.harness import ROOT

TOPICS = ["", "all", "megatron", *SECTIONS]
PAGE = (ROOT / "docs" / "config.md").read_text()


def test_every_flag_is_listed_once():
    listed = Counter(re.findall(r"^│ (--\S+)", help_text("all"), flags=re.MULTILINE))
    for entry in ENTRIES.values():
        flag = f"--[no-]{entry.flag[2:]}" if entry.kind is bool else entry.flag
        assert listed[flag] == 1, entry.key


def test_the_short_help_has_the_options_used_most_and_leads_to_the_others():
    text = help_text()
    assert len(HELP["common"].split()) == 25 and len(text.splitlines()) < 120
    listed = set(
        re.findall(r"^│ (--[a-z][\w-]*)", text.replace("--[no-]", "--"), flags=re.MULTILINE)
    )
    assert {ENTRIES[name].flag for name in HELP["common"].split()} <= listed
    assert "--help=all" in text and "--help=megatron" in text and "model.moe" in text


def test_flags_of_megatron_are_on_their_own_page_only():
    page, everything = help_text("megatron"), help_text("all")
    for flag, row in megatron().flags.items():
        assert re.search(rf"^│ {flag}( |$)", page, flags=re.MULTILINE), flag
        assert not re.search(rf"^│ {flag}( |$)", everything, flags=re.MULTILINE), flag
        assert row.meaning.split()[0] in page


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("width", [80, 100, 120])
def test_lines_fit_the_terminal_and_break_between_words(topic, width):
    text = help_text(topic, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert words(text) == words(help_text(topic, width=MAX)), "no word is cut"


def words(text: str) -> list[str]:
    return re.sub("[─│╭╮╰╯]", "", text).split()


def test_sections_are_panels():
    lines = help_text("optim", width=80).splitlines()
    assert re.fullmatch("╭─ optim ─+╮", lines[0]) and re.fullmatch("╰─+╯", lines[-1])
    assert all(line[0] == "│" == line[79] for line in lines[1:-1])


def test_the_frame_is_ascii_where_the_output_is(monkeypatch):
    monkeypatch.setattr("sys.stdout", TextIOWrapper(BytesIO(), encoding="latin-1"))
    assert help_text("optim", width=80).isascii()


MAX = 120


def test_the_width_is_that_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    assert help_text("all") == help_text("all", width=90) != help_text("all", width=100)


def test_a_topic_is_named_behind_an_equals_sign():
    assert reply(parse(["--help=optim"])) == help_text("optim")
    assert reply(parse(["-h"])) == reply(parse(["--help"])) == help_text()
    with pytest.raises(
        ConfigError, match=r"there is no help on 'megatrn'.*did you mean --help=megatron\?"
    ):
        help_text("megatrn")


@pytest.mark.parametrize(
    ("word", "listed", "not_listed"),
    [
        ("clip", ["--clip-grad", "--[no-]qk-clip", "optim"], ["--lr "]),
        ("clip_grad", ["--clip-grad"], ["qk-clip"]),
        ("Weights & Biases", ["--wandb-entity", "--[no-]wandb"], ["--prometheus-port"]),
        (
            "timing",
            ["--timing-log-level", "--timing-log-option", "accepted without effect"],
            ["--wandb"],
        ),
    ],
)
def test_a_word_lists_the_flags_whose_name_or_meaning_has_it(word, listed, not_listed):
    text = reply(parse([f"--help={word}"]))
    assert text == help_text(word) and len(text.splitlines()) < 40
    assert all(name in text for name in listed) and not any(name in text for name in not_listed)


def test_a_section_is_found_by_its_last_word():
    assert help_text("moe") == help_text("model.moe")


def test_a_default_is_written_as_it_is_typed():
    texts = {
        name: typed(ENTRIES[name].default)
        for name in ("shuffle", "num_experts", "data_path", "lr", "device")
    }
    assert texts == {
        "shuffle": "true",
        "num_experts": "unset",
        "data_path": "empty",
        "lr": "0.0003",
        "device": "auto",
    }


def test_a_flag_is_described_by_its_meaning():
    assert describe(ENTRIES["moe_router_topk"]) == (
        "--moe-router-topk N",
        "experts per token (default: 2)",
    )


def test_the_page_is_current():
    assert document(PAGE) == PAGE, "run: python -m scripts.config_page docs/config.md"


def test_every_row_of_a_table_has_as_many_cells_as_its_head():
    num_cells = 0
    for line in filter(lambda line: line.startswith("|"), PAGE.splitlines()):
        cells = line.replace(r"\|", "").strip("|").split("|")
        num_cells = len(cells) if cells[0] == " flag " else num_cells
        assert len(cells) == num_cells and not set("{}") & set(cells[1].partition("`")[0]), line


def test_help_and_page_name_every_flag_with_its_meaning():
    text, page = " ".join(help_text("all").replace("│", "").split()), PAGE
    for entry in ENTRIES.values():
        flag = f"--[no-]{entry.flag[2:]}" if entry.kind is bool else entry.flag
        assert f"{flag} " in text and f"| `{entry.flag}` |" in page
        assert entry.help in text and entry.help.replace("|", r"\|") in page

"""Words of shell scripts: quotes, variables, arrays, comments and here-documents."""

import pytest

from nanotrain.audit.shell_words import (
    MAX_NESTING,
    Result,
    Sum,
    Text,
    Variable,
    Word,
    read_tokens,
)
from nanotrain.errors import ConfigError


def words(text: str) -> list[Word]:
    return [token for token in read_tokens(text) if isinstance(token, Word)]


def plain(text: str) -> list[str]:
    return [word.plain for word in words(text)]


def test_lines_are_joined_and_comments_and_redirections_left_out():
    assert plain("a \\\n  b # c d\ne 2>&1 > log <in f") == ["a", "b", "e", "f"]


def test_operators_end_commands():
    tokens = read_tokens("a && b || c; d | e & f\n(g)")
    operators = [token for token in tokens if isinstance(token, str)]
    assert operators == ["&&", "||", ";", "|", "&", "\n", "(", ")"]


def test_single_quotes_keep_everything_and_double_quotes_keep_variables():
    (word,) = words('a\'$b "c"\'"d$e\\""')
    assert word.parts == (
        Text(False, "a"),
        Text(True, '$b "c"d'),
        Variable(True, "e"),
        Text(True, '"'),
    )


def test_empty_quotes_are_a_word():
    assert [word.parts for word in words("''")] == [(Text(True, ""),)]
    assert len(words('a "" b')) == 3


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("$A", Variable(False, "A")),
        ("${A}", Variable(False, "A")),
        ("${A:-b}", Variable(False, "A", ":-", (Text(False, "b"),))),
        ("${A:-}", Variable(False, "A", ":-")),
        ("${A[@]}", Variable(False, "A", takes_all=True)),
        ("$@", Variable(False, "@", takes_all=True)),
        ("${1:-$B}", Variable(False, "1", ":-", (Variable(False, "B"),))),
        ("$((1 + A))", Sum(False, "1 + A")),
        ("$(date)", Result(False)),
        ("`date`", Result(False)),
        ("${A%.sh}", Result(False)),
        ("${#A}", Result(False)),
    ],
)
def test_an_expansion_is_a_part(text, part):
    assert words(text)[0].parts == (part,)


def test_a_default_in_quotes_is_quoted():
    (word,) = words('"${A:-b c}"')
    assert word.parts[1] == Variable(True, "A", ":-", (Text(True, "b c"),))


def test_an_array_has_words_over_several_lines():
    (word,) = words('A=(\n  --lr 1 # comment\n  --bf16 \\\n  "b c"\n)')
    assert [item.parts[-1] for item in word.items] == [
        Text(False, "--lr"),
        Text(False, "1"),
        Text(False, "--bf16"),
        Text(True, "b c"),
    ]


def test_a_here_document_is_left_out_unless_a_shell_runs_it():
    assert plain("cat <<END\n'not closed\nEND\nb") == ["cat", "b"]
    run, call, document, after = words("sbatch <<'END'\npython a.py $B\nEND\nb")
    assert (run.plain, call.plain, after.plain) == ("sbatch", "eval", "b")
    assert Variable(True, "B") in document.parts


@pytest.mark.parametrize("text", ["a 'b", 'c "d', "A=(b", "${A", "$(a", 'x\ny "z'])
def test_text_that_does_not_end_is_one_error_with_its_line(text):
    with pytest.raises(ConfigError, match="not closed, from line [12]"):
        read_tokens(text)


def test_defaults_are_not_nested_forever():
    depth = MAX_NESTING + 2
    for text in ("${A:-" * depth + "}" * depth, "A=(" * 5_000):
        with pytest.raises(ConfigError, match="variables within variables"):
            read_tokens(text)

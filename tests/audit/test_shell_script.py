"""Shell scripts are followed as text: variables, branches, functions and launches."""

from time import process_time

import pytest

from nanotrain.audit.shell_script import read_script
from nanotrain.audit.shell_values import UNSET, unset_names, without_marks
from nanotrain.errors import ConfigError


def launched(text: str, **variables: str) -> list[str]:
    (launch,) = read_script(text, variables=variables).launches
    return [without_marks(word) for word in launch]


def arguments(text: str, **variables: str) -> list[str]:
    return launched(text, **variables)[2:]


def test_unset_variables_are_named_and_can_be_given():
    script = read_script("python p.py --save $DIR/x --lr $LR", variables={"LR": "1"})
    (launch,) = script.launches
    assert launch[-1] == "1" and unset_names(launch[3]) == ["$DIR"]
    assert without_marks(UNSET.format("A")) == "$A"


def test_branches_within_branches_and_elif():
    text = """
        S=b
        if [ $S = a ]; then
            X=1
            if [ $S = a ]; then X=2; fi
        elif [ $S = b ]; then
            X=3
            if [ $S = b ]; then X=4; fi
        else
            X=5
        fi
        python p.py $X
    """
    assert arguments(text) == ["4"]


def test_a_case_takes_the_first_pattern_that_fits():
    text = 'case "$S" in\n a|8b) X=1 ;;\n *b) X=2 ;;\n *) X=3 ;;\nesac\npython p.py $X'
    assert [arguments(f"S={name}\n{text}")[0] for name in ("8b", "7b", "c")] == ["1", "2", "3"]


def test_functions_are_followed_where_they_are_called():
    text = "launch() {\n python p.py --lr $LR\n}\nLR=1\nlaunch\n"
    assert arguments(text) == ["--lr", "1"]


def test_loops_and_unknown_conditions_are_left_out_and_named():
    text = 'while read i; do A="--lr $i"; done\nif [ -f x ]; then B=(--bf16); fi\npython p.py --a 1'
    script = read_script(text, variables={})
    assert script.notes == [
        "a loop is left out, with --lr",
        "an if that depends on what is not known is left out, with --bf16",
    ]
    assert "A" not in script.variables and "B" not in script.variables


@pytest.mark.parametrize("words", ["$(ls)", "$FILES", "1 2; do break", "{1..500}{1..500}"])
def test_a_loop_whose_turns_are_not_known_is_left_out(words):
    script = read_script(f'for i in {words}; do A="--lr 1"; done\npython p.py --a 1', variables={})
    is_literal = words.startswith("{")  # braces are not expanded: one word
    assert script.notes == ([] if is_literal else ["a loop is left out, with --lr"])


def test_what_the_reader_shall_specify_is_not_set():
    text = (
        "A=<Specify path>/x\nexport B=<path>\ncat <<EOF >file\nEOF\npython p.py $A $B <a path> <in"
    )
    (launch,) = read_script(text, variables={}).launches
    assert [without_marks(word) for word in launch[2:]] == ["$A", "$B", "$a_path"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[ "$M" = debug ] && A=2', "1"),
        ('[ "$M" = full ] && A=2', "2"),
        ("[[ $M == debug ]] && A=2 || A=3", "3"),
        ("[ $M = debug ] &&\n  A=2", "1"),
        ("[ $M = full ] || A=2", "1"),
        ("! [ $M = full ] && A=2", "1"),
        ("[ $M = debug ] && { A=2; A=4; }", "1"),
        ("[ $M = debug ] && echo x | A=2; A=3", "3"),
        ("cd /x && A=2", "2"),
        ("cd /x || A=2", "1"),
        ('[ -z "$N" ] && A=2', "2"),
    ],
)
def test_commands_joined_with_and_and_or(text, expected):
    assert arguments(f"M=full\nA=1\n{text}\npython p.py $A") == [expected]


def test_a_command_behind_an_unknown_test_is_left_out_and_named():
    script = read_script('[ -f x ] && A="--bf16"; python p.py --a 1', variables={})
    assert script.notes == ["a command that depends on what is not known is left out, with --bf16"]
    assert "A" not in script.variables


@pytest.mark.parametrize(
    "text",
    [
        'CMD="python p.py $A"; eval $CMD',
        'CMD="python p.py $A"; $CMD 2>&1 | tee log',
        'srun --nodes 1 bash -c "cd x; python p.py $A"',
        "sbatch <<EOF\n#!/bin/bash\nsrun python p.py $A\nEOF",
        "export A; CUDA_VISIBLE_DEVICES=0 python p.py $A",
    ],
)
def test_a_launch_is_found_wherever_it_is_written(text):
    assert arguments(f'A="--lr 1"\n{text}')[-2:] == ["--lr", "1"]


def test_nothing_is_run_and_the_environment_is_not_read(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "hidden")
    target = tmp_path / "made"
    launch = launched(
        f"touch {target}; X=$(touch {target}); python p.py $SECRET $X `touch {target}`"
    )
    assert not target.exists() and "hidden" not in launch


@pytest.mark.parametrize(
    "text",
    [
        "A=ab; " + 'A="$A$A"; ' * 40,
        "A=(a b); " + 'A+=("${A[@]}" "${A[@]}"); ' * 40,
        "f() {\n f\n f\n}\nf\n",
        'A="eval \\$A"; eval $A',
        "a;" * 30_000,
        "if a; then " * 3_000,
        "(" * 3_000,
    ],
)
def test_a_script_cannot_grow_without_end(text):
    start = process_time()
    with pytest.raises(ConfigError):
        read_script(text, variables={})
    assert process_time() - start < 20

"""Arguments of scripts beside those that bash gives the program."""

import shutil
import subprocess
from pathlib import Path

import pytest

from nanotrain.audit.shell_script import read_script
from nanotrain.audit.shell_values import without_marks

BASH = shutil.which("bash")
# a program that prints its arguments, one between each pair of bars
PROGRAM = '#!/bin/sh\nfor argument; do printf "%s|" "$argument"; done\n'
SCRIPTS = {
    "arrays": 'A=(--lr 1 "b c"); A+=(--bf16 ""); python p.py "${A[@]}" ${A[@]} "${A[*]}"',
    "divided values": 'A="  x   y "; python p.py $A -$A- "$A" pre$A',
    "defaults": 'E=; B=2; python p.py ${A:-1} "${E-1}" ${E:-1} ${B:+3} ${A:-"a b"} ${A:-${B}x}',
    "quotes": "A=x; python p.py 'a $A' \"a '$A'\" a\\ b \"\\$A\" $'c' \"a\"'b'c",
    "sums": "A=6; B=4; python p.py $((A * (B + 1))) $((A / B)) $((A % B)) $(( -A / B )) $((2 + $A))",
    "sums of arguments": "f() { python p.py $(($1 * 4)) $((${2} + $#)) $((N * $2)); }\nN=3\nf 8 5",
    "joined lines": "python p.py --lr \\\n  1 \\\n  --swiglu # --not-this\n",
    "branches": 'A=3\nif [ "$A" -gt 2 ] && [ -n "$A" ]; then B=1; else B=2; fi\npython p.py $B',
    "chains": '[ -z "$A" ] && B=1\n[ -n "$A" ] || C=2\n[ -n "$A" ] && B=3\npython p.py $B $C',
    "double brackets": "A=8b\nif [[ $A == 8* && $A != 8c ]]; then B=1; fi\npython p.py $B",
    "case": "A=70b\ncase $A in 7b) B=1 ;; 70*|80b) B=2 ;; *) B=3 ;; esac\npython p.py $B",
    "functions": 'f() { B="$1-$2"; python p.py "$B" "$@"; }\nf a "b c"',
    "functions in functions": 'g() { python p.py $1 $#; }\nf() { local A=$2; shift; g "$A x" "$1"; }\nf 1 2 3',
    "arguments left over": 'f() { shift 2; python p.py "$*" "$@" ${3:-none}; }\nf a b c "d e"',
    "defaults of arguments": 'f() { python p.py ${1:-8} "${2:-a b}"; }\nf\n',
    "loops": 'A=(); D=; for B in "--lr 1" --bf16; do A+=("$B"); for C in 2 3; do D="$D$C"; done; done; '
    'for E in; do D=; done; python p.py "${A[@]}" $D $B',
    "defaults that stay": ': ${A:=1} "${B:=a b}"; C=; : ${C:=$A}; python p.py $A "$B" $C ${D=4} $D',
    "appended text": 'A="--lr 1"\nA="$A --swiglu"\nA+=" --bf16"\npython p.py $A',
}


@pytest.mark.skipif(BASH is None, reason="there is no bash on this machine")
@pytest.mark.parametrize("name", SCRIPTS)
def test_arguments_are_those_that_bash_gives(name: str, tmp_path: Path) -> None:
    assert BASH is not None
    program = tmp_path / "python"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    done = subprocess.run(
        [BASH, "-c", SCRIPTS[name]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    (launch,) = read_script(SCRIPTS[name], variables={}).launches
    assert [without_marks(word) for word in launch[1:]] == done.stdout.split("|")[:-1]

"""`nanotrain completion bash`: what bash itself completes with the script."""

import shutil
import subprocess

import pytest

from nanotrain.cli.main import COMMANDS, main

# a line as typed up to the cursor, as bash divides it | completions that must be there | that must not
TYPED = [
    (["nanotrain", "tra"], {"train"}, {"compare"}),
    (["nanotrain", "checkpoint", "in"], {"inspect"}, {"train"}),
    (["nanotrain", "train", "--overlap-g"], {"--overlap-grad-reduce"}, {"--lr"}),
    (["nanotrain", "train", "--no-overlap-g"], {"--no-overlap-grad-reduce"}, {"--lr"}),
    (["nanotrain", "train", "+"], {"+config="}, {"tiny"}),
    (["nanotrain", "train", "+config", "=", "ti"], {"tiny", "tiny_moe"}, {"llama7b"}),
    (["nanotrain", "train", "+config", "="], {"tiny", "llama7b"}, {"train"}),
    (["nanotrain", "runs", "--l"], set(), {"--lr"}),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_flags_and_recipes(capsys):
    assert main(["completion", "bash"]) == 0
    lines = [capsys.readouterr().out]
    for words, _, _ in TYPED:
        text = " ".join(words).replace(" = ", "=").replace(" =", "=")
        quoted = " ".join(f"'{word}'" for word in words)
        lines.append(
            f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE='{text}'; COMP_POINT={len(text)}; "
            '_nanotrain; echo "${COMPREPLY[*]}"'
        )
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    for (words, has, has_not), reply in zip(TYPED, done.stdout.splitlines(), strict=True):
        assert has <= set(reply.split()) and not has_not & set(reply.split()), words


def test_zsh_loads_the_functions_of_bash_first(capsys):
    assert main(["completion", "zsh"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("autoload") and "bashcompinit" in out.splitlines()[0] and " ".join(COMMANDS) in out

"""`nanotrain completion SHELL`: the script that completes commands, flags and recipes in bash and zsh."""

from collections.abc import Iterable

from nanotrain.cli.checkpoint import CHECKPOINT_COMMANDS
from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS

# Commands that take the flags of the configuration.
WITH_FLAGS = "train|sweep|parity|topology|evaluate|config"

# bash divides words at `=`, so in `+config=ti` the current word is `ti`.
SCRIPT = """_nanotrain() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=
  local line=${{COMP_LINE:0:COMP_POINT}}
  if [[ $line =~ config=[^\\ ]*$ ]]; then
    current=${{line##*config=}}; words="{recipes}"
  elif ((COMP_CWORD == 1)); then
    words="{commands} --help --version"
  elif [[ $command == checkpoint ]] && ((COMP_CWORD == 2)); then
    words="{checkpoint}"
  elif [[ $current == -* && $command =~ ^({with_flags})$ ]]; then
    words="{flags}"
  elif [[ $current == +* ]]; then
    words="+config="; compopt -o nospace 2> /dev/null
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -o bashdefault -F _nanotrain nanotrain"""
ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit"


def completion_script(shell: str, *, commands: Iterable[str]) -> str:
    """The script for a shell, `bash` or `zsh`, with the names of the commands, flags and recipes of now."""
    from nanotrain.config.compose import config_dir, names_in  # Hydra takes 0.2 s

    script = SCRIPT.format(
        recipes=" ".join(names_in("config", [config_dir()])),
        commands=" ".join(commands),
        checkpoint=" ".join(CHECKPOINT_COMMANDS),
        with_flags=WITH_FLAGS,
        flags=" ".join(sorted({*FLAGS, *NEGATIONS, *ALIASES, "--nproc-per-node"})),
    )
    return f"{ZSH}\n{script}" if shell == "zsh" else script

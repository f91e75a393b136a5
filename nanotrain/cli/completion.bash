# bash divides words at `=`, so in `+config=ti` the current word is `ti`.
_nanotrain() {
  local current=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} words=
  local line=${COMP_LINE:0:COMP_POINT}
  if [[ $line =~ config=[^\ ]*$ ]]; then
    current=${line##*config=}; words="@recipes@"
  elif ((COMP_CWORD == 1)); then
    words="@commands@ --help --version"
  elif [[ $command == checkpoint ]] && ((COMP_CWORD == 2)); then
    words="@checkpoint@"
  elif [[ $command == data ]] && ((COMP_CWORD == 2)); then
    words="@data@"
  elif [[ $command == family ]] && ((COMP_CWORD == 2)); then
    words="@family@"
  elif [[ $current == -* && $command =~ ^(train|sweep|parity|topology|evaluate|config)$ ]]; then
    words="@flags@"
  elif [[ $current == +* ]]; then
    words="+config="; compopt -o nospace 2> /dev/null
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -o bashdefault -F _nanotrain nanotrain

"""The layers of a hybrid model by the shares of its kinds, as Megatron-LM up to core 0.16 has them.

pattern_of_shares     letters of the layers: M, and evenly spaced * and -
implied_pattern       the pattern of a command line that names Mamba-2 and no pattern
"""

from nanotrain.config.command_line import CommandLine
from nanotrain.config.model import ModelConfig
from nanotrain.errors import ConfigError

ATTENTION = "--hybrid-attention-ratio"
MLP = "--hybrid-mlp-ratio"
IS_HYBRID = "--is-hybrid-model"  # a model of Mamba-2 layers; without shares all of them are
MAMBA_SPEC = "mamba_stack_spec"


def pattern_of_shares(num_layers: int, *, attention: float, mlp: float) -> str:
    """The letters of a model whose attention layers and MLPs are evenly spaced.

    It begins and ends with Mamba-2; the last of the rest that is no attention is an MLP.

    Source: Megatron-LM core 0.16, `mamba_hybrid_layer_allocation.py`, whose roundings it has.

    >>> pattern_of_shares(10, attention=0.2, mlp=0.3)
    'MM-*M-*MM-'
    """
    num_attention = round(num_layers * attention)
    num_mamba = num_layers - num_attention
    is_attention = spaced(num_layers, distance=num_mamba / (num_attention + 1))
    letters = ["*" if chosen else "M" for chosen in is_attention]
    num_mlp = round(num_layers * mlp)
    if num_mlp == 0:
        return "".join(letters)
    free = [index for index, letter in enumerate(letters) if letter == "M"]
    is_mlp = spaced(len(free), distance=(num_mamba - num_mlp) / num_mlp)
    for index, chosen in zip(free, is_mlp, strict=True):
        if chosen:
            letters[index] = "-"
    return "".join(letters)


def spaced(number: int, *, distance: float) -> list[bool]:
    """Whether each layer is chosen, with `distance` layers that are not before each that is."""
    chosen = []
    rest = distance
    for _ in range(number):
        is_chosen = rest < 0.5
        chosen.append(is_chosen)
        rest += distance if is_chosen else -1
    return chosen


def implied_pattern(model_config: ModelConfig, line: CommandLine) -> tuple[str, str] | None:
    """The pattern that Mamba-2 flags imply, and its reason.

    None without such flags, and where the command line has a pattern. A share of 0 is
    Megatron-LM's default, so alone it is no such flag.

    Raises:
        ConfigError: shares above 1, or a pattern with other shares.
    """
    texts = {argument.flag: argument.value for argument in line.megatron}
    attention = share(ATTENTION, texts.get(ATTENTION, "0"))
    mlp = share(MLP, texts.get(MLP, "0"))
    named = [flag for flag, number in {ATTENTION: attention, MLP: mlp}.items() if number > 0]
    if IS_HYBRID in texts:
        named.append(IS_HYBRID)
    if MAMBA_SPEC in texts.get("--spec", ""):
        named.append("--spec")
    if not named:
        return None
    if attention + mlp > 1:
        raise ConfigError(
            f"{ATTENTION} {attention:g} and {MLP} {mlp:g} are more than 1",
            why="they are shares of the layers",
            fix="lower one of them",
        )
    pattern = pattern_of_shares(model_config.num_layers, attention=attention, mlp=mlp)
    written = model_config.hybrid_layer_pattern
    if written is None:
        return pattern, f"{' and '.join(named)} with {model_config.num_layers} layers"
    if attention + mlp > 0:
        require_shares(written, pattern)
    return None


def share(flag: str, text: str) -> float:
    """A share of the layers.

    Raises:
        ConfigError: another text.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ConfigError(f"{flag} is {text!r}", why="it takes a share of the layers, from 0 to 1")
    return number


def require_shares(written: str, pattern: str) -> None:
    """Check that a written pattern has as many layers of each kind as the pattern of the shares.

    Raises:
        ConfigError: the numbers differ.
    """
    letters = written.partition("/")[0].replace("|", "")
    for letter, flag in {"*": ATTENTION, "-": MLP}.items():
        if letters.count(letter) != pattern.count(letter):
            raise ConfigError(
                f"{flag} asks for {pattern.count(letter)} layers {letter}",
                why=f"hybrid_layer_pattern has {letters.count(letter)}",
                fix=f"leave {ATTENTION} and {MLP} out",
            )

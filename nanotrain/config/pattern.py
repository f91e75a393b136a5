"""Patterns of layers: `2` is every second layer, `[0]*3+[1]*58` three dense layers and 58 with experts.

The text is a Python expression (lists of 0 and 1, `+`, and `*` by a number, which may be a sum). It is parsed, never
evaluated.
"""

import ast
from itertools import groupby

from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of

# More layers than any model has; guards against `[1]*10**9`.
LONGEST = 10_000


def read_pattern(text: str) -> int | list[int]:
    """A frequency, or one 0 or 1 per layer.

    Raises:
        ConfigError: text that is neither.

    >>> read_pattern("2"), read_pattern("[0]*2 + [1]"), read_pattern("([1] + [0]*2)*2")
    (2, [0, 0, 1], [1, 0, 0, 1, 0, 0])
    """
    try:
        value = read_node(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = 0
    if isinstance(value, int) and value >= 1 or isinstance(value, list) and value and set(value) <= {0, 1}:
        return value
    raise ConfigError(
        f"moe_layer_freq is {text!r}",
        why="it takes N for every Nth layer, or lists of 0 (dense) and 1 (experts) joined by + and repeated by *",
        fix="set --moe-layer-freq 1 for experts in every layer, or for example --moe-layer-freq '[0]*3+[1]*58'",
    )


def read_expert_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts.

    Raises:
        ConfigError: a pattern that is invalid or does not have one 0 or 1 per layer.

    >>> read_expert_pattern("2", 4)
    (True, False, True, False)
    """
    pattern = read_pattern(text)
    if isinstance(pattern, int):
        return tuple(layer % pattern == 0 for layer in range(num_layers))
    if len(pattern) != num_layers:
        raise ConfigError(
            f"moe_layer_freq {text} is for {count_of(len(pattern), 'layer')}",
            why=f"num_layers is {num_layers}, and the pattern has one 0 or 1 for each",
            fix=f"set --moe-layer-freq '[1]*{num_layers}' with a 0 for every dense layer",
        )
    return tuple(map(bool, pattern))


def read_window_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has the attention window.

    Raises:
        ConfigError: neither a number nor one 0 or 1 per layer.

    >>> read_window_pattern("3", 4), read_window_pattern("[1]*3+[0]", 4), read_window_pattern("0", 2)
    ((True, True, False, True), (True, True, True, False), (True, True))
    """
    fix = "set --window-attn-skip-freq 0 for a window in every layer, or for example '[1]*5+[0]'"
    layers = _read_layers(text, num_layers, field="window_attn_skip_freq", values="a 1 (window) or 0 (none)", fix=fix)
    return tuple(layer % layers != 0 for layer in range(1, num_layers + 1)) if isinstance(layers, int) else layers


def read_no_rope_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is without rotary positions.

    Raises:
        ConfigError: neither a number nor one 0 or 1 per layer.

    >>> read_no_rope_pattern("2", 4), read_no_rope_pattern("[1]*3+[0]", 4), read_no_rope_pattern("0", 2)
    ((False, True, False, True), (True, True, True, False), (False, False))
    """
    fix = "set --no-rope-freq 0 for rotary positions in every layer, or for example '[0]*3+[1]'"
    layers = _read_layers(text, num_layers, field="no_rope_freq", values="a 1 (no rotary positions) or 0", fix=fix)
    return tuple(layer % layers == 0 for layer in range(1, num_layers + 1)) if isinstance(layers, int) else layers


def _read_layers(text: str, num_layers: int, *, field: str, values: str, fix: str) -> int | tuple[bool, ...]:
    """A frequency, above the layers for 0; or a flag per layer; a ConfigError for text that is neither."""
    try:
        value = read_node(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = -1
    if isinstance(value, int) and value >= 0:
        return value or num_layers + 1
    if isinstance(value, list) and len(value) == num_layers and set(value) <= {0, 1}:
        return tuple(map(bool, value))
    why = f"it takes N for every Nth layer, or {values} for each of {count_of(num_layers, 'layer')}"
    raise ConfigError(f"{field} is {text!r}", why=why, fix=fix)


def read_node(node: ast.expr) -> int | list[int]:
    """The value of a number or a list of numbers, of their sums, and of a list or number times a number."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=nodes):
            numbers = [int(entry) for entry in map(read_node, nodes) if isinstance(entry, int)]
            if len(numbers) == len(nodes):
                return numbers
        case ast.BinOp(left=left, op=operator, right=right):
            first, second = read_node(left), read_node(right)
            match (operator, first, second):
                case (ast.Add(), list(), list()):
                    return first + second
                case (ast.Add(), int(), int()) if abs(first) + abs(second) <= LONGEST:
                    return first + second
                case (ast.Sub(), int(), int()) if abs(first) + abs(second) <= LONGEST:
                    return first - second
                case (ast.Mult(), int(), int()) if abs(first * second) <= LONGEST:
                    return first * second
                case (ast.Mult(), list(entries), int(times)) | (ast.Mult(), int(times), list(entries)):
                    if len(entries) * times <= LONGEST:
                        return entries * times
    raise ValueError("not a pattern")


def write_pattern(layers: tuple[bool, ...]) -> str:
    """The shortest pattern: `1` for all layers, else run lengths.

    >>> write_pattern((True, True)), write_pattern((False, False, True, True, False))
    ('1', '[0]*2+[1]*2+[0]')
    """
    if all(layers):
        return "1"
    runs = ((int(kind), len(list(run))) for kind, run in groupby(layers))
    return "+".join(f"[{kind}]*{length}" if length > 1 else f"[{kind}]" for kind, length in runs)

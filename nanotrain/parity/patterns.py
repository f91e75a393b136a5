"""Patterns of layers of a small model, from the patterns of a larger one."""


def shrink_pattern(text: str, full: tuple[bool, ...], *, num_layers: int) -> str:
    """The pattern of fewer layers, evenly sampled, with both kinds of layers if it has both.

    >>> shrink_pattern("4", (True, True, True, False) * 2, num_layers=2)
    '[0, 1]'
    >>> shrink_pattern("[0]*3+[1]*58", (False,) * 3 + (True,) * 58, num_layers=4)
    '[0, 1, 1, 1]'
    >>> shrink_pattern("[0]+[1]*59+[0]", (False, *(True,) * 59, False), num_layers=4)
    '[0, 1, 1, 1]'
    """
    if "[" not in text and int(text) <= num_layers:  # a frequency
        return text
    small = [full[layer * len(full) // num_layers] for layer in range(num_layers)]
    for kind in set(full) - set(small):
        small[full.index(kind) * num_layers // len(full)] = kind
    return str(list(map(int, small)))


def shrink_letters(text: str | None, *, num_layers: int) -> str | None:
    """A hybrid layer pattern of fewer layers, with every kind of layer that there is room for.

    >>> shrink_letters("G-G-*E*E/*E", num_layers=5)
    'G-*EG/*E'
    """
    if text is None:
        return None
    letters, slash, mtp = text.partition("/")
    return "".join([*dict.fromkeys(letters), *letters][:num_layers]) + slash + mtp

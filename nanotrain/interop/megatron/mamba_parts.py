"""The parts of Mamba-2's joined tensors in files of ranks, by their names in `torch_dist`.

A rank has its heads of each part, one part after another:

    mixer.in_proj.weight     z, x, B, C, dt
    mixer.conv1d.weight      x, B, C
    mixer.conv1d.bias        x, B, C

Source: Megatron-LM, `mamba_mixer.py`.
"""

from collections.abc import Mapping

from torch import Tensor

from nanotrain.untrusted import shown

IN_PROJ = "mixer.in_proj.weight"
PARTS = {
    IN_PROJ: ("z", "x", "B", "C", "dt"),
    "mixer.conv1d.weight": ("x", "B", "C"),
    "mixer.conv1d.bias": ("x", "B", "C"),
}
# since core 0.19 the convolutions are parameters of the mixer
EARLIER_NAMES = {
    "mixer.conv1d_weight": "mixer.conv1d.weight",
    "mixer.conv1d_bias": "mixer.conv1d.bias",
}
States = Mapping[str, Tensor]  # weight and optimizer state of a tensor, by the beginning of its key


def with_parts(tensors: Mapping[str, States]) -> dict[str, States]:
    """The tensors of a rank; each tensor that joins several parts becomes one tensor per part.

    Args:
        tensors: tensors by name, then by the beginning of their key.

    Raises:
        ValueError: the tensors of a layer do not fit each other.
    """
    tensors = {earlier_name(name): states for name, states in tensors.items()}
    divided: dict[str, States] = {}
    for name, states in tensors.items():
        joined = [ending for ending in PARTS if name.endswith(ending)]
        if not joined:
            divided[name] = states
            continue
        ending = joined[0]
        lengths = part_lengths(tensors, name.removesuffix(ending))
        rows = {part: lengths[part] for part in PARTS[ending]}
        divided |= divided_states(name, states, rows=rows)
    return divided


def earlier_name(name: str) -> str:
    """The name of a tensor before core 0.19.

    >>> earlier_name("decoder.layers.0.mixer.conv1d_bias")
    'decoder.layers.0.mixer.conv1d.bias'
    """
    for new, earlier in EARLIER_NAMES.items():
        if name.endswith(new):
            return name.removesuffix(new) + earlier
    return name


def part_lengths(tensors: Mapping[str, States], layer: str) -> dict[str, int]:
    """The rows of each part on this rank, from the shapes of a layer's tensors.

    Args:
        tensors: tensors by name.
        layer: beginning of the names of the layer.

    Raises:
        ValueError: a tensor is missing, or the shapes do not fit each other.
    """
    rows = {}
    for name in (IN_PROJ, "mixer.conv1d.weight", "mixer.A_log"):
        weight = tensors.get(layer + name, {}).get("")
        if weight is None or not weight.dim():
            raise ValueError(f"{shown(layer + name)} is missing")
        rows[name] = weight.shape[0]
    num_heads = rows["mixer.A_log"]
    channels = rows[IN_PROJ] - rows["mixer.conv1d.weight"] - num_heads
    states, rest = divmod(rows["mixer.conv1d.weight"] - channels, 2)
    if channels < 1 or states < 1 or rest:
        raise ValueError(f"the tensors of {shown(layer + 'mixer')} do not fit each other: {rows}")
    return {"z": channels, "x": channels, "B": states, "C": states, "dt": num_heads}


def divided_states(name: str, states: States, *, rows: Mapping[str, int]) -> dict[str, States]:
    """The parts of a tensor by name.

    Args:
        name: name of the tensor.
        states: the tensor and its optimizer state.
        rows: rows of each part, in their order.

    Raises:
        ValueError: they are not the rows of the tensor.
    """
    found: dict[str, dict[str, Tensor]] = {part: {} for part in rows}
    for beginning, tensor in states.items():
        if not tensor.dim() or tensor.shape[0] != sum(rows.values()):
            raise ValueError(f"{shown(beginning + name)} has not {sum(rows.values())} rows")
        for part, values in zip(rows, tensor.split(list(rows.values())), strict=True):
            found[part][beginning] = values
    return {f"{name}.{part}": tensors for part, tensors in found.items()}

"""Implementations of torch's flash operators: FlashAttention 3 and 4 where they are installed.

torch computes its flash operators with FlashAttention 2 unless another implementation is activated
(`torch.nn.attention.activate_flash_attention_impl`, from torch 2.11 on), for the whole process.
Their limits are rows of backends.yaml.
"""

from importlib.util import find_spec

# names in torch's registry, and the modules that it imports
IMPLEMENTATIONS = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}


def installed_implementations() -> frozenset[str]:
    """The names of implementations that torch knows and whose packages are installed."""
    from torch.nn import attention

    # torch 2.10 has no list
    known: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    return frozenset(name for name in known if _is_installed(IMPLEMENTATIONS.get(name, "")))


def _is_installed(module: str) -> bool:
    try:
        return bool(module) and find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def activate_implementation(name: str) -> None:
    """Compute torch's flash operators with an implementation from here on."""
    from torch.nn import attention

    if attention.current_flash_attention_impl() != name:
        attention.activate_flash_attention_impl(name)

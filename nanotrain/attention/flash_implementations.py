"""Implementations of torch's flash operators: FlashAttention 3 and 4 where they are installed.

torch computes its flash operators with FlashAttention 2 unless another implementation is activated
(`torch.nn.attention.activate_flash_attention_impl`, from torch 2.11 on), for the whole process.
Their limits are rows of backends.yaml.
"""

from importlib.util import find_spec

# names in torch's registry, and the modules that it imports
IMPLEMENTATIONS = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}


def installed_implementations() -> frozenset[str]:
    """The names of implementations whose packages are installed."""
    return frozenset(name for name, module in IMPLEMENTATIONS.items() if _is_installed(module))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def activate_implementation(name: str) -> None:
    """Compute torch's flash operators with an implementation from here on."""
    from torch.nn import attention

    if attention.current_flash_attention_impl() != name:
        attention.activate_flash_attention_impl(name)

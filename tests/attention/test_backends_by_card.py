"""The attention backend of every card, head dims, features and dtype, against torch's own checks.

The checks are those of sdp_utils.cpp in torch 2.11 to 2.14, written out a second time.
"""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from nanotrain.attention import backends, flash_implementations
from nanotrain.attention.backends import (
    AttentionChoice,
    AttentionDevice,
    AttentionNeed,
    choose_backend,
)
from nanotrain.attention.sdpa import SdpaKernel
from nanotrain.attention.varlen import VarlenKernel
from nanotrain.config.load import load
from nanotrain.errors import ConfigError

CUDNN = {"none": 0, "9.10": 91002, "9.15": 91501, "9.23": 92300}
CARDS = {
    "T4": (7, 5),
    "A100": (8, 0),
    "A10": (8, 6),
    "L40S": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
    "B300": (10, 3),
    "RTX 5090": (12, 0),
}
HEADS = [(64, 64), (72, 72), (100, 100), (128, 128), (144, 144), (192, 128), (192, 192), (200, 200)]
HEADS += [(224, 224), (256, 256), (512, 512), (128, 192), (68, 68), (20, 20)]
DTYPES = ("bf16", "fp16", "fp32")


def torch_takes(kernel: str, device: AttentionDevice, need: AttentionNeed) -> bool:
    """Whether torch takes an attention in training: causal, no mask, no dropout."""
    assert device.capability is not None
    major, minor = device.capability
    key, value = need.head_dim, need.value_head_dim
    is_half = need.dtype != "fp32"
    if need.dtype == "bf16" and major < 8:
        return False
    if kernel == "MATH":
        return True
    if kernel == "EFFICIENT_ATTENTION":
        alignment = 8 if is_half else 4
        return key % alignment == 0 and value % alignment == 0
    if not is_half or major < 8:
        return False
    if kernel == "FLASH_ATTENTION":
        is_small = (major, minor) in ((8, 6), (8, 7), (8, 9)) or major == 12
        return value == key <= 256 and not (is_small and 192 < key <= 224)
    assert kernel == "CUDNN_ATTENTION"
    return cudnn_takes(device, need)


def cudnn_takes(device: AttentionDevice, need: AttentionNeed) -> bool:
    """check_cudnn_tensor_shapes and check_cudnn_d256_bprop_head_dim."""
    assert device.capability is not None
    major, minor = device.capability
    key, value = need.head_dim, need.value_head_dim
    is_large = (major, minor) == (9, 0) or major == 10
    if key % 8 or value % 8 or device.cudnn < 90000 or need.is_deterministic:
        return False
    if max(key, value) <= 128:
        return True
    has_256 = device.torch_version >= (2, 14) and device.cudnn > 92200
    is_mla = (key, value) == (192, 128) and device.cudnn >= 91100
    return is_large and (is_mla or (has_256 and (key, value) == (256, 256)))


def devices() -> list[AttentionDevice]:
    versions = product(CARDS.values(), CUDNN.values(), ((2, 13), (2, 14)))
    return [AttentionDevice("cuda", card, torch, cudnn) for card, cudnn, torch in versions]


def needs() -> list[AttentionNeed]:
    cases = list(product(DTYPES, HEADS, ((), ("all-gather cp",)), (False,)))
    cases += product(("bf16",), HEADS, ((),), (True,))
    return [AttentionNeed(dtype, *dims, frozenset(names), det) for dtype, dims, names, det in cases]


@pytest.mark.parametrize("flag", ["auto", "flash", "fused"])
def test_torch_takes_what_the_chosen_kernel_of_sdpa_is_called_with(flag: str) -> None:
    num_kernels = 0
    for device, need in product(devices(), needs()):
        try:
            row = choose_backend(flag, need, device=device)
        except ConfigError:
            assert flag != "auto"
            continue
        if row.name not in ("cudnn", "sdpa flash", "sdpa efficient"):
            continue
        kernel = row.kernel(True)
        assert isinstance(kernel, SdpaKernel)
        called = need
        if kernel.pads_values:
            called = AttentionNeed(need.dtype, need.head_dim, need.head_dim, need.features)
        (name,) = kernel.backends
        assert torch_takes(name, device, called), (row.name, device, need)
        num_kernels += 1
    assert num_kernels > 500


@pytest.mark.parametrize(
    ("card", "cudnn", "dims", "name"),
    [
        # MLA without padding where cuDNN has it
        ("H100", "9.15", (192, 128), "cudnn"),
        ("B200", "9.15", (192, 128), "cudnn"),
        ("B300", "9.23", (192, 128), "cudnn"),
        ("H100", "9.10", (192, 128), "sdpa flash"),
        ("A100", "9.15", (192, 128), "sdpa flash"),
        ("RTX 5090", "9.15", (192, 128), "sdpa flash"),
        # torch prefers cuDNN on 9.0 and 10.x from 9.15.1 on
        ("H100", "9.15", (128, 128), "cudnn"),
        ("H100", "9.10", (128, 128), "sdpa flash"),
        ("B200", "9.15", (64, 64), "cudnn"),
        ("A100", "9.15", (128, 128), "sdpa flash"),
        ("RTX 5090", "9.23", (128, 128), "sdpa flash"),
        # wider heads
        ("H100", "9.15", (192, 192), "sdpa flash"),
        ("H100", "9.15", (256, 256), "sdpa flash"),
        ("B200", "9.15", (256, 256), "sdpa flash"),
        ("L40S", "9.15", (224, 224), "sdpa efficient"),
        ("RTX 5090", "9.15", (200, 200), "sdpa efficient"),
        ("L40S", "9.15", (256, 256), "sdpa flash"),
        ("H100", "9.15", (512, 512), "sdpa efficient"),
        ("H100", "9.15", (100, 100), "sdpa flash"),
        ("A10", "none", (128, 128), "sdpa flash"),
    ],
)
def test_the_automatic_backend_of_a_card(
    card: str, cudnn: str, dims: tuple[int, int], name: str
) -> None:
    device = AttentionDevice("cuda", CARDS[card], (2, 13), CUDNN[cudnn])
    assert (
        choose_backend("auto", AttentionNeed("bf16", *dims, frozenset()), device=device).name
        == name
    )


@pytest.mark.parametrize(
    ("features", "dims", "name"),
    [
        (("documents",), (128, 128), "varlen flash"),
        (("documents",), (192, 128), "tiles"),
        (("ring cp",), (192, 128), "tiles"),
        (("ring cp", "documents"), (128, 128), "tiles"),
        (("all-gather cp",), (192, 128), "sdpa flash"),
        (("all-gather cp", "documents"), (192, 128), "tiles"),
    ],
)
def test_the_automatic_backend_of_hopper_and_blackwell_by_features(
    features: tuple[str, ...], dims: tuple[int, int], name: str
) -> None:
    need = AttentionNeed("bf16", *dims, frozenset(features))
    for card in ("H100", "B200"):
        device = AttentionDevice("cuda", CARDS[card], (2, 13), CUDNN["9.15"])
        assert choose_backend("auto", need, device=device).name == name


def test_heads_of_256_take_cudnn_from_torch_2_14_on() -> None:
    need = AttentionNeed("bf16", 256, 256, frozenset())
    for torch_version, name in (((2, 13), "sdpa flash"), ((2, 14), "cudnn")):
        device = AttentionDevice("cuda", (10, 0), torch_version, CUDNN["9.23"])
        assert choose_backend("auto", need, device=device).name == name


def test_fused_takes_wide_heads_by_another_kernel_or_says_what_is_taken_instead() -> None:
    device = AttentionDevice("cuda", (9, 0), (2, 13), CUDNN["9.15"])
    for width in range(144, 257, 8):
        need = AttentionNeed("bf16", width, width, frozenset())
        assert choose_backend("fused", need, device=device).name == "sdpa efficient"
    config = load(f"{MODEL} --kv-channels 250 --bf16 --attention-backend fused".split()).config
    choice = AttentionChoice.of(config, device)
    assert str(choice) == "sdpa flash (bf16)"
    assert "takes heads of up to 128 channels, not 250" in choice.warning
    assert "sdpa efficient takes heads of multiples of 8 channels" in choice.warning


MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 512 --mock-data"


def test_deterministic_mode_leaves_cudnn_out() -> None:
    device = AttentionDevice("cuda", (9, 0), (2, 13), CUDNN["9.15"])
    for words, name in (("", "cudnn (bf16)"), ("--deterministic-mode", "sdpa flash (bf16)")):
        config = load(f"{MODEL} --kv-channels 64 --bf16 {words}".split()).config
        assert str(AttentionChoice.of(config, device)) == name


@pytest.mark.parametrize(
    ("flag", "capability", "features", "dims", "name"),
    [
        ("flash3", (9, 0), (), (192, 128), "sdpa flash 3"),
        ("flash3", (9, 0), ("documents",), (128, 128), "varlen flash 3"),
        ("flash4", (9, 0), (), (128, 128), "sdpa flash 4"),
        ("flash4", (10, 0), ("documents",), (64, 64), "varlen flash 4"),
    ],
)
def test_installed_flash_implementations_are_taken_where_they_are_asked_for(
    flag: str,
    capability: tuple[int, int],
    features: tuple[str, ...],
    dims: tuple[int, int],
    name: str,
) -> None:
    both = frozenset({"FA3", "FA4"})
    device = AttentionDevice("cuda", capability, (2, 13), CUDNN["9.15"], both)
    need = AttentionNeed("bf16", *dims, frozenset(features))
    assert choose_backend(flag, need, device=device).name == name
    with pytest.raises(ConfigError, match="needs the package of flash_attn"):
        choose_backend(flag, need, device=AttentionDevice("cuda", capability))


def test_flash_implementations_say_which_cards_they_lack() -> None:
    need = AttentionNeed("bf16", 128, 128, frozenset())
    both = frozenset({"FA3", "FA4"})
    for flag, capability, lack in (
        ("flash3", (10, 0), "takes compute capabilities up to 9.0, not 10.0"),
        ("flash4", (12, 0), "takes compute capabilities up to 10.9, not 12.0"),
        ("flash4", (8, 0), "needs compute capability 9.0, not 8.0"),
    ):
        device = AttentionDevice("cuda", capability, implementations=both)
        with pytest.raises(ConfigError, match=lack):
            choose_backend(flag, need, device=device)


def test_an_implementation_is_activated_once_when_the_kernel_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By torch's registry, with a provider that stands in for the package."""
    activated = []

    def register() -> SimpleNamespace:
        activated.append("FA4")
        return SimpleNamespace(remove=lambda: None)

    registry = torch.nn.attention._registry
    monkeypatch.setitem(registry._FLASH_ATTENTION_IMPLS, "FA4", register)
    rows = backends.BACKENDS
    try:
        assert isinstance(rows["sdpa flash 4"].kernel(True), SdpaKernel)
        assert isinstance(rows["varlen flash 4"].kernel(True), VarlenKernel)
        assert torch.nn.attention.current_flash_attention_impl() == "FA4"
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert activated == ["FA4"]


def test_implementations_are_those_of_torch_whose_packages_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert flash_implementations.installed_implementations() == frozenset()
    known = set(torch.nn.attention.list_flash_attention_impls())
    assert known <= set(flash_implementations.IMPLEMENTATIONS)
    monkeypatch.setattr(flash_implementations, "find_spec", lambda module: module)
    assert flash_implementations.installed_implementations() == known
    monkeypatch.delattr(torch.nn.attention, "list_flash_attention_impls")
    assert flash_implementations.installed_implementations() == frozenset()

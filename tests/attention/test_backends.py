"""The choice of attention backends, for GPUs that are not at hand; every row; the messages; the
table in the docs.
"""

from pathlib import Path

import pytest

from nanotrain.attention.backends import (
    BACKENDS,
    EVERYTHING,
    FEATURES,
    Ability,
    AttentionBackend,
    AttentionChoice,
    AttentionDevice,
    AttentionNeed,
    CardLimit,
    choose_backend,
    lacks,
)
from nanotrain.config.load import load
from nanotrain.errors import ConfigError

CPU, H100 = AttentionDevice("cpu"), AttentionDevice("cuda", (9, 0))
NEW_CUDNN = AttentionDevice("cuda", (9, 0), cudnn=91501)
T4, OLD_TORCH = AttentionDevice("cuda", (7, 5)), AttentionDevice("cuda", (9, 0), (2, 10))
MLA = (192, 128)


def need(*features: str, dtype: str = "bf16", dims: tuple[int, int] = (128, 128)) -> AttentionNeed:
    return AttentionNeed(dtype, *dims, frozenset(features))


AUTOMATIC = [
    (NEW_CUDNN, need(), "cudnn"),
    (NEW_CUDNN, need("all-gather cp"), "sdpa flash"),
    (H100, need(), "sdpa flash"),
    (H100, need("all-gather cp"), "sdpa flash"),
    (H100, need("documents"), "varlen flash"),
    (H100, need("documents", "window", "all-gather cp"), "varlen flash"),
    (OLD_TORCH, need("documents"), "tiles"),
    (OLD_TORCH, need("window"), "flex"),
    (H100, need("sinks"), "tiles"),
    (H100, need("sinks", "window"), "flex"),
    (H100, need("softcap"), "flex"),
    (H100, need("softcap", dims=(8, 8)), "eager tiles"),
    (H100, need("dropout"), "eager tiles"),
    (H100, need("ring cp"), "tiles"),
    (H100, need("ring cp", "documents"), "tiles"),
    (H100, need("ring cp", "window"), "eager tiles"),
    (H100, need(dtype="fp32"), "sdpa efficient"),
    (H100, need("documents", dtype="fp32"), "flex"),
    (H100, need(dims=MLA), "sdpa flash"),
    (H100, need(dims=(128, 192)), "sdpa efficient"),
    (H100, need("documents", dims=MLA), "tiles"),
    (H100, need("documents", dims=(512, 512)), "eager tiles"),
    (T4, need(dtype="fp16"), "sdpa efficient"),
    (T4, need(), "eager tiles"),
    (T4, need("documents", dtype="fp16"), "eager tiles"),
    (CPU, need(dtype="fp32"), "sdpa flash"),
    (CPU, need("all-gather cp", dtype="fp32"), "tiles"),
    (CPU, need(*FEATURES), "tiles"),
]


@pytest.mark.parametrize(("device", "wanted", "name"), AUTOMATIC)
def test_the_backend_that_is_chosen(
    device: AttentionDevice, wanted: AttentionNeed, name: str
) -> None:
    assert choose_backend("auto", wanted, device=device).name == name


def test_every_row_is_chosen_for_something_and_the_last_automatic_one_computes_everything() -> None:
    chosen = {name for *_, name in AUTOMATIC}
    assert chosen == {name for name, row in BACKENDS.items() if row.is_automatic}
    for dtype in ("fp32", "bf16", "fp16"):
        for device in (CPU, H100, T4):
            choose_backend("auto", need(*FEATURES, dtype=dtype, dims=(500, 24)), device=device)


@pytest.mark.parametrize(
    ("flag", "wanted", "name"),
    [
        ("flash", need(), "sdpa flash"),
        ("flash", need("documents"), "varlen flash"),
        ("fused", need("all-gather cp"), "sdpa efficient"),
        ("fused", need(dtype="fp32"), "sdpa efficient"),
        ("unfused", need("documents", "dropout"), "math"),
        ("local", need("ring cp"), "tiles"),
        ("local", need("window"), "eager tiles"),
        ("flex", need(), "flex"),
    ],
)
def test_the_backend_that_is_asked_for(flag: str, wanted: AttentionNeed, name: str) -> None:
    assert choose_backend(flag, wanted, device=H100).name == name


def test_a_backend_that_cannot_says_what_it_lacks() -> None:
    with pytest.raises(
        ConfigError,
        match="sdpa flash has no documents, dropout; varlen flash has no dropout; leave",
    ):
        choose_backend("flash", need("documents", "dropout"), device=H100)
    with pytest.raises(
        ConfigError,
        match="cudnn has no ring cp, takes bf16 and fp16, not fp32, needs cuDNN 9.0.0, not none, takes heads of up to 128",
    ):
        choose_backend("fused", need("ring cp", dtype="fp32", dims=(192, 192)), device=H100)
    with pytest.raises(ConfigError, match="flex runs on cuda only; leave --attention-backend out"):
        choose_backend("flex", need(), device=CPU)
    flex = lacks(BACKENDS["flex"], need("softcap", dims=(24, 12)), device=H100)
    assert flex == ["takes heads of at least 16 channels, not 12"]
    varlen = lacks(
        BACKENDS["varlen flash"],
        need(dims=(100, 60)),
        device=AttentionDevice("cuda", (7, 0), (2, 12)),
    )
    assert varlen == [
        "needs torch 2.13 or newer, not 2.12",
        "needs compute capability 8.0, not 7.0",
        "takes heads of multiples of 8 channels",
        "takes values as wide as keys, not 60 and 100 channels",
    ]


def choice(words: str, device: AttentionDevice) -> str:
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 512 --mock-data"
    return str(AttentionChoice.of(load(f"{model} {words}".split()).config, device))


def test_the_choice_of_a_configuration() -> None:
    windows = "--bf16 --window-size 4 --window-attn-skip-freq 2"
    assert choice(windows, H100) == "sdpa flash (bf16); varlen flash (bf16, window)"
    assert choice("--context-parallel-size 2 --cp-comm-type a2a", CPU) == "sdpa flash (fp32)"
    assert (
        choice("--context-parallel-size 2 --softmax-type learnable", CPU)
        == "tiles (fp32, sinks, ring cp)"
    )
    assert (
        choice("--attention-backend unfused --attention-dropout 0.1", CPU) == "math (fp32, dropout)"
    )


def test_a_script_for_another_device_runs_with_a_warning() -> None:
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --vocab-size 512 --mock-data"
    config = load(f"{model} --attention-backend fused".split()).config
    chosen = AttentionChoice.of(config, CPU)
    assert str(chosen) == "sdpa flash (fp32)" and not chosen.is_forced
    assert (
        "--attention-backend fused cannot compute" in chosen.warning
        and "cudnn runs on cuda only" in chosen.warning
    )
    assert not AttentionChoice.of(config, H100).warning
    assert str(AttentionChoice.of(config, H100)) == "sdpa efficient (fp32)"


def backend_table() -> str:
    """BACKENDS in markdown, in the order of preference."""
    columns = [
        "backend",
        "`--attention-backend`",
        "on GPUs",
        "on CPUs",
        "heads on GPUs",
        "GPU, torch",
    ]
    columns += ["deterministic on GPUs", "in graphs"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in BACKENDS.values():
        heads = f"up to {row.max_head_dim}" if row.max_head_dim else "any"
        heads = f"{row.min_head_dim} to {row.max_head_dim}" if row.min_head_dim > 1 else heads
        for limit in row.wide_heads:
            heads += f"; {limit.dims[0]} and {limit.dims[1]} {limit_text(limit)}"
        if row.head_bytes > 1:
            heads += f"; multiples of {row.multiple('bf16')}"
            heads += " (fp32: 4)" if "fp32" in row.abilities["cuda"].dtypes else ""
        heads += "" if row.value_dims == "any" else f"; values {row.value_dims}"
        needs = f"{'.'.join(map(str, row.capability))}" if row.capability > (0, 0) else "any"
        if row.last_capability is not None:
            needs += f" to {'.'.join(map(str, row.last_capability))}"
        cells = [
            row.name,
            f"`{row.flag}`" + automatic_text(row),
            *(ability_text(row.abilities.get(kind)) for kind in ("cuda", "cpu")),
            heads,
            f"{needs}, {'.'.join(map(str, row.torch_version))}",
            "yes" if row.is_deterministic else "no" if row.obeys_deterministic else "refused",
            "yes" if row.is_in_graphs else "no",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def automatic_text(row: AttentionBackend) -> str:
    if not row.is_automatic:
        return ", not automatic"
    return "" if row.automatic_on is None else f", automatic {limit_text(row.automatic_on)}"


def limit_text(limit: CardLimit) -> str:
    major, minor = divmod(limit.cudnn, 10000)
    cards = " and ".join(f"{generation}.x" for generation in limit.generations)
    torch = ".".join(map(str, limit.torch_version))
    return f"on {cards} with cuDNN {major}.{minor // 100}.{minor % 100}, torch {torch}"


def ability_text(ability: Ability | None) -> str:
    if ability is None:
        return "-"
    features = ", ".join(name for name in FEATURES if name in ability.features)
    if ability.features == EVERYTHING:
        features = "everything"
    return f"{', '.join(sorted(ability.dtypes))}: {features or 'plain causal'}"


def test_the_docs_have_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "gpu.md"
    assert backend_table() in page.read_text(), f"copy this table:\n{backend_table()}"

"""`--muon-split-qkv-per-head`: the slices of every head are orthogonalized apart."""

import math

import pytest
import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim.heads import transform_heads
from nanotrain.optim.matrices import matrices_of
from nanotrain.optim.newton_schulz import newton_schulz
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.params import LocalParam
from nanotrain.spec.shape import ModelShape
from tests.laws.test_mla import MLA
from tests.laws.test_optimizers import KDA
from tests.laws.worlds import Case, config_of
from tests.optim.matrix_reference import assert_follows, momentum_of, orthogonalize

CONFIG = OptimConfig(
    optimizer="muon",
    clip_grad=0.0,
    weight_decay=0.2,
    muon_momentum=0.9,
    muon_fp32_matmul_prec="highest",
    muon_scale_mode="unit_rms_norm",  # another factor for each slice of a head
    muon_split_qkv_per_head=True,
)
HEAD = (2, 4)  # of the matrices of 12, 18 and 6 rows; stacks have none
LR = 1e-2


def step_per_head(weight, grad, state, number):
    """Muon of every slice of 2 and of 4 rows; a stack has matrices of 5 rows."""
    direction = momentum_of(grad, state, CONFIG)
    slices = [len(grad)] if len(grad) % sum(HEAD) else list(HEAD) * (len(grad) // sum(HEAD))
    updates = []
    for part in direction.split(slices):
        rows, columns = part.shape
        updates.append(math.sqrt(rows / columns) * orthogonalize(part))
    return weight * (1 - LR * CONFIG.weight_decay) - LR * torch.cat(updates)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_heads_are_updated_as_their_formulas_say(num_ranks: int) -> None:
    assert_follows(num_ranks, CONFIG, step_per_head, head_rows=HEAD)


def test_heads_are_slices_of_rows_that_repeat() -> None:
    full = torch.randn(12, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = transform_heads(full, HEAD, transform=lambda heads: newton_schulz(heads, CONFIG))
    for start, rows in ((0, 2), (2, 4), (6, 2), (8, 4)):
        head = slice(start, start + rows)
        torch.testing.assert_close(found[head], newton_schulz(full[head], CONFIG))
    assert transform_heads(full, (), transform=lambda heads: 2 * heads).equal(2 * full)


def declared(mixer: str, model: dict) -> dict[str, tuple[int, ...]]:
    shape = ModelShape.of(config_of(Case(1).but(model=model)).model)
    specs = MIXERS[mixer].declare(Declaration(shape, "fp32"))
    heads = {}
    for spec in specs:
        if spec.head_rows:
            heads[spec.name] = spec.head_rows
            (matrix,) = matrices_of(
                LocalParam.unsharded(spec), splits_tensors=True, splits_heads=True
            )
            assert matrix.num_heads * sum(spec.head_rows) == spec.shape[0]
            (whole,) = matrices_of(LocalParam.unsharded(spec), splits_tensors=True)
            assert whole.slice_shapes == (spec.shape,)
    return heads


def test_every_projection_to_heads_has_its_slices() -> None:
    assert declared("attention", {}) == {
        "query.weight": (10,),
        "key.weight": (10,),
        "value.weight": (10,),
    }
    gated = declared("attention", {"attention_output_gate": True})
    assert gated.keys() == {"query.weight", "key.weight", "value.weight", "gate.weight"}
    assert declared("mla", MLA) == {"query_up.weight": (8, 4), "kv_up.weight": (8, 8)}
    assert declared("mla", MLA | {"q_lora_rank": None}).keys() == {"query.weight", "kv_up.weight"}
    assert declared("shared_kv", {}) == {"query.weight": (10,)}
    assert declared("kda", KDA) == {"query.weight": (8,), "key.weight": (8,), "value.weight": (6,)}

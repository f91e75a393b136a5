"""`--optimizer muon` is torch.optim.Muon on full matrices and AdamW on the rest, to the bit,
however it is sharded.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.optim.muon import MUON, scale_of
from nanotrain.optim.newton_schulz import newton_schulz, newton_schulz_flops
from tests.harness import ranks, run_ranks
from tests.optim.test_distributed import LR, Trainee, grads_of, noise
from tests.parallel.dp.toys import RESIDENT_STRATEGIES, SHAPES

CONFIG = OptimConfig(
    optimizer="muon",
    clip_grad=0.0,
    weight_decay=0.2,
    muon_momentum=0.9,
    muon_scale_mode="shape_scaling",
)
MATRICES = [f"units.{i}.weight" for i, shape in enumerate(SHAPES) if len(shape) == 2]
STACK = "units.3.weight"


class Reference:
    """torch.optim.Muon on matrices, one by one for the stack, and AdamW on vectors."""

    def __init__(self, weights: dict[str, Tensor], *, nesterov: bool, scale: str) -> None:
        self.weights = {name: weight.clone() for name, weight in weights.items()}
        self.leaves: list[tuple[str, int | None, torch.optim.Optimizer]] = []
        for name, weight in self.weights.items():
            for index in range(len(weight)) if weight.ndim == 3 else [None]:
                leaf = torch.nn.Parameter(weight if index is None else weight[index])
                if weight.ndim == 1:
                    betas = CONFIG.adam_beta1, CONFIG.adam_beta2
                    optimizer = torch.optim.AdamW(
                        [leaf], lr=LR, betas=betas, eps=1e-8, weight_decay=0, fused=True
                    )
                else:
                    optimizer = torch.optim.Muon(
                        [leaf],
                        lr=LR,
                        weight_decay=0.2,
                        momentum=0.9,
                        nesterov=nesterov,
                        adjust_lr_fn=scale,
                    )
                self.leaves.append((name, index, optimizer))

    def step(self, grads: dict[str, Tensor]) -> None:
        for name, index, optimizer in self.leaves:
            (leaf,) = optimizer.param_groups[0]["params"]
            leaf.grad = (grads[name] if index is None else grads[name][index]).clone()
            optimizer.step()


def sum_of_grads(num_ranks: int, step: int) -> dict[str, Tensor]:
    parts = [grads_of(rank, step) for rank in range(num_ranks)]
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def follow_torch(ctx, config: OptimConfig, nesterov: bool, *more) -> None:
    scale, dtype = more
    for strategy in RESIDENT_STRATEGIES:
        trainee = Trainee(ctx, strategy, config=config, dtype=dtype)
        reference = Reference(initial_weights(), nesterov=nesterov, scale=scale)
        for step in range(3):
            trainee.step(grads_of(ctx.rank, step))
            reference.step(sum_of_grads(ctx.topology.world_size, step))
        for name, weight in trainee.weights().items():
            expected = reference.weights[name].to(dtype)
            assert torch.equal(weight, expected), (
                f"{strategy}: {name} is off by {(weight - expected).abs().max()}"
            )


def initial_weights() -> dict[str, Tensor]:
    return {f"units.{i}.weight": noise(shape, seed=i) for i, shape in enumerate(SHAPES)}


@pytest.mark.parametrize(("num_ranks", "sizes"), [(1, {}), (3, {}), (4, {"instances": 2})], ids=str)
def test_sharded_matrices_follow_torch_to_the_bit(num_ranks, sizes):
    run_ranks(
        num_ranks,
        follow_torch,
        CONFIG,
        False,
        "original",
        torch.float32,
        strategy="optim",
        **sizes,
        shares=True,
    )


def test_nesterov_and_the_scale_of_adam_follow_torch():
    config = replace(
        CONFIG, muon_use_nesterov=True, muon_scale_mode="spectral", muon_extra_scale_factor=0.2
    )
    run_ranks(
        2,
        follow_torch,
        config,
        True,
        "match_rms_adamw",
        torch.float32,
        strategy="optim",
        shares=True,
    )


@pytest.mark.parametrize("shape", [(5, 5), (24, 8), (8, 24)])
def test_newton_schulz_is_torchs_in_bf16_and_orthogonalizes_in_fp32(shape):
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ours = newton_schulz(matrix.bfloat16(), OptimConfig())
    assert torch.equal(
        ours, _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    )
    values = torch.linalg.svdvals(newton_schulz(matrix, OptimConfig()))
    assert values.min() > 0.5 and values.max() < 1.3
    assert torch.linalg.svdvals(matrix).max() > 2


def test_a_zero_matrix_stays_zero():
    assert not newton_schulz(torch.zeros(4, 6, dtype=torch.bfloat16), OptimConfig()).any()


def test_scales_and_flops():
    config = OptimConfig(muon_extra_scale_factor=0.5)
    for mode, expected in {"spectral": 8.0, "unit_rms_norm": 0.25, "shape_scaling": 0.5}.items():
        assert scale_of((16, 256), replace(config, muon_scale_mode=mode)) == expected / (
            1 if mode != "unit_rms_norm" else 2
        )
    assert newton_schulz_flops((2, 3), OptimConfig(muon_num_ns_steps=5)) == 5 * (4 * 4 * 3 + 2 * 8)


def test_matrices_have_one_moment_and_the_rest_those_of_the_scalar_rule():
    assert MUON.matrix is not None and MUON.matrix.state_names == ("momentum_buffer",)
    assert MUON.state_names(OptimConfig()) == ("exp_avg", "exp_avg_sq")
    assert MUON.state_names(OptimConfig(muon_scalar_optimizer="lion")) == ("exp_avg",)
    assert MUON.matrix.dtype(OptimConfig(muon_fp32_matmul_prec="highest")) is torch.float32


@ranks(2, strategy="optim", shares=True)
def test_state_is_allocated_by_kind_and_saved_by_name(ctx):
    trainee = Trainee(ctx, "optim", config=CONFIG)
    kinds = {}
    for box in trainee.optimizer.state_tensors():
        prefix, _, name = box.name.rpartition("/")
        kinds.setdefault(name, set()).add(prefix.removeprefix("optimizer/"))
    for name, prefixes in kinds.items():
        is_matrix = name in (*MATRICES, STACK)
        assert prefixes == {
            "model",
            *(["momentum_buffer"] if is_matrix else ["exp_avg", "exp_avg_sq"]),
        }

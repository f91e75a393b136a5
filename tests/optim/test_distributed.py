"""The distributed optimizer against torch AdamW on global tensors, skipped steps, and the tensors
of a checkpoint.
"""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig, PrecisionConfig
from nanotrain.config.parallel import ParallelConfig
from nanotrain.optim.distributed import DistributedOptimizer, clip_factor
from nanotrain.optim.rule import PLAIN_ARITHMETIC, ROW_NUMEL, squared_norm
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.precision.dtypes import DTYPE_NAMES, Precision
from nanotrain.precision.loss_scale import LossScale
from nanotrain.spec.boxes import TensorBox
from nanotrain.topology.topology import Topology
from tests.harness import ranks, run_ranks
from tests.parallel.dp.toys import RESIDENT_STRATEGIES, SHAPES, Toy, wrap

LR = 1e-2
CONFIG = OptimConfig(lr=LR, clip_grad=0.5, weight_decay=0.2, adam_beta1=0.9, adam_beta2=0.95)
NAMES = [f"units.{index}.weight" for index in range(len(SHAPES))]


class Trainee:
    """An initialized toy module with its wrapper and optimizer, trained on gradients by name."""

    def __init__(self, ctx: ParallelContext, strategy: str, **options) -> None:
        dtype, config = options.pop("dtype", torch.float32), options.pop("config", CONFIG)
        precision = options.pop("precision", None)
        precision_config = PrecisionConfig(
            params_dtype=DTYPE_NAMES[dtype], initial_loss_scale=1024.0, hysteresis=1
        )
        stage = Toy(
            dtype=dtype,
            shapes=options.pop("shapes", SHAPES),
            head_rows=options.pop("head_rows", ()),
        )
        self.stage = stage.to(options.pop("device", "cpu"))
        self.parallel: DataParallel = wrap(
            ctx, self.stage, strategy=strategy, dtype=dtype, **options
        )
        for index, param in enumerate(self.stage.parameters()):
            param.data.copy_(noise(param.shape, seed=index))
        self.optimizer = DistributedOptimizer(
            [self.parallel],
            config,
            precision=precision or Precision.of(precision_config),
            loss_scale=LossScale(precision_config),
            groups=ctx.groups,
        )

    def step(self, grads: dict[str, Tensor], *, lr: float = LR):
        """One step whose gradient on this rank is `grads`."""
        self.parallel.begin_step()
        self.parallel.backward_begins(is_last=True)
        for name, param in self.stage.named_parameters():
            grad = grads[name].to(param.device) * self.optimizer.loss_scale.scale
            (param.float() * grad).sum().backward()
        self.parallel.backward_ended()
        self.parallel.finish_grad_reduce()
        update = self.optimizer.step(lr)
        self.parallel.start_param_gather()
        return update

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.stage.named_parameters()}


def noise(shape: tuple[int, ...], *, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grads_of(rank: int, step: int, *, shapes=SHAPES) -> dict[str, Tensor]:
    return {
        f"units.{i}.weight": (noise(shape, seed=1000 * step + 10 * rank + i) / 20)
        .bfloat16()
        .float()
        for i, shape in enumerate(shapes)
    }


class Reference:
    """torch AdamW on global fp32 tensors, with torch's clipping."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.params = {
            name: torch.nn.Parameter(weight.float().clone()) for name, weight in weights.items()
        }
        groups = [
            {
                "params": [p for p in self.params.values() if p.ndim >= 2],
                "weight_decay": CONFIG.weight_decay,
            },
            {"params": [p for p in self.params.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=LR, betas=(CONFIG.adam_beta1, CONFIG.adam_beta2), eps=CONFIG.adam_eps
        )

    def step(self, grads: list[dict[str, Tensor]], *, lr: float = LR) -> float:
        for name, param in self.params.items():
            param.grad = torch.stack([of_rank[name] for of_rank in grads]).sum(0)
        norm = torch.nn.utils.clip_grad_norm_(self.params.values(), CONFIG.clip_grad)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        return norm.item()


def follow_the_reference(ctx):
    world = range(ctx.topology.world_size)
    for strategy in RESIDENT_STRATEGIES:
        for dtype in (torch.float32, torch.bfloat16):
            trainee = Trainee(ctx, strategy, dtype=dtype)
            reference = Reference(trainee.weights())
            for step in range(4):
                lr = LR / (step + 1)
                update = trainee.step(grads_of(ctx.rank, step), lr=lr)
                norm = reference.step([grads_of(rank, step) for rank in world], lr=lr)
                assert update.grad_norm == pytest.approx(norm, rel=1e-5) and norm > CONFIG.clip_grad
                assert not update.skipped
            main = {tensor.name: view for tensor, view in trainee.optimizer.state_tensors().items()}
            assert all(view.dtype is torch.float32 for view in main.values())
            for name, weight in trainee.weights().items():
                expected = reference.params[name].detach()
                tolerance = (
                    {"rtol": 1e-5, "atol": 1e-6}
                    if dtype is torch.float32
                    else {"rtol": 2**-8, "atol": 1e-5}
                )
                torch.testing.assert_close(weight.float(), expected, **tolerance)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_weights_follow_torch_adamw_in_every_strategy_and_dtype(num_ranks):
    run_ranks(num_ranks, follow_the_reference, strategy="optim", shares=True)


def test_two_instances_follow_torch_adamw_and_save_every_element_once():
    run_ranks(4, follow_the_reference, strategy="optim", instances=2, shares=True)
    for strategy in ("optim", "optim_grads"):
        saved = run_ranks(4, parts_to_save, strategy, strategy="optim", instances=2, shares=True)
        assert len(merge([tensors for tensors, _, _ in saved])) == 3 * len(NAMES)


@ranks(3, strategy="optim", shares=True)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(ctx):
    for strategy in RESIDENT_STRATEGIES:
        for bad in (math.nan, math.inf):
            trainee = Trainee(ctx, strategy)
            trainee.step(grads_of(ctx.rank, 0))
            before = trainee.weights()
            moments = [view.clone() for view in trainee.optimizer.state_tensors().values()]
            # When one element on one rank is bad,
            grads = grads_of(ctx.rank, 1)
            if ctx.rank == 1:
                grads[NAMES[2]][3, 4] = bad
            update = trainee.step(grads)
            # then nobody has moved,
            assert update.skipped and not math.isfinite(update.grad_norm)
            assert all(
                torch.equal(weight, before[name]) for name, weight in trainee.weights().items()
            )
            views = trainee.optimizer.state_tensors().values()
            assert all(torch.equal(view, old) for view, old in zip(views, moments, strict=True))
            assert trainee.optimizer.num_updates == 1
            # and the next step is taken as if it had not been.
            assert not trainee.step(grads_of(ctx.rank, 2)).skipped
            assert all(weight.isfinite().all() for weight in trainee.weights().values())
            assert trainee.optimizer.num_updates == 2


@ranks(1, shares=True)
def test_a_loss_scale_changes_no_update_and_halves_at_an_overflow(ctx):
    plain, scaled = Trainee(ctx, "optim"), Trainee(ctx, "optim", dtype=torch.float16)
    for name, param in plain.stage.named_parameters():  # begin at the same, fp16, values
        param.data.copy_(dict(scaled.stage.named_parameters())[name])
    # Given gradients that fp16 holds exactly, scaled or not,
    grads = {name: torch.full(shape, 2.0**-6) for name, shape in zip(NAMES, SHAPES, strict=True)}
    unscaled_update, scaled_update = plain.step(grads), scaled.step(grads)
    assert unscaled_update.grad_norm == scaled_update.grad_norm
    for mine, theirs in zip(
        plain.optimizer.state_tensors().values(),
        scaled.optimizer.state_tensors().values(),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
    # when an element overflows under the scale,
    update = scaled.step(dict(grads, **{NAMES[0]: torch.full(SHAPES[0], 1e3)}))
    # then the step is skipped and the scale is halved for the next.
    assert update.skipped and scaled.optimizer.loss_scale.scale == 512.0
    assert scaled.optimizer.num_updates == 1


@ranks(4, strategy="optim", shares=True)
def test_a_rank_whose_shards_are_padding_only_takes_part(ctx):
    # Given three elements in a bucket of 128, of which the first of four ranks owns all,
    for strategy in ("optim", "optim_grads"):
        trainee = Trainee(ctx, strategy, shapes=((3,),))
        assert bool(trainee.optimizer.state_tensors()) is (ctx.rank == 0)
        reference = Reference(trainee.weights())
        for step in range(2):
            trainee.step(grads_of(ctx.rank, step, shapes=((3,),)))
            reference.step([grads_of(rank, step, shapes=((3,),)) for rank in range(4)])
        trainee.optimizer.load_state_dict(trainee.optimizer.state_dict())
        torch.testing.assert_close(
            trainee.weights()["units.0.weight"], reference.params["units.0.weight"].detach()
        )


@ranks(1, shares=True)
def test_gaps_and_padding_stay_zero(ctx):
    trainee = Trainee(ctx, "optim", dtype=torch.bfloat16)
    for step in range(3):
        trainee.step(grads_of(0, step))
    used = sum(math.prod(shape) for shape in SHAPES)
    for state in trainee.optimizer._states:
        (part,) = state.parts
        for flat in (
            part.main.values,
            *(stored.values for stored in part.state.values()),
            state.bucket.params.full,
        ):
            used_here = sum(part.numel for part in state.bucket.update_ranges)
            assert int((flat != 0).sum()) == used_here < flat.numel()
    assert used == sum(
        part.numel for state in trainee.optimizer._states for part in state.bucket.update_ranges
    )


def parts_to_save(ctx, strategy: str):
    """Tensors to save and optimizer state after two steps, and the weights after a third."""
    trainee = Trainee(ctx, strategy, dtype=torch.bfloat16)
    for step in range(2):
        trainee.step(mean_grads(ctx, step))
    tensors = {box: view.clone() for box, view in trainee.optimizer.tensors_to_save().items()}
    state = json.loads(json.dumps(trainee.optimizer.state_dict()))
    trainee.step(mean_grads(ctx, 2))
    return tensors, state, trainee.weights()


def mean_grads(ctx, step: int) -> dict[str, Tensor]:
    """Gradients whose sum is equal in every world, exactly: they are zero on all ranks but the
    first.
    """
    return {name: grad * (ctx.rank == 0) for name, grad in grads_of(0, step).items()}


def go_on_from(ctx, strategy: str, saved: dict[str, Tensor], *rest):
    state, bucket_size = rest
    trainee = Trainee(ctx, strategy, dtype=torch.bfloat16, bucket_size=bucket_size)
    for tensor, view in trainee.optimizer.state_tensors().items():
        view.copy_(saved[tensor.name][tensor.box.slices()])
    trainee.optimizer.load_state_dict(state)
    trainee.parallel.start_param_gather()
    trainee.step(mean_grads(ctx, 2))
    return trainee.weights()


def merge(parts: list[dict[TensorBox, Tensor]]) -> dict[str, Tensor]:
    """Global tensors from the boxes of all ranks; fails if an element is missing or written twice."""
    merged: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}
    for part in parts:
        for tensor, values in part.items():
            merged.setdefault(tensor.name, torch.zeros(tensor.shape))[tensor.box.slices()] = values
            counts.setdefault(tensor.name, torch.zeros(tensor.shape))[tensor.box.slices()] += 1
    assert all((count == 1).all() for count in counts.values())
    return merged


@pytest.mark.parametrize("strategy", RESIDENT_STRATEGIES)
def test_saved_boxes_cover_every_element_once_and_load_in_another_layout(strategy):
    # Given what three ranks save after two steps,
    saved = run_ranks(3, parts_to_save, strategy, strategy="optim", shares=True)
    merged = merge([tensors for tensors, _, _ in saved])
    assert set(merged) == {
        f"{kind}/{name}"
        for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
        for name in NAMES
    }
    _, state, after_third = saved[0]
    assert all(state_of_rank == state for _, state_of_rank, _ in saved)
    # when two ranks in another strategy, with other buckets, read it and take the third step,
    for other_strategy in RESIDENT_STRATEGIES:
        resumed = run_ranks(
            2, go_on_from, other_strategy, merged, state, 1000, strategy="optim", shares=True
        )
        # then their weights are those of the run that never stopped, to the bit.
        for weights in resumed:
            assert all(torch.equal(weights[name], after_third[name]) for name in NAMES)


def test_replicas_save_equal_parts():
    saved = run_ranks(3, parts_to_save, "no_shard", strategy="optim", shares=True)
    sizes = [sum(view.numel() for view in tensors.values()) for tensors, _, _ in saved]
    assert max(sizes) - min(sizes) <= 3 * len(NAMES)


def test_fp32_parameters_are_their_own_main_weights():
    trainee = Trainee(ParallelContext.attach(Topology.of(ParallelConfig(), 1)), "no_shard")
    tensors = {box.name: view for box, view in trainee.optimizer.state_tensors().items()}
    tensors[f"model/{NAMES[1]}"].fill_(7.0)
    assert (trainee.weights()[NAMES[1]] == 7.0).all()


def reduced_grads(ctx, strategy: str):
    trainee = Trainee(ctx, strategy)
    # otherwise the step scales the gradients
    trainee.optimizer._config = replace(CONFIG, clip_grad=0.0)
    trainee.step(grads_of(ctx.rank, 0))
    return {box: view.clone() for box, view in trainee.optimizer.grad_tensors().items()}


@pytest.mark.parametrize("strategy", RESIDENT_STRATEGIES)
def test_gradients_by_name_are_the_sum_over_the_ranks(strategy):
    tensors = run_ranks(3, reduced_grads, strategy, strategy="optim", shares=True)
    expected = {name: sum(grads_of(rank, 0)[name] for rank in range(3)) for name in NAMES}
    # Without sharding every rank holds all of it, otherwise the ranks together hold it once.
    parts = [[part] for part in tensors] if strategy == "no_shard" else [tensors]
    for together in parts:
        merged = merge(together)
        assert set(merged) == set(NAMES)
        assert all(torch.allclose(merged[name], expected[name], rtol=1e-6) for name in NAMES)


def global_norm(shards, group: Group | None = None) -> float:
    """As the optimizer computes it."""
    squared = squared_norm(shards, device=torch.device("cpu"))
    all_reduce(squared, group or Group.single_rank("dp_shard"))
    return squared.sqrt().item()


def factor_of(norm: float, limit: float) -> float:
    return clip_factor(torch.tensor(norm, dtype=torch.float64), limit).item()


def norm_of_shards(ctx, vector: torch.Tensor) -> float:
    """Norm of a vector that is sharded over the ranks, with two buckets per rank."""
    shard = vector.chunk(ctx.topology.world_size)[ctx.rank]
    return global_norm(shard.tensor_split(2), ctx.group("dp_shard"))


def test_the_norm_of_shards_is_the_global_norm_and_equal_on_every_rank():
    vector = torch.randn(3 * 7001, generator=torch.Generator().manual_seed(0))
    norms = run_ranks(3, norm_of_shards, vector, strategy="optim", shares=True)
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(vector.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_shows_on_every_rank(bad):
    vector = torch.ones(3 * 7001)
    vector[15000] = bad
    assert not any(
        math.isfinite(norm)
        for norm in run_ranks(3, norm_of_shards, vector, strategy="optim", shares=True)
    )


def test_the_norm_of_a_long_shard_keeps_its_digits():
    # torch's own fp32 norm is off by 4e-4 here; a topology with shorter shards would clip
    # otherwise.
    long = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0))
    assert global_norm([long]) == pytest.approx(long.double().norm().item(), rel=1e-7)


@given(st.integers(0, 3 * ROW_NUMEL))
def test_every_element_counts_once_for_any_length(numel):
    assert global_norm([torch.full((numel,), 2.0)]) == pytest.approx(2.0 * math.sqrt(numel))


@given(st.floats(0, 1e6), st.floats(1e-3, 1e3))
def test_a_clipped_norm_is_at_most_the_limit_and_a_small_one_is_left_alone(norm, limit):
    factor = factor_of(norm, limit)
    assert norm * factor <= limit
    assert factor == 1.0 if norm + 1e-6 <= limit else factor < 1.0


def test_the_factor_is_megatrons():
    assert factor_of(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert factor_of(1e9, 0.0) == 1.0  # 0 turns clipping off


def test_squares_of_all_shards_are_summed() -> None:
    shards = [torch.full((ROW_NUMEL + 3,), 0.5), torch.full((7,), 2.0)]
    expected = 0.25 * (ROW_NUMEL + 3) + 4.0 * 7
    device = torch.device("cpu")
    assert float(squared_norm(shards, device=device)) == pytest.approx(expected, rel=1e-7)
    local = PLAIN_ARITHMETIC.local(shards, device=device)
    assert local.shape == (1,)
    assert local.dtype is torch.float64
    assert float(PLAIN_ARITHMETIC.join(local)) == float(local)


def test_no_shards_have_no_norm() -> None:
    assert float(squared_norm([], device=torch.device("cpu"))) == 0.0

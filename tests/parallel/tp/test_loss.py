"""The chunked loss over a sharded vocabulary equals the plain one, with its gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.comm.group import Group
from nanotrain.kernels.linear import GradView
from nanotrain.parallel.tp import loss as loss_module
from nanotrain.parallel.tp.layers import TensorParallel
from nanotrain.parallel.tp.loss import (
    Targets,
    TokenGroups,
    Vocabulary,
    softmax_gradient,
    vocab_parallel_cross_entropy,
)
from tests.harness import ranks, run_ranks
from tests.train.saved_tensors import PeakStorages

SINGLE_RANK = Group.single_rank("tp")


def in_one_piece(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor,
    cap: float | None = None,
    scaling: float = 1.0,
) -> torch.Tensor:
    logits = (hidden @ weight.t()).float() / scaling
    logits = logits if cap is None else cap * (logits / cap).tanh()
    return (F.cross_entropy(logits, labels, reduction="none") * mask).sum()


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(1, 40),
    vocab_size=st.integers(2, 60),
    padding=st.integers(0, 9),
    chunk=st.integers(1, 400),
    cap=st.sampled_from([(None, 1.0), (2.0, 1.0), (None, 4.0), (2.0, 0.5)]),
    seed=st.integers(0, 99),
)
def test_chunks_give_the_loss_and_gradients_of_a_single_chunk(
    num_tokens: int,
    vocab_size: int,
    padding: int,
    chunk: int,
    cap: tuple[float | None, float],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 8, generator=generator, requires_grad=True)
    weight = torch.randn(vocab_size + padding, 8, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    mask = torch.randint(0, 3, (num_tokens,), generator=generator) / 2
    expected = in_one_piece(hidden, weight[:vocab_size], labels, mask, *cap)
    gradients = torch.autograd.grad(expected / 7, (hidden, weight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", chunk)
        patch.setattr(loss_module, "MIN_CHUNK_TOKENS", 1)
        options = {
            "targets": Targets(labels, mask),
            "vocabulary": Vocabulary(vocab_size, *cap),
            "group": SINGLE_RANK,
        }
        actual = vocab_parallel_cross_entropy(hidden, weight, **options)
        with torch.no_grad():
            evaluated = vocab_parallel_cross_entropy(hidden, weight, **options)
    (actual / 7).backward()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(evaluated, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, gradients[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight.grad, gradients[1], rtol=1e-4, atol=1e-6)
    assert not weight.grad[vocab_size:].any()


def test_logits_of_one_chunk_at_a_time_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, size = 64, 400
    hidden, weight = (
        torch.ones(num_tokens, 1, requires_grad=True),
        torch.ones(size, 1, requires_grad=True),
    )
    targets = Targets(torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens))
    peaks = []
    for num_chunks in (1, 4):
        monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", num_tokens * size // num_chunks)
        monkeypatch.setattr(loss_module, "MIN_CHUNK_TOKENS", 1)
        options = {"targets": targets, "vocabulary": Vocabulary(size), "group": SINGLE_RANK}
        for has_grad in (True, False):
            with torch.set_grad_enabled(has_grad), PeakStorages() as live:
                vocab_parallel_cross_entropy(hidden, weight, **options)
            peaks.append(live.peak)
    assert peaks[2:] == pytest.approx([peak / 4 for peak in peaks[:2]], rel=0.1)


def test_a_second_backward_is_an_error_not_a_wrong_gradient() -> None:
    hidden = torch.ones(3, 2, requires_grad=True)
    loss = vocab_parallel_cross_entropy(
        hidden,
        torch.ones(4, 2),
        targets=Targets(torch.zeros(3, dtype=torch.int64), torch.ones(3)),
        vocabulary=Vocabulary(4),
        group=SINGLE_RANK,
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_hopeless_label_has_a_finite_loss() -> None:
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[500.0], [-500.0]])
    actual = vocab_parallel_cross_entropy(
        hidden,
        weight,
        targets=Targets(torch.tensor([1]), torch.ones(1)),
        vocabulary=Vocabulary(2),
        group=SINGLE_RANK,
    )
    assert actual.item() == 1000.0


def test_chunks_of_the_weight_gradient_add_up_unrounded_in_an_fp32_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 50 * 64)
    monkeypatch.setattr(loss_module, "MIN_CHUNK_TOKENS", 1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 16, generator=generator).bfloat16()
    weight = torch.nn.Parameter(torch.randn(50, 16, generator=generator).bfloat16())
    labels, mask = torch.randint(0, 50, (300,), generator=generator), torch.ones(300)
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(50, 16)
    buffer = weight.grad
    vocab_parallel_cross_entropy(
        hidden, weight, targets=Targets(labels, mask), vocabulary=Vocabulary(50), group=SINGLE_RANK
    ).backward()
    exact = weight.detach().float().requires_grad_()
    in_one_piece(hidden.float(), exact, labels, mask).backward()
    assert weight.grad is buffer
    assert not torch.equal(buffer, buffer.bfloat16().float())
    torch.testing.assert_close(buffer, exact.grad, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_with_a_known_gradient_of_the_loss_the_weight_gradient_is_added_to_the_buffer_and_is_nowhere_else(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, size, padded, width, scale = 48, 50, 64, 128, 0.3
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 16 * size)
    monkeypatch.setattr(loss_module, "MIN_CHUNK_TOKENS", 1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.nn.Parameter((0.1 * torch.randn(padded, width, generator=generator)).to(dtype))
    labels = torch.randint(0, size, (num_tokens,), generator=generator)
    mask = torch.randint(0, 3, (num_tokens,), generator=generator) / 2
    buffer, peaks, grads = torch.empty(padded, width), [], []
    for grad_scale in (None, scale, scale):  # the last one adds to what the one before has written
        targets, has_grads = Targets(labels, mask, grad_scale=grad_scale), len(grads) == 2
        view = GradView(
            torch.float32,
            lambda: None,
            lambda: None,
            partial(lambda *each: each, buffer, has_grads),
        )
        weight.grad_view = view  # type: ignore[attr-defined]
        with PeakStorages() as live:
            loss = vocab_parallel_cross_entropy(
                hidden, weight, targets=targets, vocabulary=Vocabulary(size, 3.0), group=SINGLE_RANK
            )
        peaks.append(live.peak)
        grads.append(
            torch.autograd.grad(loss, (hidden, weight), torch.tensor(scale), allow_unused=True)
        )
    ((expected_hidden, expected), (grad_hidden, none), _) = grads
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
    )
    torch.testing.assert_close(grad_hidden, expected_hidden, **tolerance)
    if dtype is torch.float16:  # its range is too small for scaled gradients of logits
        torch.testing.assert_close(none, expected)
        return
    assert none is None
    torch.testing.assert_close(buffer, 2 * expected.float(), **tolerance)
    assert peaks[0] - peaks[1] > 0.99 * 4 * padded * width


def cut_loss(ctx, vocab_size: int, padded: int, sequence_parallel: bool) -> None:
    """Three chunks of tokens, uneven masks, labels in every shard that is not all padding."""
    tensor_parallel, group = TensorParallel(ctx.group("tp"), sequence_parallel), ctx.group("tp")
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(2, 20, 6, generator=generator)
    table = (3 * torch.randn(padded, 6, generator=generator)).requires_grad_()
    labels = torch.randint(0, vocab_size, (40,), generator=generator)
    mask = torch.randint(0, 3, (40,), generator=generator) / 2
    whole = hidden.clone().requires_grad_()
    expected = in_one_piece(whole.flatten(0, 1), table[:vocab_size], labels, mask, 3.0)
    (expected / 7).backward()

    own = tensor_parallel.local_slice(hidden).clone().requires_grad_()
    rows = table.detach().chunk(group.size)[group.index].clone().requires_grad_()
    options = {
        "targets": Targets(labels, mask),
        "vocabulary": Vocabulary(vocab_size, 3.0),
        "group": group,
    }
    # All ranks, threads of a process of their own, set the same: one that restored it would do so
    # for the others too.
    loss_module.CHUNK_ELEMENTS["cpu"] = 16 * min(len(rows), vocab_size)
    loss_module.MIN_CHUNK_TOKENS = 1
    actual = vocab_parallel_cross_entropy(tensor_parallel.enter(own).flatten(0, 1), rows, **options)
    with torch.no_grad():
        evaluated = vocab_parallel_cross_entropy(
            tensor_parallel.enter(own).flatten(0, 1), rows, **options
        )
    (actual / 7).backward()
    every = [torch.empty_like(actual) for _ in range(group.size)]
    torch.distributed.all_gather(every, actual.detach(), group=group.process_group)
    assert all(torch.equal(other, actual) for other in every)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(evaluated, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        own.grad, tensor_parallel.local_slice(whole.grad), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        rows.grad, table.grad.chunk(group.size)[group.index], rtol=1e-4, atol=1e-6
    )


# No padding; some on the last rank; a rank of nothing but padding; several of them.
SIZES = [(16, 16), (13, 16), (12, 16), (11, 16), (3, 16)]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(("vocab_size", "padded"), SIZES)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_sharded_vocabulary_gives_the_same_loss_and_gradients(
    tp, vocab_size, padded, sequence_parallel
):
    run_ranks(tp, cut_loss, vocab_size, padded, sequence_parallel, tp=tp)


@ranks(4, tp=4)
def test_a_hopeless_label_on_another_rank_has_a_finite_loss(ctx):
    weight = torch.tensor([[[500.0], [-500.0], [0.0], [0.0]][ctx.rank]], requires_grad=True)
    hidden = torch.tensor([[1.0]], requires_grad=True)
    labels, mask, group = torch.tensor([1]), torch.ones(1), ctx.group("tp")
    actual = vocab_parallel_cross_entropy(
        hidden, weight, targets=Targets(labels, mask), vocabulary=Vocabulary(3), group=group
    )
    actual.backward()
    assert actual.item() == 1000.0
    assert weight.grad.item() == [1.0, -1.0, 0.0, 0.0][ctx.rank]
    assert hidden.grad.item() == [500.0, 500.0, 0.0, 0.0][ctx.rank]


@ranks(2, tp=2)
def test_one_number_per_token_is_gathered_and_no_logits(ctx):
    num_tokens, group = 24, ctx.group("tp")
    hidden, weight = (
        torch.zeros(num_tokens, 4, requires_grad=True),
        torch.zeros(50, 4, requires_grad=True),
    )
    labels, mask = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens)
    ctx.traffic.reset()
    vocab_parallel_cross_entropy(
        hidden, weight, targets=Targets(labels, mask), vocabulary=Vocabulary(100), group=group
    ).backward()
    assert ctx.traffic.bytes("tp", "all_gather") == 4 * num_tokens * (group.size - 1)
    assert ctx.traffic.bytes("tp") == 4 * num_tokens * (group.size - 1) + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_torch_form_equals_fp64(dtype):
    torch.manual_seed(1)
    logits = (4 * torch.randn(5, 37)).to(dtype)
    exact, column = logits.double().requires_grad_(), torch.tensor([[0], [36], [3], [4], [5]])
    log_probs = exact.log_softmax(1).gather(1, column)[:, 0]
    (-log_probs.sum()).backward()
    picked, gradient = softmax_gradient(
        logits, column=column, local_mask=torch.ones(5, 1), combine=lambda local: local
    )
    torch.testing.assert_close(picked.double(), log_probs.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-4, atol=1e-6)


def group_sums(ctx, hidden, weight, labels, mask, ids):
    """[2, groups] losses and counts of this rank, in training and in evaluation."""
    group = ctx.group("tp")
    shard = weight.chunk(group.size)[group.index].clone().requires_grad_()
    found = []
    for is_training in (True, False):
        sums = torch.zeros(2, 4, dtype=torch.float64)
        targets = Targets(labels, mask, TokenGroups(ids, sums))
        with torch.set_grad_enabled(is_training):
            vocab_parallel_cross_entropy(
                hidden.clone().requires_grad_(is_training),
                shard,
                targets=targets,
                vocabulary=Vocabulary(11),
                group=group,
            )
        found.append(sums)
    return found


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sums_by_group_leave_masked_tokens_out(tp):
    """Of each group the loss of its unmasked tokens; in training their number, in evaluation how
    many of them are the most likely ones, though all tokens of a context may be greedy too.
    """
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(40, 8, generator=generator)
    weight = torch.randn(16, 8, generator=generator)
    logits = (hidden @ weight[:11].t()).float()
    greedy = logits.argmax(-1)
    labels = torch.where(torch.arange(40) % 4 == 3, (greedy + 1) % 11, greedy)
    mask = (torch.rand(40, generator=generator) < 0.5).float()
    ids = torch.arange(40) % 3  # the last group has no tokens
    ids[mask == 0] = 2  # context of a row, greedy for the most part
    losses = F.cross_entropy(logits, labels, reduction="none") * mask
    is_greedy = (labels == greedy).float() * mask
    expected = torch.zeros(3, 4, dtype=torch.float64)
    expected.index_add_(1, ids, torch.stack([losses, mask, is_greedy]).double())
    assert expected[1, 0] > expected[2, 0] > 0, "some unmasked tokens are not greedy"
    by_rank = run_ranks(tp, group_sums, hidden, weight, labels, mask, ids, tp=tp)
    trained = sum(found[0] for found in by_rank)
    evaluated = sum(found[1] for found in by_rank)
    torch.testing.assert_close(trained, expected[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(evaluated, expected[[0, 2]], rtol=1e-5, atol=1e-6)

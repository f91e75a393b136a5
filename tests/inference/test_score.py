"""Log-likelihoods are those of the logits by hand, in any batch; windows predict every token once."""

import pytest
import torch

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.inference.score import log_likelihoods, rolling_windows
from nanotrain.model.parameters import initialize
from nanotrain.model.transformer import Stage, build_stage

REQUESTS = [([1, 2, 3], [4, 5]), ([7], [8, 9, 10, 11]), ([3, 1, 4, 1, 5], [9]), ([2], [])]


@pytest.fixture(scope="module")
def stage() -> Stage:
    model = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        vocab_size=40,
        max_position_embeddings=8,
    )
    stage = build_stage(model).to_empty(device="cpu")
    initialize(stage, stage.params, seed=1)
    return stage


def by_hand(stage: Stage, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    row = torch.tensor([context + continuation])
    with torch.no_grad():
        log_probs = stage.logits(row)[0].double().log_softmax(dim=-1)
    total, greedy = 0.0, True
    for place, token in enumerate(continuation, len(context)):
        total += float(log_probs[place - 1, token])
        greedy = greedy and int(log_probs[place - 1].argmax()) == token
    return total, greedy


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_those_of_the_logits_in_any_batch(stage: Stage, batch_size: int) -> None:
    context = [5, 6, 7]
    greedy = [*context]
    for _ in range(2):
        with torch.no_grad():
            greedy.append(int(stage.logits(torch.tensor([greedy]))[0, -1].argmax()))
    requests = [*REQUESTS, (context, greedy[3:])]
    for request, scored in zip(
        requests, log_likelihoods(stage, requests, batch_size=batch_size), strict=True
    ):
        total, is_greedy = by_hand(stage, *request)
        assert scored.log_likelihood == pytest.approx(total, rel=1e-5, abs=1e-9)
        assert scored.is_greedy == is_greedy
    assert is_greedy, "the last continuation is the greedy one"


def test_a_longer_context_is_cut_at_its_beginning(stage: Stage) -> None:
    context = list(range(20))
    (scored,) = log_likelihoods(stage, [(context, [21, 22])], batch_size=1)
    assert scored.log_likelihood == pytest.approx(
        by_hand(stage, context[-7:], [21, 22])[0], rel=1e-5
    )


def test_of_a_continuation_longer_than_the_positions_the_last_tokens_are_scored(
    stage: Stage,
) -> None:
    (scored,) = log_likelihoods(stage, [([5], list(range(20)))], batch_size=1)
    assert scored.log_likelihood == pytest.approx(
        by_hand(stage, [11], list(range(12, 20)))[0], rel=1e-5
    )


def test_rows_whose_experts_have_a_capacity_are_read_alone() -> None:
    moe = MoEConfig(num_experts=4, ffn_hidden_size=16, expert_capacity_factor=0.5)
    config = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        vocab_size=40,
        max_position_embeddings=8,
        moe=moe,
    )
    stage = build_stage(config).to_empty(device="cpu")
    initialize(stage, stage.params, seed=1)
    stage.eval()
    in_one_batch, one_by_one = (
        log_likelihoods(stage, REQUESTS, batch_size=batch_size) for batch_size in (4, 1)
    )
    assert in_one_batch == one_by_one


@pytest.mark.parametrize("length", [1, 3, 4, 8, 10])
def test_windows_predict_every_token_once_with_as_much_context_as_fits(length: int) -> None:
    tokens = list(range(1, 9))
    windows = list(rolling_windows(tokens, prefix=0, max_length=length))
    assert [token for _, scored in windows for token in scored] == tokens
    for context, scored in windows:
        assert len(context) + len(scored) - 1 <= length and context
        whole = [0, *tokens]
        start = whole.index(context[0])
        assert whole[start : start + len(context) + len(scored)] == [*context, *scored]
    assert all(len(context) + len(scored) - 1 == length for context, scored in windows[1:])

"""Multi-token prediction of one rank, against the equations of DeepSeek-V3 written out without
shifted sequences.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.config.model import MoEConfig, MTPConfig
from nanotrain.data.batch import Batch
from nanotrain.model.context import AttentionInputs, BatchContext, LayerContext
from nanotrain.model.mtp import for_repeated_layer
from nanotrain.model.transformer import Stage
from nanotrain.spec.stages import StageSpec
from nanotrain.train.batches import GlobalBatch
from nanotrain.train.parts.losses import MTPLosses
from tests.model.building import LLAMA, QWEN3, VOCAB, build, random_batch, randomize

MTP = replace(LLAMA, mtp=MTPConfig(num_layers=2), untie_embeddings_and_output_weights=True)
SCALES = (0.3, 0.7)


def written_out(stage: Stage, batch: Batch) -> list[Tensor]:
    """The summed loss of every layer, over the positions that it has a token and a label for."""
    assert stage.embedding is not None and stage.head is not None and stage.head.weight is not None
    hidden, _ = stage._transform(None, BatchContext(batch))
    losses = []
    layers = [layer for layer in stage.mtp_layers for _ in range(layer.num_predictions)]
    for depth, layer in enumerate(layers, start=1):
        length = batch.tokens.shape[1] - depth
        hidden = hidden[:, :length]
        embedded = F.embedding(batch.tokens[:, depth:], stage.embedding.word.weight)
        joined = torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], dim=-1)
        rotary = stage.position_tables.at(length, like=hidden).full
        mask = stage.parallel.core_attention.plan_mask(None, tokens=batch.tokens[:, :length])
        context = LayerContext(AttentionInputs(rotary, mask))
        hidden = layer.final_norm(layer.block(joined @ layer.eh_proj.weight.T, context))
        logits = hidden @ stage.head.weight[:VOCAB].T
        each = F.cross_entropy(
            logits.flatten(0, 1), batch.labels[:, depth:].flatten(), reduction="none"
        )
        losses.append((each * batch.loss_mask[:, depth:].flatten()).sum())
    return losses


def loss_sums(stage) -> torch.Tensor:
    """The summed losses of every layer, which count anew."""
    sums = torch.cat([layer.loss_sums for layer in stage.mtp_layers])
    for layer in stage.mtp_layers:
        layer.loss_sums.zero_()
    return sums


REPEATED = replace(MTP, mtp=MTPConfig(num_layers=2, use_repeated_layer=True))


@pytest.mark.parametrize("config", [MTP, REPEATED], ids=["own layers", "a repeated layer"])
def test_loss_and_gradients_are_those_of_the_equations(config):
    stage, batch = randomize(build(config)), random_batch()
    assert len(stage.mtp_layers) == config.mtp.num_own_layers
    loss = stage(None, BatchContext(batch.with_mtp(2), mtp_scales=SCALES))
    loss.backward()
    grads = {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
    assert grads.keys() == dict(stage.named_parameters()).keys()
    sums = loss_sums(stage)
    stage.zero_grad()
    plain, further = stage(None, BatchContext(batch)), written_out(stage, batch)
    assert torch.equal(loss, plain), "the value is the model's loss"
    assert sums.tolist() == pytest.approx([each.item() for each in further], rel=1e-5)
    (plain + sum(scale * each for scale, each in zip(SCALES, further, strict=True))).backward()
    for name, parameter in stage.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-4)


def test_a_balance_loss_of_a_repeated_layer_counts_once():
    moe = MoEConfig(num_experts=4, router_load_balancing_type=["aux_loss"], aux_loss_coeff=[0.3])
    own = replace(MTP, moe=moe)
    repeated = replace(own, mtp=MTPConfig(num_layers=3, use_repeated_layer=True))
    assert for_repeated_layer(own) == own
    assert for_repeated_layer(repeated).moe.aux_loss_coeff == pytest.approx([0.1])
    assert for_repeated_layer(REPEATED) == REPEATED


def test_the_gradient_of_the_loss_scales_both():
    """A step differentiates the summed loss with loss scale / tokens as its gradient."""
    stage, batch = randomize(build(MTP)), random_batch().with_mtp(2)
    grads = []
    for factor in (1.0, 0.125):
        stage.zero_grad()
        stage(None, BatchContext(batch, mtp_scales=SCALES)).backward(torch.tensor(factor))
        grads.append(
            {name: parameter.grad / factor for name, parameter in stage.named_parameters()}
        )
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_the_scales_make_means_of_sums():
    config = replace(MTP, mtp=MTPConfig(num_layers=2, loss_scaling_factor=0.3))
    context = SimpleNamespace(groups={"tp": Group.single_rank("tp")}, device=torch.device("cpu"))
    part = MTPLosses(
        SimpleNamespace(config=SimpleNamespace(model=config), context=context, stages={})
    )
    context = part.context(GlobalBatch((), 200, wait_s=0.0), counts=(100.0, 50.0))
    assert context["mtp_scales"] == pytest.approx((0.15 * 200 / 100, 0.15 * 200 / 50))
    assert part.sums(is_logged=True).tolist() == [0.0, 0.0], "as on a rank without the last stage"


def test_evaluation_and_logits_leave_the_layers_out():
    with_layers, without = build(MTP), build(replace(MTP, mtp=MTPConfig()))
    batch = random_batch()
    for layer in with_layers.mtp_layers:
        layer.register_forward_pre_hook(lambda *_: pytest.fail("called"))
    assert torch.equal(with_layers(None, BatchContext(batch)), without(None, BatchContext(batch)))
    assert torch.equal(with_layers.logits(batch.tokens), without.logits(batch.tokens))


def test_a_layer_reads_and_predicts_nothing_of_another_document():
    """Other tokens in the second document change no loss of the first, whose last predictions are
    not counted.
    """
    stage = randomize(build(replace(QWEN3, mtp=MTPConfig(num_layers=2))))
    batch = random_batch(batch=1)
    segments = torch.cat([torch.zeros(1, 10), torch.ones(1, 14)], dim=1).int()
    mask = (segments == 0).float()
    sums = []
    for tokens in (batch.tokens, torch.where(segments == 0, batch.tokens, 7)):
        labels = torch.cat(
            [tokens[:, 1:10], torch.zeros(1, 1, dtype=tokens.dtype), tokens[:, 10:]], dim=1
        )
        packed = replace(
            batch, tokens=tokens, labels=labels, loss_mask=mask, segment_ids=segments
        ).with_mtp(2)
        assert [each.num_target_tokens.item() for each in packed.mtp] == [9, 8]
        stage(None, BatchContext(packed, mtp_scales=SCALES))
        sums.append(loss_sums(stage))
    assert torch.equal(*sums)


def test_a_last_stage_without_layers_of_its_own_keeps_the_window():
    model, batch = replace(MTP, window_size=2, window_attn_skip_freq="0"), random_batch()
    context, sums = BatchContext(batch.with_mtp(2), mtp_scales=SCALES), []
    number = model.num_layers
    whole = randomize(build(model))
    ends = (StageSpec(0, 0, number, has_embedding=True, has_head=False),
            StageSpec(1, number, number, has_embedding=False, has_head=True))  # fmt: skip
    first, last = (build(model, spec=spec) for spec in ends)
    for stage in (first, last):
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    whole(None, context)
    last(first(None, context), context)
    for stage in (whole, last):
        sums.append(loss_sums(stage))
    assert torch.equal(*sums)


def test_every_prediction_has_a_scale() -> None:
    stage, batch = randomize(build(MTP)), random_batch()
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        stage(None, BatchContext(batch.with_mtp(2), mtp_scales=SCALES[:1]))

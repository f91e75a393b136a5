"""The model on a CUDA device: the numbers of the CPU, eager and compiled."""

import pytest
import torch

from nanotrain.inference.generate import Sampling, generate
from nanotrain.model.context import BatchContext
from nanotrain.model.transformer import Stage
from tests.model.building import MODELS, build, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ["llama3", "qwen3-untied", "qwen2", "gpt2"]


def passed(stage: Stage, *, device: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and every gradient, in fp32 on the CPU."""
    stage.to(device)
    stage.zero_grad()
    loss = stage(None, BatchContext(random_batch(length=48).to(torch.device(device))))
    (loss / 48).backward()
    return loss.item(), {name: p.grad.float().cpu() for name, p in stage.named_parameters()}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient, relative to its norm, or to 1 % of the largest where it
    is small.

    GPT-2's key bias moves all scores of a query alike: its gradient is zero but for rounding.
    """
    floor = 0.01 * max(value.norm().item() for value in expected.values())
    return max(
        (found[key] - value).norm().item() / max(value.norm().item(), floor)
        for key, value in expected.items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_fp32_on_cuda_is_fp32_on_the_cpu(name: str) -> None:
    loss, gradients = passed(build(MODELS[name]), device="cpu")
    found, found_gradients = passed(build(MODELS[name]), device="cuda")
    assert found == pytest.approx(loss, rel=1e-5)
    assert distance(found_gradients, gradients) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_bf16_on_cuda_follows_fp32_on_the_cpu(name: str) -> None:
    loss, gradients = passed(build(MODELS[name]), device="cpu")
    found, found_gradients = passed(build(MODELS[name], dtype=torch.bfloat16), device="cuda")
    assert found == pytest.approx(loss, rel=1e-2)
    assert distance(found_gradients, gradients) < 0.1


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_compiled_block_computes_what_it_computed_before(name: str) -> None:
    loss, gradients = passed(build(MODELS[name]), device="cuda")
    compiled = build(MODELS[name])
    for layer in compiled.layers.values():
        layer.forward = torch.compile(layer.forward, fullgraph=True)
    found, found_gradients = passed(compiled, device="cuda")
    assert found == pytest.approx(loss, rel=1e-5)
    assert distance(found_gradients, gradients) < 1e-3


def test_text_is_the_same_for_a_seed_on_either_device() -> None:
    on_cpu, on_cuda = build(MODELS["llama"]), build(MODELS["llama"]).to("cuda")
    texts = [
        generate(stage, [1, 2], num_tokens=12, sampling=Sampling(seed=3))
        for stage in (on_cpu, on_cuda)
    ]
    assert texts[0] == texts[1]

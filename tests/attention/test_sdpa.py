"""SDPA against the formula."""

import pytest
import torch

from nanotrain.attention.sdpa import attend


@pytest.mark.parametrize("value_head_dim", [5, 8, 11])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_attend_is_softmax_of_the_causal_scores(groups: int, value_head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 10, 6, 8, generator=generator)
    key, value = (
        torch.randn(2, 10, groups, head_dim, generator=generator)
        for head_dim in (8, value_head_dim)
    )
    out = attend(query, key=key, value=value)
    for head in range(6):
        group = head // (6 // groups)
        scores = query[:, :, head] @ key[:, :, group].mT / 8**0.5
        scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), float("-inf"))
        torch.testing.assert_close(out[:, :, head], scores.softmax(-1) @ value[:, :, group])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_gradients_of_grouped_heads_are_added_up_in_fp32(
    dtype: torch.dtype, tolerance: float
) -> None:
    """torch's grouped kernel adds those of six queries with an error of 7.0e-3 in bf16."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(1, 129, heads, 40, generator=generator).to(dtype) for heads in (6, 1, 1)]
    grad = torch.randn(1, 129, 6, 40, generator=generator).to(dtype)
    gradients = []
    for kind in (dtype, torch.float64):
        query, key, value = (x.detach().to(kind).requires_grad_() for x in inputs)
        attend(query, key=key, value=value).backward(grad.to(kind))
        gradients.append([x.grad.double() for x in (query, key, value) if x.grad is not None])
    for actual, expected in zip(*gradients, strict=True):
        assert (actual - expected).norm() <= tolerance * expected.norm()


def test_one_graph_attends_to_sequences_of_any_length() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for length in (7, 12):
        query, key, value = (torch.randn(2, length, heads, 8) for heads in (4, 2, 2))
        for x in (query, key, value):
            torch._dynamo.mark_dynamic(x, 1)
        expected = attend(query, key=key, value=value)
        torch.testing.assert_close(compiled(query, key=key, value=value), expected)
    torch._dynamo.reset()
    assert len(graphs) == 1

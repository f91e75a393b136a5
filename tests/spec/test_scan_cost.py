"""Costs of a scan are sums of products of its sizes; what the sizes are is counted in
kinds/test_scans.py.
"""

from dataclasses import replace

import pytest

from nanotrain.spec.operators import ScanCost
from nanotrain.spec.scan_cost import Elements, PassTerms, ScanSizes, fused_scan_bytes, scan_cost

SIZES = ScanSizes(tokens=10, num_chunks=3, chunk=4, heads=5, groups=2, key=8, value=6)
NOTHING = PassTerms(
    launches=0, launches_per_chunk=0, head_elements=Elements(), state_flops=0, value_flops=0
)


def test_a_state_is_shared_by_the_tokens_of_a_chunk() -> None:
    assert SIZES.state == 8 * 6 // 4


# a term alone, and FLOPs, elements and launches of the pass
TERMS = [
    ({"launches": 7}, 0, 0, 7),
    ({"launches_per_chunk": 7}, 0, 0, 21),
    ({"state_flops": 2}, 10 * 5 * 2 * 48, 0, 0),
    ({"value_flops": 2}, 10 * 5 * 2 * 4 * 6, 0, 0),
    ({"key_flops": 2}, 10 * 5 * 2 * 4 * 8, 0, 0),
    ({"group_flops": 2}, 10 * 2 * 2 * 4 * 8, 0, 0),
    ({"head_elements": Elements(chunk=3)}, 0, 10 * 5 * 3 * 4, 0),
    ({"head_elements": Elements(key=3)}, 0, 10 * 5 * 3 * 8, 0),
    ({"head_elements": Elements(value=3)}, 0, 10 * 5 * 3 * 6, 0),
    ({"head_elements": Elements(state=3)}, 0, 10 * 5 * 3 * 12, 0),
    ({"group_elements": Elements(chunk=1, key=1)}, 0, 10 * 2 * (4 + 8), 0),
]


@pytest.mark.parametrize(("term", "flops", "elements", "launches"), TERMS, ids=str)
def test_each_term_has_its_sizes(
    term: dict[str, object], flops: int, elements: int, launches: int
) -> None:
    cost = scan_cost(replace(NOTHING, **term), SIZES)
    assert cost == ScanCost(flops=flops, num_bytes=4 * elements, launches=launches)


def test_terms_add_up() -> None:
    merged: dict[str, object] = {}
    for term, *_ in TERMS[:6]:
        merged |= term
    cost = scan_cost(replace(NOTHING, **merged), SIZES)
    assert cost.flops == sum(flops for _, flops, _, _ in TERMS[:6]) and cost.launches == 28


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_fused_kernel_reads_inputs_once_and_states_in_fp32(itemsize: int) -> None:
    query_and_key = 2 * 2 * 8
    value_and_output = 2 * 5 * 6
    states = 2 * 5 * 12  # written by the forward, read by the next chunk
    expected = 10 * ((query_and_key + value_and_output) * itemsize + states * 4)
    assert fused_scan_bytes(SIZES, itemsize=itemsize) == expected

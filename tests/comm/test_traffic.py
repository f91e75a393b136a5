"""The traffic counter adds up bytes and calls by group and operation."""

from nanotrain.comm.traffic import TrafficCounter, reduced_bytes


def test_bytes_and_calls_add_up_by_group_and_operation():
    traffic = TrafficCounter()
    traffic.record("dp", "reduce_scatter", num_bytes=10)
    traffic.record("dp", "reduce_scatter", num_bytes=10)
    traffic.record("dp", "all_gather", num_bytes=5)
    traffic.record("tp", "all_gather", num_bytes=1)
    assert traffic.bytes("dp", "reduce_scatter") == 20
    assert traffic.calls("dp", "reduce_scatter") == 2
    assert traffic.bytes("dp") == 25
    assert traffic.bytes(op="all_gather") == 6
    assert traffic.bytes() == 26
    assert traffic.bytes("pp") == 0


def test_reset_sets_all_counts_to_zero():
    traffic = TrafficCounter()
    traffic.record("dp", "all_gather", num_bytes=5)
    traffic.reset()
    assert traffic.bytes() == traffic.calls() == 0


def test_a_group_of_one_sends_nothing():
    assert reduced_bytes(1000, 1) == 0

"""The ledger adds up what it is told, by group and operation."""

from nanotrain.comm.traffic import Ledger, reduced_bytes


def test_bytes_and_calls_add_up_by_group_and_operation():
    ledger = Ledger()
    ledger.record("dp", "reduce_scatter", num_bytes=10)
    ledger.record("dp", "reduce_scatter", num_bytes=10)
    ledger.record("dp", "all_gather", num_bytes=5)
    ledger.record("tp", "all_gather", num_bytes=1)
    assert ledger.bytes("dp", "reduce_scatter") == 20
    assert ledger.calls("dp", "reduce_scatter") == 2
    assert ledger.bytes("dp") == 25
    assert ledger.bytes(op="all_gather") == 6
    assert ledger.bytes() == 26
    assert ledger.bytes("pp") == 0


def test_reset_forgets():
    ledger = Ledger()
    ledger.record("dp", "all_gather", num_bytes=5)
    ledger.reset()
    assert ledger.bytes() == ledger.calls() == 0


def test_a_group_of_one_sends_nothing():
    assert reduced_bytes(1000, 1) == 0

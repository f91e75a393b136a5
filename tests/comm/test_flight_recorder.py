"""The flight recorder's dump as one collective per process group, and its settings."""

from nanotrain.comm.flight_recorder import (
    SETTINGS,
    RecordedCollective,
    newest_collectives,
    switch_on,
)


def entry(name: str, sequence: int, state: str, *, op: str = "nccl:all_reduce", **more):
    """As torch 2.13 writes it, without the fields that are not read."""
    return {
        "process_group": (name, more.pop("description", name)),
        "collective_seq_id": sequence,
        "profiling_name": op,
        "input_sizes": [[3, 2]],
        "input_dtypes": ["Float"],
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
    } | more


def test_of_each_process_group_the_oldest_incomplete_collective_or_the_newest_one_is_taken():
    entries = [
        entry("1", 1, "completed", description="tp"),
        entry("1", 2, "started", description="tp", op="nccl:_reduce_scatter_base"),
        entry("1", 3, "scheduled", description="tp"),
        entry("0", 4, "completed", description="default_pg"),
        entry("0", 5, "scheduled", description="default_pg", is_p2p=True),
        entry("2", 1, "scheduled", description="dp", retired=True),  # gloo: complete, and no state
    ]
    dump = {"entries": entries, "pg_config": {"1": {"ranks": "[0, 2]"}, "0": {"ranks": "[]"}}}
    assert newest_collectives(dump) == [
        RecordedCollective(
            "tp", (0, 2), 2, "_reduce_scatter_base", ((3, 2),), ("Float",), "started"
        ),
        RecordedCollective("world", (), 4, "all_reduce", ((3, 2),), ("Float",), "completed"),
        RecordedCollective("dp", (), 1, "all_reduce", ((3, 2),), ("Float",), "completed"),
    ]
    assert newest_collectives({}) == []


def test_settings_of_the_user_are_kept():
    environment = {"TORCH_FR_BUFFER_SIZE": "7"}
    switch_on(environment)
    assert environment == SETTINGS | {"TORCH_FR_BUFFER_SIZE": "7"}

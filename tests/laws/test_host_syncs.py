"""Law L10: in a step that is not logged the host waits for nothing, whatever the layout.

Every layout is one rank of a fake world in this process: collectives send nothing, and the
operators are the same.
"""

import pytest

from nanotrain.comm.device import HostCopy, Stopwatch
from nanotrain.topology.topology import Topology
from nanotrain.train.fit import fit
from nanotrain.train.hooks import timers
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.log import LogHook
from nanotrain.train.hooks.notify import NotifyHook
from nanotrain.train.hooks.timers import TimersHook
from nanotrain.train.hooks.track import TrackHook
from nanotrain.train.step import train_step
from tests.fake_world import fake_context
from tests.harness import SHORT_NAMES, parallel_config
from tests.host_syncs import HostSyncs
from tests.laws.test_mla import MLA
from tests.laws.test_quantile_balancing import QUANTILES
from tests.laws.worlds import Case, build_here
from tests.train.small_run import metrics_of, small_run

MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_bias_update_rate": 1e-3,
}
DSA = {
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "sparse_attention_type": "dsa",
    "dsa_indexer_topk": 4,
}
PADDED, TURNS = {"moe_expert_rank_capacity_factor": 2.0}, {"overlap_moe_expert_parallel_comm": True}
LAYOUTS = {
    "one rank": (1, {}, {}),
    "dp, optim": (4, {"strategy": "optim"}, {}),
    "dp, optim_grads": (4, {"strategy": "optim_grads", "instances": 2}, {}),
    "dp, optim_grads_params": (
        4,
        {"strategy": "optim_grads_params", "overlap_param_gather": True},
        {},
    ),
    "tp and sp": (4, {"tp": 2, "sequence_parallel": True, "strategy": "optim"}, {}),
    "pp": (4, {"pp": 2, "strategy": "optim", "overlap_grad_reduce": True}, {}),
    "cp": (4, {"cp": 2, "strategy": "optim"}, {}),
    "fp16": (2, {"strategy": "optim"}, {"precision": {"params_dtype": "fp16"}}),
    "bf16": (2, {"strategy": "optim"}, {"precision": {"params_dtype": "bf16"}}),
    "lion": (2, {"strategy": "optim"}, {"optim": {"optimizer": "lion"}}),
    "muon": (2, {"strategy": "optim"}, {"optim": {"optimizer": "muon"}}),
    "muon per head": (
        2,
        {"strategy": "optim"},
        {"optim": {"optimizer": "muon", "muon_split_qkv_per_head": True}, "model": MLA},
    ),
    "normuon": (2, {"strategy": "optim"}, {"optim": {"optimizer": "normuon"}}),
    "muon_h": (2, {"tp": 2}, {"optim": {"optimizer": "muon_h"}}),
    "adam_h": (2, {"strategy": "optim"}, {"optim": {"optimizer": "adam_h"}}),
    "quantiles": (2, {"strategy": "optim"}, {"model": QUANTILES}),
    "documents": (2, {"strategy": "optim"}, {"data": {"reset_attention_mask": True}}),
    "documents and cp": (
        4,
        {"cp": 2, "strategy": "optim"},
        {"data": {"reset_attention_mask": True}},
    ),
    "qk clip": (
        2,
        {"tp": 2},
        {"optim": {"qk_clip": True}, "train": {"log_max_attention_logit": True}},
    ),
    "moe": (2, {"strategy": "optim"}, {"model": MOE}),
    "moe, etp": (2, {"tp": 2, "etp": 2}, {"model": MOE}),
    "moe, padded": (4, {"ep": 2, "strategy": "optim"} | PADDED, {"model": MOE}),
    "moe, padded, etp and turns": (
        4,
        {"tp": 2, "etp": 2, "ep": 2} | PADDED | TURNS,
        {"model": MOE},
    ),
    "moe, padded, recomputed": (
        4,
        {"ep": 4} | PADDED,
        {"model": MOE, "memory": {"recompute_granularity": "full"}},
    ),
    "sparse attention": (4, {"tp": 2, "cp": 2, "cp_comm_type": "allgather"}, {"model": DSA}),
    "average and norms": (
        2,
        {"strategy": "optim"},
        {"optim": {"ema_decay": 0.9}, "train": {"log_norms_by_group": True}},
    ),
}
EP = (2, {"ep": 2, "strategy": "optim"}, {"model": MOE})
WAITING = {
    "experts on two ranks": EP,
    "recomputed": (*EP[:2], EP[2] | {"memory": {"recompute_granularity": "full"}}),
    "once per rank": (2, {"ep": 2, "moe_hierarchical_dispatch": 1}, {"model": MOE}),
    "once per node": (4, {"ep": 4, "moe_hierarchical_dispatch": 2}, {"model": MOE}),
}


def syncs_of_a_step(name: str, *, rank: int = 0) -> list[str]:
    """The places of the second step of a layout."""
    num_ranks, sizes, sections = (LAYOUTS | WAITING)[name]
    parallel = {SHORT_NAMES.get(key, key): value for key, value in sizes.items()}
    case = Case(steps=2).but(train={"global_batch_size": 8}, parallel=parallel).but(**sections)
    with fake_context(Topology.of(parallel_config(**sizes), num_ranks), rank) as ctx:
        run = build_here(ctx, case)
        batches = [run.batch_iterator.next() for _ in range(2)]
        train_step(run, batches[0])
        with HostSyncs() as syncs:
            train_step(run, batches[1])
        return syncs.places


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_that_is_not_logged_waits_for_nothing(name):
    assert syncs_of_a_step(name) == []


@pytest.mark.parametrize("name", WAITING)
def test_experts_on_several_ranks_wait_for_a_copy_of_the_counts_alone(name):
    # All-to-alls of uneven sizes need the sizes on the host: once per layer and microbatch, not
    # where it is recomputed. The host waits for the copy of the counts, made on a side stream, not
    # for what the device was given meanwhile.
    places = syncs_of_a_step(name)
    num_ranks, _, _ = WAITING[name]
    num_layers, num_microbatches = 2, 8 // num_ranks
    assert len(places) == num_layers * num_microbatches
    assert all(place.startswith("comm/device.py") and place.endswith(" read") for place in places)


def test_between_two_logged_steps_no_hook_reads_what_is_on_the_device(tmp_path, monkeypatch):
    reads: list[int] = []  # the steps at which the numbers of a step were read

    def counted(copy: HostCopy) -> list[float]:
        reads.append(run.state.step)
        return original(copy)

    class OfPhase(Stopwatch):
        def seconds(self) -> float:
            times.append(run.state.step)
            return super().seconds()

    times: list[int] = []  # the steps at which the time of a phase was read
    original = HostCopy.read
    flags = (
        "--train-iters",
        "8",
        "--log-interval",
        "3",
        "--save-interval",
        "6",
        "--report-interval",
        "0",
    )
    flags += ("--timing-log-level", "2")
    with small_run(tmp_path, *flags) as run, monkeypatch.context() as patch:
        # Nothing is ready before it is waited for, as on a busy GPU.
        patch.setattr(HostCopy, "is_ready", False)
        patch.setattr(Stopwatch, "is_ready", False)
        patch.setattr(HostCopy, "read", counted)
        patch.setattr(timers, "Stopwatch", OfPhase)
        fit(run, [TimersHook(), LogHook(), TrackHook(), CheckpointHook(), NotifyHook()])
    assert reads == [3, 3, 3, 6, 6, 6, 8, 8], "every step once, and only at logged ones"
    assert set(times) == {3, 6, 8} and len(times) > 8 * 7, "the phases of every step too"
    assert [row["step"] for row in metrics_of(tmp_path)] == list(range(1, 9))

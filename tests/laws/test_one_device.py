"""Law L10, of devices: a step creates no tensor in host memory that the device reads, but for plans
in pinned memory.

One rank of a fake world trains on the meta device, which refuses tensors of another device as a GPU
does. So a tensor made without a device fails here, and what is copied from the host, where a GPU's
host may wait, is listed.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanotrain.attention.backends import AttentionDevice
from nanotrain.topology.topology import Topology
from nanotrain.train.step import train_step
from tests.fake_world import HAS_META_COLLECTIVES, fake_context
from tests.harness import SHORT_NAMES, parallel_config
from tests.host_syncs import ROOT
from tests.laws.worlds import Case, build_here

SCORES = {"softmax_type": "learnable", "attn_logit_softcapping": 20.0, "window_size": 4}
MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_bias_update_rate": 1e-3,
}
BALANCE = {
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.01,
    "moe_shared_expert_intermediate_size": 32,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (
        {"tp": 2, "sequence_parallel": True, "strategy": "optim"},
        {
            "model": SCORES
            | {"hidden_dropout": 0.1, "final_logit_softcapping": 30.0, "mtp": {"num_layers": 1}},
            "optim": {"optimizer": "muon", "ema_decay": 0.9},
            "data": {"reset_attention_mask": True},
        },
    ),
    "experts": (
        {"strategy": "optim_grads_params"},
        {
            "model": MOE | BALANCE | {"multi_latent_attention": True},
            "precision": {"params_dtype": "bf16"},
        },
    ),
}


class HostCopies(TorchDispatchMode):
    """The files of the package whose operators read host memory and write the device's."""

    def __init__(self) -> None:
        super().__init__()
        self.files: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
        if devices == {"cpu", "meta"}:
            frame = sys._getframe(1)
            while (
                not Path(frame.f_code.co_filename).is_relative_to(ROOT) and frame.f_back is not None
            ):
                frame = frame.f_back
            self.files.add(Path(frame.f_code.co_filename).name)
        return out


@pytest.mark.skipif(
    not HAS_META_COLLECTIVES, reason="torch 2.10 has no collectives on the meta device"
)
@pytest.mark.parametrize("name", CASES)
def test_a_step_has_its_tensors_on_one_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, sections = CASES[name]
    monkeypatch.setattr(AttentionDevice, "of", classmethod(lambda cls, device: cls("cpu")))
    # torch has none for the meta device
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **options: None)
    parallel = {SHORT_NAMES.get(key, key): value for key, value in sizes.items()}
    batch = {"global_batch_size": 4, "micro_batch_size": 2}
    case = Case(steps=2).but(parallel=parallel, train=batch, **sections)
    with fake_context(Topology.of(parallel_config(**sizes), 2), 0) as context:
        context.device = torch.device("meta")
        run = build_here(context, case)
        first, second = run.batch_iterator.next(), run.batch_iterator.next()
        train_step(run, first)  # copies what stays, as the frequencies of rotary positions
        with HostCopies() as copies:
            train_step(run, second)
    # spans of documents and windows, which are pinned on a GPU
    assert copies.files == ({"tiles.py"} if name == "dense" else set())

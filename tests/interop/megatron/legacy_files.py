"""Checkpoints of Megatron-LM in files of ranks, made from one in the format `torch_dist`."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from nanotrain.interop.dcp.tensors import TorchDistFolder
from nanotrain.spec.boxes import Box

RANK = "mp_rank_00"
FILE = "model_optim_rng.pt"


def write_legacy(source: Path, folder: Path, *, arguments: dict[str, Any]) -> Path:
    """Write the weights of a step, whose layers are stacked, as the file of one rank.

    Adam's moments are ten and a hundred times a weight, so that each is known.
    """
    stored = TorchDistFolder(source)
    model = {}
    for key, tensor in stored.tensors.items():
        values = stored.read(key, Box.full(tensor.shape))
        if key.startswith("decoder.layers."):
            for layer, own in enumerate(values):
                name = key.replace("decoder.layers.", f"decoder.layers.{layer}.")
                model[name] = own.clone()
        else:
            model[key] = values
    state = {
        "args": Namespace(**arguments),
        "iteration": 3,
        "model": model,
        "optimizer": adam_state(model),
    }
    rank = folder / "iter_0000003" / RANK
    rank.mkdir(parents=True)
    torch.save(state, rank / FILE)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def adam_state(model: dict[str, torch.Tensor]) -> dict[str, Any]:
    """State of Adam with a group of weights that decay, and one of the others."""
    groups = []
    state = {}
    for decays in (True, False):
        own = [value for value in model.values() if (value.dim() != 1) == decays]
        first = len(state)
        for number, value in enumerate(own, start=first):
            state[number] = {"exp_avg": value * 10, "exp_avg_sq": value * 100}
        numbers = list(range(first, len(state)))
        groups.append({"params": numbers, "wd_mult": 1.0 if decays else 0.0, "step": 7})
    return {"state": state, "param_groups": groups}

"""Hugging Face models of random weights, the oracle of these tests."""

from copy import deepcopy
from pathlib import Path

import torch
import transformers

from nanotrain.interop.hf.families import model_from_hf
from nanotrain.interop.hf.import_weights import import_weights
from nanotrain.model.router_stats import router_tensors
from nanotrain.model.transformer import Stage, build_stage
from nanotrain.spec.boxes import TensorBox
from tests.interop.hf.configs import CONFIG_CLASSES, CONFIGS, EXPERT_BIASES
from tests.interop.hf.llama_like import ARCHITECTURES
from tests.model.building import give_storage

TOKEN_EXPERTS = "tid2eid"  # buffers with the experts of every token


def reference(name: str, *, seed: int = 0) -> torch.nn.Module:
    """A Hugging Face model in fp32 whose every parameter, biases and norms too, is random."""
    family, fields = deepcopy(CONFIGS[name])  # transformers adds to dicts of rotary positions
    config = getattr(transformers, CONFIG_CLASSES.get(family, f"{family}Config"))(**fields)
    architecture = ARCHITECTURES.get(family, f"{family}ForCausalLM")
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config)
    for module in model.modules():
        if "layer_scalar" in module._buffers:  # of Gemma 4, which is a parameter here
            module.layer_scalar = torch.nn.Parameter(module._buffers.pop("layer_scalar"))
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith(EXPERT_BIASES)]
        for parameter in (*model.parameters(), *biases):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, table in model.named_buffers():
            if name.endswith(TOKEN_EXPERTS):
                drawn = torch.rand(len(table), config.n_routed_experts)
                table.copy_(drawn.topk(table.shape[1]).indices)
        for experts in (each for each in model.modules() if hasattr(each, "zero_expert_num")):
            experts.gate_up_proj[experts.num_routed_experts :] = 0  # nothing reads these weights
    return model.eval()


def aligned(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its parameters in memory of their own.

    Those of a file lie where its header ends, and the rounding of products depends on it.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def load(folder: Path) -> Stage:
    """The whole nanotrain model of a folder, in fp32."""
    model = model_from_hf(folder)
    stage = give_storage(build_stage(model))
    parameters = dict(stage.named_parameters())
    wanted = {
        TensorBox.full(spec.name, spec.shape): parameters[spec.name]
        for spec in (local.spec for local in stage.params)
    }
    wanted |= {TensorBox.full(name, bias.shape): bias for name, bias in biases_of(stage).items()}
    import_weights(folder, model, wanted=wanted)
    return stage


def biases_of(stage: Stage) -> dict[str, torch.Tensor]:
    """The expert biases of the routers."""
    return {name.removeprefix("router/"): bias for name, bias in router_tensors(stage).items()}


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of the model holds: parameters, and the biases of routers."""
    biases = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith((*EXPERT_BIASES, TOKEN_EXPERTS, "layer_scalar"))
    }
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | biases

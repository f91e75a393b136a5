"""Training programs in plain PyTorch that save with torch.distributed.checkpoint.

CASES             a model, an optimizer, and how the program names what it saves
train_cases       for run_ranks with processes: train them, saved after SAVED steps and at the end

Samples are the tokens of `tokens()` in order, with the mean loss of a batch over all ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEQ_LENGTH, GLOBAL_BATCH, MICRO_BATCH, VOCAB_SIZE = 12, 8, 2, 40
SAVED, STEPS = 2, 7
HIDDEN, HEADS, GROUPS, FFN, LAYERS = 16, 4, 2, 32, 2
LR, BETAS, DECAY = 1e-2, (0.9, 0.95), 0.1
BATCH_FLAGS = f"--seq-length {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH} --micro-batch-size 2"
HEADS_FLAG = f"--num-attention-heads {HEADS}"
NO_BIAS_UPDATES = "--moe-router-bias-update-rate 0"
State = dict[str, Any]


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (2000,), generator=torch.Generator().manual_seed(3))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions as products of complex numbers of neighbouring channels, [B, H, S, D]."""
    head_dim = x.shape[-1]
    rates = 10000.0 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(x.shape[-2]).float(), rates)
    factors = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors).flatten(-2)


class FusedLinear(nn.Module):
    """Queries, keys and values of each group one after another; split in a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        rows = (HEADS + 2 * GROUPS) * self.head_dim
        self.wqkv = nn.Linear(HIDDEN, rows, bias=False)
        self.register_state_dict_post_hook(self.split)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        sizes = [HEADS // GROUPS, 1, 1]
        grouped = self.wqkv(x).unflatten(-1, (GROUPS, sum(sizes), self.head_dim))
        return [part.flatten(2) for part in grouped.split(sizes, dim=3)]

    @staticmethod
    def split(module: Any, state: State, prefix: str, *_: Any) -> None:
        value = state.pop(f"{prefix}wqkv.weight")
        grouped = value.unflatten(0, (GROUPS, HEADS // GROUPS + 2, module.head_dim))
        parts = grouped.split([HEADS // GROUPS, 1, 1], dim=1)
        for name, part in zip(("wq", "wk", "wv"), parts, strict=True):
            state[f"{prefix}{name}.weight"] = part.flatten(0, 2)


class Attention(nn.Module):
    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        head_dim = HIDDEN // HEADS
        if is_fused:
            self.qkv_linear = FusedLinear()
        else:
            self.wq = nn.Linear(HIDDEN, HEADS * head_dim, bias=False)
            self.wk = nn.Linear(HIDDEN, GROUPS * head_dim, bias=False)
            self.wv = nn.Linear(HIDDEN, GROUPS * head_dim, bias=False)
        self.wo = nn.Linear(HEADS * head_dim, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "qkv_linear"):
            projections = self.qkv_linear(x)
        else:
            projections = [self.wq(x), self.wk(x), self.wv(x)]
        q, k, v = (y.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for y in projections)
        k, v = (y.repeat_interleave(HEADS // GROUPS, dim=1) for y in (k, v))
        output = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.wo(output.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(HIDDEN, FFN, bias=False)
        self.w2 = nn.Linear(FFN, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, FFN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.attention = Attention(is_fused=is_fused)
        self.feed_forward = FeedForward()
        self.attention_norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(HIDDEN, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """A Llama with the modules of torchtitan, of 0.2 or of 0.3."""

    def __init__(self, *, is_new: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB_SIZE, HIDDEN)
        blocks = {str(layer): TransformerBlock(is_fused=is_new) for layer in range(LAYERS)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = "lm_head" if is_new else "output"
        self.add_module(self.head, nn.Linear(HIDDEN, VOCAB_SIZE, bias=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.get_submodule(self.head)(self.norm(x))


class TransformersModel(nn.Module):
    """A model of transformers whose forward returns logits; not part of its names."""

    def __init__(self, name: str, **config: Any) -> None:
        super().__init__()
        import transformers

        sizes = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "max_position_embeddings": SEQ_LENGTH,
            "attn_implementation": "eager",
        }
        self.config = getattr(transformers, f"{name}Config")(**sizes | config)
        self.inner = getattr(transformers, f"{name}ForCausalLM")(self.config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids).logits


def llama() -> nn.Module:
    return Llama(is_new=False)


def new_llama() -> nn.Module:
    return Llama(is_new=True)


def tied_llama() -> nn.Module:
    return TransformersModel("Llama", tie_word_embeddings=True)


def qwen3() -> nn.Module:
    return TransformersModel("Qwen3", head_dim=8, tie_word_embeddings=False)


def deepseek() -> nn.Module:
    model = TransformersModel(
        "DeepseekV3",
        num_key_value_heads=HEADS,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    )
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([0.02, -0.01, 0.03, 0.0]))
    return model


@dataclass(frozen=True)
class Case:
    """A program: its model, and what it saves."""

    build: Callable[[], nn.Module]
    save: Callable[["Training", int], State]  # the state after a number of steps
    flags: str  # that the user gives for the import
    num_ranks: int = 1
    decays_all: bool = True  # weight decay of norms too
    has_config: bool = False  # the import is given a config.json


class Training:
    """One case on this rank."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(1)
        self.case = case
        self.model = case.build()
        # what the program saves is the model of transformers, without the module around it
        self.saved = getattr(self.model, "inner", self.model)
        if case.num_ranks > 1:
            mesh = init_device_mesh("cpu", (case.num_ranks,))
            for layer in self.saved.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.saved, mesh=mesh)
        named = dict(self.saved.named_parameters())
        matrices = {name: value for name, value in named.items() if value.ndim > 1}
        groups: list[State] = [{"params": list(named.items())}]
        if not case.decays_all:
            vectors = [(name, value) for name, value in named.items() if name not in matrices]
            groups = [{"params": list(matrices.items())}]
            groups.append({"params": vectors, "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=1e-8, weight_decay=DECAY)

    def step(self, number: int) -> tuple[float, float]:
        """One step: the loss over the global batch, and the norm."""
        size = GLOBAL_BATCH // self.case.num_ranks
        rank = dist.get_rank() if self.case.num_ranks > 1 else 0
        first = number * GLOBAL_BATCH + rank * size
        begins = [SEQ_LENGTH * sample for sample in range(first, first + size)]
        stream = tokens()
        batch = torch.stack([stream[begin : begin + SEQ_LENGTH + 1] for begin in begins])
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.saved.parameters(), 1.0)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        self.optimizer.step()
        loss = loss.detach()
        if self.case.num_ranks > 1:
            dist.all_reduce(loss)
        return float(loss) / self.case.num_ranks, float(norm)


def torchtitan_state(training: Training, step: int) -> State:
    """The state of torchtitan: weights with nothing in front, the rest in parts."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(training.saved, training.optimizer, options=options)
    return titan_parts(training.saved.state_dict(), state, step)


def titan_parts(weights: State, optimizer: State, step: int) -> State:
    """The parts of torchtitan's state around weights and optimizer."""
    return weights | {
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": step},
        "train_state": {"step": step, "ntokens_seen": step * GLOBAL_BATCH * SEQ_LENGTH},
        "dataloader": {"dp_rank_0": b"opaque", "world_size": 1},
    }


def new_torchtitan_state(training: Training, step: int) -> State:
    """The state of torchtitan 0.3, whose optimizer has the names of parameters."""
    return titan_parts(training.saved.state_dict(), flat_optimizer(training.optimizer), step)


def flat_optimizer(optimizer: torch.optim.Optimizer) -> State:
    """State and settings of an optimizer by name of the parameter."""
    content = optimizer.state_dict()
    flat: State = {}
    for group in content["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            for kind, value in content["state"][index].items():
                flat[f"state.{name}.{kind}"] = value
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    flat[f"param_groups.{name}.{key}"] = value
    return flat


# names of torchtitan 0.2 for those of transformers; in order, the first that fits
TITAN_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.o_proj": "attention.wo",
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.experts.down_proj": "moe.experts.w2",
    "mlp.gate.": "moe.router.gate.",
}


def renamed(state: Mapping[str, Any]) -> State:
    """Tensors with the names of torchtitan; gate and up of experts are two tensors there."""
    changed = {}
    for name, value in state.items():
        for theirs, titan in TITAN_NAMES.items():
            name = name.replace(theirs, titan, 1)
        if "mlp.experts.gate_up_proj" in name:
            gate, up = value.chunk(2, dim=1) if value.ndim > 1 else (value, value)
            changed[name.replace("mlp.experts.gate_up_proj", "moe.experts.w1")] = gate
            changed[name.replace("mlp.experts.gate_up_proj", "moe.experts.w3")] = up
        else:
            changed[name] = value
    return changed


def renamed_state(training: Training, step: int) -> State:
    """The state of torchtitan for a model of transformers, which computes the same."""
    optimizer = flat_optimizer(training.optimizer)
    state = {name: value for name, value in optimizer.items() if isinstance(value, torch.Tensor)}
    settings = {name: value for name, value in optimizer.items() if name not in state}
    named = {}
    for name, value in settings.items():
        changed = renamed({name: torch.tensor(0.0)})
        named |= dict.fromkeys(changed, value)
    return titan_parts(renamed(training.saved.state_dict()), renamed(state) | named, step)


def fsdp_state(training: Training, step: int) -> State:
    """The dict of a program with FSDP2, as in PyTorch's tutorials."""
    model, optimizer = get_state_dict(training.saved, training.optimizer)
    return {"model": model, "optimizer": optimizer, "step": step}


class AppState:
    """Model and optimizer as one Stateful."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def state_dict(self) -> State:
        model = get_model_state_dict(self.training.saved)
        return {
            "model": model,
            "optim": get_optimizer_state_dict(self.training.saved, self.training.optimizer),
        }

    def load_state_dict(self, state: State) -> None:
        self.training.saved.load_state_dict(state["model"])


def app_state(training: Training, step: int) -> State:
    return {"app": AppState(training)}


CASES = {
    "titan_llama": Case(llama, torchtitan_state, f"{HEADS_FLAG} {BATCH_FLAGS}"),
    "titan_new_llama": Case(new_llama, new_torchtitan_state, f"{HEADS_FLAG} {BATCH_FLAGS}"),
    "titan_qwen3": Case(qwen3, renamed_state, f"--norm-epsilon 1e-6 {BATCH_FLAGS}"),
    "titan_deepseek": Case(
        deepseek, renamed_state, f"{BATCH_FLAGS} {NO_BIAS_UPDATES}", has_config=True
    ),
    "fsdp_tied_llama": Case(
        tied_llama,
        fsdp_state,
        f"{HEADS_FLAG} {BATCH_FLAGS} --norm-epsilon 1e-6",
        num_ranks=2,
        decays_all=False,
    ),
    "app_qwen3": Case(qwen3, app_state, BATCH_FLAGS, num_ranks=2, has_config=True),
    "deepseek": Case(deepseek, fsdp_state, f"{BATCH_FLAGS} {NO_BIAS_UPDATES}", has_config=True),
}


def train_cases(ctx: Any, root: Path, names: list[str]) -> dict[str, list[tuple[float, float]]]:
    """Train cases for STEPS steps, saved after SAVED and after all; loss and norm by step."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = {}
    for name in names:
        training = Training(CASES[name])
        if CASES[name].has_config:
            training.model.config.save_pretrained(root / name)  # type: ignore[union-attr]
        rows[name] = []
        for number in range(STEPS):
            rows[name].append(training.step(number))
            if number + 1 in (SAVED, STEPS):
                state = CASES[name].save(training, number + 1)
                dcp.save(state, checkpoint_id=root / name / f"step-{number + 1}")
    return rows

"""Megatron-core without a GPU and transformer-engine, from 0.12 on.

core_version              its version
OnCPU                     tensors for a GPU are put on the CPU
patch_for_cpu             functions of megatron-core that need a GPU or a package
patch_core_attention      attention whose values have another width than their keys
registered_like_te(model) parameters in the order of transformer-engine's modules
"""

import contextlib
import queue
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class OnCPU(TorchFunctionMode):
    """Puts tensors for a GPU on the CPU, and calls their type that of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def patch_for_cpu() -> None:
    """Megatron-core without a GPU, transformer-engine and psutil."""
    from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states_and_step(optimizer: Any, param: Any, tensors: dict[str, Any]) -> None:
        """With the number of updates, which the Adam of transformer-engine has in its groups; that
        of torch adds to the one of every parameter.
        """
        group, index = optimizer.model_param_group_index_map[param]
        main = optimizer.optimizer.param_groups[group]["params"][index]
        state = optimizer.optimizer.state[main]
        state["step"] = state["step"].clone()
        set_states(optimizer, param, {"step": state["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_and_step
    # compiling its fused functions takes 10 s per model, computing them 0.1 s
    torch.compiler.set_stance("force_eager")
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = lambda *_, **__: None
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    patch_core_attention()
    patch_shared_rotary_key()
    patch_grouped_gemm()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = numbers_on_the_host
    filesystem_async._process_memory = lambda: 0
    patch_writer(filesystem_async)
    # the server of megatron-core's own queue would outlive the rank
    filesystem_async._results_queue = queue.Queue()
    for module in (filesystem_async, async_utils):
        module.mp = SimpleNamespace(get_context=lambda _: InThisProcess)


def core_version() -> tuple[int, int]:
    """Major and minor number of the version of megatron-core."""
    from megatron.core import package_info

    return package_info.MAJOR, package_info.MINOR


class InThisProcess:
    """What megatron-core takes of a context of multiprocessing: a process is a call.

    It forks for every save and for every file, which takes long, and which a rank of the harness
    may not.
    """

    Queue = JoinableQueue = queue.Queue

    class Process:
        """A call that has ended when `start` returns."""

        def __init__(self, *, target: Any, args: Any = (), kwargs: Any = None) -> None:
            self.start = partial(target, *args, **(kwargs or {}))

        def is_alive(self) -> bool:
            return False

        def join(self) -> None:
            pass


def patch_writer(filesystem_async: Any) -> None:
    """Before 0.13 its writer does not know an argument that torch's function has since 2.7."""
    write_item = filesystem_async._write_item
    if core_version() < (0, 13) and not isinstance(write_item, partial):
        torch_save = SerializationFormat.TORCH_SAVE
        filesystem_async._write_item = partial(write_item, serialization_format=torch_save)


def patch_core_attention() -> None:
    """Heads whose values have another width than their keys, in megatron-core's own attention.

    Without transformer-engine it has none for MLA: the softmax is torch's.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    multi_latent_attention.TELinear = type("TELinear", (), {})  # it is compared with
    build, compute = DotProductAttention.__init__, DotProductAttention.forward
    if build.__name__ == "build_latent":
        return

    def build_latent(self: Any, *args: Any, **kwargs: Any) -> None:
        self.value_channels = kwargs.pop("v_channels", None)
        kwargs.pop("k_channels", None)
        build(self, *args, **kwargs)

    def compute_latent(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any):
        if self.value_channels is None:
            return compute(self, query, key, value, *args, **kwargs)
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        output = scaled_dot_product_attention(*heads, is_causal=True, scale=self.softmax_scale)
        return output.permute(2, 0, 1, 3).flatten(2)

    DotProductAttention.__init__, DotProductAttention.forward = build_latent, compute_latent


def patch_shared_rotary_key() -> None:
    """The gradient of the rotary key of MLA, which all heads share, as the sum over tp ranks.

    Without sequence parallelism megatron-core has that of the heads of a rank alone, up to 0.16.1.
    """
    from megatron.core import tensor_parallel
    from megatron.core.transformer import multi_latent_attention as mla

    attention = mla.MLASelfAttention
    compute = attention.get_query_key_value_tensors
    gather = tensor_parallel.gather_from_tensor_model_parallel_region
    copy = tensor_parallel.copy_to_tensor_model_parallel_region

    def compute_with_sum(self: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        calls_left = [self.config.q_lora_rank is not None]  # compressed queries are gathered first

        def gather_with_sum(local: Any, *more: Any, **options: Any) -> Any:
            full = gather(local, *more, **options)
            if calls_left.pop():
                calls_left.append(False)
                return full
            compressed, rotary = full.split(sizes, dim=-1)
            # the product makes a contiguous gradient: others are not reduced
            return torch.cat([compressed, copy(rotary) * 1.0], dim=-1)

        mla.gather_from_tensor_model_parallel_region = gather_with_sum
        return compute(self, *args, **kwargs)

    if compute.__name__ != compute_with_sum.__name__:
        attention.get_query_key_value_tensors = compute_with_sum


def patch_grouped_gemm() -> None:
    """Products of the experts of GroupedMLP, one after another; it needs a package for a GPU."""
    from megatron.core.transformer.moe import grouped_gemm_util

    def grouped_product(rows: Any, weights: Any, counts: Any, trans_b: bool = False) -> Any:
        parts = rows.split(counts.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])

    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    grouped_gemm_util.ops = SimpleNamespace(gmm=grouped_product)


def numbers_on_the_host(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """The numbers of tokens as the host has them after a copy from a GPU."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        value = getattr(dispatcher, name)
        if isinstance(value, torch.Tensor):
            setattr(dispatcher, name, value.numpy())
    return tokens_per_expert


@contextlib.contextmanager
def registered_like_te(model: Any) -> Iterator[None]:
    """Parameters in the order in which transformer-engine's modules would make them.

    Its norm before attention belongs to linear_qkv, and the experts of a rank are one module: the
    first products of all of them, then the second ones. Its norm before experts has its own name.
    """
    added = []
    for layer in model.decoder.layers:
        fused = "self_attention.linear_qkv.layer_norm_"
        layer.submodules_config.sharded_state_dict_keys_map = {"input_layernorm.": fused}
        attention = layer.self_attention
        norm = layer._modules.pop("input_layernorm")
        qkv = attention._modules.pop("linear_qkv")
        attention._modules |= {"norm": norm, "linear_qkv": qkv}
        layer._modules["input_layernorm"] = norm
        experts = layer.mlp.experts
        own = experts._modules.pop("local_experts")
        experts._modules["first"] = torch.nn.ModuleList(expert.linear_fc1 for expert in own)
        experts._modules["second"] = torch.nn.ModuleList(expert.linear_fc2 for expert in own)
        experts._modules["local_experts"] = own
        added += [(attention, "norm"), (experts, "first"), (experts, "second")]
    yield
    for module, name in added:
        del module._modules[name]

"""A Hugging Face family beside transformers: the same weights, the same logits and gradients.

    twin_config          a tiny model of the structure of a configuration
    check_conversion     transformers' class and ours on the same random weights, in fp64

    transformers' model -> save_pretrained -> import -> logits and gradients
    -> export -> transformers

transformers computes its gradients under its own names. They are saved as if they were weights, so
that its code for files and the import rename them. Files hold fp32, so each gradient is the sum of
two fp32 tensors.
"""

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.config.config import Config, DataConfig
from nanotrain.config.model import ModelConfig, MTPConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.config_class import silence_transformers
from nanotrain.interop.hf.export import export_weights
from nanotrain.interop.hf.families import FAMILIES, config_from_hf
from nanotrain.interop.hf.import_weights import import_weights
from nanotrain.interop.hf.tables import EFFECTS, read_tables
from nanotrain.model.router_stats import router_tensors
from nanotrain.model.transformer import Stage, build_stage
from nanotrain.parity.shrink import shrink
from nanotrain.spec.boxes import TensorBox
from nanotrain.untrusted import plain_text

NUM_TOKENS = 48
BATCH = 2
NOISE = 0.1  # added to initial weights, so that norms and biases are no constants
NOISE_FLOOR = 0.01  # of the median gradient, for gradients that are rounding only
TOLERANCE = 1e-10  # of logits and gradients, beside the largest of a tensor
# buffers of transformers that are weights in files
SAVED_BUFFERS = ("bias", "layer_scalar")


@dataclass(frozen=True)
class ConversionReport:
    """A tiny model by transformers and by nanotrain.

    Attributes:
        family: its `model_type`.
        transformers: version of transformers.
        num_layers, hidden_size: sizes of the tiny model.
        logits: largest difference of logits in fp64, relative to the largest logit.
        gradients: largest difference of a gradient in fp64, relative to its largest element.
        worst_gradient: the parameter with that gradient.
        num_gradients: number of parameters whose gradients were compared.
        is_round_trip: whether transformers loads the export, with the same bits in every tensor.
    """

    family: str
    transformers: str
    num_layers: int
    hidden_size: int
    logits: float
    gradients: float
    worst_gradient: str
    num_gradients: int
    is_round_trip: bool

    @property
    def is_equal(self) -> bool:
        """Whether both compute the same logits and gradients."""
        return max(self.logits, self.gradients) <= TOLERANCE

    @property
    def holds(self) -> bool:
        """Whether both compute the same, and the round trip is the identity."""
        return self.is_equal and self.is_round_trip

    @property
    def text(self) -> str:
        """The numbers in one line."""
        trip = "is the identity" if self.is_round_trip else "CHANGES tensors"
        return (
            f"beside transformers {self.transformers} in fp64, {self.num_layers} layers of "
            f"{self.hidden_size} channels: logits differ by {self.logits:.1e}, "
            f"{self.num_gradients} gradients by {self.gradients:.1e} ({self.worst_gradient}); "
            f"the round trip {trip}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All numbers."""
        return asdict(self) | {"holds": self.holds}


def twin_config(model_config: ModelConfig) -> ModelConfig:
    """A tiny model of the structure of a model, as `nanotrain parity` makes it for one rank."""
    length = min(model_config.max_position_embeddings, 4096)
    config = Config(model=model_config, data=DataConfig(seq_length=length))
    small = shrink(config, 1, num_steps=1).model
    if model_config.dsa is not None and small.dsa is not None:
        # so many index heads that no score is 0: of equal scores each library selects another
        small = replace(small, dsa=replace(small.dsa, n_heads=16, head_dim=16))
    small = replace(small, hidden_size=_twin_width(model_config, small))
    # transformers pads no vocabulary, computes no multi-token prediction, and drops nothing here
    return replace(
        small,
        mtp=MTPConfig(),
        max_position_embeddings=max(64, small.max_position_embeddings),
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def _twin_width(model_config: ModelConfig, small: ModelConfig) -> int:
    """The hidden size: the width of all heads if the model has that, else an exact square."""
    if small.mla is not None:
        return small.hidden_size
    channels = model_config.num_attention_heads * model_config.head_dim
    if model_config.hidden_size == channels:
        return small.num_attention_heads * small.head_dim
    # transformers has the root in fp32
    return 64 if model_config.scale_embeddings else small.hidden_size


def check_conversion(
    model_config: ModelConfig, family: str, *, kept: Mapping[str, Any] | None = None
) -> ConversionReport:
    """Compare a tiny model of a family with transformers' class of it.

    Args:
        model_config: the model, of which a tiny one is made.
        family: a key of FAMILIES.
        kept: entries of config.json that the family does not write.

    Raises:
        HuggingFaceError: transformers has no such class, or its class refuses the tiny model.
    """
    from transformers import __version__

    small = twin_config(model_config)
    entries = {**(kept or {}), **FAMILIES[family].write(small)}
    with (
        silence_transformers(),
        _transformers_model(family, entries) as theirs,
        TemporaryDirectory() as name,
    ):
        folder = Path(name)
        theirs.save_pretrained(folder / "weights")
        _set_kind(folder / "weights", family)
        read = config_from_hf(entries | {"model_type": family})
        ours = _load(folder / "weights", read)
        is_round_trip = _is_round_trip(theirs, ours, folder=folder, family=family)
        logits = _compare_logits(theirs, ours)
        gradients = _compare_gradients(theirs, ours, folder=folder, family=family)
    worst = max(gradients, key=lambda parameter: gradients[parameter])
    return ConversionReport(
        family,
        __version__,
        num_layers=read.num_layers,
        hidden_size=read.hidden_size,
        logits=logits,
        gradients=gradients[worst],
        worst_gradient=worst,
        num_gradients=len(gradients),
        is_round_trip=is_round_trip,
    )


@contextmanager
def _transformers_model(family: str, entries: Mapping[str, Any]) -> Iterator[Any]:
    """transformers' model with random weights in fp32, whose code computes in fp64 in the block."""
    model_class, config = _find_class(family, entries)
    module = importlib.import_module(model_class.__module__)
    with _in_fp64(module):
        torch.manual_seed(0)
        try:
            model = model_class(config)
        except Exception as error:  # the classes raise many
            raise HuggingFaceError(
                f"transformers' {model_class.__name__} refuses a tiny model of {family}",
                why=plain_text(f"{type(error).__name__}: {error}")[:200],
                fix="report this; the family is not checked",
            ) from None
        _randomize(model)
        yield model.eval()


def _find_class(family: str, entries: Mapping[str, Any]) -> tuple[Any, Any]:
    """transformers' class of a causal language model, and a configuration of it."""
    import transformers
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = read_tables(EFFECTS)["published_names"].get(family, family)
    known = {key: value for key, value in entries.items() if key != "model_type"}
    try:
        config = transformers.AutoConfig.for_model(kind, **known)
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config
        return getattr(transformers, FAMILIES[family].architecture), config
    except (AttributeError, KeyError, ValueError, ImportError):
        raise HuggingFaceError(
            f"transformers {__version__} has no causal language model {family}",
            why="its class is what nanotrain is compared with",
            fix="install a version that has it: pip install -U transformers",
        ) from None


@contextmanager
def _in_fp64(module: Any) -> Iterator[None]:
    """Code of transformers that computes in fp64 what it computes in fp32."""
    rope: Any = importlib.import_module("transformers.modeling_rope_utils")
    names = {name: getattr(torch, name) for name in dir(torch)}
    names |= dict.fromkeys(("float", "float32"), torch.float64)
    before = [(file, file.torch) for file in (module, rope)]
    cast = Tensor.float
    for file, _ in before:
        file.torch = SimpleNamespace(**names)
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.float = cast  # type: ignore[method-assign]
        for file, own in before:
            file.torch = own


def _randomize(model: nn.Module) -> None:
    """Add noise to all weights, in fp32; experts that return their input stay zero."""
    with torch.no_grad():
        for tensor in _saved_tensors(model).values():
            tensor.data = tensor.data.to(torch.float32)
            tensor.data += NOISE * torch.randn_like(tensor)
        for module in model.modules():
            experts: Any = module
            if hasattr(experts, "zero_expert_num"):
                experts.gate_up_proj[experts.num_routed_experts :] = 0


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that its files have, by name."""
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith(SAVED_BUFFERS) and buffer.is_floating_point()
    }
    return dict(model.named_parameters()) | buffers


def _set_kind(folder: Path, family: str) -> None:
    """Write the `model_type` into config.json, as several families may share a class."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"model_type": family}))


def _load(folder: Path, model_config: ModelConfig) -> Stage:
    """Our model with the weights of a folder, in fp32."""
    stage = build_stage(model_config)
    for name, parameter in list(stage.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        storage = nn.Parameter(torch.empty(parameter.shape))
        stage.get_submodule(owner)._parameters[leaf] = storage
    import_weights(folder, model_config, wanted=_boxes(stage))
    return stage


def _boxes(stage: Stage) -> dict[TensorBox, Tensor]:
    """The tensors of a stage by the boxes that a checkpoint has of them."""
    wanted: dict[TensorBox, Tensor] = {}
    parameters = dict(stage.named_parameters())
    for local in stage.params:
        spec = local.spec
        wanted[TensorBox.full(spec.name, spec.shape)] = parameters[spec.name]
    for name, bias in router_tensors(stage).items():
        wanted[TensorBox.full(name.removeprefix("router/"), bias.shape)] = bias
    return wanted


def _is_round_trip(theirs: Any, ours: Stage, *, folder: Path, family: str) -> bool:
    """Whether transformers loads our export, with the bits of its own model."""
    tensors = {box.name: tensor.detach() for box, tensor in _boxes(ours).items()}
    export_weights(folder / "export", ours.model_config, tensors=tensors.items(), family=family)
    back = type(theirs).from_pretrained(folder / "export", config=theirs.config)
    loaded = _saved_tensors(back)
    for name, tensor in _saved_tensors(theirs).items():
        if not torch.equal(tensor, loaded[name].to(tensor.dtype)):
            return False
    return True


def _compare_logits(theirs: Any, ours: Stage) -> float:
    """The largest difference of logits, relative to the largest; both models keep gradients.

    Raises:
        HuggingFaceError: code of one of them does not compute in fp64.
    """
    generator = torch.Generator().manual_seed(1)
    vocab_size = ours.model_config.vocab_size or 0
    stream = torch.randint(0, vocab_size, (BATCH, NUM_TOKENS + 1), generator=generator)
    tokens = stream[:, :-1].contiguous()
    labels = stream[:, 1:].flatten()
    theirs.config._experts_implementation = "eager"
    try:
        expected = theirs.double()(tokens, use_cache=False).logits
        computed = ours.double().logits(tokens)
        for logits in (expected, computed):
            F.cross_entropy(logits.flatten(0, 1), labels).backward()
    except Exception as error:  # depends on the class
        raise HuggingFaceError(
            f"a model of {theirs.config.model_type} does not compute in fp64",
            why=plain_text(f"{type(error).__name__}: {error}")[:200],
            fix="compare in fp32 (tests/interop/hf/)",
        ) from None
    return _difference(computed.detach(), expected.detach())


def _compare_gradients(theirs: Any, ours: Stage, *, folder: Path, family: str) -> dict[str, float]:
    """By parameter the largest difference of its gradient, relative to its largest element."""
    gradients = {}
    for name, parameter in theirs.named_parameters():
        no_gradient = torch.zeros_like(parameter)
        gradients[name] = no_gradient if parameter.grad is None else parameter.grad
    high = {name: gradient.to(torch.float32) for name, gradient in gradients.items()}
    low = {name: gradient - high[name] for name, gradient in gradients.items()}
    ones = {name: torch.ones_like(gradient) for name, gradient in gradients.items()}
    read = {}
    for part, tensors in (("high", high), ("low", low), ("trained", ones)):
        _save_as_weights(theirs, folder / part, tensors=tensors, family=family)
        read[part] = _read_all(folder / part, ours)
    expected = {name: high + read["low"][name] for name, high in read["high"].items()}
    floor = NOISE_FLOOR * median(_largest(gradient) for gradient in expected.values())
    differences = {}
    for name, parameter in ours.named_parameters():
        if not bool(read["trained"][name].any()):  # a buffer of transformers
            continue
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        differences[name] = _difference(own, expected[name], floor=floor)
    return differences


def _save_as_weights(
    theirs: Any, folder: Path, *, tensors: Mapping[str, Tensor], family: str
) -> None:
    """Save tensors under the names of a model's parameters, and zeros for its buffers."""
    theirs.to(torch.float32)  # constants too
    for name, tensor in _saved_tensors(theirs).items():
        value = tensors.get(name)
        zeros = torch.zeros(tensor.shape, dtype=torch.float32)
        tensor.data = zeros if value is None else value.to(torch.float32).clone()
    theirs.save_pretrained(folder)
    _set_kind(folder, family)


def _read_all(folder: Path, ours: Stage) -> dict[str, Tensor]:
    """The parameters in a folder by our names, in fp64."""
    targets = {}
    for box, tensor in _boxes(ours).items():
        targets[box] = torch.zeros(tensor.shape, dtype=torch.float64)
    import_weights(folder, ours.model_config, wanted=targets)
    return {box.name: tensor for box, tensor in targets.items()}


def _difference(computed: Tensor, expected: Tensor, *, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest element that is expected.

    A gradient that is zero by construction (a key bias) is rounding only: `floor` bounds the scale.
    """
    scale = max(_largest(expected), floor)
    difference = _largest(computed - expected)
    return difference / scale if scale else difference


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max().item())

"""Hugging Face families, and ModelConfig to and from their config.json.

A family can represent a model exactly if writing its config.json and reading it back gives the same model, so no
feature is lost. docs/new_family.md shows how to add a family: one file and one row of FAMILIES.

    FAMILIES                                the table
    config_from_hf, model_from_hf           config.json -> ModelConfig
    family_of, config_to_hf                 ModelConfig -> config.json
    check_against                           checks the configured model against a pretrained checkpoint
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanotrain.config.config import ModelConfig, MTPConfig
from nanotrain.config.derive import moe_layers
from nanotrain.config.schema import (
    KEYS,
    config_from_dict,
    flat_values,
    to_dict,
    typed,
    value_of,
    with_values,
    without_absent,
)
from nanotrain.errors import ConfigError, HuggingFaceError
from nanotrain.interop.hf.canonical import canonical, free_keys
from nanotrain.interop.hf.deepseek import (
    DEEPSEEK_V3_FUSED,
    DEEPSEEK_V3_NAMES,
    GLM4_MOE_FUSED,
    GLM4_MOE_NAMES,
    read_deepseek_v3,
    read_glm4_moe,
    write_deepseek_v3,
    write_glm4_moe,
)
from nanotrain.interop.hf.gemma import GEMMA3_NAMES, read_gemma3, write_gemma3
from nanotrain.interop.hf.gpt2 import GPT2, read_gpt2, write_gpt2
from nanotrain.interop.hf.gpt_oss import GPT_OSS_NAMES, read_gpt_oss, write_gpt_oss
from nanotrain.interop.hf.llama import (
    LLAMA,
    read_llama,
    read_qwen2,
    read_qwen3,
    read_smollm3,
    write_llama,
    write_qwen2,
    write_qwen3,
    write_smollm3,
)
from nanotrain.interop.hf.mistral import PHI3_NAMES, read_mistral, read_phi3, write_mistral, write_phi3
from nanotrain.interop.hf.mixture import (
    FUSED_NAMES,
    MIXTRAL_NAMES,
    QWEN2_MOE_FUSED,
    QWEN2_MOE_NAMES,
    QWEN3_MOE_NAMES,
    read_mixtral,
    read_qwen2_moe,
    read_qwen3_moe,
    write_mixtral,
    write_qwen2_moe,
    write_qwen3_moe,
)
from nanotrain.interop.hf.naming import Naming
from nanotrain.interop.hf.olmo import OLMO_NAMES, read_olmo2, read_olmo3, write_olmo2, write_olmo3
from nanotrain.interop.hf.weights import has_mtp_weights
from nanotrain.untrusted import parse_json, read_file


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face."""

    architecture: str  # class name in config.json
    read: Callable[[Mapping[str, Any]], ModelConfig]  # config.json -> model
    write: Callable[[ModelConfig], dict[str, Any]]  # model -> config.json, without the entries of `config_to_hf`
    naming: Naming  # names of the tensors
    other_namings: tuple[Naming, ...] = ()  # names that files may have but that are never written
    prefix: str = "model."  # of every tensor but the head; files of the base model without a head omit it
    # suffixes of tensors that are not weights (buffers in old files)
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    # files may have layers beyond the model's, for multi-token prediction that is left out
    ignores_later_layers: bool = False


MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")
# A model is exported as the first family that can represent it.
FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2LMHeadModel", read_gpt2, write_gpt2, GPT2, prefix="transformer.", ignored=MASK_BUFFERS),
    "llama": Family("LlamaForCausalLM", read_llama, write_llama, LLAMA),
    "qwen2": Family("Qwen2ForCausalLM", read_qwen2, write_qwen2, LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", read_qwen3, write_qwen3, LLAMA),
    "smollm3": Family("SmolLM3ForCausalLM", read_smollm3, write_smollm3, LLAMA),
    "mistral": Family("MistralForCausalLM", read_mistral, write_mistral, LLAMA),
    "phi3": Family("Phi3ForCausalLM", read_phi3, write_phi3, PHI3_NAMES),
    "mixtral": Family("MixtralForCausalLM", read_mixtral, write_mixtral, MIXTRAL_NAMES, (FUSED_NAMES,)),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", read_qwen2_moe, write_qwen2_moe, QWEN2_MOE_NAMES, (QWEN2_MOE_FUSED,)),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", read_qwen3_moe, write_qwen3_moe, QWEN3_MOE_NAMES, (FUSED_NAMES,)),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        read_deepseek_v3,
        write_deepseek_v3,
        naming=DEEPSEEK_V3_NAMES,
        other_namings=(DEEPSEEK_V3_FUSED,),
        ignores_later_layers=True,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        read_glm4_moe,
        write_glm4_moe,
        naming=GLM4_MOE_NAMES,
        other_namings=(GLM4_MOE_FUSED,),
        ignores_later_layers=True,
    ),
    "olmo2": Family("Olmo2ForCausalLM", read_olmo2, write_olmo2, OLMO_NAMES),
    "olmo3": Family("Olmo3ForCausalLM", read_olmo3, write_olmo3, OLMO_NAMES),
    "gpt_oss": Family("GptOssForCausalLM", read_gpt_oss, write_gpt_oss, GPT_OSS_NAMES),
    "gemma3_text": Family("Gemma3ForCausalLM", read_gemma3, write_gemma3, GEMMA3_NAMES),
}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the model configuration of a parsed config.json.

    Raises:
        HuggingFaceError: an unsupported family or feature.

    >>> config_from_hf({"model_type": "gpt2", "n_embd": 96, "n_head": 3}).hidden_size
    96
    """
    family = _family(str(raw.get("model_type", "(none)")))
    try:
        described = family.read(raw)
        # The same bounds as for a configuration: a size may be text, negative or a fraction in a damaged file.
        return without_absent(config_from_dict({"model": to_dict(described)}).model)
    except ConfigError as error:
        why = str(error)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    fix = "fetch the folder again"
    raise HuggingFaceError("config.json has an entry that describes no model", why=why, fix=fix) from None


def model_from_hf(folder: Path) -> ModelConfig:
    """Read the model configuration of a Hugging Face folder; see `config_from_hf`.

    Layers of multi-token prediction that config.json names and the files lack are left out: transformers writes such
    folders.
    """
    model_config = config_from_hf(read_config(folder))
    if model_config.mtp.num_layers and not has_mtp_weights(folder):
        return replace(model_config, mtp=MTPConfig())
    return model_config


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a folder.

    Raises:
        HuggingFaceError: no such folder, no config.json, or not a JSON object.
    """
    path = folder / "config.json"
    try:
        raw = parse_json(read_file(path), allow_nan=True)
    except OSError as error:
        why = error.strerror or type(error).__name__
        fix = "give a folder as `save_pretrained` writes it, with config.json and *.safetensors"
        raise HuggingFaceError(f"cannot read {path}", why=why, fix=fix) from None
    except ValueError as error:
        raise HuggingFaceError(f"{path} is not JSON", why=str(error), fix="fetch the folder again") from None
    if not isinstance(raw, dict):
        raise HuggingFaceError(f"{path} is not a JSON object", why="it has to be one", fix="fetch the folder again")
    return raw


def family_of(model_config: ModelConfig, *, name: str | None = None) -> str:
    """The family a model is exported as: `name`, or the first of FAMILIES that can represent the model.

    Raises:
        HuggingFaceError: `name` is unknown, or no family (of that name) can represent the model.
    """
    families = FAMILIES if name is None else {name: _family(name)}
    lost = {candidate: _lost_fields(model_config, family) for candidate, family in families.items()}
    for candidate, missing in lost.items():
        if not missing:
            return candidate
    reasons = "; ".join(f"{candidate} cannot represent {', '.join(missing)}" for candidate, missing in lost.items())
    raise HuggingFaceError(
        "this model cannot be written as a Hugging Face model",
        why=reasons,
        fix="export models of these families only, or add a family (docs/new_family.md)",
    )


def config_to_hf(model_config: ModelConfig, *, family: str, dtype: str = "float32") -> dict[str, Any]:
    """The config.json of a model that `family` can represent, as transformers 4 and 5 read it; `dtype` as in torch."""
    shared = {
        "architectures": [FAMILIES[family].architecture],
        "bos_token_id": None,
        "eos_token_id": None,
        "model_type": family,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return shared | FAMILIES[family].write(model_config)


def check_against(from_hf: ModelConfig, configured: ModelConfig, *, explicit: frozenset[str]) -> ModelConfig:
    """The model to train from a pretrained checkpoint: its own, with the free fields as configured.

    Args:
        from_hf: what config.json describes.
        configured: the model section of the configuration.
        explicit: keys of the section ("moe.router_topk") set on the command line; config.json overrides the others.

    Raises:
        HuggingFaceError: an explicit field that contradicts config.json, with both values.
    """
    if "mtp.num_layers" in explicit and not configured.mtp.num_layers:
        # leaves the layers of the files out
        from_hf, explicit = replace(from_hf, mtp=MTPConfig()), explicit - {"mtp.num_layers"}
    free = free_keys(from_hf)
    given = {key: value_of(configured, key) for key in sorted(explicit - set(free))}
    given = {key: value for key, value in given.items() if value is not None}
    if all(moe_layers(from_hf)):
        given.pop("ffn_hidden_size", None)  # the width of an MLP that no layer has; harmless in training too
    ours, theirs = canonical(with_values(from_hf, given)), canonical(from_hf)
    for key, value in given.items():
        configured_value, expected = value_of(ours, key), value_of(theirs, key)
        has_no_effect = configured_value != value and key != "moe.layer_freq"  # which has several spellings
        if configured_value != expected or has_no_effect:
            flag = KEYS[f"model.{key}"].flag
            raise HuggingFaceError(
                f"{flag} {typed(value)} contradicts the pretrained checkpoint",
                why=f"its config.json has {key} = {typed(expected)}",
                fix=f"leave {flag} out, or train without --pretrained-checkpoint",
            )
    return with_values(from_hf, {key: value_of(configured, key) for key in free})


def _lost_fields(model_config: ModelConfig, family: Family) -> list[str]:
    try:
        back = family.read(family.write(model_config))
    except HuggingFaceError as error:
        return [error.what]
    free = {key: value_of(back, key) for key in free_keys(model_config) if key != "init_method_std"}
    ours, theirs = flat_values(canonical(with_values(model_config, free))), flat_values(canonical(back))
    return [key for key, value in ours.items() if value != theirs[key]]


def _family(name: str) -> Family:
    if name not in FAMILIES:
        raise HuggingFaceError(
            f"Hugging Face model_type {name} is not supported",
            why=f"supported are {', '.join(FAMILIES)}",
            fix="use a checkpoint of one of these, or add the family (docs/new_family.md)",
        )
    return FAMILIES[name]

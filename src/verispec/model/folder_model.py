"""What a Hugging Face folder's config.json and tensor names say about a model, in verispec's terms.

Understands the config.json of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`). Everything that
would change the computation and is not implemented is refused by name, because ignoring it would give wrong text
without an error.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from verispec.errors import UnsupportedModelError
from verispec.model.architecture import (
    Architecture,
    Family,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    make_layers,
)
from verispec.model.fields import Fields, quoted
from verispec.model.model_files import ModelFiles
from verispec.model.safetensors_folder import CONFIG_NAME
from verispec.model.tensor_names import HEAD, Description

_FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
# The one activation a family has, and the key that names it.
_ACTIVATIONS: Mapping[Family, tuple[str, str]] = {"gemma3": ("hidden_activation", "gelu_pytorch_tanh")}
_SILU = ("hidden_act", "silu")
# Where transformers does not derive it from the width, or another value of the file.
_HEAD_DIMS: Mapping[Family, int] = {"qwen3": 128, "gemma3": 256}
_QWEN_FULL_LAYERS = 28
_GEMMA_PATTERN, _GEMMA_QUERY_SCALAR, _GEMMA_THETA, _GEMMA_LOCAL_THETA = 6, 256.0, 1e6, 1e4


def describe_folder(files: ModelFiles) -> Description:
    # A tied model's file may repeat the embedding as head; conversions of Llama 1 stored the frequencies.
    frequencies = {name for name in files.tensors if name.endswith(".rotary_emb.inv_freq")}
    return Description(_architecture(files), "folder", ignored=frozenset({HEAD.folder, *frequencies}))


def _refuse(config: Fields, found: str, supported: str) -> NoReturn:
    raise UnsupportedModelError(f"{config.where}: {found}; supported: {supported}")


def _architecture(files: ModelFiles) -> Architecture:
    config = Fields(files.metadata, str(files.path / CONFIG_NAME))
    names = config.strings("architectures")
    if len(names) != 1 or names[0] not in _FAMILIES:
        _refuse(config, f"architectures {quoted(names)}", ", ".join(_FAMILIES))
    family = _FAMILIES[names[0]]
    _refuse_unsupported(config, family)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", _HEAD_DIMS.get(family, hidden_size // max(num_heads, 1)))
    return Architecture(
        family=family,
        layers=_layers(config, family, head_dim),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        context_len=config.integer("max_position_embeddings"),
        norm_eps=config.real("rms_norm_eps", 1e-6),
        tied_head=config.flag("tie_word_embeddings", default=HEAD.folder not in files.tensors),
        embed_scale=math.sqrt(max(hidden_size, 1)) if family == "gemma3" else 1.0,
    )


def _refuse_unsupported(config: Fields, family: Family) -> None:
    if "quantization_config" in config:
        method = config.table("quantization_config").text("quant_method", "unnamed")
        _refuse(
            config, f"quantization_config ({quoted(method)})", "F32, F16 and BF16 weights, or a quantised GGUF file"
        )
    for option in ("attention_bias", "mlp_bias", "rope_interleaved", "use_bidirectional_attention"):
        if config.flag(option, default=False):
            _refuse(config, f"{option} true", f"{option} false")
    key, supported = _ACTIVATIONS.get(family, _SILU)
    if (activation := config.text(key, supported)) != supported:
        _refuse(config, f"{key} {quoted(activation)}", supported)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if cap in config:
            _refuse(config, f"{cap} {config.real(cap)}", "none")
    if (fraction := config.real("partial_rotary_factor", 1.0)) != 1.0:
        _refuse(config, f"partial_rotary_factor {fraction}", "1.0")
    if unknown := set(config.strings("layer_types")) - {_FULL, _SLIDING}:
        _refuse(config, f"layer type {quoted(min(unknown))}", f"{_FULL}, {_SLIDING}")


def _layers(config: Fields, family: Family, head_dim: int) -> tuple[LayerSpec, ...]:
    num_layers = config.integer("num_hidden_layers")
    is_gemma = family == "gemma3"
    full = LayerSpec(
        rope=_rope(config, _FULL, is_gemma=is_gemma),
        query_scalar=config.real("query_pre_attn_scalar", _GEMMA_QUERY_SCALAR) if is_gemma else max(head_dim, 1),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3"),
        activation="gelu_tanh" if is_gemma else "silu",
        post_norms=is_gemma,
    )
    if "sliding_window" not in config:
        return make_layers(num_layers, lambda i: full)
    rope = _rope(config, _SLIDING, is_gemma=True) if is_gemma else full.rope
    sliding = replace(full, window=config.integer("sliding_window"), rope=rope)
    return make_layers(num_layers, lambda i: sliding if _is_sliding(config, family, i) else full)


def _is_sliding(config: Fields, family: Family, layer: int) -> bool:
    """Whether the layer has the window; before there were `layer_types`, each family had its own rule."""
    if kinds := config.strings("layer_types"):
        if layer >= len(kinds):
            _refuse(config, f"{len(kinds)} layer_types", "one for every layer")
        return kinds[layer] == _SLIDING
    match family:
        case "mistral":
            return True
        case "gemma3":
            pattern = config.integer(
                "sliding_window_pattern", config.integer("_sliding_window_pattern", _GEMMA_PATTERN)
            )
            return pattern > 0 and (layer + 1) % pattern > 0
        case _:
            first = config.integer("max_window_layers", _QWEN_FULL_LAYERS)
            return config.flag("use_sliding_window", default=False) and layer >= first


def _rope(config: Fields, kind: str, *, is_gemma: bool) -> Rope:
    rope = config.table("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    if is_gemma and "rope_parameters" not in config:  # transformers 4: windows had a base of their own, and no scaling
        if kind == _SLIDING:
            return Rope(config.real("rope_local_base_freq", _GEMMA_LOCAL_THETA))
        return Rope(config.real("rope_theta", _GEMMA_THETA), _rope_scaling(rope))
    if is_gemma:
        rope = rope.table(kind)
    theta = rope.real("rope_theta", config.real("rope_theta", 10000.0))
    if (fraction := rope.real("partial_rotary_factor", 1.0)) != 1.0:
        _refuse(rope, f"partial_rotary_factor {fraction}", "1.0")
    if nested := [key for key, value in rope.mapping.items() if isinstance(value, dict)]:
        _refuse(rope, f"separate rope for {quoted(nested[0])} layers", "one rope for all layers")
    return Rope(theta=theta, scaling=_rope_scaling(rope))


def _rope_scaling(rope: Fields) -> RopeScaling | None:
    # "type" is how transformers before 4.43 spelled "rope_type".
    kind = rope.text("rope_type", rope.text("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(rope.real("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=rope.real("factor"),
                low_freq_factor=rope.real("low_freq_factor"),
                high_freq_factor=rope.real("high_freq_factor"),
                original_context_len=rope.integer("original_max_position_embeddings"),
            )
        case _:
            _refuse(rope, f"rope type {quoted(kind)}", "default, linear, llama3")

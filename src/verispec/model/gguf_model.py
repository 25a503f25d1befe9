"""What a GGUF file's metadata and tensor names say about a model, in verispec's terms.

Supported: llama (Llama 2 and 3, SmolLM, Mistral), qwen2, qwen3 and gemma3. Everything that would change the computation
and is not implemented is refused by name, because ignoring it would give wrong text without an error.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from verispec.errors import ModelFileError, UnsupportedModelError
from verispec.model.architecture import (
    Architecture,
    Experts,
    Family,
    FrequencyFactors,
    LayerSpec,
    LinearScaling,
    Rope,
    RopeScaling,
    format_shape,
    make_layers,
)
from verispec.model.fields import Fields, quoted
from verispec.model.model_files import ModelFiles
from verispec.model.tensor_names import EMBED, HEAD, Description

_FAMILIES: Mapping[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}

# What gemma3 files need not say. The largest model, known by its layers, scales scores by another size than its heads'.
_GEMMA_PATTERN, _GEMMA_LOCAL_THETA, _GEMMA_LARGEST_LAYERS = 6, 10000.0, 62
_ROPE_FACTORS = "rope_freqs.weight"


def describe_gguf(files: ModelFiles) -> Description:
    return Description(_architecture(files), "gguf", ignored=frozenset({_ROPE_FACTORS}))


def _architecture(files: ModelFiles) -> Architecture:
    meta = Fields(files.metadata, str(files.path))
    name = meta.text("general.architecture")
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"{files.path}: architecture {quoted(name)}; supported in GGUF files: {', '.join(_FAMILIES)}"
        )
    _refuse_unsupported(files, meta, name)
    if (embed := files.tensors.get(EMBED.gguf)) is None:
        raise ModelFileError(f"{files.path}: tensor {EMBED.gguf!r} is missing")
    hidden_size = meta.integer(f"{name}.embedding_length")
    num_heads = meta.integer(f"{name}.attention.head_count")
    head_dim = meta.integer(f"{name}.attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := meta.integer(f"{name}.{key}", head_dim)) != head_dim:
            raise UnsupportedModelError(f"{files.path}: {name}.{key} is {found}; supported: head_dim ({head_dim})")
    context_len = meta.integer(f"{name}.context_length")
    window = meta.integer(f"{name}.attention.sliding_window", 0)
    if window > 0 and name != "gemma3":
        context_len = min(context_len, window)  # the file does not say which layers have it; within it all are equal
    return Architecture(
        family=_FAMILIES[name],
        layers=_layers(files, meta, name, head_dim, hidden_size // max(num_heads, 1)),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=meta.integer(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_size=meta.integer(f"{name}.feed_forward_length"),
        vocab_size=embed.shape[0],
        context_len=context_len,
        norm_eps=meta.real(f"{name}.attention.layer_norm_rms_epsilon"),
        tied_head=HEAD.gguf not in files.tensors,
        embed_scale=math.sqrt(max(hidden_size, 1)) if name == "gemma3" else 1.0,
    )


def _layers(files: ModelFiles, meta: Fields, name: str, head_dim: int, width_per_head: int) -> tuple[LayerSpec, ...]:
    num_layers = meta.integer(f"{name}.block_count")
    rope = Rope(theta=meta.real(f"{name}.rope.freq_base", 10000.0), scaling=_rope_scaling(files, meta, name, head_dim))
    num_experts = meta.integer(f"{name}.expert_count", 0)
    experts = Experts(num_experts, meta.integer(f"{name}.expert_used_count", 0)) if num_experts > 0 else None
    plain = LayerSpec(rope=rope, query_scalar=max(head_dim, 1), experts=experts)
    if name != "gemma3":
        plain = replace(plain, qkv_bias=name == "qwen2", qk_norm=name == "qwen3")
        return make_layers(num_layers, lambda i: plain)
    scalar = width_per_head if num_layers == _GEMMA_LARGEST_LAYERS else head_dim
    every = replace(plain, query_scalar=max(scalar, 1), qk_norm=True, activation="gelu_tanh", post_norms=True)
    window = meta.integer(f"{name}.attention.sliding_window", 0)
    pattern = meta.integer(f"{name}.attention.sliding_window_pattern", _GEMMA_PATTERN)
    if window <= 0 or pattern <= 0:
        return make_layers(num_layers, lambda i: every)
    local = replace(every, window=window, rope=Rope(meta.real(f"{name}.rope.freq_base_swa", _GEMMA_LOCAL_THETA)))
    return make_layers(num_layers, lambda i: local if (i + 1) % pattern else every)


def _refuse_unsupported(files: ModelFiles, meta: Fields, name: str) -> None:
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (found := meta.real(f"{name}.{cap}", 0.0)) != 0.0:
            raise UnsupportedModelError(f"{files.path}: {name}.{cap} is {found}; supported: none")
    if (num_parts := meta.integer("split.count", 0)) > 1:
        raise UnsupportedModelError(
            f"{files.path}: one of {num_parts} parts of a split model; supported: single files (merge the parts first)"
        )


def _rope_scaling(files: ModelFiles, meta: Fields, name: str, head_dim: int) -> RopeScaling | None:
    kind = meta.text(f"{name}.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{files.path}: rope scaling {quoted(kind)}; supported: none, linear, {_ROPE_FACTORS} (Llama 3)"
        )
    # The second key is how files of 2023 spelled the first.
    factor = meta.real(f"{name}.rope.scaling.factor", meta.real(f"{name}.rope.scale_linear", 1.0))
    linear = LinearScaling(factor) if kind == "linear" and factor not in (0.0, 1.0) else None
    if _ROPE_FACTORS not in files.tensors:
        return linear
    if linear is not None:
        raise UnsupportedModelError(f"{files.path}: linear rope scaling together with {_ROPE_FACTORS}; supported: one")
    if (shape := files.tensors[_ROPE_FACTORS].shape) != (head_dim // 2,):
        raise ModelFileError(
            f"{files.path}: tensor {_ROPE_FACTORS!r} has shape {format_shape(shape)}, expected [{head_dim // 2}]"
        )
    return FrequencyFactors(tuple(files.read(_ROPE_FACTORS).tolist()))

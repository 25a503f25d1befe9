"""What a GGUF file's metadata and tensor names say about a model, in verispec's terms.

Supported: llama (Llama 2 and 3, SmolLM, Mistral), qwen2, qwen3 and gemma3. Everything that would change the computation
and is not implemented is refused by name, because ignoring it would give wrong text without an error.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

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
from verispec.model.blocks import StoredTensor
from verispec.model.fields import Fields, quoted
from verispec.model.file_digest import FileStamp
from verispec.model.gguf_file import GGUFFile

T = TypeVar("T", bound=np.generic)
_FAMILIES: Mapping[str, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}
# The families whose converter reorders the rows of q and k for interleaved rotary pairs.
_PERMUTED_FAMILIES = frozenset({"llama"})

# What gemma3 files need not say. The largest model, known by its layers, scales scores by another size than its heads'.
_GEMMA_PATTERN, _GEMMA_LOCAL_THETA, _GEMMA_LARGEST_LAYERS = 6, 10000.0, 62

_ROPE_FACTORS = "rope_freqs.weight"
_TOP_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
}


class GGUFWeights:
    """A GGUF file's tensors under verispec's names."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.location = str(file.path)
        self.architecture = _architecture(file)
        self.shapes = {name: info.shape for name, info in file.tensors.items()}
        self.ignored = frozenset({_ROPE_FACTORS})

    def stored_name(self, name: str) -> str:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        _, layer, part = name.split(".")
        return f"blk.{layer}.{_LAYER_NAMES[part]}"

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's values, with the rows of q and k in half-split order."""
        return self._ordered(name, self._file.dequantised(self.stored_name(name)))

    def stored(self, name: str) -> StoredTensor:
        """The tensor as the file has it, with the rows of q and k in half-split order."""
        stored_name = self.stored_name(name)
        data = self._file.raw(stored_name)
        return StoredTensor(self._file.tensors[stored_name].type_name, self._ordered(name, data))

    def _ordered(self, name: str, rows: npt.NDArray[T]) -> npt.NDArray[T]:
        arch = self.architecture
        if arch.family in _PERMUTED_FAMILIES and name.endswith(".q"):
            return _unpermute(rows, arch.num_heads)
        if arch.family in _PERMUTED_FAMILIES and name.endswith(".k"):
            return _unpermute(rows, arch.num_kv_heads)
        return rows

    def file_of(self, name: str) -> Path:
        return self._file.path

    def stamps(self) -> list[FileStamp]:
        return [self._file.stamp]

    def close(self) -> None:
        self._file.close()


def _unpermute(rows: npt.NDArray[T], num_heads: int) -> npt.NDArray[T]:
    # Within a head the file interleaves the halves: its row 2i is row i, its row 2i + 1 is row i + head_dim / 2.
    num_rows, width = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, width)


def _architecture(file: GGUFFile) -> Architecture:
    meta = Fields(file.metadata, str(file.path))
    name = meta.text("general.architecture")
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"{file.path}: architecture {quoted(name)}; supported in GGUF files: {', '.join(_FAMILIES)}"
        )
    _refuse_unsupported(file, meta, name)
    if (embed := file.tensors.get(_TOP_NAMES["embed"])) is None:
        raise ModelFileError(f"{file.path}: tensor {_TOP_NAMES['embed']!r} is missing")
    hidden_size = meta.integer(f"{name}.embedding_length")
    num_heads = meta.integer(f"{name}.attention.head_count")
    head_dim = meta.integer(f"{name}.attention.key_length", hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := meta.integer(f"{name}.{key}", head_dim)) != head_dim:
            raise UnsupportedModelError(f"{file.path}: {name}.{key} is {found}; supported: head_dim ({head_dim})")
    context_len = meta.integer(f"{name}.context_length")
    window = meta.integer(f"{name}.attention.sliding_window", 0)
    if window > 0 and name != "gemma3":
        context_len = min(context_len, window)  # the file does not say which layers have it; within it all are equal
    return Architecture(
        family=_FAMILIES[name],
        layers=_layers(file, meta, name, head_dim, hidden_size // max(num_heads, 1)),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=meta.integer(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_size=meta.integer(f"{name}.feed_forward_length"),
        vocab_size=embed.shape[0],
        context_len=context_len,
        norm_eps=meta.real(f"{name}.attention.layer_norm_rms_epsilon"),
        tied_head=_TOP_NAMES["head"] not in file.tensors,
        embed_scale=math.sqrt(max(hidden_size, 1)) if name == "gemma3" else 1.0,
    )


def _layers(file: GGUFFile, meta: Fields, name: str, head_dim: int, width_per_head: int) -> tuple[LayerSpec, ...]:
    num_layers = meta.integer(f"{name}.block_count")
    rope = Rope(theta=meta.real(f"{name}.rope.freq_base", 10000.0), scaling=_rope_scaling(file, meta, name, head_dim))
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


def _refuse_unsupported(file: GGUFFile, meta: Fields, name: str) -> None:
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (found := meta.real(f"{name}.{cap}", 0.0)) != 0.0:
            raise UnsupportedModelError(f"{file.path}: {name}.{cap} is {found}; supported: none")
    if (num_parts := meta.integer("split.count", 0)) > 1:
        raise UnsupportedModelError(
            f"{file.path}: one of {num_parts} parts of a split model; supported: single files (merge the parts first)"
        )


def _rope_scaling(file: GGUFFile, meta: Fields, name: str, head_dim: int) -> RopeScaling | None:
    kind = meta.text(f"{name}.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(
            f"{file.path}: rope scaling {quoted(kind)}; supported: none, linear, {_ROPE_FACTORS} (Llama 3)"
        )
    # The second key is how files of 2023 spelled the first.
    factor = meta.real(f"{name}.rope.scaling.factor", meta.real(f"{name}.rope.scale_linear", 1.0))
    linear = LinearScaling(factor) if kind == "linear" and factor not in (0.0, 1.0) else None
    if _ROPE_FACTORS not in file.tensors:
        return linear
    if linear is not None:
        raise UnsupportedModelError(f"{file.path}: linear rope scaling together with {_ROPE_FACTORS}; supported: one")
    if (shape := file.tensors[_ROPE_FACTORS].shape) != (head_dim // 2,):
        raise ModelFileError(
            f"{file.path}: tensor {_ROPE_FACTORS!r} has shape {format_shape(shape)}, expected [{head_dim // 2}]"
        )
    return FrequencyFactors(tuple(file.dequantised(_ROPE_FACTORS).tolist()))

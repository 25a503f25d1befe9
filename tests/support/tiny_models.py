"""Tiny random models of every family, written as GGUF files and as Hugging Face folders.

The writers are independent of the readers under test: GGUF goes through `gguf.GGUFWriter` and `gguf.quants`, with the
row permutation of llama.cpp's converter. Each writer returns the values a correct reader must give back.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from verispec.model.architecture import (
    Architecture,
    FrequencyFactors,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    Rope,
    expected_tensors,
    make_layers,
)

Tensors = dict[str, npt.NDArray[np.float32]]

K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *K_QUANTS)
FOLDER_TYPES = ("F32", "F16", "BF16")

_GGUF_NAMES = {
    "embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight",
    "attn_norm": "attn_norm.weight", "mlp_norm": "ffn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight",
    "v": "attn_v.weight", "o": "attn_output.weight", "q_bias": "attn_q.bias", "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias", "q_norm": "attn_q_norm.weight", "k_norm": "attn_k_norm.weight",
    "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    "attn_post_norm": "post_attention_norm.weight", "mlp_post_norm": "post_ffw_norm.weight",
}  # fmt: skip
_HF_NAMES = {
    "embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight", "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias", "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight",
}  # fmt: skip
_HF_GEMMA_NAMES = _HF_NAMES | {
    "attn_post_norm": "post_attention_layernorm.weight", "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}  # fmt: skip
_HF_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """Sizes of a tiny model. Rows are whole blocks of 32 by default; `k_quant_config` has rows of 256.

    Of a gemma every `pattern`th layer sees everything, the others a `window`, with `local_theta`.
    """

    family: str = "llama"
    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    mlp_size: int = 96
    vocab_size: int = 80
    context_len: int = 256
    norm_eps: float = 1e-5
    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | FrequencyFactors | None = None
    tied_head: bool = False
    window: int = 21
    pattern: int = 2
    local_theta: float = 100.0
    seed: int = 0

    def layer(self, index: int) -> LayerSpec:
        is_gemma = self.family == "gemma3"
        is_local = is_gemma and (index + 1) % self.pattern > 0
        return LayerSpec(
            rope=Rope(self.local_theta) if is_local else Rope(self.theta, self.scaling),
            query_scalar=self.head_dim,
            window=self.window if is_local else None,
            qkv_bias=self.family == "qwen2",
            qk_norm=self.family in ("qwen3", "gemma3"),
            activation="gelu_tanh" if is_gemma else "silu",
            post_norms=is_gemma,
        )

    @property
    def architecture(self) -> Architecture:
        return Architecture(
            family=self.family,  # type: ignore[arg-type]
            layers=make_layers(self.num_layers, self.layer),
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            mlp_size=self.mlp_size,
            vocab_size=self.vocab_size,
            context_len=self.context_len,
            norm_eps=self.norm_eps,
            tied_head=self.tied_head,
            embed_scale=self.hidden_size**0.5 if self.family == "gemma3" else 1.0,
        )


def k_quant_config(**changes: Any) -> TinyConfig:
    """A config whose every matrix row is a whole number of 256-value blocks."""
    sizes = {"num_layers": 1, "hidden_size": 256, "num_heads": 8, "head_dim": 32, "num_kv_heads": 4, "mlp_size": 256}
    return TinyConfig(**{**sizes, **changes})


def make_tensors(config: TinyConfig) -> Tensors:
    """Random weights under verispec's names, scaled so that activations stay near 1."""
    rng = np.random.default_rng(config.seed)
    tensors: Tensors = {}
    for name, (shape, _) in expected_tensors(config.architecture).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm"):
            tensors[name] = 1 + np.float32(0.1) * noise
        elif name.endswith("_bias"):
            tensors[name] = np.float32(0.1) * noise
        else:
            tensors[name] = noise / np.float32(np.sqrt(shape[-1]))
    return tensors


def gguf_name(name: str) -> str:
    """GGUF's name for a tensor of ours."""
    return _GGUF_NAMES[name] if "." not in name else "blk.{1}.".format(*name.split(".")) + _GGUF_NAMES[_part(name)]


def hf_name(name: str, family: str = "llama") -> str:
    """Hugging Face's name for a tensor of ours."""
    names = _HF_GEMMA_NAMES if family == "gemma3" else _HF_NAMES
    return names[name] if "." not in name else "model.layers.{1}.".format(*name.split(".")) + names[_part(name)]


def _part(name: str) -> str:
    return name.rsplit(".", 1)[1]


def quantise(values: npt.NDArray[np.float32], type_name: str, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Stored bytes [..., row bytes]. `gguf` cannot write k-quants, so those are random blocks with small scales."""
    if type_name not in K_QUANTS:
        stored: npt.NDArray[Any] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
        return np.ascontiguousarray(stored).view(np.uint8)
    row_nbytes = gguf.quant_shape_to_byte_shape(values.shape, gguf.GGMLQuantizationType[type_name])
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, row_nbytes, dtype=np.uint8)
    blocks = data.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][1])
    scales = (1e-4 * (1 + rng.random((len(blocks), 2)))).astype(np.float16).view(np.uint8)  # [blocks, 4]
    if type_name == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return data


def dequantise(data: npt.NDArray[np.uint8], type_name: str) -> npt.NDArray[np.float32]:
    """The reference: values of stored bytes by `gguf.quants`."""
    return np.asarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name]), dtype=np.float32)


def permute_rows(rows: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """What llama.cpp's converter does to q and k of Llama models."""
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def gguf_metadata(config: TinyConfig) -> dict[str, Any]:
    """The model's metadata as llama.cpp's converter writes it; ints become uint32, floats float32."""
    arch = gguf_arch(config)
    metadata: dict[str, Any] = {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.context_len,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.mlp_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{arch}.rope.freq_base": config.theta,
        f"{arch}.rope.dimension_count": config.head_dim,
    }
    if config.family == "gemma3":
        metadata |= {
            f"{arch}.attention.sliding_window": config.window,
            f"{arch}.attention.sliding_window_pattern": config.pattern,
            f"{arch}.rope.freq_base_swa": config.local_theta,
        }
    if isinstance(config.scaling, LinearScaling):
        metadata |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": config.scaling.factor}
    return metadata


def gguf_arch(config: TinyConfig) -> str:
    """GGUF has no Mistral of its own."""
    return "llama" if config.family == "mistral" else config.family


def write_gguf(
    path: Path,
    config: TinyConfig,
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    *,
    type_name: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    arch: str | None = None,
) -> Tensors:
    """Write a model; matrices as `type_name`, vectors as F32. `metadata` adds to or replaces; None drops a key."""
    writer = gguf.GGUFWriter(path, arch or gguf_arch(config))
    for key, value in {**gguf_metadata(config), **(metadata or {})}.items():
        _add_metadata(writer, key, value)
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    expected: Tensors = {}
    for seed, (name, values) in enumerate((tensors or make_tensors(config)).items()):
        stored_type = type_name if values.ndim == 2 else "F32"
        data = quantise(values, stored_type, seed)
        expected[name] = dequantise(data, stored_type)
        if gguf_arch(config) == "llama" and _part("." + name) in heads:
            data = permute_rows(data, heads[_part(name)])
        writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType[stored_type])
    extras = dict(extra_tensors or {})
    if isinstance(config.scaling, FrequencyFactors):
        extras["rope_freqs.weight"] = np.array(config.scaling.factors, dtype=np.float32)
    for name, values in extras.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, list(value))


def hf_config(config: TinyConfig, *, transformers: int = 5) -> dict[str, Any]:
    """config.json as transformers 4 or 5 writes it."""
    values: dict[str, Any] = {
        "architectures": [_HF_CLASSES[config.family]],
        "model_type": config.family,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_len,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
    }
    rope = _hf_rope(config)
    if config.family == "gemma3":
        return values | _hf_gemma(config, rope, transformers=transformers)
    if transformers >= 5:
        values["rope_parameters"] = {"rope_theta": config.theta, **(rope or {"rope_type": "default"})}
    else:
        values |= {"rope_theta": config.theta, "rope_scaling": rope}
    return values


def _hf_gemma(config: TinyConfig, rope: dict[str, Any] | None, *, transformers: int) -> dict[str, Any]:
    common = {
        "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": config.head_dim,
        "sliding_window": config.window,
    }  # fmt: skip
    if transformers < 5:
        local = {"rope_local_base_freq": config.local_theta, "sliding_window_pattern": config.pattern}
        return common | local | {"rope_theta": config.theta, "rope_scaling": rope}
    kinds = [
        "sliding_attention" if config.layer(i).window is not None else "full_attention"
        for i in range(config.num_layers)
    ]
    full = {"rope_theta": config.theta, **(rope or {"rope_type": "default"})}
    sliding = {"rope_theta": config.local_theta, "rope_type": "default"}
    return common | {
        "layer_types": kinds,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }


def _hf_rope(config: TinyConfig) -> dict[str, Any] | None:
    match config.scaling:
        case None:
            return None
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case FrequencyFactors():
            raise ValueError("frequency factors exist in GGUF only")


def write_safetensors(path: Path, entries: Sequence[tuple[str, str, npt.NDArray[Any]]]) -> None:
    """A safetensors file of (name, dtype, stored array); written by hand because numpy has no bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, dtype, stored in entries:
        header[name] = {
            "dtype": dtype,
            "shape": list(stored.shape),
            "data_offsets": [len(body), len(body) + stored.nbytes],
        }
        body += stored.tobytes()
    write_safetensors_parts(path, header, body)


def write_safetensors_parts(path: Path, header: Any, body: bytes) -> None:
    """A safetensors file with any header, also a wrong one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def write_folder(
    folder: Path,
    config: TinyConfig,
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    *,
    type_name: str = "F32",
    num_shards: int = 1,
    transformers: int = 5,
    config_changes: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> Tensors:
    """Write a model folder with one or several safetensors files. A config change to None stays in it as null."""
    folder.mkdir(parents=True, exist_ok=True)
    entries, expected = [], {}
    for name, values in (tensors or make_tensors(config)).items():
        # Gemma's norms are stored without the 1 that is part of each weight.
        one = np.float32(config.family == "gemma3" and name.endswith("norm"))
        stored = _to_stored(values - one, type_name)
        expected[name] = dequantise(stored.view(np.uint8), type_name) + one
        entries.append((hf_name(name, config.family), type_name, stored))
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", entries)
    else:
        _write_shards(folder, entries, num_shards)
    config_json = {**hf_config(config, transformers=transformers), **(config_changes or {})}
    files = {"config.json": json.dumps(config_json, indent=2).encode(), **(extra_files or {})}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return expected


def _to_stored(values: npt.NDArray[np.float32], type_name: str) -> npt.NDArray[Any]:
    stored = quantise(values, type_name)
    return stored.view({"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[type_name])


def _write_shards(folder: Path, entries: list[tuple[str, str, npt.NDArray[Any]]], num_shards: int) -> None:
    weight_map = {}
    for i in range(num_shards):
        file_name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        write_safetensors(folder / file_name, entries[i::num_shards])
        weight_map |= {name: file_name for name, _, _ in entries[i::num_shards]}
    index = {"metadata": {"total_size": sum(stored.nbytes for _, _, stored in entries)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

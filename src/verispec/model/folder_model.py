"""What a Hugging Face folder's config.json and tensor names say about a model, in verispec's terms.

Understands the config.json of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`). Everything that
would change the computation and is not implemented is refused by name, because ignoring it would give wrong text
without an error.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from verispec.errors import UnsupportedModelError
from verispec.model.architecture import Architecture, Family, LinearScaling, Llama3Scaling, Rope, RopeScaling
from verispec.model.blocks import StoredTensor
from verispec.model.fields import Fields, quoted
from verispec.model.file_digest import FileStamp
from verispec.model.safetensors_folder import CONFIG_NAME, SafetensorsFolder

_FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


class FolderWeights:
    """A model folder's tensors under verispec's names."""

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder = folder
        self.location = str(folder.folder)
        self.architecture = _architecture(folder)
        self.shapes = {name: stored.shape for name, stored in folder.tensors.items()}
        # A tied model's file may repeat the embedding as head; conversions of Llama 1 stored the frequencies.
        self.ignored = frozenset(
            name for name in self.shapes if name == _TOP_NAMES["head"] or name.endswith(".rotary_emb.inv_freq")
        )

    def stored_name(self, name: str) -> str:
        """The folder's name for a tensor of verispec's."""
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        _, layer, part = name.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}"

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's values."""
        return self._folder.read(self.stored_name(name))

    def stored(self, name: str) -> StoredTensor:
        """The tensor as the folder has it."""
        stored_name = self.stored_name(name)
        return StoredTensor(self._folder.tensors[stored_name].type_name, self._folder.raw(stored_name))

    def file_of(self, name: str) -> Path:
        """The safetensors file that holds the tensor."""
        return self._folder.tensors[self.stored_name(name)].file.path

    def stamps(self) -> list[FileStamp]:
        """Those of config.json and of every weight file."""
        return self._folder.stamps()

    def close(self) -> None:
        """Release the files."""
        self._folder.close()


def _refuse(config: Fields, found: str, supported: str) -> NoReturn:
    raise UnsupportedModelError(f"{config.where}: {found}; supported: {supported}")


def _architecture(folder: SafetensorsFolder) -> Architecture:
    config = Fields(folder.config, str(folder.folder / CONFIG_NAME))
    names = config.strings("architectures")
    if len(names) != 1 or names[0] not in _FAMILIES:
        _refuse(config, f"architectures {quoted(names)}", ", ".join(_FAMILIES))
    family = _FAMILIES[names[0]]
    _refuse_unsupported(config)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    head_in_files = _TOP_NAMES["head"] in folder.tensors
    return Architecture(
        family=family,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        # transformers' Qwen3 does not derive it from the width; the others do.
        head_dim=config.integer("head_dim", 128 if family == "qwen3" else hidden_size // max(num_heads, 1)),
        mlp_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        context_len=_context_len(config, family),
        norm_eps=config.real("rms_norm_eps", 1e-6),
        rope=_rope(config),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_head=config.flag("tie_word_embeddings", default=not head_in_files),
    )


def _refuse_unsupported(config: Fields) -> None:
    if "quantization_config" in config:
        method = config.table("quantization_config").text("quant_method", "unnamed")
        _refuse(
            config, f"quantization_config ({quoted(method)})", "F32, F16 and BF16 weights, or a quantised GGUF file"
        )
    for option in ("attention_bias", "mlp_bias", "rope_interleaved"):
        if config.flag(option, default=False):
            _refuse(config, f"{option} true", f"{option} false")
    if (activation := config.text("hidden_act", "silu")) != "silu":
        _refuse(config, f"hidden_act {quoted(activation)}", "silu")
    if (fraction := config.real("partial_rotary_factor", 1.0)) != 1.0:
        _refuse(config, f"partial_rotary_factor {fraction}", "1.0")
    if unknown := set(config.strings("layer_types")) - _LAYER_TYPES:
        _refuse(config, f"layer type {quoted(min(unknown))}", ", ".join(sorted(_LAYER_TYPES)))


def _context_len(config: Fields, family: Family) -> int:
    context_len = config.integer("max_position_embeddings")
    window_is_active = (
        family == "mistral"
        or config.flag("use_sliding_window", default=False)
        or "sliding_attention" in config.strings("layer_types")
    )
    if window_is_active and "sliding_window" in config:
        # Within the window a sliding-window model attends to everything.
        return min(context_len, config.integer("sliding_window"))
    return context_len


def _rope(config: Fields) -> Rope:
    rope = config.table("rope_parameters" if "rope_parameters" in config else "rope_scaling")
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

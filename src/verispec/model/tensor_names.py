"""What the two formats call verispec's tensors, and in which ways they store them differently."""

from typing import Literal, NamedTuple, TypeAlias

from verispec.model.architecture import Architecture

Format: TypeAlias = Literal["gguf", "folder"]


class _Names(NamedTuple):
    gguf: str
    folder: str


_TOP = {
    "embed": _Names("token_embd.weight", "model.embed_tokens.weight"),
    "final_norm": _Names("output_norm.weight", "model.norm.weight"),
    "head": _Names("output.weight", "lm_head.weight"),
}
_LAYER = {
    "attn_norm": _Names("attn_norm.weight", "input_layernorm.weight"),
    "q": _Names("attn_q.weight", "self_attn.q_proj.weight"),
    "k": _Names("attn_k.weight", "self_attn.k_proj.weight"),
    "v": _Names("attn_v.weight", "self_attn.v_proj.weight"),
    "q_bias": _Names("attn_q.bias", "self_attn.q_proj.bias"),
    "k_bias": _Names("attn_k.bias", "self_attn.k_proj.bias"),
    "v_bias": _Names("attn_v.bias", "self_attn.v_proj.bias"),
    "q_norm": _Names("attn_q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": _Names("attn_k_norm.weight", "self_attn.k_norm.weight"),
    "o": _Names("attn_output.weight", "self_attn.o_proj.weight"),
    "attn_post_norm": _Names("post_attention_norm.weight", "post_attention_layernorm.weight"),
    "mlp_norm": _Names("ffn_norm.weight", "post_attention_layernorm.weight"),
    "gate": _Names("ffn_gate.weight", "mlp.gate_proj.weight"),
    "up": _Names("ffn_up.weight", "mlp.up_proj.weight"),
    "down": _Names("ffn_down.weight", "mlp.down_proj.weight"),
    "mlp_post_norm": _Names("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
}
_GEMMA_MLP_NORM = _Names("ffn_norm.weight", "pre_feedforward_layernorm.weight")
_PREFIXES = _Names("blk", "model.layers")
EMBED, HEAD = _TOP["embed"], _TOP["head"]


class Description(NamedTuple):
    """A model as its files have it: all that is needed to find its tensors and to read them as verispec's."""

    architecture: Architecture
    format: Format
    ignored: frozenset[str] = frozenset()  # tensors of the files that need not be used

    @property
    def has_interleaved_heads(self) -> bool:
        """Whether rows of q and k are ordered for interleaved rotary pairs, as GGUF's converter has it for llama."""
        return self.format == "gguf" and self.architecture.family == "llama"

    @property
    def norm_offset(self) -> float:
        """What is to be added to the weights of norms: Gemma's folders leave out the 1 that is part of each."""
        return float(self.format == "folder" and self.architecture.family == "gemma3")

    def stored_name(self, name: str) -> str:
        """What the files call the tensor that verispec calls `name`."""
        if name in _TOP:
            return getattr(_TOP[name], self.format)  # type: ignore[no-any-return]
        _, layer, part = name.split(".")
        is_gemma_norm = part == "mlp_norm" and self.architecture.family == "gemma3"
        names = _GEMMA_MLP_NORM if is_gemma_norm else _LAYER[part]
        return f"{getattr(_PREFIXES, self.format)}.{layer}.{getattr(names, self.format)}"

"""The transformer in numpy: weights laid out once, and a forward over flat rows.

Products are `Dense` layers, fused where they share their input. Each function here maps rows to rows; the audit probes
them one by one.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from verispec.backends.audit import KernelProbe
from verispec.backends.numpy_dense import Dense
from verispec.model.architecture import Activation, Architecture, LayerSpec, Rope, inverse_frequencies

Float32 = NDArray[np.float32]
Reader = Callable[[str], Float32]
GELU_OUTER, GELU_CUBE = np.float32(1.5957691216057308), np.float32(0.044715)  # 2 * sqrt(2 / pi)


class Layer:
    """What one layer does, and its weights; None where it has no such thing."""

    def __init__(self, spec: LayerSpec, prefix: str, read_any: Reader) -> None:
        def read(name: str) -> Float32:
            return read_any(prefix + name)

        def read_if(is_there: bool, name: str) -> Float32 | None:
            return read(name) if is_there else None

        self.spec = spec
        self.attn_norm, self.mlp_norm = read("attn_norm"), read("mlp_norm")  # [D]
        self.qkv = Dense(read("q"), read("k"), read("v"))  # D -> (H + 2 * KV) * d
        self.qkv_bias = np.concatenate([read(f"{n}_bias") for n in "qkv"]) if spec.qkv_bias else None
        self.q_norm, self.k_norm = read_if(spec.qk_norm, "q_norm"), read_if(spec.qk_norm, "k_norm")  # [d]
        self.o = Dense(read("o"))  # H * d -> D
        self.gate_up = Dense(read("gate"), read("up"))  # D -> 2 * F
        self.down = Dense(read("down"))  # F -> D
        self.attn_post_norm = read_if(spec.post_norms, "attn_post_norm")  # [D]
        self.mlp_post_norm = read_if(spec.post_norms, "mlp_post_norm")  # [D]


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    mean = np.sum(x * x, axis=-1, keepdims=True) / np.float32(x.shape[-1])
    return np.asarray(x * (np.float32(1) / np.sqrt(mean + np.float32(eps))) * weight, np.float32)


def activate(gate_up: Float32, activation: Activation) -> Float32:
    """The activated gate times up, of a fused [M, 2F]. Both activations are gate * sigmoid of something.

    The tanh form of GELU is x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 x^3), and (1 + tanh(u)) / 2 is
    sigmoid(2u).
    """
    half = gate_up.shape[-1] // 2
    gate = gate_up[:, :half]
    inner = gate if activation == "silu" else GELU_OUTER * (gate + GELU_CUBE * (gate * gate * gate))
    return np.asarray(gate / (np.exp(-inner) + np.float32(1)) * gate_up[:, half:], np.float32)


def rotate(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """RoPE on [M, heads, d] in the half-split convention; cos and sin are [M, 1, d / 2]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class NumpyModel:
    def __init__(self, architecture: Architecture, read: Reader, *, context_len: int) -> None:
        self.architecture = architecture
        self.layers = [Layer(spec, f"layers.{i}.", read) for i, spec in enumerate(architecture.layers)]
        self.final_norm = read("final_norm")
        # A tied head is kept once, as the head needs it, and serves as embedding too.
        self._head = Dense(read("embed" if architecture.tied_head else "head"))  # D -> V
        self._embed = None if architecture.tied_head else read("embed")  # [V, D]
        ropes = {spec.rope for spec in architecture.layers}
        self._cos_sin = {rope: _cos_sin(rope, architecture.head_dim, context_len) for rope in ropes}

    def embed(self, token_ids: NDArray[np.int32]) -> Float32:
        """[M, D]"""
        rows = self._head.outputs(token_ids) if self._embed is None else self._embed[token_ids]
        return rows * np.float32(self.architecture.embed_scale)

    def qkv(self, layer: Layer, x: Float32, positions: NDArray[np.int32]) -> tuple[Float32, Float32, Float32]:
        """Norm, projections, q/k norm and RoPE: q [M, H, d], k and v [M, KV, d]."""
        arch = self.architecture
        fused = layer.qkv(self._normed(x, layer.attn_norm))
        if layer.qkv_bias is not None:
            fused += layer.qkv_bias
        heads = fused.reshape(len(x), -1, arch.head_dim)
        q, k, v = np.split(heads, (arch.num_heads, arch.num_heads + arch.num_kv_heads), axis=1)
        q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        cos, sin = (table[positions][:, None] for table in self._cos_sin[layer.spec.rope])
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def attention_output(self, layer: Layer, attended: Float32) -> Float32:
        """Output product, and a norm where there is one: what the sub-layer adds to x."""
        return self._normed(layer.o(attended), layer.attn_post_norm)

    def mlp(self, layer: Layer, x: Float32) -> Float32:
        """Norm, gate and up, activation, down, and a norm where there is one: what the sub-layer adds to x."""
        hidden = activate(layer.gate_up(self._normed(x, layer.mlp_norm)), layer.spec.activation)
        return self._normed(layer.down(hidden), layer.mlp_post_norm)

    def _normed(self, x: Float32, weight: Float32 | None) -> Float32:
        return x if weight is None else rms_norm(x, weight, self.architecture.norm_eps)

    def logits(self, x: Float32) -> Float32:
        """Final norm and head: [R, V]"""
        return self._head(self._normed(x, self.final_norm))

    def probes(self) -> list[KernelProbe]:
        """The dense kernels and norms of the first layer: all layers have its shapes."""
        arch, layer = self.architecture, self.layers[0]
        width = arch.hidden_size
        return [
            KernelProbe("norm", width, lambda x: self._normed(x, layer.attn_norm)),
            KernelProbe("qkv", width, layer.qkv),
            KernelProbe("rope", width, lambda x: self._probe_rope(layer, x)),
            KernelProbe("o", arch.num_heads * arch.head_dim, layer.o),
            KernelProbe("gate_up", width, layer.gate_up),
            KernelProbe("activation", 2 * arch.mlp_size, lambda x: activate(x, layer.spec.activation)),
            KernelProbe("down", arch.mlp_size, layer.down),
            KernelProbe("head", width, self.logits),
        ]

    def _probe_rope(self, layer: Layer, x: Float32) -> Float32:
        cos, _ = self._cos_sin[layer.spec.rope]
        positions = np.full(len(x), min(77, len(cos) - 1), np.int32)
        return np.concatenate([part.reshape(len(x), -1) for part in self.qkv(layer, x, positions)], axis=1)


def _cos_sin(rope: Rope, head_dim: int, context_len: int) -> tuple[Float32, Float32]:
    """[context, d / 2] each."""
    frequencies = inverse_frequencies(rope, head_dim).astype(np.float64)
    angles = np.arange(context_len, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

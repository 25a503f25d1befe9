"""What a decoder-only transformer looks like, as data: sizes, what each layer does, and the tensors it must have.

Knows verispec's own tensor names and shapes; knows nothing of files, arrays of weights or how a pass is computed.
All supported families are one shape: RMS norm, rotary attention with grouped K/V heads, gated MLP. Where they, or the
layers of one model, differ, a `LayerSpec` says so, and backends walk the layers without asking for the family. Rotary
pairs are half-split everywhere: element i of a head turns with element i + head_dim / 2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from verispec.errors import InputError, UnsupportedModelError
from verispec.model.elementary import power

Family: TypeAlias = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
Activation: TypeAlias = Literal["silu", "gelu_tanh"]

# Far above any real model. They bound what a hostile file can make verispec do before its tensors are looked at.
_CAPS = {
    "num_layers": 1 << 10,
    "hidden_size": 1 << 20,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "head_dim": 1 << 14,
    "mlp_size": 1 << 22,
    "vocab_size": 1 << 24,
    "context_len": 1 << 30,
}


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be positive and finite, not {value}")


def _check_cap(name: str, value: int) -> None:
    if not 1 <= value <= _CAPS[name]:
        raise InputError(f"{name} must be between 1 and {_CAPS[name]}, not {value}")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _check_positive(rope_factor=self.factor)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int

    def __post_init__(self) -> None:
        _check_positive(
            rope_factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            original_context_len=self.original_context_len,
        )
        if self.low_freq_factor >= self.high_freq_factor:
            raise InputError(
                f"low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor ({self.high_freq_factor})"
            )


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """One divisor per rotary frequency: how GGUF stores Llama 3 scaling (tensor rope_freqs.weight)."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        for factor in self.factors:
            _check_positive(rope_frequency_factor=factor)


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | FrequencyFactors


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: base theta, and how its frequencies were stretched, if they were."""

    theta: float
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _check_positive(rope_theta=self.theta)


class Experts(NamedTuple):
    """An MLP that is one of several: how many there are, and how many a token goes through."""

    num: int
    num_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    rope: Rope
    query_scalar: float  # scores are divided by its square root; head_dim in most models
    window: int | None = None  # positions a row sees, its own included; None: all
    qkv_bias: bool = False
    qk_norm: bool = False  # of each head, before it is rotated
    activation: Activation = "silu"  # of the gate
    experts: Experts | None = None  # None: one MLP for all tokens
    post_norms: bool = False  # a norm also behind attention and MLP, before their results are added

    def __post_init__(self) -> None:
        _check_positive(query_scalar=self.query_scalar)
        if self.window is not None and self.window < 1:
            raise InputError(f"window must be at least 1, not {self.window}")


def make_layers(num_layers: int, spec: Callable[[int], LayerSpec]) -> tuple[LayerSpec, ...]:
    """One spec per layer, by index; a number of layers that no model has is refused before any is made."""
    _check_cap("num_layers", num_layers)
    return tuple(map(spec, range(num_layers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's sizes and layers, validated: an `Architecture` that exists is one the backends can run."""

    family: Family
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    context_len: int
    norm_eps: float
    tied_head: bool
    embed_scale: float = 1.0  # what embeddings are multiplied with, in float32

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def distinct_layers(self) -> list[int]:
        """The first layer of each kind: what a measurement of one layer has to cover."""
        return sorted({spec: i for i, spec in reversed(list(enumerate(self.layers)))}.values())

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise InputError(f"family {self.family!r} is unknown; known families: {', '.join(FAMILIES)}")
        for name in _CAPS:
            _check_cap(name, getattr(self, name))
        _check_positive(norm_eps=self.norm_eps, embed_scale=self.embed_scale)
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise InputError(f"head_dim must be even for rotary embedding, not {self.head_dim}")
        for scaling in {spec.rope.scaling for spec in self.layers}:
            if isinstance(scaling, FrequencyFactors) and len(scaling.factors) != self.head_dim // 2:
                raise InputError(f"{len(scaling.factors)} rotary frequency factors for head_dim {self.head_dim}")


def inverse_frequencies(rope: Rope, head_dim: int) -> npt.NDArray[np.float32]:
    """The angle per position of each rotary pair, in the float32 steps of Hugging Face transformers."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)  # [head_dim / 2]
    # Our own power: numpy's depends on the CPU's vector unit, libm's on the C library, and this must on neither.
    powers = np.array([power(rope.theta, float(x)) for x in exponents], dtype=np.float32)
    plain: npt.NDArray[np.float32] = np.float32(1) / powers  # [head_dim / 2]
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / np.float32(factor)
        case FrequencyFactors(factors):
            divisors: npt.NDArray[np.float32] = np.array(factors, dtype=np.float32)
            return plain / divisors
        case Llama3Scaling() as scaling:
            return _llama3_frequencies(plain, scaling)


def _llama3_frequencies(plain: npt.NDArray[np.float32], scaling: Llama3Scaling) -> npt.NDArray[np.float32]:
    factor, low, high, context_len = (
        np.float32(x)
        for x in (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context_len)
    )
    # Quotients with a scalar on top are written as torch computes them: reciprocal, then product.
    one = np.float32(1)
    wavelengths = (one / plain) * np.float32(2 * math.pi)  # [head_dim / 2]
    smooth = ((one / wavelengths) * context_len - low) / (high - low)
    blended = (one - smooth) * plain / factor + smooth * plain
    is_long = wavelengths > context_len / low
    is_short = wavelengths < context_len / high
    return np.where(is_long, plain / factor, np.where(is_short, plain, blended))


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]  # outermost dimension first
    split_axis: int | None = None  # along which devices may share it: outputs, or inputs whose products are then added


def check_dense(arch: Architecture) -> None:
    """Refuse a mixture of experts: no backend here computes one."""
    for experts in {spec.experts for spec in arch.layers if spec.experts is not None}:
        raise UnsupportedModelError(f"mixture of {experts.num} experts; supported: dense models")


def expected_tensors(arch: Architecture) -> dict[str, TensorSpec]:
    """Every tensor the model must have, by verispec's name."""
    check_dense(arch)
    tensors = {
        "embed": TensorSpec((arch.vocab_size, arch.hidden_size), 0),
        "final_norm": TensorSpec((arch.hidden_size,)),
    }
    if not arch.tied_head:
        tensors["head"] = TensorSpec((arch.vocab_size, arch.hidden_size), 0)
    for i, spec in enumerate(arch.layers):
        tensors.update({f"layers.{i}.{name}": tensor for name, tensor in _layer_tensors(arch, spec).items()})
    return tensors


def _layer_tensors(arch: Architecture, spec: LayerSpec) -> dict[str, TensorSpec]:
    q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    hidden, mlp, head_dim = arch.hidden_size, arch.mlp_size, arch.head_dim
    tensors = {
        "attn_norm": TensorSpec((hidden,)),
        "q": TensorSpec((q_size, hidden), 0),
        "k": TensorSpec((kv_size, hidden), 0),
        "v": TensorSpec((kv_size, hidden), 0),
        "o": TensorSpec((hidden, q_size), 1),
        "mlp_norm": TensorSpec((hidden,)),
        "gate": TensorSpec((mlp, hidden), 0),
        "up": TensorSpec((mlp, hidden), 0),
        "down": TensorSpec((hidden, mlp), 1),
    }
    if spec.qkv_bias:
        tensors |= {f"{name}_bias": TensorSpec(tensors[name].shape[:1], 0) for name in "qkv"}
    if spec.qk_norm:
        tensors |= {"q_norm": TensorSpec((head_dim,)), "k_norm": TensorSpec((head_dim,))}
    if spec.post_norms:
        tensors |= {"attn_post_norm": TensorSpec((hidden,)), "mlp_post_norm": TensorSpec((hidden,))}
    return tensors


def format_shape(shape: Sequence[int]) -> str:
    """A shape as error messages write it."""
    return f"[{', '.join(map(str, shape))}]"

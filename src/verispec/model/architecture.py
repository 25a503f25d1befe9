"""What a decoder-only transformer looks like, as data: sizes, rotary embedding, and the tensors it must have.

Knows verispec's own tensor names and shapes; knows nothing of files, arrays of weights or how a pass is computed.
All supported families are one shape: RMS norm, rotary attention with grouped K/V heads, gated SiLU MLP. Rotary
pairs are half-split everywhere: element i of a head turns with element i + head_dim / 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from verispec.errors import InputError
from verispec.model.elementary import power

Family: TypeAlias = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's sizes and options, validated: an `Architecture` that exists is one the backends can run."""

    family: Family
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    context_len: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool
    qk_norm: bool
    tied_head: bool

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise InputError(f"family {self.family!r} is unknown; known families: {', '.join(FAMILIES)}")
        for name, cap in _CAPS.items():
            value = getattr(self, name)
            if not 1 <= value <= cap:
                raise InputError(f"{name} must be between 1 and {cap}, not {value}")
        _check_positive(norm_eps=self.norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise InputError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise InputError(f"head_dim must be even for rotary embedding, not {self.head_dim}")
        scaling = self.rope.scaling
        if isinstance(scaling, FrequencyFactors) and len(scaling.factors) != self.head_dim // 2:
            raise InputError(f"{len(scaling.factors)} rotary frequency factors for head_dim {self.head_dim}")


def inverse_frequencies(arch: Architecture) -> npt.NDArray[np.float32]:
    """The angle per position of each rotary pair, in the float32 steps of Hugging Face transformers."""
    exponents = np.arange(0, arch.head_dim, 2, dtype=np.float32) / np.float32(arch.head_dim)  # [head_dim / 2]
    # Our own power: numpy's depends on the CPU's vector unit, libm's on the C library, and this must on neither.
    powers = np.array([power(arch.rope.theta, float(x)) for x in exponents], dtype=np.float32)
    plain: npt.NDArray[np.float32] = np.float32(1) / powers  # [head_dim / 2]
    match arch.rope.scaling:
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


def expected_tensors(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor the model must have, by verispec's name, with its shape (outermost dimension first)."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (arch.vocab_size, arch.hidden_size),
        "final_norm": (arch.hidden_size,),
    }
    if not arch.tied_head:
        shapes["head"] = (arch.vocab_size, arch.hidden_size)
    layer = _layer_tensors(arch)
    for i in range(arch.num_layers):
        shapes.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    return shapes


def _layer_tensors(arch: Architecture) -> dict[str, tuple[int, ...]]:
    q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    hidden, mlp = arch.hidden_size, arch.mlp_size
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (q_size, hidden),
        "k": (kv_size, hidden),
        "v": (kv_size, hidden),
        "o": (hidden, q_size),
        "mlp_norm": (hidden,),
        "gate": (mlp, hidden),
        "up": (mlp, hidden),
        "down": (hidden, mlp),
    }
    if arch.qkv_bias:
        shapes |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
    if arch.qk_norm:
        shapes |= {"q_norm": (arch.head_dim,), "k_norm": (arch.head_dim,)}
    return shapes


def format_shape(shape: Sequence[int]) -> str:
    """A shape as error messages write it."""
    return f"[{', '.join(map(str, shape))}]"

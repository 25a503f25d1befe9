"""Tiny models and two passes over them, the same on a GPU and on a CPU: what golden digests are made of."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.cuda.bit_model import BitModel, Context
from verispec.backends.cuda.bits import bf16
from verispec.backends.cuda.shapes import Positions, Shapes, positions_of
from verispec.model.architecture import Architecture, Family, LayerSpec, LinearScaling, Rope, expected_tensors

GOLDENS = Path(__file__).with_name("goldens.json")  # made on an H200 by `device_check`
CONTEXT_LEN = 512
NUM_SLOTS = 700
TABLE_ROWS = 3
GIVEN_A = 245  # sequence A's first positions: their K/V is given, not computed
CHUNK_A, PROMPT_A, PROMPT_B = 265, 270, 20  # its rows cross the border of a span in the first pass

Float32 = NDArray[np.float32]


def _words(name: str, count: int) -> NDArray[np.uint64]:
    """Splitmix64 of a counter that starts at a hash of the name: the same numbers everywhere."""
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def numbers(name: str, shape: tuple[int, ...]) -> Float32:
    """Values in (-1, 1) with a tail: most are small, a few are large."""
    u = (_words(name, int(np.prod(shape))) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return np.asarray(u * (np.float32(0.25) + u * u), np.float32).reshape(shape)


def _architecture(
    family: Family, width: int, heads: int, kv_heads: int, head_dim: int, mlp: int, *, theta: float = 10000.0
) -> Architecture:
    layer = LayerSpec(
        rope=Rope(theta=theta), query_scalar=head_dim, qkv_bias=family == "qwen2", qk_norm=family == "qwen3"
    )
    return Architecture(
        family=family, layers=(layer,) * 2, hidden_size=width, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, mlp_size=mlp, vocab_size=320, context_len=CONTEXT_LEN, norm_eps=1e-5,
        tied_head=family == "llama",
    )  # fmt: skip


def _gemma() -> Architecture:
    """All that Gemma 3 has of its own; the first window leaves a whole span out."""
    plain = _architecture("gemma3", 128, 2, 1, 256, 192)
    layer = replace(plain.layers[0], query_scalar=168, qk_norm=True, activation="gelu_tanh", post_norms=True)
    everywhere = replace(layer, rope=Rope(theta=1e6, scaling=LinearScaling(8.0)))
    layers = (replace(layer, window=12), everywhere, replace(layer, window=100))
    return replace(plain, layers=layers, tied_head=True, embed_scale=128**0.5)


ARCHITECTURES = {
    "llama": _architecture("llama", 128, 4, 2, 32, 256),  # parts of K 1, 2, 1, 4
    "qwen2": _architecture("qwen2", 192, 3, 1, 64, 192, theta=1e6),  # parts of K 1, 3, 1, 3, and a bias
    "qwen3": _architecture("qwen3", 144, 6, 3, 32, 128),  # rows of 144 columns: no parts; a q/k norm
    "gemma3": _gemma(),  # parts of K 1, 4, 1, 3
}


class TinyModel(NamedTuple):
    """Weights by name."""

    arch: Architecture
    shapes: Shapes
    tensors: dict[str, Float32]
    positions: list[Positions]


def tiny_model(name: str) -> TinyModel:
    """One of ARCHITECTURES, with the same weights everywhere."""
    arch = ARCHITECTURES[name]
    tensors = {}
    for tensor, (shape, _) in expected_tensors(arch).items():
        values = numbers(f"{name}/{tensor}", shape)
        if len(shape) == 1:
            values = values * np.float32(0.5) if tensor.endswith("_bias") else np.float32(1) + values * np.float32(0.3)
        elif tensor != "embed":
            values = values * np.float32(4 / np.sqrt(shape[1]))
        tensors[tensor] = values
    return TinyModel(arch, Shapes.of(arch), tensors, positions_of(arch, CONTEXT_LEN))


@dataclass(frozen=True)
class TinyRows:
    """Rows of one pass; every row's whole context stands in the table."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    seq_rows: NDArray[np.int64]
    slots: NDArray[np.int64]


def slot_table() -> NDArray[np.int64]:
    """Scattered slots, none of them twice. [TABLE_ROWS, CONTEXT_LEN]"""
    order = np.argsort(_words("slots", NUM_SLOTS - 2), kind="stable") + 2
    table = np.zeros((TABLE_ROWS, CONTEXT_LEN), np.int64)
    table[1, :400] = order[:400]
    table[2, :200] = order[400:600]
    return table


def given_kv(model: TinyModel) -> tuple[Float32, Float32]:
    """K and V of sequence A's first positions, bf16 values. [layers, GIVEN_A, KV, d]"""
    shape = (model.arch.num_layers, GIVEN_A, model.shapes.kv_heads, model.shapes.head_dim)
    return bf16(numbers("k", shape) * np.float32(6)), bf16(numbers("v", shape) * np.float32(6))


def passes() -> list[TinyRows]:
    """A chunk of a prompt; then the rest of it and a second prompt."""
    table = slot_table()
    prompts = {1: _words("prompt a", PROMPT_A) % np.uint64(320), 2: _words("prompt b", PROMPT_B) % np.uint64(320)}
    chunks = [[(1, range(GIVEN_A, CHUNK_A))], [(1, range(CHUNK_A, PROMPT_A)), (2, range(PROMPT_B))]]
    result = []
    for chunk in chunks:
        rows = [(int(prompts[seq][j]), j, seq, int(table[seq, j])) for seq, positions in chunk for j in positions]
        result.append(TinyRows(*(np.array(column, np.int64) for column in zip(*rows, strict=True))))
    return result


def groups_of(seq_rows: NDArray[np.integer[Any]], most: int) -> NDArray[np.int32]:
    """Rows of one sequence that follow each other, as (first row, number of rows), `most` at once. [G, 2]"""
    groups, first = [], 0
    for i in range(1, len(seq_rows) + 1):
        if i == len(seq_rows) or seq_rows[i] != seq_rows[first] or i - first == most:
            groups.append((first, i - first))
            first = i
    return np.array(groups, np.int32)


def bit_model_steps(model: TinyModel) -> list[dict[str, Float32]]:
    """What every kernel of both passes must give."""
    table = slot_table()
    bit_model = BitModel(
        model.shapes, model.positions, model.tensors.__getitem__, num_slots=NUM_SLOTS, tied=model.arch.tied_head
    )
    given = table[1, :GIVEN_A]
    bit_model.k[:, given], bit_model.v[:, given] = given_kv(model)
    results = []
    for rows in passes():
        context = Context(table[rows.seq_rows], rows.positions + 1)
        bit_model.forward(rows.token_ids, rows.positions, rows.slots, context)
        results.append(dict(bit_model.steps))
    return results


def digest(values: Float32) -> str:
    """Of the float32 bits; bf16 values have one float32 form."""
    return hashlib.sha256(np.ascontiguousarray(values, np.float32).tobytes()).hexdigest()[:16]

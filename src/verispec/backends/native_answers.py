"""The known-answer test of the native kernels: tiny models of every stored type, against digests kept beside this file.

The native backend is row-pure by construction; what could still be wrong is the build, the CPU or the memory. So the
library that was loaded computes passes of many shapes with the instruction set and the threads it will serve with, from
weights in the file's blocks to draws, and every bit has to be as it was when the digests were made. Inputs come from
SHAKE-256, so that they are the same everywhere.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verispec.backends.native_model import FLOAT_TYPES, LAYOUTS
from verispec.backends.options import AS_STORED, QUANTISED, LoadedModel, NativeOptions
from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import FULL_VIEW, Backend, Pass, PassKind, View
from verispec.kv import NUM_RESERVED
from verispec.model.architecture import Architecture, LayerSpec, Rope, expected_tensors
from verispec.model.blocks import FORMATS, StoredTensor
from verispec.sampling.rows import SampleKey, Sampler
from verispec.types import SamplingParams

PATH = Path(__file__).with_name("native_answers.json")
_NUM_LAYERS = 2
NUM_SLOTS, NUM_SEQUENCES, CONTEXT_LEN = 96, 2, 64
_VOCAB = 331
_PROMPT_LENS = (37, 23)  # rows of the first passes: whole tiles of rows, and every rest
_DECODED_SHAPES = (1, 2, 3, 4, 5, 8)
_K = 5
_ALWAYS = ("F32", "F16")
_GEMMA_TYPES, _WINDOW = ("F32", "Q8_0"), 21
# Where the half-precision scales of a block stand, and the exponent they get: values near 1 in every type.
_SCALES = {
    "Q4_0": ((0,), 0x2C00), "Q4_1": ((0, 2), 0x2C00), "Q5_0": ((0,), 0x2800), "Q5_1": ((0, 2), 0x2800),
    "Q8_0": ((0,), 0x1C00), "Q4_K": ((0, 2), 0x1000), "Q5_K": ((0, 2), 0x0C00), "Q6_K": ((208,), 0x0400),
}  # fmt: skip
_PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(temperature=1.3, top_k=7, seed=3),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=100, min_p=0.001, seed=4),
    SamplingParams(temperature=1.1, logit_bias=((3, 2.0), (9, -3.0)), seed=5),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=-0.3, seed=6),
)

Slots = NDArray[np.int32]
MakeBackend = Callable[[LoadedModel, NativeOptions], Backend]


class Case(NamedTuple):
    """One tiny model: the type of all its matrices, whether they are quantised at load, and the type of its K/V.

    A gemma has what no other family has: windows, GELU, norms behind sub-layers and a scaled embedding.
    """

    type_name: str
    quantises: bool
    kv_dtype: str
    is_gemma: bool = False

    def concerns(self, type_names: Set[str], *, quantises: bool, is_gemma: bool) -> bool:
        """Whether a model with matrices of these types uses its kernels; _ALWAYS are for biases and norms of heads."""
        is_used = self.type_name in type_names or (self.type_name in _ALWAYS and not self.quantises)
        return is_used and self.quantises <= quantises and self.is_gemma <= is_gemma

    @property
    def name(self) -> str:
        """What the digest is kept under."""
        gemma, quantised = "gemma3 " * self.is_gemma, " as Q8_0" * self.quantises
        return f"{gemma}{self.type_name}{quantised}, {self.kv_dtype} K/V"

    @property
    def options(self) -> NativeOptions:
        return NativeOptions(
            num_slots=NUM_SLOTS,
            num_seq_rows=NUM_SEQUENCES,
            weights=QUANTISED if self.quantises else AS_STORED,
            kv_dtype=self.kv_dtype,
        )


def cases(kv_dtype: str) -> list[Case]:
    """Every stored type as it is, the float types also quantised, two as gemma: together they use every kernel."""
    kinds = [(name, False) for name in LAYOUTS] + [(name, True) for name in FLOAT_TYPES]
    plain = [Case(name, quantises, kv_dtype) for name, quantises in kinds]
    return plain + [Case(name, False, kv_dtype, is_gemma=True) for name in _GEMMA_TYPES]


def wrong_answers(chosen: Iterable[Case], make_backend: MakeBackend) -> tuple[str, ...]:
    """Those whose bits are not the expected ones; `make_backend(model, options)` has what is to be tested."""
    expected = json.loads(PATH.read_text(encoding="utf-8"))["answers"]
    return tuple(case.name for case in chosen if answer(case, make_backend) != expected[case.name])


def answer(case: Case, make_backend: MakeBackend) -> str:
    """The digest of everything the case's passes give."""
    backend = make_backend(_model(case), case.options)
    digest = hashlib.sha256()
    try:
        for step, pass_ in enumerate(_passes()):
            _bind(backend, step)
            result = backend.submit(pass_).result()
            assert result.draw is not None
            assert result.top_k is not None
            assert result.noisy_top_k is not None
            assert result.logprobs is not None
            for part in (*result.draw, *result.top_k, *result.noisy_top_k, result.logprobs):
                digest.update(np.ascontiguousarray(part).tobytes())
    finally:
        backend.close()
    return digest.hexdigest()[:16]


def _bytes(name: str, count: int) -> NDArray[np.uint8]:
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(count), np.uint8)


def _floats(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Values in [-1, 1) that are exact in every float type, being multiples of 1 / 128."""
    integers = _bytes(name, math.prod(shape)).astype(np.float32) - np.float32(128)
    return np.asarray(integers / np.float32(128), np.float32).reshape(shape)


def _stored(type_name: str, name: str, shape: tuple[int, int]) -> StoredTensor:
    if type_name in FLOAT_TYPES:
        values = _floats(name, shape) / 8
        bits = values.view(np.uint32) >> 16 if type_name == "BF16" else values
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[type_name]
        return StoredTensor(type_name, np.ascontiguousarray(bits.astype(dtype)).view(np.uint8))
    fmt, (offsets, exponent) = FORMATS[type_name], _SCALES[type_name]
    blocks = _bytes(name, math.prod(shape) // fmt.block_len * fmt.block_nbytes).reshape(-1, fmt.block_nbytes).copy()
    for offset in offsets:  # random mantissas, and a sign for minima
        halves = (blocks[:, offset : offset + 2].copy().view(np.uint16) & 0x03FF) | exponent
        halves |= 0x8000 if offset == 2 and not type_name.endswith("K") else 0
        blocks[:, offset : offset + 2] = halves.view(np.uint8)
    return StoredTensor(type_name, blocks.reshape(shape[0], -1))


def _read(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Norms near 1, biases near 0."""
    return np.asarray(_floats(name, shape) / np.float32(4) + np.float32(name.endswith("norm")), np.float32)


def _model(case: Case) -> LoadedModel:
    """Float types get odd sizes, others rows of 256. Groups of heads, biases and norms of heads vary with the type."""
    index = list(LAYOUTS).index(case.type_name)
    is_float = case.type_name in FLOAT_TYPES and not case.quantises
    groups = ((1, 7), (2, 3), (3, 2)) if is_float else ((2, 4), (4, 2), (8, 1))
    num_kv_heads, group = groups[index % 3]
    head_dim = 24 if is_float else 32
    layers = (
        LayerSpec(
            rope=Rope(theta=10000.0), query_scalar=head_dim, qkv_bias=bool(index % 2), qk_norm=not index % 2
        ),
    ) * _NUM_LAYERS  # fmt: skip
    if case.is_gemma:
        full = LayerSpec(rope=Rope(theta=1e6), query_scalar=40, qk_norm=True, activation="gelu_tanh", post_norms=True)
        layers = (replace(full, rope=Rope(theta=10000.0), window=_WINDOW), full)
    architecture = Architecture(
        family="gemma3" if case.is_gemma else "qwen2" if index % 2 else "qwen3",
        layers=layers,
        hidden_size=104 if is_float else 256,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_size=90 if is_float else 256,
        vocab_size=_VOCAB,
        context_len=CONTEXT_LEN,
        norm_eps=1e-5,
        tied_head=index % 3 > 0,
        embed_scale=10.0 if case.is_gemma else 1.0,
    )
    shapes = {name: spec.shape for name, spec in expected_tensors(architecture).items()}
    return LoadedModel(
        architecture,
        lambda name: _read(name, shapes[name]),
        lambda name: _stored(case.type_name, name, (shapes[name][0], shapes[name][1])),
    )


@cache
def _passes() -> tuple[Pass, ...]:
    return tuple(_make_passes())


def _make_passes() -> Iterator[Pass]:
    """Two prompts, then rows of both sequences in turn, some behind a tail, then a pass with skipped sub-layers."""
    slots = NUM_RESERVED + np.arange(NUM_SLOTS, dtype=np.int32) * 5 % NUM_SLOTS  # not in order
    tables = (slots[: NUM_SLOTS // 2], slots[NUM_SLOTS // 2 :])
    for sequence, length in enumerate(_PROMPT_LENS):
        builder = PassBuilder()
        builder.update_table(sequence + 1, 0, tables[sequence][:length].tolist())
        for position in range(length):
            _add(builder, tables, sequence, position)
        yield _pass(builder)
    for step, shape in enumerate((*_DECODED_SHAPES, 2)):
        builder = PassBuilder()
        for i in range(shape):  # a row, then rows that attend to it through their tails
            sequence = (step + i % 2) % NUM_SEQUENCES
            _add(builder, tables, sequence, _PROMPT_LENS[sequence] + i // 2, tail_len=1 + i // 2)
        is_last = step == len(_DECODED_SHAPES)
        yield _pass(builder, View.without({0}, {_NUM_LAYERS - 1}) if is_last else FULL_VIEW)


def _add(builder: PassBuilder, tables: Sequence[Slots], sequence: int, position: int, *, tail_len: int = 0) -> None:
    table, token_id = tables[sequence], (31 * position + 7 * sequence) % _VOCAB
    if tail_len:
        tail = table[position + 1 - tail_len : position + 1].tolist()
        builder.add_node(sequence + 1, position, token_id, tail)
    else:
        builder.add_chain(sequence + 1, position, (token_id,), (int(table[position]),))


def _pass(builder: PassBuilder, view: View = FULL_VIEW) -> Pass:
    """Everything is wanted of every row."""
    shape = len(builder)
    builder.noisy_k = _K
    for row in range(shape):
        builder.draw.rows.append(row)
        builder.noisy.rows.append(row)
        builder.want_top(row, _K)
        builder.given_rows.append(row)
        builder.given_ids.append(row * 17 % _VOCAB)
    return builder.build(PassKind.CANONICAL, lambda num_rows: shape, vocab_size=_VOCAB, view=view)


def _bind(backend: Backend, step: int) -> None:
    """Both sequences sample in other ways at every step; half of what they have seen counts as their prompt."""
    for sequence in range(NUM_SEQUENCES):
        params = _PARAMS[(step + 3 * sequence) % len(_PARAMS)]
        key = SampleKey(params.seed or 0, (step + sequence) % 3)
        backend.bind(sequence + 1, Sampler(params, key, prompt_len=_PROMPT_LENS[sequence] // 2))

"""Digests of a wide product and of draws with filters, beside those of whole tiny models: a CPU derives them, and a GPU
must give them.

`python -m tests.backends.cuda.case_digests` prints what a CPU derives, for DIGESTS.
"""

from __future__ import annotations

import math

import numpy as np

from tests.backends.cuda.draw_reference import reference
from verispec.backends.cuda import bits, tiny
from verispec.backends.cuda.shapes import num_parts

DIGESTS = {"wide product": "51f4bcc6467fb3f2", "draws with filters": "2ef090d56c0212dc"}
ROWS, OUTPUTS, COLUMNS = 12, 4224, 1024  # more than stay in the cache, and more rows than linear.cu takes
SOME_OUTPUTS = slice(0, OUTPUTS, 4)  # enough for one bit of the accumulator to show in bf16
VOCAB = 5000


def wide_inputs() -> tuple[np.ndarray, np.ndarray]:
    """Rows and weights, bf16 values."""
    return bits.bf16(tiny.numbers("wide/x", (ROWS, COLUMNS))), bits.bf16(tiny.numbers("wide/w", (OUTPUTS, COLUMNS)))


def wide_outputs() -> np.ndarray:
    """By the bit model, at some of the outputs. [ROWS, 1056]"""
    x, w = wide_inputs()
    found: np.ndarray = bits.bf16(bits.product(x, w[SOME_OUTPUTS], num_parts(OUTPUTS, COLUMNS)))
    return found


def draw_logits() -> np.ndarray:
    return tiny.numbers("draw/logits", (ROWS, VOCAB)) * np.float32(16)


def draw_parameters() -> list[dict[str, float]]:
    """Every filter, alone and with others."""
    return [
        {
            "temperature": float(np.float32((1, 0.7, 1.5, 0)[i % 4])), "top_k": (40, 0, 3000)[i % 3],
            "top_p": float(np.float32((0.9, 1, 0.5)[i // 2 % 3])), "log_min_p": (-math.inf, -3.0)[i % 2],
            "t": 7 * i, "seed": 2**33 + i, "sample": i % 3, "stream": i % 2,
        }
        for i in range(ROWS)
    ]  # fmt: skip


def drawn() -> np.ndarray:
    """Tokens and log-probabilities by plain numpy. [ROWS, 2]"""
    rows = zip(draw_logits(), draw_parameters(), strict=True)
    return np.array([reference(logits, logits, row) for logits, row in rows], np.float32)


def derived() -> dict[str, str]:
    return {"wide product": tiny.digest(wide_outputs()), "draws with filters": tiny.digest(drawn())}


if __name__ == "__main__":
    print(derived())

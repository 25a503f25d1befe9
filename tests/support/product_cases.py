"""Inputs of products for which an arithmetic is easily wrong. Needs numpy and the package alone: a GPU is checked with
the same cases as the CPU."""

from __future__ import annotations

import numpy as np

from verispec.backends.cuda import bits

# Everyday values, all exponents, the edges, and what is no number.
KINDS = ("plain", "wide", "small", "tiny", "huge", "zeros", "edges", "not finite")
EDGES = np.array([0, -0.0, 1, -1, 2.0**-126, 2.0**-133, -(2.0**-130), 3.3e38, -3.3e38, 1.99, 255, -255], np.float32)


def values(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.standard_normal(shape).astype(np.float32)
    with np.errstate(all="ignore"):
        if kind == "wide":
            x = x * np.float32(2) ** rng.integers(-20, 20, shape).astype(np.float32)
        elif kind == "small":  # products of two are subnormal, or nearly
            x = x * np.float32(2) ** rng.integers(-100, -40, shape).astype(np.float32)
        elif kind in ("tiny", "huge"):
            x = x * np.float32(2.0 ** {"tiny": -120, "huge": 120}[kind])
        elif kind == "zeros":
            x = np.where(rng.random(shape) < 0.9, np.float32(0), x)
        elif kind == "edges":
            x = rng.choice(EDGES, shape)
        elif kind == "not finite":
            x = np.where(rng.random(shape) < 0.02, rng.choice([np.nan, np.inf, -np.inf], shape), x).astype(np.float32)
        return bits.bf16(x)

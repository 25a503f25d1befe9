"""The draw in plain numpy, one row at a time and by sorting: what the GPU's draws and the package's must equal."""

import math

import numpy as np

from verispec.sampling.maths import log_f32
from verispec.sampling.noise import gumbel_f32, philox4x32


def exp_f32(x: np.ndarray) -> np.ndarray:
    f = np.float32
    c = np.where(x < -87, f(-87), x).astype(np.float32)
    n = (c * f(1.44269504) + f(12582912)) - f(12582912)
    r = (c - n * f(0.693359375)) - n * f(-2.12194440e-4)
    p = np.full_like(r, 1.9875691500e-4)
    for k in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + f(k)
    y = (p * r * r + r) + f(1)
    return np.where(x < -87, f(0), y * np.ldexp(f(1), n.astype(np.int32))).astype(np.float32)


def weights(z: np.ndarray) -> np.ndarray:
    return np.rint(exp_f32(z).astype(np.float64) * 2.0**40).astype(np.int64)


def reference(logits: np.ndarray, edited: np.ndarray, row: dict[str, float]) -> tuple[int, float]:
    if not np.isfinite(edited.max()):
        return -1, math.nan
    top = logits.max()
    total = np.float32(weights(logits - top).sum()) * np.float32(2.0**-40)
    log_total = log_f32(np, np.array([total], np.float32))[0]
    z = (edited - edited.max()) / np.float32(row["temperature"] or 1)
    if row["temperature"] == 0:
        chosen = int(np.argmax(edited))
    else:
        order = np.lexsort((np.arange(len(z)), -z))
        keep = int((z >= np.float32(row["log_min_p"])).sum())
        keep = max(1, min(keep, int(row["top_k"]) or keep))
        if row["top_p"] < 1:
            reached = np.cumsum(weights(z[order[:keep]]))
            needed = math.ceil(float(np.float32(row["top_p"])) * float(reached[-1]))
            keep = min(keep, int((reached < needed).sum()) + 1)
        ids = np.sort(order[:keep])
        ids = ids[z[ids] > -np.inf]
        blocks = ids >> 2
        seed, zero = int(row["seed"]), blocks * 0
        counter = (blocks, zero + int(row["t"]), zero + int(row["sample"]), zero + int(row["stream"]))
        words = np.stack(philox4x32(counter, (zero + (seed & 0xFFFFFFFF), zero + (seed >> 32))))
        noisy = z[ids] + gumbel_f32(np, words[ids & 3, np.arange(len(ids))])
        chosen = int(ids[np.argmax(noisy)])
    return chosen, float((logits[chosen] - top) - log_total)


def draw_case(rng: np.random.Generator, kind: str, vocab: int, rows: int) -> np.ndarray:
    logits = (rng.standard_normal((rows, vocab)) * 4).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits * 2) / 2
    if kind == "banned":
        logits[:, ::2] = -np.inf
    if kind == "flat":  # more ids than a list of candidates holds, all nearly alike
        logits *= np.float32(1e-3)
    if kind == "unusable":
        logits[0, 5], logits[1, 7], logits[2] = np.nan, np.inf, -np.inf
    return logits.astype(np.float32)


def parameters_of(rng: np.random.Generator, rows: int) -> list[dict[str, float]]:
    """Sampling parameters in many combinations."""
    return [
        {
            "temperature": float(np.float32((0, 1, 0.7, 1.5)[i % 4])),
            "top_k": (0, 0, 1, 40, 3000)[i % 5],
            "top_p": float(np.float32((1, 0.9, 0.5, 0.01)[i // 2 % 4])),
            "stream": int(rng.integers(0, 4)),
            "log_min_p": float(np.float32((-math.inf, -3.0, -0.5)[i % 3])),
            "t": int(rng.integers(0, 9999)),
            "seed": int(rng.integers(0, 1 << 63)),
            "sample": int(rng.integers(0, 4)),
        }
        for i in range(rows)
    ]

"""The draw on a GPU against plain numpy, and the noise of all 2^32 words against the CPU's C++.

python -m tests.backends.cuda.draw_check [WORDS]; WORDS is how many words of noise to compare, 2^32 unless told.
"""

import ctypes
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tests.backends.cuda.draw_reference import draw_case, parameters_of, reference
from verispec.backends.cuda.drawing import DrawInputs, DrawKernels
from verispec.sampling import draw
from verispec.sampling.noise import gumbel_f32
from verispec.sampling.rows import NO_EDITS, SamplingRows

NATIVE = Path(__file__).parents[3] / "native"
_SOURCE = """
#include "maths.h"
extern "C" void noise(unsigned first, unsigned count, float* out) {
  for (unsigned i = 0; i < count; ++i) out[i] = vs::gumbel_f32(first + i);
}
"""
BLOCK = 1 << 26


def cpu_noise(folder: Path) -> ctypes.CDLL:
    (folder / "noise.cpp").write_text(_SOURCE)
    library = folder / "noise.so"
    command = ["c++", "-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", f"-I{NATIVE}"]
    subprocess.run([*command, str(folder / "noise.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def check_noise(words: int) -> int:
    kernels = DrawKernels(4096, 1)
    first = np.arange(1 << 20, dtype=np.int64) * 4093 % (1 << 32)  # numpy itself, on some of them
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as threads:
        library, workers = cpu_noise(Path(name)), os.cpu_count() or 1
        different, share = 0, BLOCK // workers
        host = torch.empty(BLOCK, dtype=torch.float32, pin_memory=True)
        sample = np.concatenate([first, np.arange(4096), (1 << 32) - 1 - np.arange(4096)])
        native = np.empty(1, np.float32)
        odd = 0
        for word in sample[:: len(sample) // 2000]:
            library.noise(ctypes.c_uint(int(word)), ctypes.c_uint(1), ctypes.c_void_p(native.ctypes.data))
            odd += int(native[0] != gumbel_f32(np, np.array([word]))[0])
        print(f"noise: numpy and C++ differ on {odd} of 2000 words", flush=True)
        for start in range(0, words, BLOCK):
            device = kernels.noise(start, BLOCK)
            jobs = [
                threads.submit(
                    library.noise, ctypes.c_uint(start + i * share), ctypes.c_uint(share),
                    ctypes.c_void_p(host.data_ptr() + 4 * i * share),
                )
                for i in range(workers)
            ]  # fmt: skip
            for job in jobs:
                job.result()
            unequal = device.view(torch.int32) != host.cuda().view(torch.int32)
            count = int(unequal.sum())
            different += count
            if count:
                print("words", (unequal.nonzero().flatten()[:5] + start).tolist(), flush=True)
    print(f"noise: {different} of {words} words differ", flush=True)
    return different + odd


KINDS = ("plain", "ties", "banned", "unusable", "edited", "flat")
VOCABS = (320, 5000, 49152, 151936, 262144)


def check_draws(
    make: Callable[[int, int], DrawKernels] = DrawKernels, device: str = "cuda", vocabs: tuple[int, ...] = VOCABS
) -> int:
    """How many draws are not those of plain numpy, which sorts."""
    rng, wrong, total = np.random.default_rng(0), 0, 0
    for vocab in vocabs:
        kernels = make(vocab, 64)
        for kind in KINDS:
            rows = 12
            logits = draw_case(rng, kind, vocab, rows)
            edited = logits + (rng.random(logits.shape) < 0.1).astype(np.float32) if kind == "edited" else logits
            parameters = parameters_of(rng, rows)
            for filters in (True, False):
                if not filters:
                    parameters = [{**p, "top_k": 0, "top_p": 1.0, "log_min_p": -math.inf} for p in parameters]
                kernels.draw(
                    torch.from_numpy(logits).to(device), device_parameters(parameters, device), rows, filters=filters,
                    edited=torch.from_numpy(edited).to(device) if kind == "edited" else None,
                )  # fmt: skip
                tokens, logprobs = kernels.token_ids.tolist(), kernels.logprobs.cpu().numpy()
                wrong += children_differ(kernels, logits, edited, parameters, filters, device)
                for i in range(rows):
                    wanted = reference(logits[i], edited[i], parameters[i])
                    same = np.float32(wanted[1]).tobytes() == logprobs[i].tobytes() or (
                        math.isnan(wanted[1]) and math.isnan(logprobs[i])
                    )
                    total += 1
                    if tokens[i] != wanted[0] or not same:
                        wrong += 1
                        print(
                            "BAD", vocab, kind, filters, i, parameters[i], (tokens[i], logprobs[i]), wanted, flush=True
                        )
    print(f"draws: {wrong} of {total} differ", flush=True)
    return wrong


def children_differ(
    kernels: DrawKernels, logits: np.ndarray, edited: np.ndarray, parameters: list[dict[str, float]], filters: bool,
    device: str, k: int = 6,
) -> int:  # fmt: skip
    """How many rows have other children, or other probabilities, than the shared code gives them."""
    rows, shares = len(logits), torch.zeros(logits.shape, device=device)
    found = kernels.children(
        torch.from_numpy(logits).to(device), device_parameters(parameters, device), rows, k=k, filters=filters,
        edited=torch.from_numpy(edited).to(device) if edited is not logits else None, shares=shares,
    ).cpu().numpy()  # fmt: skip
    sampling = sampling_rows(parameters)
    expected = draw.noisy_top_k(np, edited, sampling, k)
    words = np.stack([expected.token_ids.astype(np.int32), *(part.view(np.int32) for part in expected[1:])])
    differ = (found != words).any(axis=(0, 2))
    wanted = draw.probabilities(np, edited, sampling)
    differ |= ~((shares.cpu().numpy() == wanted) | np.isnan(wanted)).all(axis=1)
    for i in np.flatnonzero(differ):
        print("BAD children", logits.shape[1], filters, i, parameters[i], found[:, i], words[:, i], flush=True)
    return int(differ.sum())


def sampling_rows(rows: list[dict[str, float]]) -> SamplingRows:
    def column(name: str, dtype: type) -> np.ndarray:
        return np.array([row[name] for row in rows], dtype)

    ints = {"t": "t", "sample_index": "sample", "stream": "stream", "top_k": "top_k"}
    floats = ("temperature", "top_p", "log_min_p")
    return SamplingRows(
        seeds=column("seed", np.uint64), **{name: column(key, np.int64) for name, key in ints.items()},
        **{name: column(name, np.float32) for name in floats}, **NO_EDITS,
    )  # fmt: skip


def device_parameters(rows: list[dict[str, float]], device: str = "cuda") -> DrawInputs:
    def ints(values: list[list[int]]) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.uint64).astype(np.uint32).view(np.int32)).to(device)

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row[name] for row in rows], dtype=dtype, device=device)

    return DrawInputs(
        seeds=ints([[int(r["seed"]) & 0xFFFFFFFF, int(r["seed"]) >> 32] for r in rows]),
        counters=ints([[int(r["t"]), int(r["sample"]), int(r["stream"])] for r in rows]),
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        log_min_p=column("log_min_p", torch.float32),
    )


def main() -> None:
    with np.errstate(all="ignore"):
        wrong = check_draws()
    begin = time.perf_counter()
    wrong += check_noise(int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 32)
    print(f"{time.perf_counter() - begin:.0f} s", "FAILED" if wrong else "all equal")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

"""Loading into the native backend holds one tensor of the file at a time beside what stays."""

from __future__ import annotations

import json
import math
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.native import ROOT
from tests.support.tiny_models import TinyConfig
from verispec.backends.native_backend import NativeBackend
from verispec.backends.options import LoadedModel, NativeOptions
from verispec.model.architecture import expected_tensors
from verispec.model.blocks import FORMATS, StoredTensor
from verispec.model.model_files import MappedFile

pytestmark = pytest.mark.usefixtures("native_kernels")

CONFIG = TinyConfig(num_layers=10, hidden_size=1024, num_heads=16, num_kv_heads=16, head_dim=64, mlp_size=3072,
                    vocab_size=4096, tied_head=True)  # fmt: skip
MOST = 1.3  # peak over what stays


def resident_kb(name: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0])


def load(path: Path) -> dict[str, int]:
    """Load a model of zeros whose every tensor is somewhere in one file of Q4_K blocks; what that took, in kB."""
    shapes = {name: tensor.shape for name, tensor in expected_tensors(CONFIG.architecture).items()}
    fmt, file = FORMATS["Q4_K"], MappedFile(path)
    offsets, total = {}, 0
    for name, shape in shapes.items():
        offsets[name] = total
        total += math.prod(shape) // fmt.block_len * fmt.block_nbytes

    def stored(name: str) -> StoredTensor:
        num_rows, width = shapes[name]
        row_nbytes = width // fmt.block_len * fmt.block_nbytes
        return StoredTensor("Q4_K", file.bytes_at(offsets[name], num_rows * row_nbytes).reshape(num_rows, row_nbytes))

    def read(name: str) -> object:
        import numpy as np

        return np.zeros(shapes[name], np.float32)

    before = resident_kb("VmRSS")
    model = LoadedModel(CONFIG.architecture, read, stored)  # type: ignore[arg-type]
    backend = NativeBackend([model], NativeOptions(num_slots=64, num_seq_rows=2, threads=2))
    file.close()
    found = {"peak": resident_kb("VmHWM") - before, "stays": resident_kb("VmRSS") - before}
    backend.close()
    return found


def in_a_process(path: Path, *how: str) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.backends.test_native_memory", str(path), *how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result: dict[str, int] = json.loads(done.stdout)
    return result


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    num_values = sum(math.prod(tensor.shape) for tensor in expected_tensors(CONFIG.architecture).values())
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(num_values)  # zeros, more than enough of them
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_of_loading_is_little_more_than_what_stays(weights: Path) -> None:
    found = in_a_process(weights)
    assert found["stays"] > 90_000  # the packed weights
    assert found["peak"] < MOST * found["stays"]
    kept = in_a_process(weights, "--keep-pages")
    assert kept["peak"] > MOST * kept["stays"], "control: a file that stays in memory is seen"


if __name__ == "__main__":
    if "--keep-pages" in sys.argv:
        del mmap.MADV_DONTNEED
    print(json.dumps(load(Path(sys.argv[1]))))

"""Products of many rows, their source run on a CPU: the bits of linear.cu, whoever is early or late."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cached_property

import pytest

torch = pytest.importorskip("torch")

from tests.backends.cuda import test_wide  # noqa: E402
from tests.support import cuda_emulated  # noqa: E402
from verispec.backends.cuda.arguments import filled  # noqa: E402
from verispec.backends.cuda.kernels import LargeArgs, LinearArgs, RowArgs  # noqa: E402
from verispec.backends.cuda.product_forms import LARGE_THREADS, Kind, large_form  # noqa: E402

pytestmark = pytest.mark.cuda

# The two blocks of a cluster are halves of one, each with its own half of the memory.
BOTH = (
    "for (int r = 0; r < 2; ++r) emulated::copy_block<LATE_COPIES>(emulated::dynamic_memory + to % (1 << 17) + "
    "(r << 17), &map, column, eight, block, barrier + (r - int(threadIdx.x) / kThreads) * 2 * STAGES);"
)
STEPS = test_wide.STEPS | {
    "void wide_both##n(float (*d)[4], uint64 a, uint64 b, int adds)": (
        "emulated::wide_step<LATE_STEPS>(d, a, b, adds, n, threadIdx.x / 32 % 4);"
    ),
    "void copy_to_both(unsigned to, const Map& map, int column, int eight, int block, uint64* barrier)": BOTH,
    "void arrive_at(uint64* barrier, int rank)": (
        "emulated::count_at(barrier + (rank - int(threadIdx.x) / kThreads) * 2 * STAGES, 1, 0);"
    ),
}
ONLY_WIDE = (
    "void meet_multiplying()", "float2 load_shared(unsigned address, int rank)",
)  # fmt: skip
LARGE = (
    ("threadIdx.x", "(threadIdx.x % kThreads)"),
    ("blockIdx.x", "(blockIdx.x * 2 + threadIdx.x / kThreads)"), ("gridDim.x", "(gridDim.x * 2)"),
    cuda_emulated.dynamic_memory(1024, "auto* memory = emulated::dynamic_memory + (threadIdx.x / kThreads << 17);"),
    ("__shared__ __align__(8) uint64 full[STAGES], empty[STAGES];",
     "static uint64 of[2][2 * STAGES]; uint64 *full = of[threadIdx.x / kThreads], *empty = full + STAGES;"),
    *cuda_emulated.bodies({k: v for k, v in (cuda_emulated.GPU_ONLY | STEPS).items() if k not in ONLY_WIDE}),
)  # fmt: skip


class Layer(test_wide.Layer):
    """One linear layer of many rows."""

    def boxed(self, args: LinearArgs, x: torch.Tensor, w: torch.Tensor, box_rows: int) -> LargeArgs:
        boxes = test_wide.emulated_map(w, self.outputs, 32), test_wide.emulated_map(x, self.rows, box_rows)
        return LargeArgs(*boxes, args, self.factors.data_ptr())

    @cached_property
    def factors(self) -> torch.Tensor:
        found = torch.zeros(self.places)
        args = filled(RowArgs(), nodes_in=self.tensors["nodes_in"], out=found, eps=1e-5, rows=self.rows)
        sizes = (f"WIDTH={self.width}", "HEADS=1", "KV_HEADS=1", "HEAD_DIM=16", "MLP=16", "PARTS=1")
        cuda_emulated.launch(
            "rows.cu", "row_factors", args, grid=(-(-self.rows // 8), 1, 1), threads=256, defines=sizes,
        )  # fmt: skip
        return found

    def large(
        self, *, blocks: int, group: int = 1, stages: int = 3, clusters: int = 2,
        late: tuple[bool, bool] = (False, False), backwards: bool = False, apart: bool = False,
        changes: tuple[tuple[str, str], ...] = (),
    ) -> list[torch.Tensor]:  # fmt: skip
        flags = (f"LATE_{what}={str(is_late).lower()}" for what, is_late in zip(("COPIES", "STEPS"), late, strict=True))
        sizes = (f"BLOCKS={blocks}", f"GROUP={group}", f"STAGES={stages}")
        return self.by(
            "large.cu", "large", grid=clusters, threads=2 * LARGE_THREADS, changes=(*changes, *LARGE), box_rows=128,
            backwards=backwards, apart=apart, defines=(*sizes, *flags),
        )  # fmt: skip


QKV = (2 + 2) * 32
LAYERS = [
    (Layer(Kind.GATE_UP, 256, 256, 1, 300), {"blocks": 2}),
    (Layer(Kind.GATE_UP, 320, 128, 1, 140), {"blocks": 2, "clusters": 1}),
    (Layer(Kind.PLAIN, 192, 256, 2, 257), {"blocks": 2, "stages": 2}),
    (Layer(Kind.QKV, QKV, 384, 3, 128), {"blocks": 1, "stages": 4}),
    (Layer(Kind.QKV, QKV, 128, 1, 200), {"blocks": 2, "clusters": 1}),
    (Layer(Kind.RESIDUAL, 320, 256, 2, 600), {"blocks": 2, "group": 2}),
    (Layer(Kind.RESIDUAL, 64, 512, 4, 130), {"blocks": 1}),
]
NAMES = [f"{layer.kind.name} {layer.parts} parts, {layer.rows} rows" for layer, _ in LAYERS]


@pytest.mark.parametrize(
    ("late", "backwards", "apart"),
    [((False, False), False, False), ((True, False), True, True), ((True, True), False, False)],
)
@pytest.mark.parametrize(("layer", "form"), LAYERS, ids=NAMES)
def test_it_has_the_bits_of_the_kernel_of_few_rows(
    layer: Layer, form: dict[str, int], late: tuple[bool, bool], backwards: bool, apart: bool
) -> None:
    """Copies and products as early or as late as can be, threads in any order, warps beside each other or alone."""
    assert test_wide.same(layer.large(**form, late=late, backwards=backwards, apart=apart), layer.linear)


FAULTS = {
    "a stage is given back while it is read": ("wide_done<1>();", ""),
    "weights that have not arrived": ("wait_for(full + turn.stage, turn.phase);", ""),
    "a stage that is still read": ("if (again) wait_for(empty + turn.stage, turn.phase ^ 1);", ""),
    "one block's half of the weights": ("4 * rank,\n", "0,\n"),
    "rows before the kernel in front has ended": ("  meet_cluster();\n  wait_for_previous();", "  meet_cluster();"),
    "the first part alone": ("if (PARTS > 1) add_all(acc[0], acc[1]);", ""),
    "rows of the other half": ("args.factors + min(row + 8 * h, a.rows - 1)", "args.factors + min(row, a.rows - 1)"),
    "tiles in another order": ("rest % size, column = rest / size", "rest / kTiles, column = rest / size"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_control_faults_are_noticed(name: str) -> None:
    def is_right(layer: Layer, form: dict[str, int], late: tuple[bool, bool]) -> bool:
        try:
            return test_wide.same(layer.large(**form, late=late, changes=(FAULTS[name],)), layer.linear)
        except cuda_emulated.StuckError:
            return False

    found = (is_right(layer, form, late) for late in ((False, True), (True, False)) for layer, form in reversed(LAYERS))
    assert not all(found)


def test_forms_fit() -> None:
    """For matrices and rows of many sizes: rings fit, and clusters are no more than SMs or tiles."""
    for outputs in (576, 1536, 4096, 6144):
        for rows in (512, 1000, 4352):
            form = large_form(outputs, rows, 132)
            assert form.shared <= 227 * 1024 - 2048
            assert form.clusters <= 66
            assert form.clusters == 66 or form.clusters * 64 * form.blocks * 256 >= outputs * rows


OUTSIDE = """
import torch
from tests.support import cuda_emulated
from verispec.backends.cuda.arguments import filled
from verispec.backends.cuda.kernels import RowArgs
nodes, out = torch.zeros(8 * 64), torch.zeros({})
args = filled(RowArgs(), nodes_in=nodes, out=out, eps=1e-5, rows=8)
sizes = ("WIDTH=64", "HEADS=1", "KV_HEADS=1", "HEAD_DIM=16", "MLP=16", "PARTS=1")
cuda_emulated.launch("rows.cu", "row_factors", args, grid=(1, 1, 1), threads=256, defines=sizes)
"""


@pytest.mark.skipif("VERISPEC_TEST_EMULATED" not in os.environ, reason="without a sanitizer: make cuda-asan")
@pytest.mark.parametrize(("num_places", "is_noticed"), [(8, False), (4, True)])
def test_control_a_write_behind_the_end_is_noticed(num_places: int, is_noticed: bool) -> None:
    """What `make cuda-asan` says of these kernels it could have said."""
    found = subprocess.run([sys.executable, "-c", OUTSIDE.format(num_places)], capture_output=True, text=True)
    assert ("heap-buffer-overflow" in found.stderr) is is_noticed, found.stderr
    assert (found.returncode != 0) is is_noticed

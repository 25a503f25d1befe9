"""Products of 9 to 64 rows, their source run on a CPU: the bits of linear.cu, whoever is early or late."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace
from functools import cached_property

import pytest

torch = pytest.importorskip("torch")

from tests.support import cuda_emulated  # noqa: E402
from verispec.backends.cuda.arguments import filled  # noqa: E402
from verispec.backends.cuda.kernels import LinearArgs, WideArgs  # noqa: E402
from verispec.backends.cuda.product_forms import WIDE_THREADS, Kind, wide_form, wide_rows  # noqa: E402
from verispec.backends.cuda.tensor_map import TensorMap  # noqa: E402

pytestmark = pytest.mark.cuda

# Products of four warps, boxes of the copy engine, and barriers that count.
STEP = f"emulated::wide_step<LATE_STEPS>(d, a, b, adds, n, threadIdx.x % {WIDE_THREADS} / 32);"
BOX = "emulated::copy_box<LATE_COPIES>(emulated::dynamic_memory + to, &map, column, row, barrier);"
STEPS = {
    "void wide_both##n(float (*d)[4], uint64 a, uint64 b, int adds)": STEP,
    "void wide_commit()": "emulated::commit_steps();",
    "void wide_done()": "emulated::wait_for_steps(LEFT);",
    "void copy_box(unsigned to, const Map& map, int column, int row, uint64* barrier)": BOX,
    "void copy_box_once(unsigned to, const Map& map, int column, int row, uint64* barrier, uint64 policy)": BOX,
    "void start_barrier(uint64* barrier, int count)": "emulated::start_barrier(barrier, count);",
    "void arrive(uint64* barrier)": "emulated::count_at(barrier, 1, 0);",
    "void expect(uint64* barrier, int nbytes)": "emulated::count_at(barrier, 1, nbytes);",
    "void wait_for(uint64* barrier, int phase)": "return emulated::wait_for(barrier, phase);",
    "void meet_multiplying()": "emulated::meet(1 + threadIdx.x / kThreads, kMultiplying);",
    # The blocks of a cluster are parts of one, with its barriers, and each has its own quarter of the memory.
    "void meet_cluster()": "__syncthreads();",
    "float2 load_shared(unsigned address, int rank)": (
        "return *reinterpret_cast<float2*>(emulated::dynamic_memory + address % (1 << 16) + (rank << 16));"
    ),
}
LINEAR = (cuda_emulated.dynamic_memory(128), *cuda_emulated.bodies(cuda_emulated.GPU_ONLY))
WIDE = (
    ("threadIdx.x", "(threadIdx.x % kThreads)"),
    ("blockIdx.x", "(blockIdx.x * PARTS + threadIdx.x / kThreads)"), ("gridDim.x", "(gridDim.x * PARTS)"),
    cuda_emulated.dynamic_memory(1024, "auto* memory = emulated::dynamic_memory + (threadIdx.x / kThreads << 16);"),
    ("__shared__ __align__(8) uint64 full[STAGES], empty[STAGES];",
     "static uint64 of[PARTS][2 * STAGES]; uint64 *full = of[threadIdx.x / kThreads], *empty = full + STAGES;"),
    *cuda_emulated.bodies(cuda_emulated.GPU_ONLY | STEPS),
)  # fmt: skip


def emulated_map(matrix: torch.Tensor, rows: int, box_rows: int) -> TensorMap:
    """A matrix as the emulated copy engine wants it."""
    return TensorMap((matrix.data_ptr(), rows, matrix.shape[1], box_rows))


@dataclass
class Layer:
    """One linear layer, random, and what stands around it."""

    kind: Kind
    outputs: int
    columns: int
    parts: int
    rows: int
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    busy: int = 1
    tensors: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.rows + self.outputs)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        self.width = self.outputs if self.kind is Kind.RESIDUAL else self.columns
        self.places = places = max(80, self.rows + 8)
        ids = torch.randperm(places, generator=generator)[: self.rows].int()
        self.tensors = {
            "x": random(places, self.columns).bfloat16(), "w": random(self.outputs, self.columns).bfloat16(),
            "nodes_in": random(places, self.width // 16).square(), "bias": random(self.outputs),
            "cosines": random(100, self.head_dim // 2), "sines": random(100, self.head_dim // 2),
            "positions": torch.randint(100, (places,), generator=generator).int(),
            "slots": torch.arange(places).int() + 2,
            "gain": random(self.outputs), "residual": random(places, self.outputs).bfloat16(), "row_ids": ids,
        }  # fmt: skip
        self.tensors["x"].view(torch.int16)[:, 0] = 0x0D81  # a mark: only who waits for the kernel in front finds it
        self.tensors["x"][3] = float("nan")
        self.tensors["x"][5, 7] = float("inf")

    def by(
        self, source: str, name: str, *, grid: int, threads: int, box_rows: int = 0, **how: object
    ) -> list[torch.Tensor]:  # fmt: skip
        """All that the kernel writes, as bits. Who has matrices copied in boxes finds its rows side by side."""
        t, rows = self.tensors, self.rows
        wide = torch.float32 if self.kind is Kind.HEAD else torch.bfloat16
        count = {Kind.QKV: self.heads * self.head_dim, Kind.GATE_UP: self.outputs // 2}.get(self.kind, self.outputs)
        is_residual = self.kind is Kind.RESIDUAL
        written = {
            "out": t["residual"].clone() if is_residual else torch.zeros(self.places, count, dtype=wide),
            "k_store": torch.zeros(self.places + 10, self.kv_heads, self.head_dim, dtype=torch.bfloat16),
            "v_store": torch.zeros(self.places + 10, self.kv_heads, self.head_dim, dtype=torch.bfloat16),
            "not_finite": torch.zeros(self.places, dtype=torch.int32),
            "scaled": torch.zeros(self.places, self.outputs, dtype=torch.bfloat16),
            "nodes_out": torch.zeros(self.places, max(1, self.outputs // 16)),
        }  # fmt: skip
        given = {
            name: t[name] for name in ("x", "w", "nodes_in", "bias", "cosines", "sines", "positions", "slots", "gain")
        }
        if self.kind is Kind.HEAD and box_rows:
            given |= {name: t[name][t["row_ids"].long()].contiguous() for name in ("x", "nodes_in")}
        elif self.kind is Kind.HEAD:
            given["row_ids"] = t["row_ids"]
        busy = torch.tensor([self.busy], dtype=torch.int32)
        args = filled(LinearArgs(), **given, **written, eps=1e-5, rows=rows, busy=busy)
        if box_rows:
            args = self.boxed(args, given["x"], given["w"], box_rows)
        sizes = {"KIND": int(self.kind), "N": self.outputs, "K": self.columns, "PARTS": self.parts, "WIDTH": self.width}
        sizes |= {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "HEAD_DIM": self.head_dim}
        defines = (*(f"{k}={v}" for k, v in sizes.items()), *how.pop("defines", ()))
        cuda_emulated.launch(
            source, name, args, grid=(grid, how.pop("grid_y", 1), 1), threads=threads, defines=defines, **how
        )
        return [value.view(torch.int16 if value.element_size() == 2 else torch.int32) for value in written.values()]

    def boxed(self, args: LinearArgs, x: torch.Tensor, w: torch.Tensor, box_rows: int) -> ctypes.Structure:
        """Arguments of a kernel that has matrices copied."""
        boxes = emulated_map(w, self.outputs, box_rows), emulated_map(x, self.rows, wide_rows(self.rows))
        return WideArgs(*boxes, args)

    @cached_property
    def linear(self) -> list[torch.Tensor]:
        """By the kernel of few rows, eight at once."""
        is_scaled = self.kind in (Kind.QKV, Kind.GATE_UP, Kind.HEAD)
        return self.by(
            "linear.cu", "linear", grid=self.outputs // 16, threads=32 * (self.parts + is_scaled), changes=LINEAR,
            grid_y=-(-self.rows // 8), defines=("ROW_TILES=1", "TILES=1", "STAGES=4", "LATE_COPIES=false"),
        )  # fmt: skip

    def wide(
        self, *, tiles: int, stages: int, step: int = 1, blocks: int | None = None,
        late: tuple[bool, bool] = (False, False), backwards: bool = False, apart: bool = False,
        changes: tuple[tuple[str, str], ...] = (),
    ) -> list[torch.Tensor]:  # fmt: skip
        groups = -(-self.outputs // (16 * tiles))
        flags = (f"LATE_{what}={str(is_late).lower()}" for what, is_late in zip(("COPIES", "STEPS"), late, strict=True))
        sizes = (f"HALVES={1 + (self.rows > 32)}", f"TILES={tiles}", f"STEP={step}", f"STAGES={stages}")
        return self.by(
            "wide.cu", "wide", grid=blocks or groups, threads=WIDE_THREADS * self.parts, defines=(*sizes, *flags),
            changes=(*changes, *WIDE), backwards=backwards, apart=apart, box_rows=16 * tiles,
        )  # fmt: skip


QKV = (2 + 2) * 32
LAYERS = [
    (Layer(Kind.GATE_UP, 352, 256, 1, 9), {"tiles": 3, "stages": 4, "blocks": 3}),
    (Layer(Kind.GATE_UP, 64, 576, 1, 10), {"tiles": 2, "stages": 3}),
    (Layer(Kind.HEAD, 208, 192, 1, 32), {"tiles": 9, "stages": 3, "blocks": 1}),
    (Layer(Kind.PLAIN, 96, 256, 2, 33), {"tiles": 2, "stages": 3, "step": 2}),
    (Layer(Kind.QKV, QKV, 384, 3, 40), {"tiles": 4, "stages": 3}),
    (Layer(Kind.QKV, QKV, 128, 1, 17), {"tiles": 5, "stages": 3}),
    (Layer(Kind.RESIDUAL, 112, 512, 4, 64), {"tiles": 3, "stages": 3}),
    (Layer(Kind.RESIDUAL, 64, 640, 2, 12), {"tiles": 1, "stages": 6}),
]
NAMES = [f"{layer.kind.name} {layer.parts} parts, {layer.rows} rows" for layer, _ in LAYERS]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("late", "backwards", "apart"),
    [
        ((False, False), False, False),
        ((True, False), True, True),
        ((False, True), False, True),
        ((True, True), True, False),
    ],
)
@pytest.mark.parametrize(("layer", "form"), LAYERS, ids=NAMES)
def test_it_has_the_bits_of_the_kernel_of_few_rows(
    layer: Layer, form: dict[str, int], late: tuple[bool, bool], backwards: bool, apart: bool
) -> None:
    """Copies and products as early or as late as can be, threads in any order, warps beside each other or alone."""
    assert same(layer.wide(**form, late=late, backwards=backwards, apart=apart), layer.linear)


FAULTS = {
    "a stage is given back while it is read": ("wide_done<1>();", ""),
    "rows of the wrong half": ("(warp * HALVES + h) * 8 + g", "(h * 4 + warp) * 8 + g"),
    "weights that have not arrived": ("wait_for(full + turn.stage, turn.phase);", ""),
    "rows before the kernel in front has ended": (
        "    wait_for_previous();\n    for (int i = 0; i < min(STAGES",
        "    for (int i = 0; i < min(STAGES",
    ),
    "the first part alone": ("y[2 * j] = tree_of_parts<PARTS>(even)", "y[2 * j] = even[0]"),
    "sums of another tile": ("2 * (tile - group * TILES) + j)", "(tile - group * TILES) + j)"),
    "factors of other rows": ("kScaled ? factor[row_at(h)]", "kScaled ? factor[g]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_control_faults_are_noticed(name: str) -> None:
    found = (
        same(layer.wide(**form, late=late, changes=(FAULTS[name],)), layer.linear)
        for late in ((False, True), (True, False))
        for layer, form in sorted(LAYERS, key=lambda part: -part[0].parts)
    )
    assert not all(found)


@pytest.mark.parametrize(("layer", "form"), LAYERS, ids=NAMES)
def test_a_pass_without_rows_has_no_products(layer: Layer, form: dict[str, int]) -> None:
    """Nothing is written, by either kernel; the control is the same with rows."""
    idle = replace(layer, busy=0)
    before = [torch.zeros_like(part) for part in layer.linear]
    if layer.kind is Kind.RESIDUAL:
        before[0] = layer.tensors["residual"].view(torch.int16)
    assert same(idle.linear, before)
    assert same(idle.wide(**form), before)
    assert not same(layer.linear, before)


def test_forms_give_every_sm_a_block_and_fit() -> None:
    """For matrices of many sizes: as many blocks as SMs or nearly, rings that fit, and stages for the pipeline."""
    for outputs, columns, parts in (
        (6144, 4096, 2),
        (28672, 4096, 1),
        (4096, 14336, 2),
        (1536, 8960, 4),
        (128256, 4096, 1),
    ):
        for rows in (9, 32, 33, 64):
            form = wide_form((outputs, columns), parts, rows, 132)
            blocks = -(-outputs // (16 * form.tiles)) * parts
            assert form.shared <= 227 * 1024 - 2048
            assert form.stages >= 3
            assert columns // parts % (64 * form.step) == 0
            waves = -(-blocks // 132)
            assert blocks / (132 * waves) > 0.7

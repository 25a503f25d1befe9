"""The product of draft weights, its source run on a CPU: against whole numbers by numpy."""

import ctypes

import pytest

torch = pytest.importorskip("torch")

from tests.support import cuda_emulated  # noqa: E402
from verispec.backends.cuda.arguments import filled  # noqa: E402
from verispec.backends.cuda.kernels import Kind, LinearArgs, draft_form, draft_rows  # noqa: E402
from verispec.backends.cuda.quantize import Quantized, eight_bits, quantized  # noqa: E402

pytestmark = pytest.mark.cuda

# Products of whole numbers, and barriers by name.
WHOLE = {
    "void whole_mma(int* d, const unsigned* a, uint2 b)": "emulated::whole_mma(d, a, b, kWholeBits);",
    "void arrive(int barrier)": "emulated::arrive(barrier, kThreads);",
    "void meet(int barrier)": "emulated::meet(barrier, kThreads);",
}
CHANGES = (cuda_emulated.dynamic_memory(128), *cuda_emulated.bodies(cuda_emulated.GPU_ONLY | WHOLE))


def product(
    kind: Kind, w: Quantized, rows: int, args: ctypes.Structure, *, blocks: int, backwards: bool,
    sizes: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """As `Kernels` launches it, by fewer blocks than there are tiles."""
    outputs, columns = w.shape
    row_tile = draft_rows(columns, rows)
    form = draft_form(kind, w.shape, w.bits, row_tile, num_sms=1)
    defines = {"KIND": int(kind), "N": outputs, "K": columns, "BITS": w.bits, "BLOCK_ROWS": row_tile}
    defines |= {"WARPS": form.warps, "STAGES": form.stages, "STEP": form.step, "LATE": form.late}
    named = (*(f"{name}={value}" for name, value in defines.items()), *sizes, f"LATE_COPIES={str(backwards).lower()}")
    cuda_emulated.launch(
        "quantized.cu", "quantized", args, grid=(blocks, -(-rows // row_tile), 1), threads=32 * (form.warps + 1),
        defines=named, changes=CHANGES, backwards=backwards,
    )  # fmt: skip


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("bits", "rows", "columns"), [(4, 1, 192), (4, 3, 256), (8, 11, 128), (8, 1, 448), (4, 8, 1472)]
)
def test_it_is_the_product_of_rounded_rows_and_weights(bits: int, rows: int, columns: int, backwards: bool) -> None:
    generator = torch.Generator().manual_seed(bits + rows)
    w = quantized(torch.randn(112, columns, generator=generator).bfloat16(), bits)
    x = torch.randn(rows, columns, generator=generator).bfloat16()
    x[0, 64:128] = 0
    x[:, 5] *= 30
    out = torch.zeros(rows, 112, dtype=torch.bfloat16)
    args = filled(LinearArgs(), x=x, w=w, out=out, rows=rows)
    product(Kind.PLAIN, w, rows, args, blocks=2, backwards=backwards, sizes=("WIDTH=192",))
    expected = eight_bits(x).double() @ w.dense().double().T
    scale = expected.abs().amax()
    assert (out.double() - expected).abs().max() < 5e-3 * scale
    exact = x.double() @ w.dense().double().T
    assert 0 < (out.double() - exact).norm() < 2e-2 * exact.norm()


def test_a_row_that_is_no_number_leaves_the_others_alone() -> None:
    w = quantized(torch.randn(32, 128, generator=torch.Generator().manual_seed(0)).bfloat16(), 8)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).bfloat16()

    def rows(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4, 32, dtype=torch.bfloat16)
        args = filled(LinearArgs(), x=x, w=w, out=out, rows=4)
        product(Kind.PLAIN, w, 4, args, blocks=2, backwards=False, sizes=("WIDTH=128",))
        return out

    plain = rows(x)
    broken = x.clone()
    broken[1, 7], broken[2, 100] = float("nan"), float("inf")
    found = rows(broken)
    assert torch.equal(found[[0, 3]], plain[[0, 3]])
    assert not found[1:3].isfinite().any()


@pytest.mark.parametrize("columns", [64, 576, 896, 1536, 4096, 4864, 8960, 14336, 18944, 27648, 28672, 53248])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_form_fits_an_sm(columns: int, bits: int) -> None:
    for rows in range(1, 12):
        tile = draft_rows(columns, rows)
        for kind, outputs in ((Kind.QKV, columns), (Kind.QKV, 48), (Kind.RESIDUAL, 896), (Kind.HEAD, 151936)):
            form = draft_form(kind, (outputs, columns), bits, tile, num_sms=132)
            assert form.shared + form.warps * 1024 + 64 <= 227 * 1024
            assert form.stages >= 2
            assert form.warps * -(-(columns // 64) // form.warps) * 64 >= columns

"""The product of draft weights, its source run on a CPU: against the rounded rows and weights by torch."""

import ctypes

import pytest

torch = pytest.importorskip("torch")

from tests.support import cuda_emulated  # noqa: E402
from verispec.backends.cuda.arguments import filled  # noqa: E402
from verispec.backends.cuda.kernels import DRAFT_SPANS, Kernels, LinearArgs  # noqa: E402
from verispec.backends.cuda.product_forms import Kind, draft_form, draft_rows, sums_nbytes  # noqa: E402
from verispec.backends.cuda.quantize import Quantized, eight_bits, quantized  # noqa: E402
from verispec.backends.cuda.shapes import SPAN, Shapes  # noqa: E402
from verispec.backends.options import DRAFT_BITS  # noqa: E402

pytestmark = pytest.mark.cuda

KINDS = ("int4", "int8", "fp8")
# Products of whole numbers and of floats, what makes floats, and barriers by name.
OF_BYTES = {
    "void whole_mma(int* d, const unsigned* a, uint2 b)": "emulated::whole_mma(d, a, b, kWholeBits);",
    "void e4m3_mma(float* d, const unsigned* a, uint2 b)": "emulated::e4m3_mma(d, a, b);",
    "unsigned short e4m3_pair(float first, float second)": "return emulated::e4m3_pair(first, second);",
    "void arrive(int barrier)": "emulated::arrive(barrier, kMeeting);",
    "void meet(int barrier)": "emulated::meet(barrier, kMeeting);",
}
CHANGES = (cuda_emulated.dynamic_memory(128), *cuda_emulated.bodies(cuda_emulated.GPU_ONLY | OF_BYTES))


def product(
    x: torch.Tensor, w: Quantized, *, backwards: bool = False, enders: int = 1,
    changes: tuple[tuple[str, str], ...] = (),
) -> torch.Tensor:  # fmt: skip
    """As `Kernels` launches it, by fewer blocks than there are tiles. [rows, outputs] bf16"""
    (outputs, columns), rows = w.shape, len(x)
    assert not (w.words.view(torch.int16)[::8] == 0x0D81).any(), "weights look to the emulation as if written late"
    out = torch.zeros(rows, outputs, dtype=torch.bfloat16)
    args: ctypes.Structure = filled(LinearArgs(), x=x, w=w, out=out, rows=rows)
    row_tile = draft_rows(columns, rows)
    form = draft_form(Kind.PLAIN, w.shape, w.bits, row_tile, num_sms=1)._replace(enders=enders)
    defines = {"KIND": int(Kind.PLAIN), "N": outputs, "K": columns, "BITS": w.bits, "E4M3": int(w.is_float)}
    defines |= {"BLOCK_ROWS": row_tile, "WARPS": form.warps, "STAGES": form.stages, "STEP": form.step}
    defines |= {"LATE": form.late, "ENDERS": form.enders, "AMONG": form.among, "WIDTH": columns}
    named = (*(f"{name}={value}" for name, value in defines.items()), f"LATE_COPIES={str(backwards).lower()}")
    cuda_emulated.launch(
        "quantized.cu", "quantized", args, grid=(2, -(-rows // row_tile), 1), threads=32 * (form.warps + form.enders),
        defines=named, changes=(*CHANGES, *changes), backwards=backwards,
    )  # fmt: skip
    return out


def expected(x: torch.Tensor, w: Quantized) -> torch.Tensor:
    return eight_bits(x, w.kind).double() @ w.dense().double().T


def random_case(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, Quantized]:
    generator = torch.Generator().manual_seed(DRAFT_BITS[kind] + rows)
    w = quantized(torch.randn(112, columns, generator=generator).bfloat16(), kind)
    return torch.randn(rows, columns, generator=generator).bfloat16(), w


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [
        ("int4", 1, 192), ("int4", 3, 256), ("int4", 8, 1472), ("int8", 11, 128), ("int8", 1, 448),
        ("fp8", 1, 448), ("fp8", 3, 256), ("fp8", 11, 192),
    ],
)  # fmt: skip
def test_it_is_the_product_of_rounded_rows_and_weights(kind: str, rows: int, columns: int, backwards: bool) -> None:
    x, w = random_case(kind, rows, columns)
    x[0, 64:128] = 0
    x[:, 5] *= 30
    found, wanted = product(x, w, backwards=backwards).double(), expected(x, w)
    assert (found - wanted).abs().max() < 5e-3 * wanted.abs().amax()
    exact = x.double() @ w.dense().double().T
    assert 0 < (found - exact).norm() < (4e-2 if w.is_float else 2e-2) * exact.norm()


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("kind", "rows", "columns"), [("int4", 1, 256), ("int8", 3, 192), ("fp8", 8, 128)])
def test_whoever_ends_tiles_they_are_the_same(kind: str, rows: int, columns: int, backwards: bool) -> None:
    """Two warps in turns, of which one has no tile more than the other in one block, and one in the other; and more
    than there are tiles."""
    x, w = random_case(kind, rows, columns)
    alone = product(x, w, backwards=backwards)
    for enders in (2, 3, 6):
        assert torch.equal(product(x, w, backwards=backwards, enders=enders), alone)


def test_control_two_that_end_the_same_tiles_are_noticed() -> None:
    x, w = random_case("int4", 1, 256)
    fault = ("i < num_tiles; i += ENDERS", "i < num_tiles; i += 1")
    with pytest.raises(cuda_emulated.StuckError):
        product(x, w, enders=2, changes=(fault,))


def test_floats_are_those_of_torch() -> None:
    """Each output has a column of its own: rows come back as they were rounded, also what has fewer bits near 0."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(11, 64, generator=generator) * 20 - 11.2  # 448 is 2^8.8, the least that is not 0 is 2^-9
    x = (2**sizes * torch.randn(11, 64, generator=generator).sign()).bfloat16()
    x[:, 9] = 448
    found = product(x, quantized(448 * torch.eye(64, dtype=torch.bfloat16), "fp8"))
    nearest = x.float().to(torch.float8_e4m3fn).float()
    assert torch.equal(found.float(), 448 * nearest)
    assert torch.equal(eight_bits(x, "fp8"), nearest)


def test_products_of_floats_are_added_to_the_last_bit() -> None:
    """Whole numbers between 8 and 448, whose products and sums float32 has; the result is rounded once."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(80, 127, (2, 48, 64), generator=generator, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float() * torch.randn(2, 48, 64, generator=generator).sign()
    values[:, :, ::32] = 448  # so that all scales are 1
    rows, weights = values
    w = quantized(weights.bfloat16(), "fp8")
    assert torch.equal(w.dense(), weights)
    assert torch.equal(product(rows.bfloat16(), w), (rows.double() @ weights.double().T).bfloat16())


FAULTS = {
    "columns change places": ("mul(v[2], inverse), mul(v[3], inverse)", "mul(v[3], inverse), mul(v[2], inverse)"),
    "weights change places": ("w[1] = values[half].y, w[2] = values[half].z", "w[2] = values[half].y, w[1] = w[2]"),
    "the scale of whole numbers": ("1.0f) / kMost", "1.0f) / 127.0f"),
    "scales of other columns": ("__uint_as_float(both << 16)", "__uint_as_float(both & 0xffff0000)"),
    "products of whole numbers": ("if (E4M3) return e4m3_mma(sums, weights, x);", ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_products_of_floats_are_noticed(name: str) -> None:
    x, w = random_case("fp8", 3, 256)
    wanted = expected(x, w)
    found = product(x, w, changes=(FAULTS[name],)).double()
    assert not (found - wanted).abs().max() < 5e-3 * wanted.abs().amax()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_row_that_is_no_number_leaves_the_others_alone(kind: str) -> None:
    w = quantized(torch.randn(32, 128, generator=torch.Generator().manual_seed(0)).bfloat16(), kind)
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = product(x, w)
    broken = x.clone()
    broken[1, 7], broken[2, 100] = float("nan"), float("inf")
    found = product(broken, w)
    assert torch.equal(found[[0, 3]], plain[[0, 3]])
    assert not found[1:3].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_options(kind: str) -> None:
    w = quantized(torch.zeros(16, 64, dtype=torch.bfloat16), kind)
    assert w.bits == DRAFT_BITS[kind]
    assert set(KINDS) == {name for name, bits in DRAFT_BITS.items() if bits}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_every_form_fits_an_sm(rows: int, bits: int) -> None:
    for chunks in range(1, 1025):
        columns = 64 * chunks
        tile = draft_rows(columns, rows)
        for kind, outputs in (
            (Kind.QKV, columns), (Kind.QKV, 48), (Kind.RESIDUAL, 896), (Kind.GATE_UP, 2 * columns), (Kind.HEAD, 151936),
        ):  # fmt: skip
            form = draft_form(kind, (outputs, columns), bits, tile, num_sms=132)
            assert form.shared + sums_nbytes(tile, form.warps, form.enders) <= 227 * 1024
            assert form.stages >= 2
            assert form.warps * -(-chunks // form.warps) * 64 >= columns
            assert -(-chunks // form.warps) % form.step == 0
            assert form.among * 32 * (form.warps + form.enders) <= 2048


SMALL_HEADS, LARGE_HEADS = Shapes(1536, 12, 2, 128, 8960, 151936, 1e-6), Shapes(2048, 8, 4, 256, 8192, 151936, 1e-6)


@pytest.mark.parametrize(
    ("shapes", "rows", "spans", "span"),
    [
        (SMALL_HEADS, 1, 1, 64), (SMALL_HEADS, 1, 2, 64), (SMALL_HEADS, 1, 4, 128), (SMALL_HEADS, 1, 5, SPAN),
        (SMALL_HEADS, 4, 2, 64), (SMALL_HEADS, 5, 1, SPAN), (LARGE_HEADS, 1, 1, 64), (LARGE_HEADS, 4, 4, SPAN),
    ],
)  # fmt: skip
def test_blocks_share_a_context_of_drafts_where_a_cluster_has_room(
    shapes: Shapes, rows: int, spans: int, span: int
) -> None:
    """What one has not would go through memory that is made for whole spans."""
    kernels = object.__new__(Kernels)
    kernels.shapes, kernels.num_sms, kernels.draft_spans = shapes, 132, DRAFT_SPANS
    assert kernels.draft_span(rows, spans) == span
    if span < SPAN:
        assert kernels._span_form(rows, spans * SPAN // span, span).cluster == spans * SPAN // span

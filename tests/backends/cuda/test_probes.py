"""The audit and the known answers compare the implementations of a kernel with each other: faults in one are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tests.support.cuda_stand_in import StandIn, StandInKernels  # noqa: E402
from tests.support.tiny_models import TinyConfig, make_tensors  # noqa: E402
from verispec.backends.audit import Audit, ProbeOutcome, audit  # noqa: E402
from verispec.backends.cuda import answers, kernels, probes, tiny  # noqa: E402
from verispec.backends.cuda.backend import CudaBackend, CudaModel  # noqa: E402
from verispec.backends.cuda.product_forms import product_form  # noqa: E402
from verispec.backends.cuda.shapes import Shapes  # noqa: E402

pytestmark = pytest.mark.cuda

SHAPES = (1, 8, 16, 24, 64, 96)
PRODUCTS = ("q/k/v", "output", "gate/up", "down", "head")
A_LITTLE = 1 + 2**-7  # one bit of bf16
A_BIT = 1 + 2**-22  # of float32


class Kernels(StandInKernels):
    """With a fault in one implementation."""

    fault = ""

    def plain(self, x, w, *, many):
        return super().plain(x, w, many=many) * (A_LITTLE if self.fault == "library" and many else 1)

    def head(self, w, b, logits, row_ids, rows, *, many, busy=None):
        super().head(w, b, logits, row_ids, rows, many=many, busy=busy)
        logits[:rows] *= A_BIT if self.fault in ("logits", "library") and many else 1

    def attend_rows(self, k, v, inputs, b, *, first_row, rows, **how):
        super().attend_rows(k, v, inputs, b, first_row=first_row, rows=rows, **how)
        if self.fault == "long runs of rows" and rows > 16:
            b.attention[first_row : first_row + rows] *= A_LITTLE

    def attend_groups(self, k, v, inputs, b, groups, **how):
        super().attend_groups(k, v, inputs, b, groups, **how)
        for first, count in groups.tolist():
            part = b.attention[first : first + count]
            if self.fault == "groups":
                part *= A_LITTLE
            if self.fault == "the last row of a group" and count:
                part[-1] *= A_LITTLE


class Faulty(StandIn):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def kernels(self, shapes):
        kernels = Kernels(shapes)
        kernels.fault = self._fault
        return kernels


def audited(fault: str = "") -> Audit:
    config = TinyConfig(context_len=600)
    model = CudaModel(config.architecture, make_tensors(config).__getitem__)
    backend = CudaBackend([model], device=Faulty(fault), num_slots=600, num_seq_rows=2)
    return audit(backend.probes(), shapes=SHAPES)


def outcomes(found: Audit) -> dict[str, ProbeOutcome]:
    return {outcome.name: outcome for outcome in found.outcomes}


def test_every_implementation_is_named_and_all_are_one_family() -> None:
    found = audited()
    assert found.families == (SHAPES,)
    forms = {name: [tuple(form) for form in outcome.forms] for name, outcome in outcomes(found).items()}
    assert all(forms[name] == [("linear.cu", (1, 8, 16, 24, 64)), ("library", (96,))] for name in PRODUCTS)
    assert forms["attention"] == [("rows of 4 spans", SHAPES)]
    assert forms["prompt attention"] == [
        ("rows of 4 spans", (1, 8, 16)), ("a block for each span of a group", (24, 64, 96)),
    ]  # fmt: skip
    assert forms["draw"] == []
    lines = found.forms_table().splitlines()
    assert lines[0] == "q/k/v, output, gate/up, down, head  linear.cu (1-64); library (96)"
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("fault", "names", "classes"),
    [
        ("library", PRODUCTS, ((1, 8, 16, 24, 64), (96,))),
        ("logits", ("head",), ((1, 8, 16, 24, 64), (96,))),
        ("groups", ("prompt attention",), ((1, 8, 16), (24, 64, 96))),
        ("the last row of a group", ("prompt attention",), ((1, 8, 16),)),
        ("long runs of rows", ("attention",), ((1, 8, 16), (24, 64, 96))),
    ],
)
def test_a_fault_in_one_implementation_is_found(
    fault: str, names: tuple[str, ...], classes: tuple[tuple[int, ...], ...]
) -> None:
    found = audited(fault)
    assert {name for name, o in outcomes(found).items() if o.classes != (SHAPES,)} == set(names)
    assert all(outcomes(found)[name].classes == classes for name in names)
    assert SHAPES not in found.families


def test_logits_of_more_rows_than_a_pass_has_are_of_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_HEAD_ROWS", 40)
    found = outcomes(audited())["head"]
    assert found.classes == (SHAPES,)
    assert found.forms == (("linear.cu", SHAPES),)


def test_wide_and_large_products_have_names_of_their_own() -> None:
    """Of weights that do not stay in the cache; large ones are in several parts of K, with work for all SMs."""
    w, one_part = torch.empty(4096, 4096, device="meta"), torch.empty(28672, 4096, device="meta")
    few = [product_form(w, rows, many=False, num_sms=132) for rows in (8, 9, 64)]
    many = [product_form(w, rows, many=True, num_sms=132) for rows in (65, 512)]
    assert few == ["linear.cu", "wide.cu", "wide.cu"]
    assert many == ["library", "large.cu"]
    assert product_form(one_part, 4096, many=True, num_sms=132) == "library"


@pytest.mark.parametrize("name", list(tiny.ARCHITECTURES))
def test_known_answers_are_asked_of_groups(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stand-in's own digests in the place of a GPU's."""
    seen: list[str] = []
    digest: Callable[..., str] = tiny.digest
    monkeypatch.setattr(tiny, "digest", lambda values: seen.append(digest(values)) or seen[-1])
    assert len(answers.wrong_answers(StandIn(), name)) == 6, "these are not the bits of a GPU"
    monkeypatch.setattr(tiny, "GOLDENS", tmp_path / "goldens.json")
    tiny.GOLDENS.write_text(json.dumps({name: {f"{i}/logits": seen[i] for i in range(2)}}))
    assert answers.wrong_answers(StandIn(), name) == ()
    wrong = answers.wrong_answers(Faulty("groups"), name)
    assert wrong == (f"{name}, pass 0, rows in groups", f"{name}, pass 1, rows in groups")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_name_of_a_form_is_that_of_what_is_launched(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real kernels' host side, for a GPU of 132 SMs."""
    launched: list[str] = []

    class Launch:
        def __init__(self, name: str, *, two_buffers: bool = False, cluster: bool = False, **how: object) -> None:
            self._told = name, two_buffers, cluster

        def launch(self, *args: object, cluster: int = 1, **how: object) -> None:
            name, two_buffers, has_cluster = self._told
            assert has_cluster == (cluster > 1)
            span = "a cluster for each row" if has_cluster else f"a block for each span{', two buffers' * two_buffers}"
            launched.append("a block for each row" if name == "attention_whole" else span)

    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: sms)
    monkeypatch.setattr(kernels, "current_stream", lambda: 0)
    real = kernels.Kernels(Shapes(4096, 32, 8, head_dim, 14336, 128256, 1e-5))
    monkeypatch.setattr(real, "_attention_kernel", Launch)
    monkeypatch.setattr(real, "_attention_args", lambda *args: kernels.AttentionArgs())
    for spans in (1, 4, 8, 16):
        for rows in (1, 2, 4, 8, 33, 64, 4096):
            real.attend_rows(None, None, None, None, first_row=0, rows=rows, spans=spans, window=1)
            assert launched[-1] == real.rows_form(rows, spans), (rows, spans)
    assert len(set(launched)) == 4

"""The script that records a GPU's answers, on the CPU that gives the same bits: its receipts are reproduced."""

import sys
from pathlib import Path

import pytest

from bench import gpu_receipt
from tests.support.tiny_llm import loaded, write_model
from verispec.receipt import parse, replay


@pytest.mark.usefixtures("native_kernels")
def test_its_receipts_are_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = write_model(tmp_path / "tiny.gguf"), tmp_path / "receipts"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_receipt, "REQUESTS", [(t.lower().rstrip("?."), o) for t, o in gpu_receipt.REQUESTS])
    monkeypatch.setattr(sys, "argv", ["gpu_receipt", str(model), str(file), "hopper"])
    gpu_receipt.main()
    receipts = [parse(line, name="receipt") for line in file.read_bytes().splitlines()]
    assert len(receipts) == len(gpu_receipt.REQUESTS)
    with loaded(model, tmp_path, backend="hopper") as llm:
        assert all(replay(llm, receipt).reproduced for receipt in receipts)

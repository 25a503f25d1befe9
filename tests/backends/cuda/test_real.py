"""What the check of real weights on a GPU counts as a failure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tests.backends.cuda import real_check as real  # noqa: E402

pytestmark = pytest.mark.cuda
USUAL = real.Divergence(1e-3, 0.97)
EQUAL = {"1 row at a time": 0, "control: another token": 9}


def test_divergence_is_that_of_the_definition() -> None:
    wanted, got = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    shares = got[0].double().softmax(-1)
    expected = float((0.5 * (0.5 / shares).log()).sum()) / 2  # of two rows, one of them equal
    assert real.divergence(wanted, got) == (pytest.approx(expected), 1.0)
    assert real.divergence(wanted, torch.tensor([[1.0, 0.0], [0.0, 2.0]])).same == 0.5


@pytest.mark.parametrize(
    ("kl", "differing", "wrong"),
    [
        (1.0999e-3, EQUAL, ""), (0.0, EQUAL, ""), (1.2e-3, EQUAL, "mean KL"), (float("nan"), EQUAL, "mean KL"),
        (5e-4, EQUAL | {"8 rows at a time": 1}, "8 rows"), (5e-4, EQUAL | {"control: another token": 0}, "control"),
    ],
)  # fmt: skip
def test_what_is_a_failure(kl: float, differing: dict[str, int], wrong: str) -> None:
    found = real.failures(real.Divergence(kl, 0.98), USUAL, differing)
    assert len(found) == bool(wrong)
    assert all(wrong in failure for failure in found)


def test_a_text_is_cut_and_one_that_is_short_refused(tmp_path: Path) -> None:
    tokenizer, path = SimpleNamespace(encode=lambda text: list(map(ord, text))), tmp_path / "text"
    path.write_text("ab" * 3000)
    texts = real.texts_of(tokenizer, path)
    assert texts.shape == (8, 512)
    assert texts[0, :3].tolist() == [97, 98, 97]
    path.write_text("ab")
    with pytest.raises(SystemExit, match="2 tokens"):
        real.texts_of(tokenizer, path)

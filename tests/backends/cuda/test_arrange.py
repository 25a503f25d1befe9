"""Where rows stand on the device: every row once, groups that may share their K/V, padding that harms nobody."""

from __future__ import annotations

import numpy as np
import pytest

from verispec.backends.cuda import available
from verispec.backends.cuda.arrange import MAX_PLACES, MAX_ROWS, arrange
from verispec.backends.pass_builder import PassBuilder
from verispec.backends.protocol import Rows
from verispec.backends.select import check_name
from verispec.errors import InputError
from verispec.kv import DUMP_SLOT, NUM_RESERVED

ROWS_PER_GROUP = 10


def mixed(rng: np.random.Generator, num_sequences: int, most: int) -> Rows:
    """Prompts, decoding rows, chains and trees of several sequences, in a random order of sequences."""
    builder = PassBuilder()
    for seq_row in rng.permutation(num_sequences) + 1:
        start, count = int(rng.integers(0, 300)), int(rng.choice([1, 1, 2, 7, 8, 9, 33, 150]))
        if len(builder) + count + 2 > most:
            break
        slots = [NUM_RESERVED + 1000 * int(seq_row) + i for i in range(count + 2)]
        builder.add_chain(int(seq_row), start, [5] * count, slots[:count])
        if rng.random() < 0.3:
            builder.add_node(int(seq_row), start + count, 6, slots[count : count + 1])
            builder.add_node(int(seq_row), start + count + 1, 7, slots[count : count + 2])
    return builder.rows(len(builder) + int(rng.integers(0, 20)))


@pytest.mark.parametrize("seed", range(30))
def test_every_row_stands_once_and_groups_are_runs_of_one_sequence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = mixed(rng, 60, MAX_ROWS)
    found = arrange(rows, 3, ROWS_PER_GROUP)
    real = np.flatnonzero(rows.slots != DUMP_SLOT)
    places, columns = found.places[real], found.columns
    assert len(set(places.tolist())) == len(real)
    assert columns.shape[1] <= MAX_PLACES
    for i, name in enumerate(("token_ids", "positions", "slots", "seq_rows", "prefix_lens")):
        assert np.array_equal(columns[i, places], getattr(rows, name)[real])
    padding = np.setdiff1d(np.arange(columns.shape[1]), places)
    assert (columns[2, padding] == DUMP_SLOT).all()
    for place in places.tolist():
        same = columns[3] == columns[3, place]
        assert columns[5, place] == columns[1, same].min()  # what this pass writes is not ready before it
    grouped = [place for first, count in found.groups.tolist() for place in range(first, first + count)]
    assert sorted(grouped) == sorted(p for p in places.tolist() if p >= found.single)
    assert len(found.groups) <= found.num_groups
    for first, count in found.groups.tolist():
        assert 1 <= count <= ROWS_PER_GROUP
        group = columns[:, first : first + count]
        assert len(set(group[3].tolist())) == 1
        assert np.array_equal(group[1], group[1, 0] + np.arange(count))
        assert np.array_equal(group[4], group[1] + 1)  # no tails


@pytest.mark.parametrize("num_single", [1, 9, 513, 769, 1025, 2049, 3073, 4072])
def test_the_largest_pass_finds_its_places(num_single: int) -> None:
    """Whatever part of it are rows that are attended to one by one."""
    builder = PassBuilder()
    for seq_row in range(1, num_single + 1):
        builder.add_chain(seq_row, 3, [5], [NUM_RESERVED + seq_row])
    count = MAX_ROWS - num_single
    builder.add_chain(num_single + 1, 0, [5] * count, range(NUM_RESERVED + MAX_ROWS, NUM_RESERVED + MAX_ROWS + count))
    assert arrange(builder.rows(MAX_ROWS), 3, ROWS_PER_GROUP).columns.shape[1] <= MAX_PLACES


def test_without_a_driver_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    available.why_not.cache_clear()
    monkeypatch.setattr(available.ctypes, "CDLL", missing)
    with pytest.raises(InputError, match="no NVIDIA driver"):
        check_name("cuda")
    available.why_not.cache_clear()

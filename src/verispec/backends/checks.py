"""Checks of a pass at a backend's door, shared by all backends: bad arrays raise, they never corrupt memory."""

import numpy as np

from verispec.backends.protocol import FROM_DRAFT, FROM_STATE, BackendLimits, Burst, DrawWanted, Pass, Rows
from verispec.errors import InputError
from verispec.kv import NUM_RESERVED, ZERO_SLOT


def check_pass(pass_: Pass, limits: BackendLimits) -> None:
    """Raise InputError unless every index of the pass lies inside the backend's arrays."""
    rows = pass_.rows
    num_rows, total_slots = len(rows), limits.num_slots + NUM_RESERVED
    if num_rows == 0:
        raise InputError("a pass needs at least one row")
    if not 0 <= pass_.store < limits.num_stores:
        raise InputError(f"store {pass_.store} does not exist; there are {limits.num_stores}")
    max_tail = rows.tails.shape[-1]
    if max_tail > limits.max_tail:
        raise InputError(f"tails of {max_tail} slots exceed the maximum depth {limits.max_tail}")
    bounds = {
        "token_ids": (FROM_DRAFT, limits.vocab_size),
        "positions": (0, limits.context_len),
        "slots": (ZERO_SLOT + 1, total_slots),
        "seq_rows": (0, limits.num_seq_rows + 1),
        "prefix_lens": (0, limits.context_len + 1),
        "tail_lens": (0, max_tail + 1),
    }
    columns = [getattr(rows, name) for name in bounds]
    for name, array in (*zip(bounds, columns, strict=True), ("tails", rows.tails)):
        if array.shape[:1] != (num_rows,) or array.ndim != 1 + (name == "tails"):
            raise InputError(f"{name} has shape {array.shape} in a pass of {num_rows} rows")
    together = np.array(columns)
    lowest, highest = together.min(axis=1).tolist(), together.max(axis=1).tolist()
    for (name, (low, high)), least, most in zip(bounds.items(), lowest, highest, strict=True):
        _check_bounds(name, low, high, least, most)
    _check_range("tails", rows.tails, 0, total_slots)
    if (rows.prefix_lens + rows.tail_lens != rows.positions + 1).any():
        raise InputError("a row's context must hold every position up to its own")
    update = pass_.table_update
    _check_range("table_update.seq_rows", update.seq_rows, 1, limits.num_seq_rows + 1)
    _check_range("table_update.positions", update.positions, 0, limits.context_len)
    _check_range("table_update.slots", update.slots, NUM_RESERVED, total_slots)
    for part in (pass_.wanted.top_k, pass_.wanted.noisy_top_k):
        if part is not None and not 1 <= part.k <= limits.vocab_size:
            raise InputError(f"k must be from 1 to {limits.vocab_size}, not {part.k}")
    head_rows = pass_.wanted.head_rows()
    _check_range("wanted rows", head_rows, 0, num_rows)
    if pass_.head_shape < len(head_rows):
        raise InputError(f"{len(head_rows)} rows want logits, but the head's shape is {pass_.head_shape}")
    drafted = np.flatnonzero(rows.token_ids == FROM_DRAFT)
    _check_hidden(pass_, limits)
    if rows.masks is not None:
        _check_masks(pass_, rows.masks, limits)
    if pass_.burst is not None:
        _check_burst(pass_.burst, pass_.wanted.draw)
        if pass_.burst.drafts:
            _check_drafts(pass_.burst, rows, limits, drafted)
            return
    if len(drafted):
        raise InputError("rows are to be drafted by nobody")


def _check_hidden(pass_: Pass, limits: BackendLimits) -> None:
    wanted, start = pass_.wanted.hidden, pass_.start
    if wanted is None and start is None:
        return
    if not limits.hidden:
        raise InputError("this backend neither gives hidden states nor starts from them")
    shape = limits.hidden[pass_.store]
    if wanted is not None:
        _check_range("rows of hidden states", wanted.rows, 0, len(pass_.rows))
        _check_range("layers of hidden states", np.array(wanted.layers, np.int64), 0, shape.num_layers + 1)
    if start is not None:
        _check_range("rows that start from hidden states", start.rows, 0, len(pass_.rows))
        if tuple(start.states.shape) != (len(start.rows), shape.width):
            raise InputError(f"{len(start.rows)} rows start from hidden states of shape {tuple(start.states.shape)}")
        if pass_.burst is not None:
            raise InputError("a pass that starts from hidden states has no further rounds")


def _check_masks(pass_: Pass, masks: np.ndarray, limits: BackendLimits) -> None:
    if not limits.num_masks:
        raise InputError("this backend has no masks")
    if masks.shape != (len(pass_.rows),):
        raise InputError(f"masks has shape {masks.shape} in a pass of {len(pass_.rows)} rows")
    _check_range("masks", masks, 0, limits.num_masks)
    burst = pass_.burst
    if burst is None:
        return
    masked = masks[burst.rows] > 0
    if burst.draft_lens[masked].any():
        raise InputError("a row with a mask has no draft: the next mask is for the host to say")
    if burst.rounds[masked].any() and not (limits.follows and burst.follow):
        raise InputError("a row with a mask has further rounds, and nobody to say the next mask")


def _check_burst(burst: Burst, draw: DrawWanted | None) -> None:
    num_rows = len(burst.rows)
    if num_rows == 0 or len(burst.rounds) != num_rows:
        raise InputError(f"a burst has {num_rows} rows and numbers of rounds for {len(burst.rounds)}")
    if draw is None or not set(burst.rows.tolist()) <= set(draw.rows.tolist()):
        raise InputError("a burst goes on from rows that draw")
    if int(burst.rounds.min()) < 0:
        raise InputError(f"a burst of {int(burst.rounds.min())} rounds")
    if burst.shape < num_rows:
        raise InputError(f"{num_rows} rows go on, but the shape of a round is {burst.shape}")


def _check_drafts(burst: Burst, rows: Rows, limits: BackendLimits, drafted: np.ndarray) -> None:
    num_rows, sequences = len(burst.rows), np.concatenate([part.sequences for part in burst.drafts])
    _check_range("drafting sequences", sequences, 0, num_rows)
    if len(np.unique(sequences)) != len(sequences):
        raise InputError("a sequence drafts in two ways")
    for part in burst.drafts:
        if not 0 <= part.store < limits.num_stores:
            raise InputError(f"store {part.store} does not exist; there are {limits.num_stores}")
        if len(part.lengths) != len(part.sequences) or not len(part.lengths) or int(part.lengths.min()) < 1:
            raise InputError("every sequence that drafts has a length of at least 1")
        if part.tree is not None and not (limits.trees and (part.lengths == part.tree.num_nodes).all()):
            raise InputError("this backend drafts no trees, or of another number of nodes")
        if part.by_probability and not limits.by_probability:
            raise InputError("this backend judges no drafts of bursts by probabilities")
        if part.tree is not None and len(part.tree.keep) > limits.max_tail:
            raise InputError(f"a tree of {len(part.tree.keep)} levels; at most {limits.max_tail} are possible")
        if part.shape < len(part.sequences) or part.first_shape < part.first_rows * len(part.sequences):
            raise InputError(f"{len(part.sequences)} sequences draft in a shape of {part.shape} rows")
        first = burst.rows[part.sequences]
        is_early = (rows.positions[first] < part.first_rows - 1) & (rows.token_ids[first] != FROM_STATE)
        if (rows.token_ids[first] == FROM_DRAFT).any() or is_early.any():
            raise InputError("a draft needs its sequence's last tokens")
    lengths = burst.draft_lens
    sequence, i = np.nonzero(np.arange(int(lengths.max())) < lengths[:, None])
    expected = burst.rows[sequence] + 1 + i
    if not np.array_equal(np.sort(expected), drafted) or (rows.seq_rows[expected] != rows.seq_rows[expected - 1]).any():
        raise InputError("the rows to be drafted are not those behind their sequences' own")
    if burst.shape < num_rows + len(drafted):
        raise InputError(f"{num_rows + len(drafted)} rows go on, but the shape of a round is {burst.shape}")


def _check_range(name: str, values: np.ndarray, low: int, high: int) -> None:
    if values.size:
        _check_bounds(name, low, high, int(values.min()), int(values.max()))


def _check_bounds(name: str, low: int, high: int, least: int, most: int) -> None:
    if not low <= least <= most < high:
        raise InputError(f"{name} must lie in [{low}, {high}), found {least} to {most}")

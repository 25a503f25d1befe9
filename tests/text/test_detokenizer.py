import itertools
import random
import sys
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verispec.errors import InputError
from verispec.text.detokenizer import TextStream, answer_text
from verispec.types import SamplingParams


class FakeTokenizer:
    """Token i is the i-th byte string."""

    def __init__(self, tokens: Sequence[bytes], *, strips_leading_space: bool = False) -> None:
        self.tokens = tokens
        self.strips_leading_space = strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def decode(self, ids: Sequence[int]) -> str:
        data = b"".join(self.tokens[i] for i in ids)
        return (data.removeprefix(b" ") if self.strips_leading_space else data).decode("utf-8", errors="replace")


class Outcome(NamedTuple):
    text: str
    num_tokens: int
    stop: str | None


def run(tokens: Sequence[bytes], stop: tuple[str, ...] = (), *, min_tokens: int = 0, strips: bool = False) -> Outcome:
    """Pushes the tokens until one stops; checks on the way what holds for every stream."""
    stream = TextStream(FakeTokenizer(tokens, strips_leading_space=strips), stop)
    pieces: list[str] = []
    for token_id in range(len(tokens)):
        piece = stream.push(token_id, may_stop=token_id + 1 >= min_tokens)
        pieces.append(piece.text)
        assert stream.text == "".join(pieces)
        if piece.stopped:
            assert stream.matched_stop is not None
            assert stream.push(0) == ("", True)
            assert stream.finish() == ""
            assert stream.text == "".join(pieces)
            return Outcome(stream.text, token_id + 1, stream.matched_stop)
    pieces.append(stream.finish())
    assert stream.finish() == ""
    assert stream.text == "".join(pieces)
    return Outcome(stream.text, len(tokens), None)


def oracle(tokens: Sequence[bytes], stop: tuple[str, ...], *, min_tokens: int = 0) -> Outcome:
    """Brute force: the whole text after every token; the first occurrence to end in an allowed token's characters."""
    whole_before = ""
    for num_tokens in range(1, len(tokens) + 1):
        whole = visible(b"".join(tokens[:num_tokens]))
        if num_tokens >= min_tokens:
            for end in range(len(whole_before) + 1, len(whole) + 1):
                hits = [text for text in stop if whole[:end].endswith(text)]
                if hits:
                    winner = max(hits, key=len)
                    return Outcome(whole[: end - len(winner)], num_tokens, winner)
        whole_before = whole
    return Outcome(b"".join(tokens).decode("utf-8", errors="replace"), len(tokens), None)


TAILS = [b"", b"a"] + [bytes(tail) for n in (1, 2, 3) for tail in itertools.product(b"\x80\x90\xa0\xbf", repeat=n)]


def visible(data: bytes) -> str:
    """The characters that no later byte can change: what all continuations of the bytes have in common."""
    texts = [(data + tail).decode("utf-8", errors="replace") for tail in TAILS]
    pairs = zip(min(texts), max(texts), strict=False)
    return "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def cut(data: bytes, borders: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(data) + 1) for place in borders), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(places)]


BORDERS = st.lists(st.integers(0, 10**6), max_size=12)
SMALL_ALPHABET = st.text(alphabet="ab é👍", max_size=16)
STOPS = st.lists(st.text(alphabet="ab é👍", min_size=1, max_size=4), max_size=4).map(tuple)


class TestCharacters:
    @given(text=st.text(), borders=BORDERS)
    @example(text="👩‍👩‍👧", borders=[1, 2, 3, 5, 8, 9, 13])
    def test_any_split_gives_the_text_and_no_half_character(self, text: str, borders: list[int]) -> None:
        tokens = cut(text.encode(), borders)
        stream = TextStream(FakeTokenizer(tokens))
        pieces = [stream.push(token_id).text for token_id in range(len(tokens))]
        assert "".join(pieces) == text
        assert stream.finish() == ""

    @given(tokens=st.lists(st.binary(max_size=4), max_size=12))
    @example(tokens=[b"\xf0\x9f", b"a", b"\xf0\x9f\x91"])
    @example(tokens=[b"\xed", b"\xa0\x80"])
    def test_invalid_bytes_are_replaced_as_in_one_go(self, tokens: list[bytes]) -> None:
        assert run(tokens).text == b"".join(tokens).decode("utf-8", errors="replace")

    def test_control_decoding_token_by_token_is_wrong(self) -> None:
        tokens = cut("👍".encode(), [2])
        assert "".join(token.decode("utf-8", errors="replace") for token in tokens) != run(tokens).text == "👍"

    @given(text=st.text(alphabet=" aé", max_size=6), borders=BORDERS, strips=st.booleans())
    def test_leading_space_is_stripped_once(self, text: str, borders: list[int], strips: bool) -> None:
        tokens = [b"", *cut(text.encode(), borders)]
        wanted = FakeTokenizer(tokens, strips_leading_space=strips).decode(range(len(tokens)))
        assert run(tokens, strips=strips).text == wanted == (text.removeprefix(" ") if strips else text)

    @given(text=st.text(alphabet=" aé", min_size=1, max_size=6), borders=BORDERS)
    def test_an_answer_is_what_it_adds_to_the_text_of_its_prompt(self, text: str, borders: list[int]) -> None:
        """A space in front is the answer's own, unless nothing but a control token stands before it."""
        tokens = [b"", b" a", *cut(text.encode(), borders)]
        tokenizer, params = FakeTokenizer(tokens, strips_leading_space=True), SamplingParams()
        for prompt_ids in ((0,), (0, 1), (1, 0)):
            stream = answer_text(tokenizer, prompt_ids, params)  # type: ignore[arg-type]
            added = stream.push_all(range(2, len(tokens))) + stream.finish()
            assert added == (text.removeprefix(" ") if prompt_ids[-1] == 0 else text)
            if prompt_ids[-1] == 1:
                assert tokenizer.decode([*prompt_ids, *range(2, len(tokens))]) == tokenizer.decode(prompt_ids) + added
        by_itself = answer_text(tokenizer, (0, 1), SamplingParams(regex="a*"))  # type: ignore[arg-type]
        assert by_itself.push_all(range(2, len(tokens))) + by_itself.finish() == text.removeprefix(" ")


class TestStops:
    @given(text=SMALL_ALPHABET, borders=BORDERS, stop=STOPS, min_tokens=st.integers(0, 6))
    def test_equals_the_oracle(self, text: str, borders: list[int], stop: tuple[str, ...], min_tokens: int) -> None:
        tokens = cut(text.encode(), borders)
        assert run(tokens, stop, min_tokens=min_tokens) == oracle(tokens, stop, min_tokens=min_tokens)

    @given(tokens=st.lists(st.sampled_from([b"\xf0", b"\x9f", b"\x91\x8d", b"a", b"\xff", b""]), max_size=10))
    def test_equals_the_oracle_on_invalid_bytes(self, tokens: list[bytes]) -> None:
        assert run(tokens, ("👍a", "\ufffda", "aa")) == oracle(tokens, ("👍a", "\ufffda", "aa"))

    @given(text=SMALL_ALPHABET, borders=BORDERS, other=BORDERS, stop=STOPS)
    def test_the_split_does_not_matter(
        self, text: str, borders: list[int], other: list[int], stop: tuple[str, ...]
    ) -> None:
        one, two = (run(cut(text.encode(), places), stop) for places in (borders, other))
        assert (one.text, one.stop) == (two.text, two.stop)

    @pytest.mark.parametrize(
        ("text", "stop", "wanted", "matched"),
        [
            ("one STOP two", ("STOP",), "one ", "STOP"),
            ("abcd", ("bcd", "c"), "ab", "c"),  # the one that completes first, though it starts later
            ("abcd", ("cd", "bcd", "d"), "a", "bcd"),  # all complete together: the one that starts first
            ("aab", ("ab",), "a", "ab"),
            ("ababac", ("abac",), "ab", "abac"),
            ("abab", ("b", "b"), "a", "b"),
            ("x", ("x",), "", "x"),
            ("no", ("nope",), "no", None),
        ],
    )
    def test_which_stop_wins(self, text: str, stop: tuple[str, ...], wanted: str, matched: str | None) -> None:
        for tokens in ([text.encode()], [char.encode() for char in text]):
            outcome = run(tokens, stop)
            assert (outcome.text, outcome.stop) == (wanted, matched)

    def test_text_is_held_back_only_while_it_could_become_a_stop(self) -> None:
        stream = TextStream(FakeTokenizer([b"a<", b"|en", b"d>", b"|", b"<|end|>"]), ("<|end|>",))
        assert [stream.push(token_id) for token_id in range(5)] == [
            ("a", False),
            ("", False),
            ("<|end>", False),
            ("|", False),
            ("", True),
        ]

    def test_control_searching_each_token_alone_misses_a_stop(self) -> None:
        tokens = [b"S", b"TOP"]
        assert not any(b"STOP" in token for token in tokens)
        assert run(tokens, ("STOP",)).stop == "STOP"


class TestMinTokens:
    def test_a_stop_completed_too_early_is_text_for_good(self) -> None:
        tokens = [b"END", b" and", b" END"]
        assert run(tokens, ("END",), min_tokens=2) == ("END and ", 3, "END")
        assert run(tokens, ("END",), min_tokens=1) == ("", 1, "END")

    def test_the_boundary_is_exact(self) -> None:
        tokens = [b"x", b"END", b"y"]
        assert run(tokens, ("END",), min_tokens=2) == ("x", 2, "END")
        assert run(tokens, ("END",), min_tokens=3) == ("xENDy", 3, None)

    def test_an_overlapping_later_occurrence_still_counts(self) -> None:
        assert run([b"aa", b"a"], ("aa",), min_tokens=2) == ("a", 2, "aa")
        assert run([b"ab", b"ab"], ("abab", "ab"), min_tokens=2) == ("", 2, "abab")


class TestArguments:
    @pytest.mark.parametrize("stop", ["END", ("",), ("a", ""), (3,)])
    def test_bad_stops_are_refused(self, stop: tuple[str, ...]) -> None:
        with pytest.raises(InputError, match="stop"):
            TextStream(FakeTokenizer([]), stop)

    def test_push_after_finish_is_a_mistake(self) -> None:
        stream = TextStream(FakeTokenizer([b"a"]))
        stream.finish()
        with pytest.raises(RuntimeError):
            stream.push(0)


def count_calls(num_tokens: int) -> int:
    """Python-level calls and lines of the last hundred tokens, as a clock that does not jitter."""
    chooser = random.Random(7)
    tokens = [bytes(chooser.choices(b"ab", k=3)) for _ in range(num_tokens)]
    stream = TextStream(FakeTokenizer(tokens), ("a" * 40 + "c", "bab" * 10 + "c"))
    for token_id in range(num_tokens - 100):
        stream.push(token_id)
    num_events = 0

    def count(frame: object, event: str, arg: object) -> object:
        nonlocal num_events
        num_events += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        for token_id in range(num_tokens - 100, num_tokens):
            stream.push(token_id)
    finally:
        sys.settrace(before)
    return num_events


def test_cost_per_token_does_not_grow_with_the_text() -> None:
    assert count_calls(20_000) < 1.5 * count_calls(200)


@given(st.lists(st.binary(max_size=5), max_size=12), st.booleans())
@example([b" \xe2", b"\x82", b"", b"\xac \xf0\x9f", b"\xff\x98\x80", b"\xed\xa0\x80"], True)
def test_many_tokens_at_once_are_the_same_text(pieces: list[bytes], strips: bool) -> None:
    tokens = range(len(pieces))
    one_by_one, at_once = (TextStream(FakeTokenizer(pieces, strips_leading_space=strips)) for _ in range(2))
    expected = "".join(one_by_one.push(token_id).text for token_id in tokens)
    assert at_once.push_all(tokens) == expected
    assert at_once.finish() == one_by_one.finish()
    assert at_once.text == one_by_one.text


def test_many_tokens_at_once_look_for_no_stop_strings() -> None:
    stream = TextStream(FakeTokenizer([b"ab"]), ("b",))
    with pytest.raises(RuntimeError, match="stop strings"):
        stream.push_all([0])

import json
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from tests.support.golden_tokenizers import GOLDENS, KINDS, SMALL, SMALL_KINDS, STRINGS, small_metadata
from verispec.errors import InputError, ModelFileError, UnsupportedModelError
from verispec.model.folder_tokenizer import tokenizer_from_folder
from verispec.model.gguf_file import open_gguf
from verispec.model.gguf_tokenizer import tokenizer_from_gguf
from verispec.model.tokenizer import Tokenizer, byte_level_bytes

# Any text, with what tokenizers find hard made likely.
TEXTS = st.lists(st.one_of(st.text(), st.sampled_from(STRINGS)), max_size=6).map("".join)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    with open_gguf(smollm2_path) as file:
        return tokenizer_from_gguf(file.metadata)


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue("smollm2") if request.param == "smollm" else SMALL[request.param]


def without_special(tokenizer: Tokenizer, text: str) -> bool:
    """Whether no special token is written in the text, so that decoding gives all of it back."""
    return not any(special in text for special in tokenizer.special_texts.values())


class TestGoldens:
    @pytest.mark.parametrize(("tokenizer", "kind"), [(kind, kind) for kind in KINDS], indirect=["tokenizer"])
    def test_ids_equal_the_reference(self, tokenizer: Tokenizer, kind: str) -> None:
        golden = json.loads((GOLDENS / f"{kind}.json").read_text())
        wrong = [
            (text, found, wanted)
            for text, wanted in zip(STRINGS, golden["ids"], strict=True)
            if (found := tokenizer.encode(text)) != wanted
        ]
        assert wrong == []

    def test_there_are_enough_strings_and_the_only_known_difference_is_normalisation(self) -> None:
        assert len(STRINGS) >= 200
        for kind in KINDS:
            differences = json.loads((GOLDENS / f"{kind}.json").read_text())["differences"]
            assert {entry["why"] for entry in differences.values()} <= {"llama.cpp does not normalise to NFC"}
            assert all(not unicodedata.is_normalized("NFC", STRINGS[int(index)]) for index in differences)

    @pytest.mark.parametrize("kind", ["gpt-2", "qwen2", "llama-bpe"])
    @pytest.mark.parametrize("other", ["gpt-2", "qwen2", "llama-bpe", "smollm"])
    def test_control_a_wrong_pre_tokenizer_is_noticed(self, kind: str, other: str) -> None:
        golden = json.loads((GOLDENS / f"{kind}.json").read_text())
        swapped = tokenizer_from_gguf(small_metadata(kind) | {"tokenizer.ggml.pre": other})
        same = [swapped.encode(text, add_special=False) for text in STRINGS] == [
            ids[SMALL[kind].add_bos :] for ids in golden["ids"]
        ]
        assert same == (kind == other)


def _alphabet() -> dict[str, int]:
    """GPT-2's, as its authors spell it: the character that stands for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


ALPHABET = _alphabet()


def bytes_of(piece: str) -> bytes:
    """A byte-level token, character by character."""
    return bytes(ALPHABET[c] for c in piece) if all(c in ALPHABET for c in piece) else piece.encode()


class TestAllPiecesAtOnce:
    @given(pieces=st.lists(st.text(st.characters(max_codepoint=0x150) | st.characters(exclude_categories=["Cs"]))))
    @example(pieces=["", "Ġa", "", "\u0143", "\u0144", "a b", "\x00", "\U0010ffff", ""])
    def test_byte_level_pieces_equal_those_taken_one_by_one(self, pieces: list[str]) -> None:
        assert byte_level_bytes(pieces) == [bytes_of(piece) for piece in pieces]

    @pytest.mark.parametrize(("tokenizer", "kind"), [(kind, kind) for kind in KINDS], indirect=["tokenizer"])
    def test_the_table_of_every_kind(self, tokenizer: Tokenizer, kind: str) -> None:
        """Ordinary tokens one by one; the library tells how each is written."""
        added = tokenizer.backend.get_added_tokens_decoder()
        ordinary = [i for i in range(tokenizer.vocab_size) if i not in added and tokenizer.backend.id_to_token(i)]
        assert len(ordinary) > 200
        for token_id in ordinary:
            piece = tokenizer.backend.id_to_token(token_id)
            byte = bytes.fromhex(piece[3:5]) if kind == "sentencepiece" and piece.startswith("<0x") else None
            wanted = byte or (piece.replace("▁", " ").encode() if kind == "sentencepiece" else bytes_of(piece))
            assert tokenizer.token_bytes(token_id) == wanted, piece


class TestRoundTrip:
    @pytest.mark.parametrize("kind", SMALL_KINDS)
    @given(text=TEXTS)
    @example(text="e\u0301")
    @example(text="  two spaces")
    def test_decode_of_encode_is_the_text(self, kind: str, text: str) -> None:
        check_round_trip(SMALL[kind], text, normal_form=kind == "qwen2")

    @pytest.mark.parametrize("kind", SMALL_KINDS)
    @given(texts=st.lists(TEXTS, max_size=5))
    def test_many_texts_at_once_are_encoded_like_each_alone(self, kind: str, texts: list[str]) -> None:
        assert SMALL[kind].encode_all(texts) == [SMALL[kind].encode(text) for text in texts]

    def test_of_many_texts_one_that_cannot_be_encoded_is_refused_like_alone(self) -> None:
        with pytest.raises(InputError, match="lone surrogate"):
            SMALL[SMALL_KINDS[0]].encode_all(["fine", "\ud800"])

    @given(text=TEXTS)
    @example(text="\x04\U00040000")
    def test_decode_of_encode_is_the_text_for_smollm2(self, smollm2: Tokenizer, text: str) -> None:
        """Its vocabulary lacks 21 of the 256 bytes; the model cannot see them, here as in llama.cpp."""
        if without_special(smollm2, text):
            known = {smollm2.token_bytes(token_id) for token_id in range(smollm2.vocab_size)}
            seen = bytes(byte for byte in text.encode() if bytes([byte]) in known)
            assert smollm2.decode(smollm2.encode(text)) == seen.decode("utf-8", errors="replace")

    def test_control_without_the_normal_form_qwen2_is_not_a_round_trip(self) -> None:
        assert SMALL["qwen2"].decode(SMALL["qwen2"].encode("e\u0301")) != "e\u0301"

    @pytest.mark.parametrize(
        ("tokenizer", "num_missing"), [*((kind, 0) for kind in SMALL_KINDS), ("smollm", 21)], indirect=["tokenizer"]
    )
    def test_bytes_without_a_token(self, tokenizer: Tokenizer, num_missing: int) -> None:
        known = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
        assert len({bytes([byte]) for byte in range(256)} - known) == num_missing

    @pytest.mark.parametrize("kind", SMALL_KINDS)
    @given(text=TEXTS)
    def test_bytes_agree_with_the_library_decoder(self, kind: str, text: str) -> None:
        ids = SMALL[kind].encode(text)
        backend = tokenizers.Tokenizer.from_str(SMALL[kind].backend.to_str())
        if kind == "sentencepiece":
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            backend.decoder = decoders.Sequence(steps)
        assert SMALL[kind].decode(ids) == backend.decode(ids, skip_special_tokens=True)


def check_round_trip(tokenizer: Tokenizer, text: str, *, normal_form: bool) -> None:
    if not without_special(tokenizer, text):
        return
    # The meta symbol is SentencePiece's space; added tokens stay outside the normaliser.
    if tokenizer.strips_leading_space and ("▁" in text or "<think>" in text):
        return
    wanted = "<think>".join(map(normalised, text.split("<think>"))) if normal_form else text
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == wanted
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert data == ((" " if tokenizer.strips_leading_space and text else "") + wanted).encode()


def normalised(text: str) -> str:
    """NFC by the library: its Unicode tables and Python's differ on characters newer than one of them."""
    return normalizers.NFC().normalize_str(text)


class TestSmolLM2:
    def test_named_ids(self, smollm2: Tokenizer) -> None:
        assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_ids, smollm2.add_bos) == (49152, 1, (2,), False)
        assert smollm2.special_ids == frozenset(range(17))
        assert smollm2.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        assert smollm2.chat_template is not None
        assert "add_generation_prompt" in smollm2.chat_template

    def test_special_tokens_in_the_text_are_special_and_silent(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>")
        assert (ids[0], ids[-1]) == (1, 2)
        assert smollm2.decode(ids) == "user\nHi"
        assert smollm2.token_bytes(2) == b""
        assert smollm2.token_text(2) == "<|im_end|>"

    def test_building_is_quick_and_needs_no_transformers(self, smollm2_path: Path) -> None:
        with open_gguf(smollm2_path) as file:
            start = time.process_time()
            tokenizer_from_gguf(file.metadata)
            assert time.process_time() - start < 0.5
        code = "import verispec.model.gguf_tokenizer, sys; print('transformers' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


class TestTokens:
    def test_half_characters_are_exact_bytes_and_readable(self) -> None:
        tokenizer = SMALL["gpt-2"]
        token_id = tokenizer.backend.get_vocab()["ð"]
        assert tokenizer.token_bytes(token_id) == b"\xf0"
        assert tokenizer.token_text(token_id) == "\\xf0"

    def test_sentencepiece_bytes_and_leading_space(self) -> None:
        tokenizer = SMALL["sentencepiece"]
        assert tokenizer.token_bytes(tokenizer.backend.get_vocab()["<0x0A>"]) == b"\n"
        assert tokenizer.encode("") == [tokenizer.bos_id]
        assert tokenizer.token_bytes(tokenizer.encode("The")[1]).startswith(b" ")

    @pytest.mark.parametrize("kind", SMALL_KINDS)
    def test_token_types(self, kind: str) -> None:
        tokenizer = SMALL[kind]
        user_id, unused_id = tokenizer.vocab_size - 2, tokenizer.vocab_size - 1
        assert tokenizer.encode("a<think>", add_special=False)[-1] == user_id
        assert tokenizer.token_bytes(user_id) == b"<think>"
        assert user_id not in tokenizer.special_ids
        assert unused_id not in tokenizer.encode("[PAD0]")
        assert tokenizer.token_bytes(unused_id) == b""

    def test_ids_past_the_vocabulary_are_silent_and_negative_ones_refused(self) -> None:
        assert SMALL["gpt-2"].token_bytes(10**6) == b""
        with pytest.raises(InputError, match="-1"):
            SMALL["gpt-2"].token_bytes(-1)

    @pytest.mark.parametrize("text", ["\ud800", b"bytes", None])
    def test_what_is_not_text_is_refused(self, text: Any) -> None:
        with pytest.raises(InputError):
            SMALL["gpt-2"].encode(text)


def change(**entries: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda metadata: metadata | {f"tokenizer.ggml.{key}": value for key, value in entries.items()}


def drop(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda metadata: {key: value for key, value in metadata.items() if key != f"tokenizer.ggml.{name}"}


class TestMetadata:
    def test_every_end_token_counts_once(self) -> None:
        edit = change(eot_token_id=0, eom_token_id=2, eos_token_ids=[2, 5], bos_token_id=2**32 - 1)
        tokenizer = tokenizer_from_gguf(edit(small_metadata("gpt-2")))
        assert tokenizer.eos_ids == (2, 5, 0)
        assert tokenizer.bos_id is None

    def test_the_end_of_a_turn_is_an_end_where_it_is_a_control_token(self) -> None:
        metadata = small_metadata("gpt-2")
        pieces = [*metadata["tokenizer.ggml.tokens"], "<end_of_turn>"]
        types = [1] * (len(pieces) - 1)
        for kind, ends in ((3, (0, len(pieces) - 1)), (1, (0,))):
            edit = change(tokens=pieces, token_type=[*types, kind], eos_token_id=0)
            assert tokenizer_from_gguf(edit(metadata)).eos_ids == ends

    def test_bos_by_kind_and_by_flag(self) -> None:
        assert [SMALL[kind].add_bos for kind in SMALL_KINDS] == [False, False, True, True]
        assert tokenizer_from_gguf(change(add_bos_token=True)(small_metadata("gpt-2"))).encode("") == [0]
        assert SMALL["llama-bpe"].encode("", add_special=False) == []

    def test_without_space_prefix(self) -> None:
        tokenizer = tokenizer_from_gguf(change(add_space_prefix=False)(small_metadata("sentencepiece")))
        assert not tokenizer.strips_leading_space
        assert tokenizer.decode(tokenizer.encode(" The")) == " The"
        assert tokenizer.token_bytes(tokenizer.encode("The")[1]).startswith(b"T")

    @pytest.mark.parametrize(
        ("edit", "named"),
        [
            (change(model="bert"), "gpt2, llama"),
            (change(pre="default"), "gpt-2, llama-bpe, qwen2, smollm"),
            (change(pre="deepseek-llm"), "deepseek-llm"),
            (drop("pre"), "tokenizer.ggml.pre"),
        ],
    )
    def test_unsupported_is_refused_by_name(self, edit: Callable[[dict[str, Any]], dict[str, Any]], named: str) -> None:
        with pytest.raises(UnsupportedModelError, match=named):
            tokenizer_from_gguf(edit(small_metadata("gpt-2")))

    @pytest.mark.parametrize(
        ("kind", "edit", "named"),
        [
            ("gpt-2", drop("model"), "model is missing"),
            ("gpt-2", change(model=7), "model must be a string"),
            ("gpt-2", drop("tokens"), "tokens is missing"),
            ("gpt-2", change(tokens="abc"), "tokens is not an array"),
            ("gpt-2", change(tokens=5), "tokens is not an array"),
            ("gpt-2", change(tokens=["a", 1]), r"tokens\[1\]"),
            ("gpt-2", change(tokens=["a", "b", "a"]), "ids 0 and 2"),
            ("gpt-2", change(token_type=[1]), "1 entries"),
            ("gpt-2", lambda m: change(token_type=[9] * len(m["tokenizer.ggml.tokens"]))(m), "from 1 to 6"),
            ("gpt-2", drop("merges"), "merges is missing"),
            ("gpt-2", change(merges=["ab"]), r"merges\[0\]"),
            ("gpt-2", change(merges=[" a"]), r"merges\[0\]"),
            ("gpt-2", change(merges=["a zzz"]), r"merges\[0\]"),
            ("gpt-2", change(merges=[None]), r"merges\[0\]"),
            ("gpt-2", change(merges=["a b c"]), r"merges\[0\]"),
            ("gpt-2", change(tokens=["a", "b", "ab", ""], token_type=[1] * 4, merges=["a b", "a "]), r"merges\[1\]"),
            ("gpt-2", change(eos_token_id=10**6), "outside the vocabulary"),
            ("gpt-2", change(eos_token_id="2"), "not a token id"),
            ("gpt-2", change(eos_token_ids=3), "not an array"),
            ("gpt-2", change(add_bos_token=1), "must be true or false"),
            ("llama-bpe", drop("bos_token_id"), "names none"),
            ("gpt-2", lambda m: m | {"tokenizer.chat_template": 3}, "chat_template must be a string"),
            ("sentencepiece", drop("scores"), "scores is missing"),
            ("sentencepiece", change(scores=[0.0]), "1 entries"),
            ("sentencepiece", change(scores=["x"]), "not a number"),
            ("sentencepiece", lambda m: change(scores=[float("nan")] * len(m["tokenizer.ggml.tokens"]))(m), "NaN"),
            (
                "sentencepiece",
                lambda m: change(token_type=[6] * len(m["tokenizer.ggml.tokens"]))(m),
                "marked as a byte",
            ),
        ],
    )
    def test_malformed_is_a_file_error(
        self, kind: str, edit: Callable[[dict[str, Any]], dict[str, Any]], named: str
    ) -> None:
        with pytest.raises(ModelFileError, match=named):
            tokenizer_from_gguf(edit(small_metadata(kind)))


def write_folder(folder: Path, **configs: Any) -> None:
    """A Hugging Face folder around the small vocabulary: `config` for config.json, and so on."""
    backend = tokenizers.Tokenizer.from_str(SMALL["gpt-2"].backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    for name, value in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


class TestFolder:
    def test_equals_the_gguf_tokenizer(self, tmp_path: Path) -> None:
        write_folder(tmp_path)
        tokenizer = tokenizer_from_folder(tmp_path)
        assert [tokenizer.encode(text) for text in STRINGS] == [SMALL["gpt-2"].encode(text) for text in STRINGS]
        used = {token_id for text in STRINGS for token_id in tokenizer.encode(text)}
        assert all(tokenizer.token_bytes(i) == SMALL["gpt-2"].token_bytes(i) for i in used)
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (None, (), False)

    def test_end_tokens_of_all_files(self, tmp_path: Path) -> None:
        eos = {"content": "<|im_end|>"}
        configs: dict[str, Any] = {"generation_config": {"eos_token_id": [0, 2]}, "config": {"eos_token_id": 1}}
        write_folder(tmp_path, tokenizer_config={"eos_token": eos, "bos_token": "<|endoftext|>"}, **configs)
        tokenizer = tokenizer_from_folder(tmp_path)
        assert (tokenizer.eos_ids, tokenizer.bos_id) == ((0, 2, 1), 0)
        assert tokenizer.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}

    @pytest.mark.parametrize(("flag", "wanted"), [(None, True), (True, True), (False, False)])
    def test_bos_from_the_post_processor_unless_the_config_says(
        self, tmp_path: Path, flag: bool | None, wanted: bool
    ) -> None:
        config = {"bos_token": "<|endoftext|>"} | ({} if flag is None else {"add_bos_token": flag})
        write_folder(tmp_path, tokenizer_config=config)
        backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        backend.save(str(tmp_path / "tokenizer.json"))
        assert tokenizer_from_folder(tmp_path).add_bos is wanted

    def test_chat_templates(self, tmp_path: Path) -> None:
        named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
        for value, wanted in (("T", "T"), (named, "D"), (named[:1], None)):
            write_folder(tmp_path, tokenizer_config={"chat_template": value})
            assert tokenizer_from_folder(tmp_path).chat_template == wanted
        (tmp_path / "chat_template.jinja").write_text("J")
        assert tokenizer_from_folder(tmp_path).chat_template == "J"

    def test_sentencepiece(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer.from_str(SMALL["sentencepiece"].backend.to_str())
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = tokenizer_from_folder(tmp_path)
        assert tokenizer.strips_leading_space
        used = {token_id for text in STRINGS for token_id in tokenizer.encode(text)}
        assert all(tokenizer.token_bytes(i) == SMALL["sentencepiece"].token_bytes(i) for i in used)

    def test_holes_in_the_ids(self, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 5}, merges=[]))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        backend.add_special_tokens([AddedToken("b")])
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = tokenizer_from_folder(tmp_path)
        assert [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)] == [b"a", b"", b"", b"", b"", b""]

    @pytest.mark.parametrize(
        ("name", "content", "named"),
        [
            ("tokenizer.json", "", "is blank"),
            ("tokenizer.json", "[]", "must be an object"),
            ("tokenizer.json", "[" * 100000, "nested too deeply"),
            ("tokenizer.json", '{"a": 1, "a": 2}', "the key 'a' twice"),
            ("tokenizer.json", '{"decoder": {"type": "ByteLevel"}}', "not a tokenizer"),
            ("tokenizer.json", b"\xff", "cannot be read"),
            ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id"),
            ("generation_config.json", '{"eos_token_id": [100000]}', "outside the vocabulary"),
            ("tokenizer_config.json", '{"eos_token": "nope"}', "not in the vocabulary"),
            ("tokenizer_config.json", '{"eos_token": 7}', "not in the vocabulary"),
            ("tokenizer_config.json", '{"add_bos_token": 1, "bos_token": null}', "add_bos_token"),
            ("tokenizer_config.json", '{"chat_template": 1}', "chat_template"),
        ],
    )
    def test_malformed_is_a_file_error(self, tmp_path: Path, name: str, content: str | bytes, named: str) -> None:
        write_folder(tmp_path)
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ModelFileError, match=named):
            tokenizer_from_folder(tmp_path)

    def test_missing_and_unsupported(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
            tokenizer_from_folder(tmp_path)
        backend = tokenizers.Tokenizer(models.BPE())
        backend.decoder = decoders.WordPiece()
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UnsupportedModelError, match="WordPiece"):
            tokenizer_from_folder(tmp_path)

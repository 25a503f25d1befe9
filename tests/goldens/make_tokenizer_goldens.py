"""Makes the token ids that tests/model/test_tokenizer.py compares with, from references that are not verispec.

Needs an environment of its own with `xllamacpp` (llama.cpp), `sentencepiece`, `tokenizers` and `gguf`, and imports
nothing of verispec:

    python tests/goldens/make_tokenizer_goldens.py <SmolLM2-135M-Instruct GGUF>

Trains a small vocabulary per pre-tokenizer once (kept in `<kind>.vocab.json.gz`, in the form of GGUF metadata), writes
each as a tiny GGUF model and asks llama.cpp for the ids of every string. Where Hugging Face differs on purpose, the
ids wanted are those of the published Hugging Face pipeline, and the golden file names the difference.
"""

import argparse
import gzip
import io
import json
import tempfile
import unicodedata
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import tokenizers
import xllamacpp
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

FOLDER = Path(__file__).parent / "tokenizers"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<think>"
UNUSED = "[PAD0]"
NUM_TOKENS = 1000

SENTENCES = """\
The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's used to it by now.
She said: "We'll see what they've done, I'm sure you'd agree." Nobody replied for 45 minutes.
In 1969, 3 people flew 384400 km to the Moon; 2 of them walked on it for 2.5 hours.
Reading, writing, speaking and understanding are four different things to learn in a new language.
A token is a piece of text that a model reads or writes in one step; the pieces are found by counting.
Der schnelle braune Fuchs springt über den faulen Hund. Größe, Übermut, Straße, Äpfel und Öl.
Le cœur a ses raisons que la raison ne connaît point. Où êtes-vous allés, garçon ? À Noël, déjà.
El niño comió piñas y mañana volverá. ¿Qué pasó? ¡Nada! Corazón, acción, información.
Широкая электрификация южных губерний даст мощный толчок подъёму сельского хозяйства.
Η ταχεία καφετιά αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.
敏捷的棕色狐狸跳过了懒狗。今天天气很好，我们去公园散步吧。你好，世界！
いろはにほへと ちりぬるを。日本語のテキストを分割するのは難しいです。カタカナもあります。
다람쥐 헌 쳇바퀴에 타고파. 한국어 문장을 나누어 봅시다. 안녕하세요 세계.
نص عربي قصير للتجربة، مرحبا بالعالم. שלום עולם, זה טקסט בעברית.
नमस्ते दुनिया, यह एक छोटा वाक्य है। สวัสดีชาวโลก นี่คือข้อความ
def main(argv: list[str]) -> int:\n    for i in range(10):\n        print(f"{i:>3} {argv[i]}")\n    return 0
#include <stdio.h>\nint main(void) {\n\tprintf("Hello, world\\n");\n\treturn 0;\n}
SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name ORDER BY 2 DESC;
if (a && b || !c) { x += y * z - w / v % u; } else { throw new Error("no such thing"); }
<div class="note"><p>Some &amp; other things</p></div> https://example.org/a/b?c=d&e=f#g
Emoji: 😀 😃 👍 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 ❤️ 🇩🇪 and arrows → ⇒ ≤ ≥ ≠ ∞ ∑ √.
"""


def strings() -> list[str]:
    """What to tokenize: one entry per thing that has ever been split wrongly."""
    texts = ["", *SENTENCES.splitlines()]
    for run in ("a", " ", "\n", "\t", "=", "-", "1", "ab", " a", "\r\n", "é", "你", "👍", " \n", "\n ", "<", "'s", "▁"):
        texts += [run, run * 2, run * 3, run * 7, run * 33, f"x{run * 3}", f"{run * 3}x"]
    texts += [f"{sign}{number}" for sign in ("", " ", "-", "$") for number in ("0", "12", "123", "1234", "3.14", "1e9")]
    texts += ["1 000 000", "1,234,567.89", "2024-02-29T12:34:56Z", "0xDEADBEEF", "v1.2.3-rc4", "10%", "½ ¼ ¾", "x² y³"]
    texts += ["٣٤٥", "१२३४", "Ⅷ Ⅻ", "①②③", "１２３４", "𝟘𝟙𝟚", "㊿", "10⁻³"]
    texts += [
        f"it{quote}{tail}" for quote in "'’" for tail in ("s", "S", "t", "re", "RE", "ve", "m", "ll", "LL", "d", "x")
    ]
    texts += ["'s", " 's", "''s", "'ſ", "don'T", "O'Reilly", "rock 'n' roll", "'tis", "s' end"]
    texts += [
        "e\u0301",
        "é",
        "A\u030a",
        "\u212b",
        "ﬁ",
        "ﬁne ofﬁce",
        "o\u0302\u0323",
        "가",
        "\u1100\u1161",
        "\u1100\u1161\u11a8",
        "\u0344",
        "क्षि",
        "ก็",
    ]
    texts += ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "❤️", "🇩🇪🇫🇷", "👨🏿‍🚀 go", "1️⃣2️⃣", "a\u200db", "\ufe0f", "\u200b", "\u2060x"]
    texts += [
        "你好世界",
        "你好 世界",
        "你好，world！",
        "日本語テキスト",
        "한국어 텍스트",
        "漢字かな交じり文",
        "𠮷野家",
        "「引用」",
    ]
    texts += [
        "Привет, мир!",
        "Γειά σου Κόσμε",
        "مرحبا بالعالم",
        "שלום עולם",
        "नमस्ते",
        "สวัสดี",
        "Zażółć gęślą jaźń",
        "İstanbul ıI",
    ]
    texts += [
        "a b",
        "a  b",
        "a   b",
        " a",
        "  a",
        "a ",
        "a  ",
        "a \n b",
        "a\n\nb",
        "a \n\n  b",
        "\n a",
        "a\tb",
        "\t\ta",
    ]
    texts += [
        "a\u00a0b",
        "a\u3000b",
        "a\u2003 b",
        "a\u2028b",
        "a\u0085b",
        "a\x0bb\x0cc",
        "a\u1680b",
        "a\u180eb",
        "\ufeffa",
    ]
    texts += ["\x00", "a\x00b", "\x01\x02", "\x7f", "\x1b[0m", "\ufffd", "\uffff", "\U0010ffff", "\ue000", "\U000e0041"]
    texts += [
        "foo_bar",
        "fooBarBaz",
        "FOO_BAR",
        "foo.bar()",
        "a->b",
        "x += 1;",
        "!!!",
        "?!",
        "...",
        "…",
        "--",
        "—",
        "«»",
    ]
    texts += [
        "def f(x):\n    return x",
        "\tif (x) {\n\t\ty();\n\t}",
        "a;\n\n\n\nb;",
        "# c\r\n\r\n",
        '{\n  "k": [1, 2]\n}',
        "\\n\\t",
    ]
    texts += [
        "$x^2 + \\frac{1}{2}$",
        "a@b.org",
        "C:\\dir\\file",
        "`code`",
        "**bold**",
        "[link](http://x.y)",
        "<!-- -->",
        "~/.config",
    ]
    for token in [*SPECIAL, USER_DEFINED, UNUSED, "<s>", "</s>", "<unk>", "<0x41>"]:
        texts += [token, f"a{token}b", f" {token} ", f"{token}{token}", token[:-1], f"\n{token}\n"]
    texts += [
        "<|im_start|>user\nHi there!<|im_end|>\n<|im_start|>assistant\n",
        "<think>\nhm\n</think>\n\nYes.",
        "<<|im_end|>>",
    ]
    return list(dict.fromkeys(texts))


WORDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*" + WORDS


def hugging_face(kind: str, model: models.Model) -> tokenizers.Tokenizer:
    """The pipeline in the published tokenizer.json of the model family behind each name."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt-2", "smollm"))
    split = {
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "qwen2": [pre_tokenizers.Split(Regex(SPLIT.replace("DIGITS", "")), "isolated")],
        "llama-bpe": [pre_tokenizers.Split(Regex(SPLIT.replace("DIGITS", "{1,3}")), "isolated")],
    }
    result = tokenizers.Tokenizer(model)
    if kind == "sentencepiece":
        result.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        return result
    result.pre_tokenizer = pre_tokenizers.Sequence([*split[kind], byte_level])
    result.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        result.normalizer = normalizers.NFC()
    return result


def from_metadata(kind: str, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """Hugging Face's tokenizer with the same vocabulary; SentencePiece has its own reference and none here."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    result = hugging_face(kind, models.BPE(ids, merges, ignore_merges=kind == "llama-bpe"))
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, i in ids.items() if types[i] == gguf.TokenType.CONTROL]
    user = [token for token, i in ids.items() if types[i] == gguf.TokenType.USER_DEFINED]
    result.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    result.add_tokens([AddedToken(token, normalized=False) for token in user])
    return result


def train_byte_level(kind: str) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    trained = hugging_face(kind, models.BPE())
    trained.train_from_iterator([*SENTENCES.splitlines() * 3, *strings()], trainer)
    model = json.loads(trained.to_str())["model"]
    normal = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = [*SPECIAL, *normal, USER_DEFINED, UNUSED]
    types = [3] * len(SPECIAL) + [1] * len(normal) + [4, 5]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def train_sentencepiece() -> dict[str, Any]:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            [*SENTENCES.splitlines() * 3, *(text for text in strings() if text.isprintable() and text)]
        ),
        model_writer=out,
        model_type="bpe",
        vocab_size=NUM_TOKENS,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        character_coverage=0.995,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(model.vocab_size())
    kinds = [6 if model.is_byte(i) else 2 if model.is_unknown(i) else 3 if model.is_control(i) else 1 for i in ids]
    (FOLDER / "sentencepiece.model.gz").write_bytes(gzip.compress(out.getvalue(), mtime=0))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*map(model.id_to_piece, ids), USER_DEFINED, UNUSED],
        "tokenizer.ggml.token_type": [*kinds, 4, 5],
        "tokenizer.ggml.scores": [*map(model.get_score, ids), 0.0, -1e4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write_model(path: Path, metadata: dict[str, Any]) -> None:
    """A one-layer Llama around the vocabulary: llama.cpp's server wants a model that it could run."""
    width, rows = 32, len(metadata["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        add = (
            writer.add_array
            if isinstance(value, list)
            else writer.add_string
            if isinstance(value, str)
            else writer.add_uint32
        )
        add(key, value)
    square = np.zeros((width, width), np.float32)
    weights = {"token_embd": np.zeros((rows, width), np.float32), "output_norm": np.ones(width, np.float32)}
    weights |= {f"blk.0.{name}_norm": np.ones(width, np.float32) for name in ("attn", "ffn")}
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    weights |= {f"blk.0.{name}": square for name in names}
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_ids(path: Path, texts: Iterable[str]) -> Iterator[list[int]]:
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_ctx, params.n_parallel = str(path), 0, 64, 1
    params.cpuparams.n_threads, params.warmup, params.verbosity = 1, False, -1
    server = xllamacpp.Server(params)
    for text in texts:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            yield json.load(answer)["tokens"]


def write_golden(kind: str, path: Path, reference: tokenizers.Tokenizer | None, prefix: list[int]) -> None:
    """Ids by llama.cpp; where Hugging Face's pipeline says otherwise, its ids, with llama.cpp's beside them."""
    ids, differences = [], {}
    for index, (text, found) in enumerate(zip(texts := strings(), llama_cpp_ids(path, strings()), strict=True)):
        wanted = found if reference is None else prefix + reference.encode(text, add_special_tokens=False).ids
        ids.append(wanted)
        if wanted != found:
            differences[str(index)] = {"why": reason(kind, text), "llama_cpp": found}
    print(kind, len(texts), "strings,", len(differences), "differences")
    for index, entry in differences.items():
        print("  ", entry["why"], ascii(texts[int(index)]), ids[int(index)], entry["llama_cpp"])
    golden = {"reference": f"llama.cpp, by xllamacpp {xllamacpp.__version__}", "ids": ids, "differences": differences}
    dump(FOLDER / f"{kind}.json", golden)
    if kind == "sentencepiece":
        check_sentencepiece(ids)


def check_sentencepiece(ids: list[list[int]]) -> None:
    """A second witness: the sentencepiece library, which knows nothing of tokens written in the text."""
    proto = gzip.decompress((FOLDER / "sentencepiece.model.gz").read_bytes())
    model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    plain = [(text, wanted) for text, wanted in zip(strings(), ids, strict=True) if "<" not in text]
    different = [text for text, wanted in plain if [model.bos_id(), *model.encode(text)] != wanted]
    print("sentencepiece library:", len(plain), "strings,", len(different), "differences")
    if different:
        raise SystemExit(f"the sentencepiece library differs on {different!a}")


def reason(kind: str, text: str) -> str:
    """Why llama.cpp and Hugging Face differ on `text`; an unknown reason stops the script."""
    if kind == "qwen2" and not unicodedata.is_normalized("NFC", text):
        return "llama.cpp does not normalise to NFC"
    raise SystemExit(f"{kind}: unexplained difference on {text!a}")


def dump(path: Path, value: dict[str, Any]) -> None:
    """JSON with one line per entry of a list or object, so that diffs can be read."""
    text = json.dumps(value, ensure_ascii=True, indent=None, separators=(",", ":"))
    path.write_text(text.replace("],[", "],\n[").replace('","', '",\n"') + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("smollm2", type=Path)
    smollm2 = parser.parse_args().smollm2
    dump(FOLDER / "strings.json", {"strings": strings()})
    metadata = {name: field.contents() for name, field in gguf.GGUFReader(smollm2).fields.items()}
    write_golden("smollm", smollm2, from_metadata("smollm", metadata), [])
    for kind in ("gpt-2", "qwen2", "llama-bpe", "sentencepiece"):
        vocab = FOLDER / f"{kind}.vocab.json.gz"
        if not vocab.exists():
            trained = train_sentencepiece() if kind == "sentencepiece" else train_byte_level(kind)
            vocab.write_bytes(gzip.compress(json.dumps(trained).encode(), mtime=0))
        metadata = json.loads(gzip.decompress(vocab.read_bytes()))
        with tempfile.TemporaryDirectory() as folder:
            write_model(path := Path(folder) / "vocab.gguf", metadata)
            reference = None if kind == "sentencepiece" else from_metadata(kind, metadata)
            write_golden(kind, path, reference, [0] if kind == "llama-bpe" else [])


if __name__ == "__main__":
    main()

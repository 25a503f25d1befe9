"""`generate --prompts`: a file of prompts as one batch. A line alone equals the line in the file."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, press_ctrl_c
from verispec.batch.prompts import OBJECT_KEYS
from verispec.cli.progress import CountDisplay, LoadingDisplay
from verispec.cli.prompt_file import OrderedPrinter
from verispec.engine import Engine, Request
from verispec.llm import LLM
from verispec.strict_json import MAX_OBJECT_NBYTES

SAMPLED = ["--temperature", "1.2", "--max-tokens", "6"]


def jsonl(path: Path, *objects: Any) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return str(path)


def test_a_line_alone_equals_the_line_in_the_file(cli: Cli, tmp_path: Path) -> None:
    prompts = ["Name a river.", "Name a mountain.", "Count to three."]
    alone = [cli("generate", prompt, "--json", "--seed", "7", *SAMPLED).json()["digest"] for prompt in prompts]
    by_option = jsonl(tmp_path / "a.jsonl", *({"prompt": prompt} for prompt in prompts))
    by_line = jsonl(tmp_path / "b.jsonl", *({"prompt": prompt, "seed": 7} for prompt in reversed(prompts)))
    together = cli("generate", "--prompts", by_option, "--seed", "7", *SAMPLED).json_lines()
    own_seeds = cli("generate", "--prompts", by_line, "--seed", "8", "--drafter", "none", *SAMPLED).json_lines()
    other = cli("generate", "--prompts", by_option, "--seed", "8", *SAMPLED).json_lines()
    assert [line["digest"] for line in together] == alone
    assert [line["digest"] for line in reversed(own_seeds)] == alone
    assert not {line["digest"] for line in other} & set(alone)
    assert [line["index"] for line in together] == [0, 1, 2]


def test_a_line_may_predict_its_answer(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters get it, it changes no token and does not go through; what is neither text nor ids is a bad line."""
    predicted, add = [], Engine.add

    def recorded(self: Engine, request: Request, **options: Any) -> int:
        predicted.append(list(request.prediction_ids))
        return add(self, request, **options)

    monkeypatch.setattr(Engine, "add", recorded)
    asked = {"prompt": "Name a river.", "max_tokens": 16}
    answer = cli("generate", "--prompts", jsonl(tmp_path / "a.jsonl", asked), "--stats").json_lines()[0]
    ids = answer["token_ids"]
    lines = [{**asked, "seed": 0, "prediction": each} for each in (answer["text"], ids, [answer["text"], ids[:4]])]
    file = jsonl(tmp_path / "b.jsonl", *lines, {**asked, "prediction": 3}, {**asked, "predictions": "x"})
    *good, bad, slip = cli("generate", "--prompts", file, "--stats").json_lines()
    assert [line["digest"] for line in good] == [answer["digest"]] * 3
    assert all("prediction" not in line for line in good)
    assert predicted == [[], ids, ids, [ids, ids[:4]]]
    assert bad["error"] == "the line['prediction'] must be text or token ids, a list of these, or a Draft, not int"
    assert slip["error"] == "unknown key 'predictions'; did you mean prediction?"


def test_two_runs_are_the_same_bytes(cli: Cli, tmp_path: Path) -> None:
    """Without a seed line i has seed i, and nothing in a line depends on time, cache or drafter."""
    file = jsonl(tmp_path / "a.jsonl", *[{"prompt": "Name a river.", "id": "r"}] * 3, {"prompt": "hi", "seed": None})
    first = cli("generate", "--prompts", file, *SAMPLED)
    assert first.out == cli("generate", "--prompts", file, *SAMPLED, "--json", "--drafter", "none").out
    lines = first.json_lines()
    assert [line["seed"] for line in lines] == [0, 1, 2, 3]
    assert len({line["digest"] for line in lines}) == 4
    assert set(lines[0]) == {"id", "index", "text", "token_ids", "logprobs", "finish_reason", "seed", "digest",
                             "prompt_tokens", "profile"}  # fmt: skip
    timed = cli("generate", "--prompts", file, *SAMPLED, "--stats").json_lines()
    assert all(line["stats"].keys() >= {"tokens_per_second", "cached_tokens", "drafter"} for line in timed)
    assert [{key: line[key] for key in line if key != "stats"} for line in timed] == lines


def test_other_keys_go_through(cli: Cli, tmp_path: Path) -> None:
    extra = {"id": "q-17", "answer": ["Paris", 5], "meta": {"source": None}, "question_id": 3, "label": "x"}
    file = jsonl(tmp_path / "a.jsonl", {**extra, "prompt": "hi", "max_tokens": 2}, {**extra, "prompt": ""})
    done = cli("generate", "--prompts", file)
    good, bad = done.json_lines()
    assert done.code == 2
    assert {key: good[key] for key in extra} == {key: bad[key] for key in extra} == extra
    assert (good["index"], bad["index"], bad["error"]) == (0, 1, "prompt must be text that is not empty")
    assert good["text"]


def test_the_forms_of_a_prompt(cli: Cli, smollm2: LLM, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    terse = [{"role": "system", "content": "Be terse."}, *messages]
    forms = [{"prompt": "hi"}, {"messages": messages}, {"token_ids": smollm2.chat_ids(messages)}, {"messages": terse}]
    file = jsonl(tmp_path / "a.jsonl", *forms)
    plain = [line["digest"] for line in cli("generate", "--prompts", file, "--max-tokens", "3").json_lines()]
    assert plain[0] == plain[1] == plain[2] != plain[3]
    system = cli("generate", "--prompts", file, "--max-tokens", "3", "--system", "Be terse.").json_lines()
    assert [line["digest"] for line in system] == [plain[3], plain[3], plain[2], plain[3]]
    raw = cli("generate", "--prompts", file, "--max-tokens", "3", "--raw")
    assert raw.code == 2
    assert ["error" in line for line in raw.json_lines()] == [False, True, False, True]


BAD_LINES = [
    (b"", "the line is blank"),
    (b"  \r", "the line is blank"),
    (b"{", "the line is not JSON: Expecting property name enclosed in double quotes at byte 1"),
    (b'{"prompt": "h\xc3\xa9", }', "at byte 18"),
    (b'{"prompt": "\xff"}', "byte 12 (0xff) is not UTF-8"),
    (b"[1]", "must be an object"),
    (b"null", "must be an object"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"prompt": ' + b"9" * 5000 + b"}", "too many digits"),
    (b'{"prompt": "x", "prompt": "y"}', "the key 'prompt' twice"),
    (b'{"prompt": "x", "temperature": NaN}', "NaN"),
    (b'{"prompt": "x", "temperature": -1}', "temperature must be in [0, 100]"),
    (b'{"prompt": "x", "top_p": 2}', "top_p must be in (0, 1], not 2"),
    (b'{"prompt": "x", "max_tokens": 0}', "max_tokens must be from 1"),
    (b'{"prompt": "x", "max_tokens": "5"}', "max_tokens must be a whole number"),
    (b'{"prompt": "x", "stop": 5}', "stop must be"),
    (b'{"prompt": "x", "stop": "\\ud800"}', "stop holds half"),
    (b'{"prompt": "x", "regex": "\\ud800"}', "regex: holds half"),
    (b'{"prompt": "x", "stop": null}', "stop must be"),
    (b'{"prompt": "x", "stop_ids": 5}', "stop_ids must be"),
    (b'{"prompt": "x", "logit_bias": [1]}', "logit_bias must"),
    (b'{"prompt": "x", "logit_bias": {"x": 1}}', "logit_bias must"),
    (b'{"prompt": "x", "logit_bias": {"99999999": 1}}', "logit_bias names token 99999999"),
    (b'{"prompt": "x", "top-p": 1}', "unknown key 'top-p'; did you mean top_p?"),
    (b'{"prompt": "x", "max_new_tokens": 1}', "unknown key 'max_new_tokens'; did you mean max_tokens?"),
    (b'{"prompt": "x", "Temperature": 1}', "unknown key 'Temperature'; did you mean temperature?"),
    (b'{"prompt": "x", "text": "y"}', "the key 'text' is one of the output's own"),
    (b'{"prompt": ""}', "prompt must be text"),
    (b'{"prompt": 5}', "must be text"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"seed": 1}', "exactly one of prompt, token_ids, messages; it has none"),
    (b'{"prompt": "x", "token_ids": [1]}', "it has prompt, token_ids"),
    (b'{"token_ids": [1.5]}', "must be a token id"),
    (b'{"token_ids": [-1]}', "token id -1"),
    (b'{"token_ids": [true]}', "must be a token id"),
    (b'{"token_ids": []}', "empty"),
    (b'{"token_ids": 5}', "must be a list"),
    (b'{"messages": []}', "messages must be a non-empty list"),
    (b'{"messages": [5]}', "messages[0]"),
    (b'{"messages": [{"role": "user"}]}', "messages[0].content"),
    (b'{"prompt": "' + b"x" * MAX_OBJECT_NBYTES + b'"}', "the limit is"),
]


def test_a_bad_line_is_an_error_object_in_its_place(cli: Cli, tmp_path: Path) -> None:
    good = b'{"prompt": "hi", "max_tokens": 1, "stop": "x", "stop_ids": [5], "logit_bias": {"7": 1}}'
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([good, *(line for line, _ in BAD_LINES), good]) + b"\r\n\n\n")
    done = cli("generate", "--prompts", str(file))
    assert done.code == 2
    assert done.err == f"verispec: --prompts {file}: 41 of 43 lines failed; line 2: the line is blank\n"
    first, *bad, last = done.json_lines()
    assert first["text"]
    assert first["digest"] == last["digest"]
    for index, (found, (line, words)) in enumerate(zip(bad, BAD_LINES, strict=True), start=1):
        assert set(found) & OBJECT_KEYS == {"index", "error"}, line[:50]
        assert found["index"] == index
        assert words in found["error"], line[:50]


def test_files_that_cannot_be_used(bare_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sentence(file: str, stdin: bytes = b"") -> str:
        done = bare_cli("generate", "--prompts", file, stdin=stdin)
        assert (done.code, done.out) == (2, "")
        return done.err.removeprefix(f"verispec: --prompts {file}: ")

    (tmp_path / "blank.jsonl").write_bytes(b"\n \r\n")
    (tmp_path / "utf16.jsonl").write_text('{"prompt": "x"}', encoding="utf-16")
    assert sentence(str(tmp_path)) == "Is a directory\n"
    assert sentence(str(tmp_path / "none.jsonl")) == "No such file or directory\n"
    assert sentence(str(tmp_path / "blank.jsonl")) == "the file is empty\n"
    assert "UTF-16" in sentence(str(tmp_path / "utf16.jsonl"))
    assert sentence("-") == "the file is empty\n"

    def refuse(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert sentence("secret.jsonl") == "Permission denied\n"


def test_ctrl_c_prints_what_is_finished(cli: Cli, smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(engine: Engine) -> Any:
        nonlocal steps
        steps += 1
        if steps == 6:
            press_ctrl_c()
        return real_step(engine)

    steps, real_step = 0, Engine.step
    lines = [{"prompt": "Count to 90.", "max_tokens": 40}, {"prompt": "hi", "max_tokens": 1}, {"prompt": ""}]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    monkeypatch.setattr(Engine, "step", step)
    done = cli("generate", "--prompts", "-", stdin=stdin)
    assert done.code == 130
    assert [line["index"] for line in done.json_lines()] == [1, 2]
    assert done.err == "--prompts -: interrupted; 2 of 3 lines are finished\n"
    smollm2.engine.check()
    assert not smollm2.engine.has_work
    monkeypatch.undo()


def test_objects_come_in_order_as_soon_as_they_can() -> None:
    seen: list[int] = []
    printer = OrderedPrinter(lambda result: seen.append(result["index"]))
    printer.put(2, {})
    assert seen == []
    printer.put(0, {})
    assert seen == [0]
    printer.put(1, {})
    assert seen == [0, 1, 2]
    printer.put(5, {})
    printer.flush()
    assert seen == [0, 1, 2, 5]


def test_the_bar_shows_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with CountDisplay("generating", 40) as display:
        for _ in range(20):
            now += 0.01
            display.advance()
    assert "20/40 100.0/s 0:00:00 left" in shown.getvalue()
    shown.truncate(0)
    with CountDisplay("generating", 10**9, num_before=10**8) as display:
        assert "/s" not in shown.getvalue()
        now += 0.01
        display.advance()
    assert "100000001/1000000000 100.0/s" in shown.getvalue()  # what was there before is no speed


def test_elsewhere_a_slow_stage_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with LoadingDisplay() as display:
        for stage in ("loading", "auditing attention", "auditing mlp", "timing passes"):
            for i in range(50):
                now += 0.001 if stage == "loading" else 1.0
                display.update(stage, i / 50)
    assert capsys.readouterr().err == "auditing ...\ntiming ...\n"


def test_a_bar_on_the_terminal_and_the_lines_in_the_file(
    terminal: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stdout is redirected while stderr is a terminal."""
    file = jsonl(tmp_path / "a.jsonl", {"prompt": "hi"}, {"prompt": "Say yes."})
    inner = f"exec {sys.executable} -m verispec generate --prompts {file} --max-tokens 4 > {tmp_path}/out.jsonl"
    shown = terminal(command=["bash", "-c", inner]).rest()
    assert "generating" in shown
    assert "2/2" in shown or "1/2" in shown or "0/2" in shown
    assert "digest" not in shown
    assert [json.loads(line)["index"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [0, 1]

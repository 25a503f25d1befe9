"""The page in a real browser: an answer that can be seen to be drafted, replayed and checked; nothing from elsewhere.

With --shots=FOLDER the pictures that are taken are kept there, to be looked at. With --need-browser a browser that is
missing is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_load import wait_for
from tests.support.page import ANSWERS, CHROMIUM, Pass, Talk, made_up_stream, talking
from tests.support.served import Served, serving
from verispec.llm import LLM
from verispec.server.app import PAGE
from verispec.spec.drafter import Curve
from verispec.spec.suffix import SuffixDrafter

pytestmark = pytest.mark.slow

MAX_NBYTES = 60_000
REPEAT = "Repeat this: " + "one two three " * 6
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {
    "on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}}}  # fmt: skip
DRAFTERS = ("suffix", "lookup", "grammar", "decode", "skip", "model")
COLOURS = """() => {
  const {width, height} = document.getElementById("strip");
  const data = document.getElementById("strip").getContext("2d").getImageData(0, 0, width, height).data;
  const found = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) found.add(data.slice(i, i + 3).join());
  return found.size;
}"""

IN_SIGHT = "e => e.getBoundingClientRect().bottom <= document.getElementById('talk').getBoundingClientRect().bottom"


def test_the_page_is_small_and_refers_to_nothing_outside(served: Served) -> None:
    assert sum(map(len, PAGE.values())) < MAX_NBYTES
    answer = served.client.get("/")
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    for name, data in PAGE.items():
        text = data.decode()
        assert "//cdn" not in text
        assert "https://" not in text
        assert "innerHTML" not in text
        assert served.client.get(f"/static/{name}").content == data
    assert b'style="' not in PAGE["index.html"]
    assert b"onclick" not in PAGE["index.html"]


@pytest.fixture(scope="module")
def browser(pytestconfig: pytest.Config) -> Iterator[Any]:
    if not pytestconfig.getoption("--need-browser"):
        for name in ("playwright", "axe_playwright_python"):
            pytest.importorskip(name, reason=f"{name} is not installed: make test-page installs it")
        if CHROMIUM is None:
            pytest.skip("there is no Chromium on this machine")
    assert CHROMIUM, "there is no Chromium on this machine"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def talk(browser: Any, served: Served) -> Iterator[Talk]:
    with talking(browser, served.url) as talk:
        yield talk


@pytest.fixture
def eager_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of four from drafter suffix, whatever they are worth on this machine."""
    curve = Curve.chain(4, 0.9, is_forced=True)
    monkeypatch.setattr(SuffixDrafter, "curves", lambda self, key: (curve,))


@pytest.fixture
def shots(tmp_path: Path, pytestconfig: pytest.Config) -> Path:
    folder = Path(pytestconfig.getoption("--shots") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def show_stream(talk: Talk, passes: list[Pass], **more: Any) -> Any:
    """An answer that never was."""
    body = made_up_stream(passes, **more)
    talk.page.route(ANSWERS, lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    return talk.ask("hello")


def changed(talk: Talk, **fields: Any) -> None:
    """Requests for answers have these fields."""

    def go(route: Any) -> None:
        route.continue_(post_data=json.dumps({**json.loads(route.request.post_data), **fields}))

    talk.page.route(ANSWERS, go)


def slow_down(talk: Talk) -> None:
    """Let a stream come at some 30 tokens a second."""
    session = talk.page.context.new_cdp_session(talk.page)
    session.send("Network.enable")
    limits = {"offline": False, "latency": 0, "downloadThroughput": 20_000, "uploadThroughput": -1}
    session.send("Network.emulateNetworkConditions", limits)


@pytest.mark.usefixtures("eager_suffix")
def test_drafts_of_a_repetitive_text_can_be_seen(talk: Talk, shots: Path) -> None:
    chain = {"method": "suffix", "num_speculative_tokens": 4}
    changed(talk, ignore_eos=True, verispec={"trace": True, "receipt": True, "speculative": chain})
    talk.set(max_tokens=100, temperature=0.3)
    for seed in (1, 2, 3):
        talk.set(seed=seed)
        answer = talk.ask(f"{REPEAT} <b>{seed}</b>")
        assert talk.page.locator(".turn.user .said").last.inner_text() == f"{REPEAT} <b>{seed}</b>"  # never HTML
        assert answer.locator(".proof .good", has_text="✓").count() == 1  # the page's digest is the server's
        assert re.search(
            r"tokens per pass; \d+ of \d+ drafted tokens accepted;.*; (about [\d.]+×|speed-up)", _why(answer)
        )
        assert not answer.locator(".token").count()  # text, until tokens are asked for
        talk.press("Tokens")
        assert answer.locator(".token").count() > 50  # bytes of one character are one
    talk.page.screenshot(path=shots / "page.png")
    assert talk.page.locator(".drafted.by-suffix").count() > 3
    assert talk.page.locator("del.rejected").count() > 0
    assert talk.page.locator(".rejected + .token.drafted, .rejected + .token.own, .rejected + .rejected").count() > 0
    assert talk.page.locator(".draft .node small", has_text="target").count() > 0  # the last draft stays
    assert re.match(r"The last draft, by suffix: \d+ of \d+", talk.last.locator(".draft summary").inner_text())
    assert talk.page.evaluate(COLOURS) == 3
    talk.press("Tokens")
    assert not talk.last.locator(".token").count()


def _why(answer: Any) -> str:
    return answer.locator(".why").inner_text()


def test_an_answer_is_put_to_the_test(talk: Talk, tmp_path: Path, shots: Path) -> None:
    talk.set(max_tokens=60, temperature=0)
    answer = talk.ask(REPEAT)
    talk.press("Replay")
    answer.locator(".verdict.good", has_text="✓ reproduced: 60 tokens").wait_for()
    talk.press("Check")
    answer.locator(".verdict.good", has_text="✓ one digest: drafter none").wait_for()
    talk.press("Compare")
    answer.locator(".verdict.good", has_text="✓ the same digest").wait_for()
    assert talk.page.locator(".verdict").evaluate(IN_SIGHT)
    measured = r".*; [\d.]+× as fast as none, measured: [\d.]+ against [\d.]+ tokens/s"
    assert re.fullmatch(measured, _why(answer))  # in place of the estimate
    assert "about" not in _why(answer)
    talk.page.screenshot(path=shots / "tested.png")
    with talk.page.expect_download() as started:
        talk.press("Receipt")
    receipt = tmp_path / "receipt.json"
    started.value.save_as(receipt)
    ids = json.loads(receipt.read_text())["output"]["token_ids"]
    edited = json.loads(receipt.read_text())
    edited["output"]["token_ids"][1] = (ids[1] + 1) % 250
    dropped = (("good", receipt.read_text(), "✓ reproduced"), ("bad", json.dumps(edited), "✗ position"))
    for name, content, said in dropped:
        files = talk.page.evaluate_handle(
            "([name, text]) => { const d = new DataTransfer(); d.items.add(new File([text], name)); return d; }",
            [name, content],
        )
        talk.page.dispatch_event("body", "drop", {"dataTransfer": files})
        talk.page.locator(f"#said.{name}", has_text=f"{name}: {said}").wait_for()
    talk.page.set_input_files("#file", receipt)
    talk.page.locator("#said.good", has_text="receipt.json: ✓ reproduced").wait_for()


def test_the_digest_grows_with_the_text(talk: Talk) -> None:
    talk.page.evaluate("""() => {
      window.seen = [];
      new MutationObserver(() => {
        const line = document.querySelector(".growing");
        if (line?.textContent && line.textContent !== window.seen.at(-1)) window.seen.push(line.textContent);
      }).observe(document.getElementById("talk"), {childList: true, subtree: true});
    }""")
    slow_down(talk)
    talk.set(max_tokens=90, temperature=1, seed=5)
    answer = talk.ask("hello")
    seen = talk.page.evaluate("window.seen")
    assert len(seen) > 5
    assert len({line.split()[1] for line in seen}) == len(seen)  # another one each time
    assert answer.locator(".proof code").inner_text() == seen[-1].split()[1]
    assert seen[-1].endswith("seed 5")


def test_a_digest_that_is_not_of_the_stream_is_found_out(talk: Talk) -> None:
    passes = [Pass(["one "]), Pass(["two ", "three"])]
    answer = show_stream(talk, passes)
    assert answer.locator(".proof .good", has_text="✓").count() == 1
    talk.page.unroute(ANSWERS)
    answer = show_stream(talk, passes, digest="0" * 64)
    assert answer.locator(".proof .bad", has_text="✗").count() == 1


def test_the_speed_up_is_told_or_that_it_is_not_known(talk: Talk) -> None:
    plain, drafted = Pass(["a "]), Pass(["b ", "c ", "d "], ("suffix", ["b ", "c ", "e "], [-1, 0, 1], [0, 1]), ms=15)
    answer = show_stream(talk, [*[plain] * 6, *[drafted] * 5])
    # 20 tokens in 5 x 10 + 5 x 15 ms; at 10 ms each they had taken 200.
    assert (
        _why(answer)
        == "2 tokens per pass; 10.0 tokens/s; about 1.60× as fast as none, going by its 5 passes without a draft"
    )
    talk.page.unroute(ANSWERS)
    assert "speed-up not known: hardly a pass" in _why(show_stream(talk, [plain, drafted, drafted]))
    talk.page.unroute(ANSWERS)
    talk.set(drafter="none", max_tokens=8)
    assert re.match("nothing was drafted: .{10}.*; as fast as none$", _why(talk.ask("hello")))


def test_each_drafter_has_a_colour_and_rejected_tokens_their_place(talk: Talk, shots: Path) -> None:
    passes = [Pass([f"{name} ", "own "], (name, [f"{name} "], [-1], [0])) for name in DRAFTERS]
    tree = ("model", ["x ", "a ", "y ", "b ", "z1 ", "z2 "], [-1, -1, 1, 1, 3, 4], [1, 3])
    answer = show_stream(talk, [*passes, Pass(["a ", "b ", "c "], tree), Pass(["end"])])
    talk.press("Tokens")
    colour = "e => getComputedStyle(e).backgroundColor"
    tints = {name: answer.locator(f".by-{name}").first.evaluate(colour) for name in DRAFTERS}
    assert len({*tints.values(), answer.locator(".own").first.evaluate(colour)}) == 1 + len(DRAFTERS)
    for name, tint in tints.items():
        assert talk.page.locator(f".legend .by-{name}").evaluate(colour) == tint
    shown = answer.locator(".said > *").evaluate_all("all => all.map((e) => [e.localName, e.textContent])")
    assert [each for each in shown if each[0] == "del" or each[1] in "a b c "][-6:] == [
        ["del", "x "], ["span", "a "], ["del", "y "], ["span", "b "], ["del", "z1 z2 "], ["span", "c "],
    ]  # fmt: skip
    assert answer.locator(".draft .node.accepted code").all_inner_texts() == ["a ", "b "]
    assert answer.locator(".draft .node").first.inner_text().split("\n")[-2:] == ["draft 0.75", "target 0.50"]
    talk.page.screenshot(path=shots / "drafters.png")


def test_tokens_tell_their_alternatives_to_pointer_and_keyboard(talk: Talk) -> None:
    answer = show_stream(talk, [Pass(["one ", "two "], ("suffix", ["one "], [-1], [0])), Pass(["three"])])
    talk.press("Tokens")
    tip = talk.page.locator("#tip")
    answer.locator(".token").nth(1).hover()
    assert tip.inner_text().split("\n")[0] == "the model's own"
    talk.page.mouse.move(0, 0)
    tip.wait_for(state="hidden")
    answer.locator('.token[tabindex="0"]').focus()
    assert "drafted by suffix" in tip.inner_text()
    assert '▸ 0.905  "one "' in tip.inner_text()
    assert '"else"' in tip.inner_text()
    talk.page.keyboard.press("ArrowRight")
    talk.page.keyboard.press("ArrowRight")
    assert '"three"' in tip.inner_text()
    assert answer.locator('.token[tabindex="0"]').all_inner_texts() == ["three"]
    talk.page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_the_tip_stays_with_a_focused_token_that_scrolls(talk: Talk) -> None:
    answer = show_stream(talk, [Pass([f"line {i}\n"]) for i in range(60)])
    talk.press("Tokens")
    answer.locator(".token").first.hover()
    answer.locator('.token[tabindex="0"]').focus()
    talk.page.keyboard.press("End")
    tip = talk.page.locator("#tip", has_text="line 59")
    tip.wait_for()

    def distance() -> float:
        token, box = answer.locator(".token").last.bounding_box(), tip.bounding_box()
        assert token is not None
        assert box is not None
        return min(abs(token["y"] - box["y"] - box["height"]), abs(box["y"] - token["y"] - token["height"]))

    wait_for(lambda: distance() < 30)  # once it has heard of the scrolling


MARKDOWN = """# Title

Some **bold**, *slanted* and `code`, a [name](javascript:alert(1)) and <img src=x onerror=alert(1)>.

1. first
2. second
   - inner

- one
- two

```python
if a < b:
    print("<b>")
```
The end."""


def test_an_answer_that_has_ended_is_written_as_markdown(talk: Talk, shots: Path) -> None:
    said = show_stream(talk, [Pass([MARKDOWN[:50]]), Pass([MARKDOWN[50:]])]).locator(".said")
    assert said.locator("h2").inner_text() == "Title"
    assert (said.locator("strong").inner_text(), said.locator("em").inner_text()) == ("bold", "slanted")
    assert said.locator("ol > li").count() == 2
    assert said.locator("ol ul > li").all_inner_texts() == ["inner"]
    assert said.locator(":scope > ul > li").all_inner_texts() == ["one", "two"]
    assert said.locator("a, img, b").count() == 0
    assert "name (javascript:alert(1)" in said.locator("p").first.inner_text()
    said.get_by_role("button", name="Copy code").click()
    said.get_by_role("button", name="Copied").wait_for()
    assert talk.page.evaluate("navigator.clipboard.readText()") == 'if a < b:\n    print("<b>")'
    # As on plain http on another host:
    talk.page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    talk.press("Copy")
    talk.page.screenshot(path=shots / "markdown.png")
    talk.page.reload()
    assert talk.page.evaluate("navigator.clipboard.readText()") == MARKDOWN


def test_stop_by_button_and_by_escape(talk: Talk) -> None:
    talk.set(max_tokens=900, temperature=1, drafter="none")
    changed(talk, ignore_eos=True)
    slow_down(talk)
    for stop in (lambda: talk.page.click("#stop"), lambda: talk.page.keyboard.press("Escape")):
        talk.page.fill("#text", "hello")
        talk.page.press("#text", "Enter")
        talk.page.locator(".token").nth(3).wait_for(state="attached")
        stop()
        talk.page.locator("#send").wait_for()
        assert re.match(r"stopped after \d+ tokens; 1.00 tokens per pass so far", _why(talk.last))
        talk.press("Tokens")
        assert 0 < talk.last.locator(".token").count() < 800
        talk.page.get_by_role("button", name="New conversation").click()


def test_regenerate_edit_and_the_system_prompt(talk: Talk) -> None:
    sent: list[Any] = []
    talk.page.on("request", lambda r: sent.append(r.post_data_json) if r.url.endswith("completions") else None)
    talk.set(max_tokens=8, system="Be brief.")
    talk.ask("first")
    talk.ask("second")
    talk.press("Regenerate")
    talk.ended()
    assert talk.page.locator(".turn").count() == 4
    assert sent[2]["messages"] == sent[1]["messages"]
    assert sent[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    edit = talk.page.get_by_role("button", name="Edit").first
    edit.focus()
    talk.page.keyboard.press("Enter")
    talk.page.keyboard.press("Escape")  # nothing is lost
    assert talk.page.locator(".turn").count() == 4
    edit.press("Enter")
    talk.page.get_by_label("Message, to be edited").fill("third")
    talk.page.keyboard.press("Enter")
    talk.ended()
    assert talk.page.locator(".turn").count() == 2
    assert [m["content"] for m in sent[3]["messages"]] == ["Be brief.", "third"]


def test_conversations_are_kept_chosen_and_deleted(talk: Talk) -> None:
    talk.set(max_tokens=8, temperature=0)
    talk.ask("the first")
    talk.page.get_by_role("button", name="New conversation").click()
    talk.ask("the second")
    assert talk.page.evaluate(COLOURS) == 2  # the strip goes on from one to the next
    names = talk.page.locator("#list button:first-child")
    names.get_by_text("the first").click()
    assert talk.page.locator(".turn.user .said").inner_text() == "the first"
    talk.press("Tokens")  # as long as the page is not loaded anew
    assert talk.last.locator(".token").count() > 0
    talk.page.reload()
    assert names.all_inner_texts() == ["the second", "the first"]
    assert talk.page.locator(".turn.user .said").inner_text() == "the second"
    assert talk.last.locator(".proof .good").count() == 1
    talk.page.get_by_role("button", name="Delete the second").click()
    assert talk.page.locator(".turn.user .said").inner_text() == "the first"
    talk.page.reload()
    assert names.all_inner_texts() == ["the first"]


def test_the_strip_has_the_last_200_passes(talk: Talk) -> None:
    show_stream(talk, [Pass(["a "])] * 250)
    assert talk.page.locator("#strip").get_attribute("aria-label") == "The last 200 passes, of 1 answer: 200 tokens"


def test_what_looks_like_html_is_text(talk: Talk) -> None:
    """In questions, tokens, finished answers, alternatives, names of conversations and of files."""
    evil = "<img src=x onerror=alert(1)><b id=evil>"
    talk.set(system=evil)
    body = made_up_stream([Pass([evil, " own", "\n\n# " + evil], ("suffix", [evil], [-1], [0]))])
    talk.page.route(ANSWERS, lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    answer = talk.ask(evil)
    for _ in range(2):
        assert evil in answer.inner_text()
        assert talk.page.locator("img, #evil").count() == 0
        talk.press("Tokens")
    assert evil[:20] in talk.page.locator("#list").inner_text()
    files = talk.page.evaluate_handle(
        "name => { const d = new DataTransfer(); d.items.add(new File(['{'], name)); return d; }", evil
    )
    talk.page.dispatch_event("body", "drop", {"dataTransfer": files})
    talk.page.locator("#said.bad", has_text=evil).wait_for()
    assert talk.page.locator("img, #evil").count() == 0


def test_a_key_goes_into_the_settings_and_is_sent(browser: Any, chat_llm: LLM) -> None:
    """The page itself needs none; it says what is missing, and forgets the key with its tab."""
    with serving(chat_llm, api_keys=("key-of-the-page",)) as keyed:
        context = browser.new_context()
        talk = Talk(context.new_page(), keyed.url)
        talk.page.goto(keyed.url)
        talk.page.locator("#state", has_text="the API key is missing").wait_for()
        talk.set(key="key-of-the-page", max_tokens=8)
        talk.page.locator("#state", has_text="fingerprint vs-").wait_for()
        answer = talk.ask("hello")
        talk.press("Replay")
        answer.locator(".verdict.good", has_text="✓ reproduced").wait_for()
        assert "key-of-the-page" not in talk.page.evaluate("JSON.stringify(localStorage)")
        context.close()


def test_a_browser_that_is_full_says_so(talk: Talk) -> None:
    talk.page.evaluate("() => { Storage.prototype.setItem = () => { throw new DOMException('it is full'); }; }")
    show_stream(talk, [Pass(["one"])])
    talk.page.locator("#said", has_text="this browser can keep no more").wait_for()


def test_a_call_of_a_tool_on_the_page(talk: Talk, shots: Path) -> None:
    page = talk.page
    talk.set(tools="[")
    page.fill("#text", "hello")
    page.press("#text", "Enter")
    page.locator(".why", has_text="the list of tools in the settings is not JSON").wait_for()
    page.get_by_role("button", name="New conversation").click()
    # With this seed there is one call; others have several.
    talk.set(tools=json.dumps([LOOK]), tool_choice="required", seed=2)
    talk.ask("hello")
    call = page.get_by_role("group", name="Call of look")
    assert call.locator("pre").inner_text() in ('{"on": true}', '{"on": false}')
    talk.press("Tokens")
    assert talk.last.locator(".by-grammar").count() > 0
    page.screenshot(path=shots / "call.png")
    page.reload()  # calls are kept with their conversation
    talk.set(tool_choice="none")
    page.get_by_label("Result of look").fill("it is on")
    page.get_by_role("button", name="Give the result").click()
    page.locator(".turn.tool", has_text="it is on").wait_for()
    page.wait_for_selector(".turn.tool ~ .turn.assistant .proof")
    talk.set(tools="", schema=json.dumps(LOOK["function"]["parameters"]))  # type: ignore[index]
    page.get_by_role("button", name="New conversation").click()
    answer = talk.ask("hello")
    assert json.loads(answer.locator(".said").inner_text())["on"] in (True, False)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_hinders_anybody(browser: Any, served: Served, shots: Path, scheme: str, width: int) -> None:
    with talking(browser, served.url, width=width, color_scheme=scheme) as talk:
        passes = [Pass([f"{name} ", "own "], (name, [f"{name} ", "no "], [-1, -1], [0])) for name in DRAFTERS]
        show_stream(talk, [Pass([MARKDOWN]), *passes])
        assert _issues(talk) == []
        talk.press("Tokens")
        assert _issues(talk) == []
        talk.page.screenshot(path=shots / f"{scheme}-{width}.png")
        assert talk.page.evaluate("document.documentElement.scrollWidth") <= width
        if width < 500:
            assert talk.page.locator("#side").is_hidden()
            talk.page.get_by_role("button", name="Menu").click()
            talk.page.locator("aside summary", has_text="Settings").click()
            assert _issues(talk) == []
            talk.page.screenshot(path=shots / f"{scheme}-menu.png")
            talk.page.get_by_role("button", name="Menu").click()
            assert talk.page.locator("#side").is_hidden()


def _issues(talk: Talk) -> list[str]:
    """What axe-core finds serious."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(talk.page).response["violations"]
    return [f"{v['id']}: {v['nodes'][0]['html']}" for v in found if v["impact"] in ("serious", "critical")]


def test_the_theme_is_kept(talk: Talk) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = talk.page.evaluate(background)
    talk.set()
    talk.page.get_by_role("button", name="Dark or light").click()
    dark = talk.page.evaluate(background)
    assert dark != light
    talk.page.reload()
    assert talk.page.evaluate(background) == dark

"""The page in a real browser: an answer that can be seen to be drafted, replayed and checked; nothing from elsewhere.

With --shots=FOLDER the pictures that are taken are kept there, to be looked at.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import Served
from verispec.server.app import PAGE

pytestmark = pytest.mark.slow

MAX_NBYTES = 60_000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


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
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-page installs it")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def shots(tmp_path: Path, pytestconfig: pytest.Config) -> Path:
    folder = Path(pytestconfig.getoption("--shots") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_conversation_on_the_page(browser: Any, served: Served, shots: Path) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(served.url) else problems.append(request.url))
    page.goto(served.url)
    page.locator("#state", has_text="fingerprint vs-").wait_for()
    page.get_by_text("Settings").click()
    page.fill("#max_tokens", "60")
    page.fill("#temperature", "0")
    page.fill("#text", "<b>bold</b> abcabcabc")
    page.press("#text", "Enter")
    page.wait_for_selector(".proof")
    assert page.locator(".turn.user").inner_text() == "<b>bold</b> abcabcabc"  # text, never HTML
    assert page.locator(".token").count() > 3
    assert page.locator(".why").inner_text()
    page.get_by_role("button", name="Replay").click()
    page.wait_for_selector(".verdict.good", timeout=20_000)
    assert "reproduced" in page.locator(".verdict").inner_text()
    page.get_by_role("button", name="Check").click()
    page.locator(".verdict", has_text="✓ one digest").wait_for()
    page.screenshot(path=shots / "page.png")
    page.reload()  # conversations are kept
    page.wait_for_selector(".proof")
    page.get_by_text("Settings").click()
    page.get_by_role("button", name="Dark or light").click()
    page.set_viewport_size({"width": 390, "height": 800})
    page.screenshot(path=shots / "phone.png")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390
    assert problems == []
    page.close()


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {
    "on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}}}  # fmt: skip


def test_a_call_of_a_tool_on_the_page(browser: Any, served: Served, shots: Path) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(served.url)
    page.locator("#state", has_text="fingerprint vs-").wait_for()
    page.get_by_text("Settings").click()
    page.fill("#tools", "[")
    page.fill("#text", "hello")
    page.press("#text", "Enter")
    page.locator(".why", has_text="the list of tools in the settings is not JSON").wait_for()
    page.get_by_role("button", name="New conversation").click()
    page.fill("#tools", json.dumps([LOOK]))
    page.select_option("#tool_choice", "required")
    page.fill("#seed", "2")  # of which there is one call; others have several
    page.fill("#text", "hello")
    page.press("#text", "Enter")
    page.wait_for_selector(".proof")
    call = page.get_by_role("group", name="Call of look")
    assert call.locator("pre").inner_text() in ('{"on": true}', '{"on": false}')
    page.screenshot(path=shots / "call.png")
    page.reload()  # calls are kept with their conversation
    page.get_by_text("Settings").click()
    page.select_option("#tool_choice", "none")
    page.get_by_label("Result of look").fill("it is on")
    page.get_by_role("button", name="Give the result").click()
    page.locator(".turn.tool", has_text="it is on").wait_for()
    page.wait_for_selector(".turn.tool ~ .turn.assistant .proof")
    page.fill("#tools", "")
    page.fill("#schema", json.dumps(LOOK["function"]["parameters"]))  # type: ignore[index]
    page.get_by_role("button", name="New conversation").click()
    page.fill("#text", "hello")
    page.press("#text", "Enter")
    page.wait_for_selector(".proof")
    assert json.loads(page.locator(".said").inner_text())["on"] in (True, False)
    page.screenshot(path=shots / "schema.png")
    assert problems == []
    page.close()


def test_an_edited_receipt_is_found_out_on_the_page(browser: Any, served: Served, tmp_path: Path) -> None:
    receipt_id = served.chat(verispec={"receipt": True})["verispec"]["receipt"]
    text = served.client.get(f"/verispec/receipts/{receipt_id}").text
    page = browser.new_page()
    page.goto(served.url)
    page.locator("#state", has_text="fingerprint vs-").wait_for()
    ids = served.core.receipts.find(receipt_id, "").output.token_ids
    changed = text.replace(f'"token_ids": [{ids[0]}, {ids[1]}', f'"token_ids": [{ids[0]}, {(ids[1] + 1) % 250}')
    for name, content, said in (("good.json", text, "✓ reproduced"), ("bad.json", changed, "✗ position")):
        path = tmp_path / name
        path.write_text(content)
        page.set_input_files("#file", path)
        page.locator("#state", has_text=f"{name}: {said}").wait_for()
    page.close()

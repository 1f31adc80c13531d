"""The page in a real browser: headless Chromium looks at a server. Without a Chromium these tests are skipped."""

from __future__ import annotations

import pickle
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache import Engine, terminal
from agentcache.server import page
from agentcache.server.page import HEADERS
from agentcache.server.served_models import ServedModel
from agentcache.types import Reason
from tests.serving import ALICE, KEYS, TIDE, Served, serving

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Get the weather of a city.", "parameters": CITY}}
SYSTEM = "You are a helpful assistant."
PATIENCE_MS = 200_000  # on a busy machine a server takes its time to load
MARKUP = "<img src=x onerror=alert(1)>"
# contrast of each text with what lies under it, and of the parts of bars with the card: [ratio, text], the least first
CONTRAST = """() => {
  const part = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const rgb = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const under = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour.length === 3) return colour;
    }
  };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((x, y) => y - x); return (x + 0.05) / (y + 0.05); };
  const shown = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility());
  const texts = shown.filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  const told = texts.map((e) => [ratio(rgb(getComputedStyle(e).color), under(e)), e.textContent.slice(0, 30)]);
  const parts = shown.filter((e) => e.matches(".legend i")).map((e) => [1.5 * ratio(under(e), under(e.parentElement)), e.className]);
  return [...told, ...parts].sort((a, b) => a[0] - b[0]);
}"""


WATCH = "(then) => new MutationObserver(eval(then)).observe(document.querySelector('#with .times'), {childList: true})"


@pytest.mark.skipif(shutil.which("node") is None, reason="the page's JavaScript runs here")
def test_sizes_are_those_of_the_command_line() -> None:
    script = re.search(r"function bytes.*?\n}\n", (Path(page.__file__).parent / "page" / "page.js").read_text(), re.DOTALL)
    assert script is not None
    counts = [762 << 10, 3 << 20, 20 << 30]
    done = subprocess.run(
        ["node", "-e", f"{script[0]} console.log({counts}.map(bytes).join())"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "762 kB,3.0 MB,20.0 GB"
    assert [terminal.size(count) for count in counts] == ["762.0 kB", "3.0 MB", "20.0 GB"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, or another that is installed."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium was found: install Debian's package chromium")
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def server(browser: Any, served: Served) -> str:
    """Address of a server without keys."""
    return served.url


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """visit(url): a page that must leave no error in its console, but those named."""
    contexts, errors, allowed = [], [], []

    def opened(url: str, expected: str | None = None, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: message.type in ("error", "warning") and errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        allowed.append(expected)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [error for error in errors if not any(known and known in error for known in allowed)] == []


def register(page: Any, server: str, name: str, tool: dict[str, Any] = TIDE) -> None:
    """Register a tool group from outside, and wait until the page shows it."""
    answer = page.request.post(f"{server}/tools", data={"name": name, "system": SYSTEM, "tools": [tool]}, timeout=PATIENCE_MS)
    assert answer.ok, answer.text()
    page.locator("#groups h3", has_text=name).wait_for()


def ask(page: Any, question: str) -> None:
    """Ask both ways, and wait for the end."""
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask both ways").click()
    page.locator("#stop[aria-disabled=true]").wait_for()


def test_each_reason_is_told_in_words() -> None:
    assert all(len(reason.words.split()) > 1 for reason in Reason)
    assert Reason("COLD") is Reason.COLD is pickle.loads(pickle.dumps(Reason.COLD))


def test_page_reaches_nothing_but_its_server(visit: Callable[..., Any], server: str) -> None:
    page = visit(server, expected="Content Security Policy")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    told = page.reload()
    page.locator("#models h3").wait_for()
    assert {url.split("?")[0].removeprefix(server) for url in asked if not url.startswith("data:")} == {
        "/",
        "/page.css",
        "/page.js",
        "/events",
    }
    assert told.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    page.evaluate("fetch('http://127.0.0.1:9/').catch((error) => { window.refused = String(error); })")
    page.wait_for_function("window.refused")
    assert page.evaluate("window.refused") == "TypeError: Failed to fetch"


def test_question_is_asked_with_and_without_reuse(visit: Callable[..., Any], server: str) -> None:
    page = visit(server)
    register(page, server, "asked", WEATHER)
    page.get_by_label("Tool group", exact=True).select_option("asked")
    page.evaluate(WATCH.replace(".times", ".answer"), "() => { window.steps = (window.steps || 0) + 1; }")
    ask(page, "What is the weather in Paris?")
    on, off = page.locator("#with"), page.locator("#without")
    assert "get_weather" in on.locator(".answer").inner_text()
    assert on.locator(".answer").inner_text() == off.locator(".answer").inner_text()
    assert page.evaluate("window.steps") > 2, "the answer comes piece by piece"
    assert re.search(r"First token after .* ms, all after .* [1-9]\d* tokens cached", on.locator(".times").inner_text())
    assert ": 0 tokens cached" in off.locator(".times").inner_text()
    assert page.locator("#verdict").inner_text().startswith("The same answer both ways.")

    last, before = page.locator("#requests > li").nth(0), page.locator("#requests > li").nth(1)
    last.get_by_text("reuse off").wait_for()
    assert last.locator(".bar .computed").count() == 1
    assert last.locator(".bar .memory").count() == 0
    assert before.locator(".bar .memory").count() == 1
    assert re.match(r"\d+ prompt tokens: \d+ from memory, \d+ computed in the tail$", before.get_by_role("img").get_attribute("aria-label"))
    assert "first token after" in before.inner_text()
    last.get_by_role("link", name="REUSE_OFF").click()
    assert page.locator("#reasons :target").inner_text().split() == ["REUSE_OFF", *Reason.REUSE_OFF.words.split()]
    page.locator("#groups li", has_text="asked").get_by_text("1 of 1 request").wait_for()


def test_group_is_unpinned_pinned_and_deleted_by_keyboard(visit: Callable[..., Any], server: str) -> None:
    page = visit(server)
    register(page, server, "town/guide?")
    item = page.locator("#groups li", has_text="town/guide?")
    pin, remove = item.locator(".pin"), item.locator(".delete")
    for before, after in (("Release the pin", "Pin"), ("Pin", "Release the pin")):
        assert pin.inner_text() == before
        pin.press("Enter")
        item.get_by_text(after, exact=True).wait_for()
        assert pin.evaluate("button => button === document.activeElement"), "the button keeps the focus"
    page.once("dialog", lambda dialog: dialog.dismiss())
    remove.press("Enter")
    assert item.is_visible()
    page.once("dialog", lambda dialog: dialog.accept())
    remove.press("Enter")
    item.wait_for(state="detached")
    assert page.get_by_role("status").filter(has_text="town/guide? is deleted.").is_visible()
    assert "town/guide?" not in [group["name"] for group in page.request.get(f"{server}/tools").json()["groups"]]


def test_text_of_others_is_never_markup(visit: Callable[..., Any], server: str) -> None:
    page = visit(server)
    register(page, server, MARKUP, {"type": "function", "function": {**TIDE["function"], "name": MARKUP}})  # type: ignore[dict-item]
    page.get_by_label("Tool group", exact=True).select_option(MARKUP)
    ask(page, MARKUP)
    page.locator("#requests h3", has_text=MARKUP).first.wait_for()
    assert page.locator("img").count() == 0
    page.request.delete(f"{server}/tools/{MARKUP}")


def test_servers_refusal_is_shown_in_its_words(visit: Callable[..., Any], server: str) -> None:
    page = visit(server, expected="status of 400")
    page.locator("#models").get_by_text("Ready", exact=True).wait_for()
    ask(page, "far too long " * 1500)
    said = page.locator("#with").get_by_role("alert")
    said.wait_for()
    assert "tokens" in said.inner_text()
    assert page.locator("#with .times").inner_text() == ""
    ask(page, "Short.")
    assert said.is_hidden()
    assert page.locator("#verdict").inner_text()


def test_stop_ends_the_question(visit: Callable[..., Any], server: str) -> None:
    page = visit(server)
    page.locator("#models").get_by_text("Ready", exact=True).wait_for()
    page.evaluate(WATCH, "() => document.getElementById('stop').click()")
    ask(page, "Tell me of all the harbours.")
    assert page.locator("#with").get_by_role("alert").inner_text() == "Stopped."
    assert page.locator("#without .answer").inner_text() == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_readable_at_400_pixels(visit: Callable[..., Any], server: str, scheme: str) -> None:
    page = visit(server, viewport={"width": 400, "height": 800}, color_scheme=scheme)
    register(page, server, "narrow")
    ask(page, "Hello")
    page.locator("#requests .bar").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    least, where = page.evaluate(CONTRAST)[0]
    assert least >= 4.5, where
    unnamed = (
        "[...document.querySelectorAll('button, select, textarea, input')].filter((e) => !(e.textContent.trim() || e.labels.length)).length"
    )
    assert page.evaluate(unnamed) == 0


def test_page_asks_for_the_key(visit: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    with serving(keys=keys) as served:
        page = visit(served.url, expected="status of 401")
        page.get_by_text("This server asks for a key.").wait_for()
        for given, shown in (("wrong", "this API key is unknown"), (ALICE, "Live")):
            page.get_by_label("Key").fill(given)
            page.get_by_role("button", name="Use this key").click()
            page.get_by_text(shown).wait_for()
        page.locator("#models h3").wait_for()
        assert page.locator("#key-form").is_hidden()
        assert ALICE not in str(page.context.storage_state()), "the key stays in its tab"
        page.context.close()


def test_page_shows_how_its_model_loads(visit: Callable[..., Any]) -> None:
    opened = threading.Event()

    def slow(say: Callable[[str], None]) -> Engine:
        say("loading weights")
        opened.wait(120)
        return Engine("embedded", store=None)

    with serving(ServedModel("slow", slow)) as served:
        page = visit(served.url)
        page.get_by_text("Loading: loading weights").wait_for()
        assert page.get_by_role("progressbar", name="Loading the model").is_visible()
        opened.set()
        page.locator("#models").get_by_text("Ready", exact=True).wait_for()
        page.locator("#models").get_by_text("cpu").wait_for()
        assert page.get_by_role("progressbar").count() == 0
        page.context.close()

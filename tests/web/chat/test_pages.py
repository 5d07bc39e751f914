"""Page contents: forms that work without scripts, accurate texts, and no resources from other origins."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from scripted_engine import ScriptedEngine, say

from notso.web.chat.submit import derive_title, new_chat
from notso.web.chat.templates import TEMPLATE_DIRECTORY, human_count, human_size
from notso.web.edge.assets import STATIC_DIRECTORY, Assets
from notso.web.edge.errors import is_api_path
from notso.web.values import wording
from notso.web.values.ids import new_id

Start = Callable[..., Any]

MAX_OWN_SCRIPT_BYTES = 24_000  # after compression
TEMPLATES = sorted(TEMPLATE_DIRECTORY.glob("*.html"))
OWN_SCRIPTS = sorted(STATIC_DIRECTORY.glob("*.js"))


class Forms(HTMLParser):
    """Parse the forms of a page as a browser without scripts would submit them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.forms: list[dict[str, Any]] = []
        self._area: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "form":
            self.forms.append({"action": attributes["action"], "method": attributes["method"], "fields": {}})
        elif tag == "input" and self.forms and attributes.get("name"):
            if attributes.get("type") in ("checkbox", "radio") and "checked" not in attributes:
                return
            self.forms[-1]["fields"][attributes["name"]] = attributes.get("value", "on")

    def find(self, ending: str) -> dict[str, Any]:
        return next(form for form in self.forms if form["action"].endswith(ending) and "text" not in form["fields"])


def test_address_of_a_failed_form_leads_to_the_page_above(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    methods: dict[str, set[str]] = {}
    for route in iter_route_contexts(server.app.routes):
        methods.setdefault(route.path, set()).update(route.original_route.methods)
    forms = [path for path, known in methods.items() if "GET" not in known and not is_api_path(path)]
    typed, id = {"Accept": "text/html"}, new_id()
    found = {}
    for path in forms:
        assert server.client.get(re.sub(r"\{\w+\}", id, path)).status_code == 405, "programs get the error"
        answer = server.client.get(re.sub(r"\{\w+\}", id, path), headers=typed)
        assert answer.status_code == 303, path
        found[path] = answer.headers["location"].replace(id, "ID")
        assert server.client.get(answer.headers["location"], headers=typed).status_code in (200, 303, 404), path
    assert found["/operator/keys"] == "/operator" and found["/projects/{project_id}/members"] == "/projects/ID"
    assert found["/chats/{chat_id}/messages/{message_id}/branch"] == "/chats/ID" and found["/language"] == "/"


def test_conversation_works_without_scripts(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    form = Forms(server.client.get("/").text).find("/chats")
    answer = server.client.post(form["action"], data=form["fields"] | {"text": "Hello <there>\nsecond line"})
    chat = answer.headers["location"]
    asked = server.last(chat.removeprefix("/chats/"))
    server.finished(asked)
    page = server.client.get(chat).text
    assert "Hello &lt;there&gt;\nsecond line" in page
    assert "I say what my <strong>script</strong> says." in page
    assert "<title>Hello &lt;there&gt; · notso</title>" in page
    form = Forms(page).find("/messages")
    assert form["method"] == "post" and form["fields"]["thinking"] == "on"
    del form["fields"]["thinking"]
    assert server.client.post(form["action"], data=form["fields"] | {"text": "More"}).headers["location"] == chat
    server.finished(server.last(asked.chat_id))
    page = server.client.get(chat).text
    assert page.count('<article class="turn') == 4 + 1, "four turns and the template for a queued message"
    assert "thinking" not in Forms(page).find("/messages")["fields"], "the thinking toggle keeps its setting"
    for name in ("rename", "delete"):
        form = Forms(page).find({"rename": "/title", "delete": "/delete"}[name])
        answer = server.client.post(form["action"], data=form["fields"] | {"title": "A <new> name"})
        if name == "rename":
            assert "A &lt;new&gt; name" in server.client.get(answer.headers["location"]).text
        else:
            assert answer.headers["location"].startswith("/?undo=")
            assert server.client.get(chat).status_code == 404


def test_example_questions_can_be_asked(shared: Any) -> None:
    forms = [form for form in Forms(shared.client.get("/").text).forms if "text" in form["fields"]]
    assert len(forms) == 3
    assert len({form["fields"]["key"] for form in forms}) == 3
    answer = shared.client.post(forms[0]["action"], data=forms[0]["fields"])
    asked = shared.last(answer.headers["location"].removeprefix("/chats/"))
    assert shared.finished(asked).state == "done"


def test_deleting_a_chat_stops_its_answer(start: Start) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 5000, piece=5), pace_seconds=0.01)
    server = start(engine).ready()
    asked = server.ask("Hello")
    server.wait(lambda: len(engine.requests) == 1)
    other = server.ask("Next")
    assert server.client.post(f"/chats/{asked.chat_id}/delete").status_code == 303
    server.wait(lambda: len(engine.requests) == 2)
    assert server.client.get(f"/generations/{asked.generation_id}/events").status_code == 404
    server.client.post(f"/generations/{other.generation_id}/stop")
    server.finished(other)


def test_thinking_switch_setting_is_saved(shared: Any) -> None:
    asked = shared.ask("Hello")
    shared.finished(asked)
    url = f"/chats/{asked.chat_id}"
    headers = {"HX-Request": "true"}
    assert shared.client.post(f"{url}/thinking", data={"text": "draft"}, headers=headers).status_code == 204
    assert "thinking" not in Forms(shared.client.get(url).text).find("/messages")["fields"]
    assert shared.client.post(f"{url}/thinking", data={"thinking": "on"}).status_code == 303
    assert "thinking" in Forms(shared.client.get(url).text).find("/messages")["fields"]


def test_htmx_response_contains_both_messages_and_a_new_key(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    engine.gate.clear()
    key = new_id()
    answer = server.client.post(
        f"/chats/{asked.chat_id}/messages", data={"text": "More", "key": key}, headers={"HX-Request": "true"}
    )
    assert answer.status_code == 200 and "<html" not in answer.text
    assert answer.text.count("<article") == 2
    assert 'hx-sse:connect="/generations/' in answer.text and 'hx-sse:close="done"' in answer.text
    nonce = answer.headers["content-security-policy"].partition("'nonce-")[2].partition("'")[0]
    assert set(re.findall(r'hx-nonce="([^"]*)"', answer.text)) == {nonce}
    assert key not in answer.text and "/stop" in answer.text
    engine.gate.set()
    last = server.last(asked.chat_id)
    server.finished(last)
    final = server.client.get(f"/chats/{asked.chat_id}/messages/{last.message_id}", headers={"HX-Request": "true"}).text
    assert 'hx-sse:connect="/generations' not in final and "/stop" not in final and "Send" in final


def test_demo_model_is_labeled_and_offers_download(start: Start) -> None:
    page = start(ScriptedEngine(is_demo=True)).ready().client.get("/").text
    assert "Demo model" in page and 'href="/models">Download SmolLM3-3B (1.92 GB)</a>' in page


def test_page_does_not_mention_demo_for_a_real_model(start: Start, tmp_path: Path) -> None:
    page = start(ScriptedEngine(is_demo=False), data_dir=tmp_path / "other").ready().client.get("/").text
    assert "emo model" not in page and "Download SmolLM3" not in page


def test_user_text_is_escaped(shared: Any) -> None:
    text = "<script>alert(1)</script> <hx-partial hx-target=body> {{ 7 * 7 }} **bold** &amp; \"'"
    asked = shared.ask(text)
    shared.finished(asked)
    page = shared.client.get(f"/chats/{asked.chat_id}").text
    bubble = page.partition('<div class="bubble" dir="auto" hx-ignore>')[2].partition("</div>")[0]
    shown = "&lt;script&gt;alert(1)&lt;/script&gt; &lt;hx-partial hx-target=body&gt; {{ 7 * 7 }} **bold** &amp;amp; "
    assert bubble == shown + "&#34;&#39;"
    assert "<script>alert" not in page and "<hx-partial hx-target=body" not in page


def test_title_is_derived_from_the_first_line_and_shortened() -> None:
    assert derive_title("\n  Hello   there \nmore") == "Hello there"
    assert derive_title("word " * 40) == "word " * 19 + "word…"
    assert derive_title("x" * 180) == "x" * 100 + "…" and derive_title("x" * 80) == "x" * 80
    assert [derive_title(text) for text in ("# A heading", "> quoted", "- 1", "#tag", "-1")] == [
        *("A heading", "quoted", "1", "#tag", "-1")
    ]
    assert derive_title(" \n ") == wording.words["new_chat"]
    assert new_chat("Hi", thinking=False).title == "Hi"


def test_pages_load_no_resources_from_other_origins(shared: Any) -> None:
    page = shared.client.get("/").text
    addresses = re.findall(r'\s(?:src|href|action)="([^"]*)"', page)
    assert addresses and all(address.startswith(("/", "#")) and not address.startswith("//") for address in addresses)
    for address in addresses:
        if address.startswith("/static/"):
            answer = shared.client.get(address)
            assert answer.status_code == 200
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
            assert b"://" not in answer.content.replace(b"http://www.w3.org/2000/svg", b"") or "vendor" in address


def test_start_page_transfers_less_than_80_kb(shared: Any) -> None:
    page = shared.client.get("/").text
    # KaTeX is loaded only on pages with formulas, so it does not appear here
    files = re.findall(r' (?:src|href)="(/static/[^"#]*)"', page)
    size = len(gzip.compress(page.encode()))
    for address in files:
        with shared.client.stream("GET", address, headers={"Accept-Encoding": "gzip"}) as answer:
            assert answer.headers["content-encoding"] == "gzip"
            size += sum(len(chunk) for chunk in answer.iter_raw())
    assert size < 80_000


def test_vendored_files_match_the_listed_checksums() -> None:
    folder = STATIC_DIRECTORY / "vendor"
    listed = dict(re.findall(r"\| ([\w./-]+) \|.*\| ([0-9a-f]{64}) \|", (folder / "VENDORED.md").read_text()))
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".md", ".LICENSE")]
    found = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert listed == found and len(found) > 20
    assert (folder / "htmx.LICENSE").exists() and (folder / "katex" / "katex.LICENSE").exists()


def test_assets_reference_each_other_by_content_hash(tmp_path: Path) -> None:
    (tmp_path / "fonts").mkdir()
    (tmp_path / "fonts" / "a.woff2").write_bytes(b"font")
    (tmp_path / "a.css").write_text("a { src: url(fonts/a.woff2), url(fonts/a.ttf) }")
    (tmp_path / "b.webmanifest").write_text('{"icons": [{"src": "fonts/a.woff2"}]}')
    assets = Assets(tmp_path)
    font = assets.url("fonts/a.woff2")
    style = assets.by_path.get(assets.url("a.css").removeprefix("/static/"))
    manifest = assets.by_path.get(assets.url("b.webmanifest").removeprefix("/static/"))
    assert style is not None and manifest is not None
    beside = "../" + font.removeprefix("/static/")
    assert style.body == f"a {{ src: url({beside}), url(fonts/a.ttf) }}".encode()
    assert beside.encode() in manifest.body


def test_asset_url_changes_with_content(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("a {}")
    first = Assets(tmp_path).url("a.css")
    (tmp_path / "a.css").write_text("b {}")
    assert Assets(tmp_path).url("a.css") != first
    assert first.removeprefix("/static/") not in Assets(tmp_path).by_path


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_have_no_inline_scripts_and_use_htmx_safely(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"\son\w+\s*=", text), "inline event handler"
    assert "hx-on" not in text and "js:" not in text and "javascript:" not in text and "style=" not in text
    assert "hx-disable" not in text, "hx-disable gives no protection in htmx 4"
    assert "|safe" not in text.replace(" ", "") and "autoescape" not in text
    for tag in re.findall(r"<script[^>]*>", text):
        assert 'nonce="{{ nonce }}"' in tag and "src=" in tag
    for tag in re.findall(
        r"<(?!hx-partial)\w+\b(?:\"[^\"]*\"|'[^']*'|\{\{.*?\}\}|\{%.*?%\}|[^>\"'])*>", text, re.DOTALL
    ):
        if re.search(r"\shx-(?!ignore|nonce)", tag):
            assert "hx-nonce" in tag, tag


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_error_of_a_request_does_not_replace_a_part_of_the_page(path: Path) -> None:
    text = re.sub(r"{{ \w+_errors }}", 'hx-status:5xx=""', path.read_text())
    text = re.sub(r"{{.*?}}|{%.*?%}", "", text)
    for tag in re.findall(r"""<[a-z]+ (?:"[^"]*"|'[^']*'|[^<>"'])*>""", text):
        swap = re.search(r'hx-(?:get|post)=.* hx-swap="(\w+)"', tag)
        assert swap is None or swap[1] == "innerHTML" or "hx-status:5xx=" in tag, tag


def test_own_scripts_are_small_commented_and_avoid_unsafe_calls() -> None:
    assert sum(len(gzip.compress(path.read_bytes())) for path in OWN_SCRIPTS) < MAX_OWN_SCRIPT_BYTES
    for path in OWN_SCRIPTS:
        assert path.read_text().startswith("// "), "each script begins with a comment that says why htmx is not enough"
        assert not re.search(
            r"\beval\b|new Function|innerHTML\s*=|insertAdjacentHTML|document\.write", path.read_text()
        )


def test_interface_texts_are_all_defined_and_used() -> None:
    sources = [path.read_text() for path in TEMPLATES] + [
        path.read_text() for path in Path(wording.__file__).parents[1].rglob("*.py") if path.name != "wording.py"
    ]
    text = "\n".join(sources)
    used = set(re.findall(r"\bwords\.([a-z_0-9]+)", text))
    used |= set(re.findall(r"""(?i:words)\[["']([a-z_0-9]+)["']\]""", text))
    used -= {"get", "format"}
    assert used <= wording.words.keys()
    built = ("weights_", "phase_", "announce_", "state_", "theme_", "example_", "reasoning_for", "phase_thinking_for")
    built += ("stat_name_", "day_", "version_", "menu_", "part_", "key_", "set_", "unset_", "prefer_", "limit_")
    built += ("tool_", "question_", "mark_", "start_", "prompt_kind_", "tab_")
    built += ("toast_", "command_", "shortcut_", "code_", "plugin_")
    built += ("import_", "imported_", "left_out_", "alert_", "document_", "member_")
    assert {word for word in wording.words if word not in used and not word.startswith(built)} == set()


def test_sizes_counts_and_ordinals_are_formatted() -> None:
    assert [human_size(number) for number in (999_400, 999_700, 999_999_999)] == ["999 kB", "1 MB", "1 GB"]
    assert [human_count(number) for number in (999_400_000, 999_700_000)] == ["999 M", "1 B"]
    assert [human_size(number) for number in (0, 999, 1_915_305_312, 8_000_000)] == [
        "0 bytes",
        "999 bytes",
        "1.92 GB",
        "8 MB",
    ]
    assert [human_count(number) for number in (5, 12_000, 10_000_000, 3_075_098_624)] == ["5", "12 K", "10 M", "3.08 B"]
    assert [wording.ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st")
    ]


def test_responses_are_compressed_if_the_browser_accepts_gzip(shared: Any) -> None:
    page = shared.client.get("/")
    (style, *_) = re.findall(r'"(/static/[^"]+\.css)"', page.text)
    for accepted, packed in (
        ("gzip, br", "gzip"),
        ("br;q=1.0, GZIP;q=0.5", "gzip"),
        ("br, *;q=0.1", "gzip"),
        ("identity", None),
        ("gzip;q=0", None),
        ("gzip; q=0.000, *", None),
        ("gzip;q=x", None),
        ("gzipped", None),
        ("*;q=0", None),
    ):
        file = shared.client.get(style, headers={"Accept-Encoding": accepted})
        answer = shared.client.get("/", headers={"Accept-Encoding": accepted})
        assert file.headers.get("content-encoding") == packed, accepted
        assert answer.headers.get("content-encoding") == packed and answer.headers["vary"] == "Accept-Encoding"
        assert answer.text.rstrip().endswith("</html>")

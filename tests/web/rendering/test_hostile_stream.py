"""A thousand hostile texts pass byte by byte through the Markdown renderer and the event stream."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

import pytest
from browser.hostile_texts import BATCHES, hostile
from fastapi.sse import format_sse_event

from notso.web.rendering.budget import Budget
from notso.web.rendering.markdown import render_markdown, sanitize
from notso.web.rendering.streaming import StreamingMarkdown
from notso.web.turns.sse import update_html
from notso.web.turns.turn_log import TurnLog

# seconds; large enough that a busy machine never falls back to plain text, which would look like a difference
UNHURRIED = 1_000.0

ACTIVE = re.compile(
    r"<(?!/?(?:a|blockquote|br|button|code|del|div|em|figure|h[1-6]|hr|li|ol|p|pre|s|span|strong|table|"
    r"tbody|td|th|thead|tr|ul)[\s>/])[a-z!?/]|\s(?:on\w+|hx-\S*|data-\S*|style|src|srcdoc|id)=",
    re.I,
)


def decoded(data: bytes) -> Iterator[str]:
    """Decode bytes that arrive one per token, as the engine's text stream does."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for at in range(len(data)):
        yield decoder.decode(data[at : at + 1])
    yield decoder.decode(b"", final=True)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_hostile_streams_are_safe_at_every_byte_and_match_whole_render(batch: int) -> None:
    seen = {""}
    for data in hostile(batch):
        markdown, closed, whole = StreamingMarkdown(Budget(UNHURRIED)), "", data.decode(errors="replace")
        for piece in decoded(data):
            rendered = markdown.feed(piece)
            closed += rendered.closed
            for html in {rendered.closed, rendered.tail} - seen:
                seen.add(html)
                tags = "".join(re.findall(r"<[^>]*>", html))
                assert not ACTIVE.search(tags), (data, html)
                assert "javascript:" not in tags.lower() and "data:" not in tags.lower(), (data, html)
        assert closed + markdown.finish().closed == render_markdown(whole, budget=Budget(UNHURRIED)), data
        assert sanitize(render_markdown(whole)) == render_markdown(whole, budget=Budget(UNHURRIED)), data


def test_event_reader_fed_single_bytes_gets_the_sent_events(event_reader: type) -> None:
    """No event is forged or lost, even if the text imitates an event stream and the network splits it anywhere."""
    log, number, sent, wire = TurnLog(), None, [], b""
    markdown = StreamingMarkdown()
    for data in (data for batch in range(BATCHES) for data in hostile(batch)):
        for piece in (data.decode(errors="replace"), "\n\n"):
            rendered = markdown.feed(piece)
            log.write("answer", rendered.closed, rendered.tail)
        update = log.since(number)
        number = update.number
        html = update_html("0", update)
        sent.append(html)
        wire += format_sse_event(data_str=html, id=str(number))
    reader = event_reader()
    for at in range(len(wire)):
        reader.feed(wire[at : at + 1])
    assert [event.event for event in reader.events] == ["message"] * len(sent)
    assert [event.data for event in reader.events] == [re.sub(r"\r\n?", "\n", html) for html in sent]
    assert reader.last_id == str(number)

"""Rendering of stream updates as HTML for htmx: one `<hx-partial>` per changed element."""

from __future__ import annotations

from html import escape

from notso.web.rendering.labels import with_labels
from notso.web.turns.turn_log import Update
from notso.web.values.wording import number, words

SNAPSHOT_MARK = "<!--snapshot-->"
"""Starts an update that replaces everything; the page's filter for repeated events lets it through."""


def update_html(message_id: str, update: Update) -> str:
    """Render one update; model output in it is already sanitized."""
    parts = [SNAPSHOT_MARK] if update.snapshot else []
    for name, channel in update.channels.items():
        target = f"#msg-{message_id}-{name}"
        if update.snapshot or channel.append:
            parts.append(
                _partial(
                    f"{target}-closed", "innerHTML" if update.snapshot else "beforeend", with_labels(channel.append)
                )
            )
        if channel.tail is not None:
            # A closed block makes the tail a different block; morphing would carry over elements of the old one.
            anew = update.snapshot or channel.append
            parts.append(_partial(f"{target}-tail", "innerHTML" if anew else "innerMorph", with_labels(channel.tail)))
    for card_id, card in update.cards.items():
        parts.append(_partial(f"#call-{card_id}-state", "innerHTML", card.state))
        parts.append(_partial(f"#call-{card_id}-result", "innerHTML", card.result))
    parts.append(
        _partial("#status-label", "innerHTML", f'<span data-phase="{update.phase}">{escape(update.label)}</span>')
    )
    if update.reasoning_label:
        parts.append(_partial(f"#msg-{message_id}-reasoning-label", "textContent", escape(update.reasoning_label)))
    parts.append(_partial(f"#msg-{message_id}-progress", "textContent", escape(update.detail)))
    return "".join(parts)


def announcement_html(phase: str, answer_words: int) -> str:
    """Return the screen reader announcement of a phase ('' if silent)."""
    sentence = words.get(f"announce_{phase}", "").format(count=number(answer_words))
    return _partial("#announcer", "textContent", escape(sentence)) if sentence else ""


def _partial(target: str, swap: str, html: str) -> str:
    return f'<hx-partial hx-target="{target}" hx-swap="{swap}">{html}</hx-partial>'

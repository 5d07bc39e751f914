"""Translation of labels of code and alerts: cached HTML is rendered once for all readers, in English."""

from __future__ import annotations

from notso.web.rendering.extensions import ALERTS
from notso.web.values.wording import language, table, words

_LABELS = {
    "copy-code": "code_copy",
    "wrap-code": "code_wrap",
    "preview-code": "code_preview",
    "whole-code": "code_whole",
}


def with_labels(html: str) -> str:
    """Translate the labels in sanitized HTML."""
    if language.get() == "en":
        return html
    for name, word in _LABELS.items():
        # Text cannot contain this, because `<` is escaped in it.
        button = f'<button class="{name}" type="button">'
        html = html.replace(f"{button}{table('en')[word]}</button>", f"{button}{words[word]}</button>")
    for kind in ALERTS:
        title = '<p class="alert-title">{}</p>'
        html = html.replace(title.format(table("en")["alert_" + kind]), title.format(words["alert_" + kind]))
    return html

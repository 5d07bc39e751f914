"""The labels of code blocks in another language: kept HTML, which is made once for all readers, has them in English."""

from __future__ import annotations

from notso.web.values.wording import language, table, words

_LABELS = {
    "copy-code": "code_copy",
    "wrap-code": "code_wrap",
    "preview-code": "code_preview",
    "whole-code": "code_whole",
}


def with_labels(html: str) -> str:
    """Sanitised HTML with its labels in the reader's language. No text can look like them: in it `<` is escaped."""
    if language.get() == "en":
        return html
    for name, word in _LABELS.items():
        button = f'<button class="{name}" type="button">'
        html = html.replace(f"{button}{table('en')[word]}</button>", f"{button}{words[word]}</button>")
    return html

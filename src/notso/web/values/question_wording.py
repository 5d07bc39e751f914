"""What the page says where a call waits for a person: for leave to run, or for values that a tool's server asks for. A
part of the table in wording.py.
"""

from __future__ import annotations

QUESTION_WORDS: dict[str, str] = {
    "permission": "The model asks to use the tool {name} with this:",
    "permission_once": "Allow once",
    "permission_chat": "Allow in this chat",
    "permission_deny": "Deny",
    "error_permission": "This call waits for nobody any more.",
    "question": "The server {server} asks you, for the tool {name}:",
    "question_note": "What you send is read by {server}. It must not ask for passwords or keys: never send any.",
    "question_send": "Send",
    "question_decline": "Decline",
    "question_nothing": "Nothing",
    "question_required": "needed",
    "question_any": "any",
    "question_needed": "{title} is needed.",
    "question_length": "{title} must have {lowest} to {highest} characters.",
    "question_range": "{title} must be from {lowest} to {highest}.",
    "question_choice": "{title} must be one of the choices.",
    "question_choices": "{title}: {lowest} to {highest} of the choices can be taken.",
    "question_number": "{title} must be a number.",
    "question_integer": "{title} must be a whole number.",
    "question_email": "{title} must be an e-mail address.",
    "question_uri": "{title} must be an address, such as https://example.org.",
    "question_date": "{title} must be a date, such as 2026-01-31.",
    "question_date-time": "{title} must be a time with its zone, such as 2026-01-31T12:00:00Z.",
    "error_question": "This question waits for nobody any more.",
}

"""What the page says of many chats, and of what is kept to be used again: marks, archive, prompts, previews, voices."""

from __future__ import annotations

LIBRARY_WORDS: dict[str, str] = {
    "earlier": "{count} earlier messages",
    # marks in the list of chats
    "mark_working": "being answered",
    "mark_waiting": "waiting in line",
    "mark_asking": "waits for you",
    "mark_unread": "new answer",
    "prefer_notify": "Notify me when an answer is ready",
    # chats that are put away, kept for a while, or go on elsewhere
    "archive": "All chats",
    "archive_empty": "There are no chats yet.",
    "archive_this": "Archive this chat",
    "archive_put": "Archive",
    "archive_take": "Take out of the archive",
    "archived": "archived",
    "archive_delete": "Delete",
    "archive_none": "Choose some chats first.",
    "archive_select": "Choose {title}",
    "archive_all": "Choose all",
    "toast_archived": "Archived: {count}.",
    "toast_unarchived": "Taken out of the archive: {count}.",
    "toast_deleted_many": "Chats deleted: {count}.",
    "temporary": "Temporary chat",
    "temporary_note": "Temporary: not listed, not found by searching, deleted an hour after its last use.",
    "temporary_keep": "Keep this chat",
    "branch": "Go on from here in a new chat",
    "branch_title": "{title} (branch)",
    # saved prompts
    "prompts": "Saved prompts",
    "prompts_hint": "Type / and the name in a chat. A message comes into the input, instructions are set for the chat.",
    "prompts_none": "Nothing is saved yet.",
    "prompt_name": "Name",
    "prompt_kind": "What it is",
    "prompt_kind_message": "a message",
    "prompt_kind_instructions": "instructions to the model",
    "prompt_text": "Text",
    "prompt_new": "A new one",
    "error_prompt_name": "A name is 1 to 32 small letters, digits, - or _, and no command: {name} cannot be one.",
    "error_prompt_text": "A prompt has 1 to {limit} characters.",
    "error_prompts": "At most {limit} prompts can be saved.",
    # what a browser can show and say
    "code_preview": "Preview",
    "preview": "Preview",
    "preview_note": "Without scripts and without network.",
    "read_aloud": "Read aloud",
    "dictate": "Dictate",
}

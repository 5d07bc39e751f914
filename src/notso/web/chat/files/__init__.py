"""Chats as files: out, in, and as rows for tuning."""

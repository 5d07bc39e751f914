"""Conversations: turns, their event logs, and the routes that create and watch them."""

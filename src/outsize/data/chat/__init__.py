"""Conversations to text by a chat template, and which of its characters the assistant wrote."""

from outsize.data.chat.chat_template import CHATML_TEMPLATE, FALLBACK_TEMPLATE, TEMPLATES, ChatTemplate

__all__ = ["CHATML_TEMPLATE", "FALLBACK_TEMPLATE", "TEMPLATES", "ChatTemplate"]

"""Branches of a conversation, and how a message list continues one."""

"""A completion taken apart into reasoning, content and tool calls."""

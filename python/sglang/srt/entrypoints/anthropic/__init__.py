"""Anthropic's Messages API, served by way of chat completions."""

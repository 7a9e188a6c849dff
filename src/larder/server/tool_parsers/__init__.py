"""Parsers of tool calls in answers, by the names that vLLM gives them."""

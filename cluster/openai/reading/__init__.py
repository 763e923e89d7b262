"""From what a model writes to what an assistant's message holds: reasoning, content, tool calls.

Readers are incremental: text comes in pieces that are cut anywhere, and however it is cut, the
parts put together are the same.
"""

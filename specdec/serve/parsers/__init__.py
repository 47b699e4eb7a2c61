"""Answers taken apart while they stream: reasoning, content, tool calls. Next: answer_parser.py, which joins them."""

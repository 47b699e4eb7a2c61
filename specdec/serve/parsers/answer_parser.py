"""An answer's text in pieces, taken apart into reasoning, content and tool calls. Next: ../chunks.py, their writer.

Pieces of any size give the same parts: the whole answer in one is how the answer without a stream is made.
"""

from dataclasses import dataclass, field
from typing import Any

from specdec.errors import ConfigError
from specdec.serve.parsers.reasoning import BEGIN, END, NoReasoning, ReasoningTokens, ThinkTags
from specdec.serve.parsers.tools import TOOL_BODIES, NoTools, TaggedTools, ToolDelta

REASONING_PARSERS = ('default', 'deepseek-r1', 'qwen-qwq', 'qwen3')  # all of them: think tags
TOOL_PARSERS = tuple(TOOL_BODIES)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a piece of text brought."""

    content: str = ''
    reasoning: str = ''
    calls: list[ToolDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class AnswerParser:
    def __init__(self, reasoning: ThinkTags | NoReasoning, tools: TaggedTools | NoTools) -> None:
        self._reasoning, self._tools = reasoning, tools

    @property
    def num_calls(self) -> int:
        return self._tools.num_calls

    def push(self, text: str, last: bool = False) -> Parts:
        """`last`: nothing follows, so nothing is held back any more."""
        reasoning, text = self._reasoning.push(text)
        content, calls = self._tools.push(text)
        if not last:
            return Parts(content, reasoning, calls)
        more_reasoning, text = self._reasoning.flush()
        more_content, more_calls = self._tools.push(text)
        final_content, final_calls = self._tools.flush()
        return Parts(
            content + more_content + final_content, reasoning + more_reasoning, calls + more_calls + final_calls
        )


@dataclass(frozen=True, slots=True)
class ParserFactory:
    """Which parsers the server was started with; None takes nothing apart. ConfigError for unknown names."""

    reasoning: str | None = None
    tools: str | None = None

    def __post_init__(self) -> None:
        _choice('reasoning_parser', self.reasoning, REASONING_PARSERS)
        _choice('tool_call_parser', self.tools, TOOL_PARSERS)

    @property
    def is_idle(self) -> bool:
        return self.reasoning is None and self.tools is None

    def parser(self, prompt: str, tools: list[dict[str, Any]] | None) -> AnswerParser | None:
        """For an answer to this rendered prompt; None if there is nothing to take apart."""
        wants_tools = self.tools is not None and bool(tools)
        if self.reasoning is None and not wants_tools:
            return None
        reasoning = NoReasoning() if self.reasoning is None else ThinkTags(opens_reasoning(prompt))
        return AnswerParser(reasoning, TaggedTools(tools, TOOL_BODIES[self.tools]) if wants_tools else NoTools())

    def token_counter(self, prompt: str) -> ReasoningTokens | None:
        return None if self.reasoning is None else ReasoningTokens(opens_reasoning(prompt))


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends inside a reasoning section."""
    return prompt.rstrip().endswith(BEGIN) and not prompt.rstrip().endswith(END)


def _choice(name: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise ConfigError(name, value, 'not served here; one of ' + ', '.join(known))

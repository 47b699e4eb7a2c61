"""What can go wrong, sorted by who has to act. Everything raised on purpose derives from SpecdecError.

ConfigError: the person who starts the engine. RequestError: the person who sends a request; it never
stops the engine. EngineError: the engine itself failed. Next: messages.py, the values these errors name.
"""

from typing import Any


class SpecdecError(Exception):
    """Base of every error that specdec raises on purpose."""


class ConfigError(SpecdecError, ValueError):
    """A setting that cannot be honoured: names the field, the value, and what to do about it."""

    def __init__(self, field: str, value: Any, remedy: str) -> None:
        super().__init__(field, value, remedy)
        self.field, self.value, self.remedy = field, value, remedy

    def __str__(self) -> str:
        return f'{self.field}={short(self.value)}: {self.remedy}'


class CheckpointError(ConfigError):
    """A checkpoint that cannot be read, or does not fit; `field` is the key, tensor or path at fault."""


class RequestError(SpecdecError, ValueError):
    """A request that cannot be served: names the field, the value, and what to do about it.

    `code` is a short machine-readable name (HTTP uses it as the error's `code`).
    """

    def __init__(self, field: str, value: Any, remedy: str, code: str = 'invalid_value') -> None:
        super().__init__(field, value, remedy, code)
        self.field, self.value, self.remedy, self.code = field, value, remedy, code

    def __str__(self) -> str:
        return f'{self.field}={short(self.value)}: {self.remedy}'


class CapacityError(RequestError):
    """The engine is full for now; ask again in `retry_after` seconds (HTTP 429 with Retry-After)."""

    def __init__(self, field: str, value: Any, remedy: str, retry_after: float = 1.0) -> None:
        super().__init__(field, value, remedy, 'rate_limit_exceeded')
        self.args = (field, value, remedy, retry_after)
        self.retry_after = retry_after


class EngineError(SpecdecError):
    """The engine failed while serving; the message carries the cause."""


def short(value: Any, limit: int = 120) -> str:
    """A value as errors show it, on one line."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        text = f'a very large {type(value).__name__}'
    return text if len(text) <= limit else text[: limit - 3] + '...'

"""Which implementation of an operator runs on which device: chosen by name, loaded on first use, never per call.

Every operator lives in its own folder: `__init__.py` states the contract, `ref.py` is plain torch (the CPU path and the
oracle of the tests), other files are named after what they are written in.
"""

import importlib
from collections.abc import Callable
from typing import Any


class Implementations:
    """`Implementations(__name__, cuda='triton')('cuda', 'rms_norm')` is rms_norm of that operator's triton.py."""

    def __init__(self, package: str, **by_device: str) -> None:
        self.package = package
        self.modules = {'cpu': 'ref', 'cuda': 'ref', **by_device}
        self.loaded: dict[tuple[str, str], Callable[..., Any]] = {}

    def __call__(self, device_type: str, function: str) -> Callable[..., Any]:
        key = (device_type, function)
        found = self.loaded.get(key)
        if found is None:
            module = importlib.import_module(f'{self.package}.{self.modules[device_type]}')
            found = self.loaded[key] = vars(module)[function]
        return found

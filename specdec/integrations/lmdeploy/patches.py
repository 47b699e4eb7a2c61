"""Everything the plug-in changes in LMDeploy: one table, each entry guarded by the source of what it replaces.

An LMDeploy that is not 0.18, that has the method itself, or whose sources differ where a patch would go is left alone,
with a message that says why. Next: configs.py and agent.py, which the patches lead to.
"""

import functools
import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger('specdec')

SERVED_VERSION = '0.18.'
MARK = '__specdec_original__'  # attribute of a replacement: what stood there before


@dataclass(frozen=True, slots=True)
class Patch:
    """One symbol of LMDeploy. `owner`: module, or module:Class; `digest`: of the source it must have; `replacement`:
    'module:name' of a function that is given the original, and returns what to put in its place.
    """

    owner: str
    name: str
    digest: str
    replacement: str
    why: str

    @property
    def symbol(self) -> str:
        return f'{self.owner.replace(":", ".")}.{self.name}'

    def current(self) -> Any:
        return found(self.owner, self.name)

    def apply(self) -> None:
        original = self.current()
        module, _, name = self.replacement.partition(':')
        plain = original.__func__ if isinstance(original, staticmethod) else original
        made = functools.wraps(plain)(vars(importlib.import_module(module))[name](plain))
        vars(made)[MARK] = original
        setattr(place(self.owner), self.name, staticmethod(made) if isinstance(original, staticmethod) else made)


def place(owner: str) -> Any:
    """The module, or module:Class, of that name."""
    module, _, name = owner.partition(':')
    there: Any = importlib.import_module(module)
    return vars(there)[name] if name else there


def found(owner: str, name: str) -> Any:
    """What stands there now, as it is stored (a staticmethod object, say)."""
    return vars(place(owner))[name]


_HERE = 'specdec.integrations.lmdeploy'
PATCHES = (
    Patch(
        'lmdeploy.pytorch.engine.config_builder:ConfigBuilder',
        'build_specdecode_config',
        '87add9563a75e20b',
        f'{_HERE}.configs:build_specdecode_config',
        "the draft's checkpoint is read by specdec, in any dialect; the engine learns taps, proposals and cache sizes",
    ),
    Patch(
        'lmdeploy.pytorch.strategies.ar_spec:ARSpecStrategyFactory',
        'build_sampling_strategy',
        'ed9fe5aeb47a1955',
        f'{_HERE}.agent:build_sampling_strategy',
        'histories for penalties come with their true lengths',
    ),
    Patch(
        'lmdeploy.pytorch.engine.model_agent.agent',
        'build_spec_agent',
        '98f1e4977dd5d383',
        f'{_HERE}.agent:build_spec_agent',
        'ranks with a draft get an agent that runs specdec proposers',
    ),
)
# What subclasses and imports of the plug-in take for granted: (owner, name, digest).
RELIED_ON = (
    ('lmdeploy.pytorch.spec_decode.spec_agent:SpecModelAgent', '__init__', '6ce43202e34b94b0'),
    ('lmdeploy.pytorch.spec_decode.spec_agent:SpecModelAgent', '_rejection_sampling', 'e2745a0365be49b3'),
    ('lmdeploy.pytorch.spec_decode.spec_agent:SpecModelAgent', 'async_model_forward', 'eb42a8948a45242d'),
    ('lmdeploy.pytorch.spec_decode.spec_agent:SpecModelAgent', 'build_cache_plan', '54afb715c8f1aebf'),
    ('lmdeploy.pytorch.spec_decode.spec_agent', '_expand_sampling_inputs', '6bb623ecdcf8c9a8'),
    ('lmdeploy.pytorch.engine.logits_process:FusedLogitsProcessor', '__call__', 'a1d470096708d64a'),
    ('lmdeploy.pytorch.strategies.ar.sampling:ARSamplingStrategy', 'make_sampling_inputs', '1970432630eae13e'),
    ('lmdeploy.pytorch.strategies.ar.step_inputs', 'step_sampling_delta', '8182e995adce2418'),
    ('lmdeploy.pytorch.config:SpecDecodeConfig', 'from_config', '7d25f602e9e92ee3'),
)
CLI_PATCHES = (
    Patch(
        'lmdeploy.cli.utils:ArgumentHelper',
        'add_spec_group',
        '9e55194cd3eca090',
        f'{_HERE}.cli:add_spec_group',
        '--speculative-algorithm takes dspark, and --speculative-stock is there',
    ),
    Patch(
        'lmdeploy.cli.cli',
        'get_speculative_config',
        'e45655ef242b1490',
        f'{_HERE}.cli:get_speculative_config',
        "the command line builds the plug-in's SpeculativeConfig",
    ),
    Patch(
        'lmdeploy.cli.serve',
        'get_speculative_config',
        'e45655ef242b1490',
        f'{_HERE}.cli:get_speculative_config',
        "the command line builds the plug-in's SpeculativeConfig",
    ),
)
# Target classes that LMDeploy looks up by architecture, replaced by subclasses that hand out more taps.
TARGETS = {
    'Qwen3ForCausalLM': f'{_HERE}.targets.TappedQwen3ForCausalLM',
    'Qwen3MoeForCausalLM': f'{_HERE}.targets.TappedQwen3MoeForCausalLM',
}


def source_digest(symbol: Callable[..., Any]) -> str:
    """What identifies a function's source: 16 hex digits, '' where there is no source to read."""
    plain = symbol.__func__ if isinstance(symbol, (staticmethod, classmethod)) else symbol
    try:
        text = inspect.getsource(plain)
    except (OSError, TypeError):
        return ''
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def installed(patches: tuple[Patch, ...] = PATCHES) -> bool:
    return all(_is_ours(patch.current()) for patch in patches)


def install(patches: tuple[Patch, ...] = PATCHES) -> bool:
    """Apply the patches, once; False and a warning, and nothing changed, where LMDeploy is not the one they are for."""
    if reason := refusal():
        logger.warning('LMDeploy is left as it is: %s', reason)
        return False
    pending = [patch for patch in patches if not _is_ours(patch.current())]
    strange = [patch.symbol for patch in pending if source_digest(patch.current()) != patch.digest]
    strange += [f'{owner}.{name}' for owner, name, digest in RELIED_ON if source_digest(found(owner, name)) != digest]
    if strange:
        logger.warning('LMDeploy is left as it is: %s is not as in LMDeploy 0.18.0', ', '.join(strange))
        return False
    for patch in pending:
        patch.apply()
    _module_map().update(TARGETS)
    return True


def refusal() -> str | None:
    """Why this LMDeploy cannot be patched; None if it can."""
    try:
        version = importlib.import_module('lmdeploy.version').__version__
    except ModuleNotFoundError:
        return "it is not installed; pip install '.[lmdeploy]' in a checkout of specdec"
    if not version.startswith(SERVED_VERSION):
        return f'its version is {version}, the plug-in is for 0.18'
    proposers = importlib.import_module('lmdeploy.pytorch.spec_decode.proposers.base').SPEC_PROPOSERS
    if 'dspark' in proposers.module_dict:
        return 'it has method dspark itself'
    return None


def _is_ours(symbol: Any) -> bool:
    plain = symbol.__func__ if isinstance(symbol, staticmethod) else symbol
    return MARK in vars(plain)


def _module_map() -> dict[str, str]:
    return importlib.import_module('lmdeploy.pytorch.models.module_map').CUSTOM_MODULE_MAP

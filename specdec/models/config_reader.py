"""config.json, key by key: types, ranges and conflicts are checked where a key is read, and errors name key and file.

Also the parts that targets and drafts share: the rotary embedding and the decoder stack. JSON null counts as absent,
as in Hugging Face configs. Next: checkpoint.py for targets, draft_dialects.py for drafts.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.errors import CheckpointError
from specdec.layers.rotary import RopeConfig
from specdec.models.configs import DecoderConfig

REQUIRED: Any = object()
ROPE_KINDS = ('default', 'linear', 'yarn')
FLOAT_DTYPES = ('float32', 'bfloat16', 'float16')


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """One object of a JSON file: `where` is the file, `prefix` the object's path in it ('dflash_config.', say)."""

    values: Mapping[str, Any]
    where: str
    prefix: str = ''

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, remedy: str) -> CheckpointError:
        return CheckpointError(self.prefix + key, self.values.get(key), f'{remedy} ({self.where})')

    def child(self, key: str) -> 'ConfigReader':
        """The object under `key`; an empty one where it is absent."""
        value = self._read(key, {}, lambda v: isinstance(v, dict), 'expected an object')
        return ConfigReader(value, self.where, f'{self.prefix}{key}.')

    def integer(self, key: str, default: Any = REQUIRED, low: int = 1) -> Any:
        return self._read(key, default, lambda v: _is_integer(v) and v >= low, f'expected an integer >= {low}')

    def number(self, key: str, default: Any = REQUIRED, zero: bool = False) -> Any:
        """A finite number above 0, or at least 0 if `zero` is allowed."""
        return self._read(
            key,
            default,
            lambda v: _is_number(v) and 0 <= v < float('inf') and (zero or v > 0),
            f'expected a number {">=" if zero else ">"} 0',
        )

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        return self._read(key, default, lambda v: isinstance(v, bool), 'expected true or false')

    def text(self, key: str, default: Any = REQUIRED, choices: tuple[str, ...] | None = None) -> Any:
        wanted = 'expected a string' if choices is None else f'served here: {", ".join(choices)}'
        return self._read(key, default, lambda v: isinstance(v, str) and (choices is None or v in choices), wanted)

    def integers(self, key: str, default: Any = REQUIRED, low: int = 0) -> Any:
        """A list of integers >= `low`, as a tuple."""
        value = self._read(
            key,
            default,
            lambda v: isinstance(v, list) and all(_is_integer(i) and i >= low for i in v),
            f'expected a list of integers >= {low}',
        )
        return tuple(value) if isinstance(value, list) else value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above 0, as a tuple."""
        value = self._read(
            key,
            REQUIRED,
            lambda v: isinstance(v, list) and all(_is_number(n) and 0 < n < float('inf') for n in v),
            'expected a list of numbers > 0',
        )
        return tuple(map(float, value))

    def texts(self, key: str, default: Any = REQUIRED) -> Any:
        value = self._read(
            key,
            default,
            lambda v: isinstance(v, list) and all(isinstance(i, str) for i in v),
            'expected a list of strings',
        )
        return tuple(value) if isinstance(value, list) else value

    def _read(self, key: str, default: Any, valid: Callable[[Any], bool], wanted: str) -> Any:
        if not self.has(key):
            if default is REQUIRED:
                raise self.error(key, f'missing; {wanted}')
            return default
        if not valid(value := self.values[key]):
            raise self.error(key, wanted)
        return value


def read_json(path: Path) -> ConfigReader:
    """The object in a JSON file; CheckpointError if it cannot be read or is something else."""
    try:
        values = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        raise CheckpointError('file', str(path), 'not found; name a checkpoint folder that has it') from None
    except OSError as error:
        raise CheckpointError('file', str(path), f'cannot be read: {error.strerror}') from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError('file', str(path), f'not valid JSON: {error}') from None
    if not isinstance(values, dict):
        raise CheckpointError('file', str(path), 'expected a JSON object')
    return ConfigReader(values, str(path))


def pick(key: str, *readers: ConfigReader) -> ConfigReader:
    """The first reader that has `key` (the first of all if none has). Two that disagree are an error: programs in use
    differ in which one they believe."""
    found = [reader for reader in readers if reader.has(key)]
    for other in found[1:]:
        if other.values[key] != found[0].values[key]:
            raise other.error(
                key, f'contradicts {found[0].prefix}{key}={found[0].values[key]!r}; remove the one that is wrong'
            )
    return found[0] if found else readers[0]


def read_decoder(
    reader: ConfigReader,
    head_dim: int | None = None,
    inherited_rope: bool = False,
    partial_rope: float | None = None,
    intermediate: int | None = None,
) -> DecoderConfig:
    """The decoder stack. `head_dim` and `intermediate` stand in for absent keys (None: an error); the others: see
    read_rope.
    """
    if reader.text('hidden_act', 'silu') != 'silu':
        raise reader.error('hidden_act', "only 'silu' is served")
    num_heads = reader.integer('num_attention_heads')
    num_kv_heads = reader.integer('num_key_value_heads')
    if num_heads % num_kv_heads:
        raise reader.error('num_key_value_heads', f'does not divide num_attention_heads={num_heads}')
    head_dim = reader.integer('head_dim', REQUIRED if head_dim is None else head_dim)
    if head_dim % 2:
        raise reader.error('head_dim', 'rotary embeddings need an even head size')
    rope, max_position = read_rope(reader, inherited_rope, partial_rope)
    return DecoderConfig(
        hidden_size=reader.integer('hidden_size'),
        num_layers=reader.integer('num_hidden_layers'),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=reader.integer('intermediate_size', REQUIRED if intermediate is None else intermediate),
        rms_norm_eps=float(reader.number('rms_norm_eps')),
        vocab_size=reader.integer('vocab_size'),
        rope=rope,
        max_position=max_position,
        attention_bias=reader.flag('attention_bias', False),
    )


def read_rope(reader: ConfigReader, inherited: bool = False, partial: float | None = None) -> tuple[RopeConfig, int]:
    """The rotary embedding and the longest position it is meant for, from `rope_parameters` or the older keys.

    A missing theta is an error: libraries assume 1e4 or 1e6, and neither is told by the result. `inherited`: the config
    is a copy of a target's, whose partial_rotary_factor and mrope keys the trained draft never obeyed. `partial`: the
    rotated share of a head where the config states none; None: only full rotation is served.
    """
    max_position = reader.integer('max_position_embeddings')
    scaling = _rope_object(reader)
    if scaling.has('full_attention') or scaling.has('sliding_attention'):
        raise reader.error(scaling.prefix.rstrip('.'), 'one rotary embedding per layer type is not served')
    theta = pick('rope_theta', scaling, reader).number('rope_theta')
    kind_key = 'rope_type' if scaling.has('rope_type') else 'type'
    kind = scaling.text(kind_key, 'default')
    if (inherited or partial is not None) and kind == 'mrope':  # its three axes coincide for text
        kind = 'default'
    if kind not in ROPE_KINDS:
        raise scaling.error(kind_key, f'served here: {", ".join(ROPE_KINDS)}')
    share = 1.0
    if not inherited:
        place = pick('partial_rotary_factor', scaling, reader)
        share = float(place.number('partial_rotary_factor', 1.0 if partial is None else partial))
        if partial is None and share != 1.0:
            raise place.error('partial_rotary_factor', 'only full rotation (1.0) is served')
    if kind == 'default':
        return RopeConfig(theta=float(theta), partial=share), max_position
    if kind == 'linear':
        factor = float(scaling.number('factor'))
        return RopeConfig(theta=float(theta), kind='linear', factor=factor, partial=share), max_position
    rope, max_position = _read_yarn(scaling, reader, float(theta), max_position)
    return replace(rope, partial=share), max_position


def _read_yarn(scaling: ConfigReader, reader: ConfigReader, theta: float, max_position: int) -> tuple[RopeConfig, int]:
    place = pick('original_max_position_embeddings', scaling, reader)
    original = place.integer('original_max_position_embeddings', max_position)
    factor = float(scaling.number('factor', max_position / original))
    rope = RopeConfig(
        theta=theta,
        kind='yarn',
        factor=factor,
        original_max_position=original,
        beta_fast=float(scaling.number('beta_fast', 32.0)),
        beta_slow=float(scaling.number('beta_slow', 1.0)),
        attention_factor=scaling.number('attention_factor', None),
        mscale=scaling.number('mscale', None, zero=True) or None,
        mscale_all_dim=scaling.number('mscale_all_dim', None, zero=True) or None,
        truncate=scaling.flag('truncate', True),
    )
    # Qwen's own instructions add the yarn keys and leave max_position_embeddings as it was.
    extended = int(original * factor) if place.has('original_max_position_embeddings') else 0
    return rope, max(max_position, extended)


def _rope_object(reader: ConfigReader) -> ConfigReader:
    new, old = reader.child('rope_parameters'), reader.child('rope_scaling')
    if new.values and old.values and new.values != old.values:
        raise reader.error('rope_scaling', 'contradicts rope_parameters; remove the one that is wrong')
    return new if new.values or not old.values else old


def read_dtype(*readers: ConfigReader, fallback: Callable[[], str]) -> str:
    """The first 'dtype' or 'torch_dtype' found; `fallback` asks the weights."""
    for reader in readers:
        for key in ('dtype', 'torch_dtype'):
            if reader.has(key):
                name = reader.text(key).removeprefix('torch.')
                if name not in FLOAT_DTYPES:
                    raise reader.error(key, f'served here: {", ".join(FLOAT_DTYPES)}')
                return name
    return fallback()


def refuse_quantised(reader: ConfigReader) -> None:
    """Quantised weights need kernels that are not here; as plain tensors they would load as nonsense."""
    for key in ('quantization_config', 'compression_config'):
        if reader.has(key):
            raise CheckpointError(
                reader.prefix + key,
                _quantisation_name(reader.values[key]),
                f'quantised checkpoints are not served; use the unquantised one ({reader.where})',
            )


def _quantisation_name(value: Any) -> Any:
    return value.get('quant_method', value) if isinstance(value, dict) else value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

"""Checkpoint folders, read once into types: configs from JSON, shapes from headers, tensors one at a time.

Nothing else opens a checkpoint's files, and no pickle (.bin, .pt) is opened at all. Next: draft_dialects.py, what the
many kinds of draft configs mean; weights.py, where tensors go.
"""

import os
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.models.config_reader import (
    ConfigReader,
    read_decoder,
    read_dtype,
    read_json,
    refuse_quantised,
)
from specdec.models.configs import DraftConfig, GenerationDefaults, MoeConfig, Qwen3Config, TargetConfig
from specdec.models.deepseek_v4.config import ARCHITECTURE, DeepseekV4Config, read_deepseek_v4
from specdec.models.deepseek_v4.tensors import plain_tensors, release_name
from specdec.models.draft_dialects import check_fit, draft_name, normalise
from specdec.models.hybrid.config import ARCHITECTURES as HYBRIDS
from specdec.models.hybrid.config import read_hybrid
from specdec.models.tensor_table import FLOATS, TensorInfo, account, draft_tensor_shapes, ignored_draft

Progress = Callable[[int, int], None]
Part = Callable[[str, tuple[int, ...]], tuple[slice, ...] | None]
Header = dict[str, TensorInfo]

SINGLE = 'model.safetensors'
CALIBRATION = 'specdec.json'
INDEX = 'model.safetensors.index.json'
TARGET_ARCHITECTURES = ('Qwen3ForCausalLM', 'Qwen3MoeForCausalLM', *HYBRIDS, ARCHITECTURE)
# Pages of a mapped file count as this process's memory until the mapping closes, so it is closed this often.
MAPPED_BYTES = 256 << 20


def read_config(folder: Path) -> ConfigReader:
    """config.json of a checkpoint folder."""
    if not os.path.isdir(folder):  # unlike Path.is_dir, False also where permission is missing
        raise CheckpointError('folder', str(folder), 'not found or not readable; name a folder that holds config.json')
    return read_json(folder / 'config.json')


def looks_like_draft(folder: Path) -> bool:
    """Whether config.json is a draft's in any dialect, served or not; says nothing about targets' own validity."""
    reader = read_config(folder)
    names = reader.texts('architectures', ())
    return (
        reader.has('speculators_model_type')
        or reader.has('dflash_config')
        or any(name.endswith(('DraftModel', 'DSparkModel')) for name in names)
    )


def read_target(folder: Path) -> TargetConfig:
    """A target's config.json. Raises CheckpointError, naming the key, for anything that is not served."""
    reader = read_config(folder)
    architectures = reader.texts('architectures', ())
    if len(architectures) != 1 or architectures[0] not in TARGET_ARCHITECTURES:
        raise reader.error('architectures', f'targets served here: {", ".join(TARGET_ARCHITECTURES)}')
    if architectures[0] == ARCHITECTURE:
        return read_deepseek_v4(reader, tensor_shapes(folder))
    refuse_quantised(reader)
    if architectures[0] in HYBRIDS:
        return read_hybrid(reader, architectures[0], tensor_shapes(folder), lambda: _stored_dtype(folder))
    sparse = architectures[0] == 'Qwen3MoeForCausalLM'
    # Only the MoE family defines what an absent head_dim means: transformers then splits the hidden size.
    split = reader.integer('hidden_size') // reader.integer('num_attention_heads') if sparse else None
    decoder = read_decoder(reader, head_dim=split)
    return Qwen3Config(
        architecture=architectures[0],
        decoder=decoder,
        windows=_windows(reader, decoder.num_layers, sparse),
        tie_embeddings=reader.flag('tie_word_embeddings', False),
        dtype=read_dtype(reader, fallback=lambda: _stored_dtype(folder)),
        moe=_moe(reader, decoder.num_layers) if sparse else None,
    )


def read_draft(folder: Path, target: TargetConfig | None = None) -> DraftConfig:
    """A draft's config in any dialect, checked against the headers of its weights and, if given, against the target.

    Raises CheckpointError, naming what is at fault.
    """
    config, found = parse_draft(folder)
    if target is not None:
        check_fit(config, target, str(folder))
    account(found, draft_tensor_shapes(config), ignored_draft(config)).check(str(folder))
    return replace(config, confidence_temperatures=read_confidence_temperatures(folder, config))


def read_confidence_temperatures(folder: Path, config: DraftConfig) -> tuple[float, ...] | None:
    """From the draft's specdec.json, which `specdec calibrate` writes; None without one."""
    path = folder / CALIBRATION
    if not os.path.exists(path):
        return None
    reader = read_json(path)
    unknown = sorted(reader.values.keys() - {'confidence_temperatures'})
    if unknown:
        raise reader.error(unknown[0], 'only confidence_temperatures is read from here; remove it')
    temperatures = reader.numbers('confidence_temperatures')
    if not config.has_confidence:
        raise reader.error('confidence_temperatures', 'the draft has no confidence head; remove the file')
    if len(temperatures) != config.num_proposals:
        raise reader.error('confidence_temperatures', f'expected {config.num_proposals}, one per proposal')
    return temperatures


def parse_draft(folder: Path) -> tuple[DraftConfig, dict[str, TensorInfo]]:
    """The config, consistent with the shapes that say something about it, and all headers; no completeness check."""
    reader = read_config(folder)
    if os.path.exists(folder / 'mask_embedding.pt'):
        raise CheckpointError(
            'file',
            str(folder / 'mask_embedding.pt'),
            "a pickle, which is never loaded; store it as tensor 'mask_embedding.weight' [1, hidden] in safetensors",
        )
    found: dict[str, TensorInfo] = {}

    def shapes() -> Mapping[str, TensorInfo]:
        found.update(draft_shapes(folder))
        return found

    return normalise(reader, shapes), found


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """generation_config.json, which may be absent; EOS ids come from config.json where it names none."""
    path = folder / 'generation_config.json'
    reader = read_json(path) if os.path.exists(path) else ConfigReader({}, str(path))
    place = reader if reader.has('eos_token_id') else read_config(folder)
    return GenerationDefaults(
        eos_ids=_eos_ids(place),
        do_sample=reader.flag('do_sample', None),
        temperature=reader.number('temperature', None, zero=True),
        top_k=reader.integer('top_k', None, low=0),
        top_p=reader.number('top_p', None),
        min_p=reader.number('min_p', None, zero=True),
        repetition_penalty=reader.number('repetition_penalty', None),
    )


def tensor_shapes(folder: Path) -> dict[str, TensorInfo]:
    """Name -> (shape, dtype) of every tensor in the folder, from the files' headers alone."""
    return {name: info for header in _headers(folder).values() for name, info in header.items()}


def tensors(
    folder: Path,
    progress: Progress | None = None,
    wanted: Callable[[str], bool] | None = None,
    part: Part | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) for every tensor in the folder, on the CPU, in the file's dtype, one at a time.

    `wanted` leaves the others unread; `part`(name, shape): the index that is to be read of one, None for all of it.
    `progress(done, total)` is called in bytes after each tensor. Headers are all checked before the first tensor.
    """
    headers = {
        path: {name: info for name, info in header.items() if wanted is None or wanted(name)}
        for path, header in _headers(folder).items()
    }
    total = sum(info.num_bytes for header in headers.values() for info in header.values())
    done = 0
    for path, header in headers.items():
        for names in _portions(header):
            with _opened(path) as file:
                for name in names:
                    index = None if part is None else part(name, header[name].shape)
                    yield name, file.get_tensor(name) if index is None else file.get_slice(name)[index]
                    done += header[name].num_bytes
                    if progress is not None:
                        progress(done, total)


def target_tensors(
    folder: Path,
    config: TargetConfig,
    progress: Progress | None = None,
    taken: Container[str] = (),
    part: Part | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """What the target's modules take, under the names that they know; `taken`: those names, where packed weights are
    told from others by their scales; `part` as for tensors, where weights are stored as they are used.
    """
    if isinstance(config, DeepseekV4Config):
        pairs = tensors(folder, progress, lambda name: not _bundled(name))
        return plain_tensors(pairs, tensor_shapes(folder), taken)
    return tensors(folder, progress, part=part)


def bundled_tensors(
    folder: Path, progress: Progress | None = None, taken: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """What the heads bundled in a DeepSeek-V4 checkpoint take; `taken` as above."""
    return plain_tensors(tensors(folder, progress, _bundled), tensor_shapes(folder), taken)


def _bundled(name: str) -> bool:
    return release_name(name).startswith('mtp.')


def draft_shapes(folder: Path) -> dict[str, TensorInfo]:
    """tensor_shapes under the names that all draft dialects share."""
    shapes: dict[str, TensorInfo] = {}
    for stored, info in tensor_shapes(folder).items():
        if (name := draft_name(stored)) in shapes:
            raise CheckpointError(stored, str(folder), f'the file holds {name} under two names; remove one of them')
        shapes[name] = TensorInfo(_as_row(name, info.shape), info.dtype)
    return shapes


def draft_tensors(folder: Path, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
    """tensors() under the names that all draft dialects share."""
    for stored, tensor in tensors(folder, progress):
        name = draft_name(stored)
        yield name, tensor.reshape(_as_row(name, tuple(tensor.shape)))


def _as_row(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    # The override is stored as a one-row embedding by some tools and as a plain vector by others.
    return (1, *shape) if name == 'mask_embedding.weight' and len(shape) == 1 else shape


def _windows(reader: ConfigReader, layers: int, sparse: bool) -> tuple[int | None, ...]:
    window = reader.integer('sliding_window') if reader.flag('use_sliding_window', False) else None
    types = reader.texts('layer_types', None)
    if types is not None and (len(types) != layers or not set(types) <= {'full_attention', 'sliding_attention'}):
        raise reader.error('layer_types', f'expected {layers} entries: full_attention or sliding_attention')
    if window is None:
        if types is not None and 'sliding_attention' in types:
            raise reader.error(
                'use_sliding_window', 'layer_types has sliding layers; set it to true with sliding_window'
            )
        return (None,) * layers
    if types is None:
        # transformers gives the MoE family one mask for all layers, the dense one a full-attention head start.
        first = 0 if sparse else reader.integer('max_window_layers', low=0)
        return tuple(window if layer >= first else None for layer in range(layers))
    if sparse and 'full_attention' in types:
        raise reader.error('layer_types', 'Qwen3-MoE slides in all layers or in none')
    return tuple(window if kind == 'sliding_attention' else None for kind in types)


def _moe(reader: ConfigReader, layers: int) -> MoeConfig:
    local = reader.has('num_local_experts') and not reader.has('num_experts')
    key = 'num_local_experts' if local else 'num_experts'
    experts, active = reader.integer(key), reader.integer('num_experts_per_tok')
    if active > experts:
        raise reader.error('num_experts_per_tok', f'more than {key}={experts}')
    step = reader.integer('decoder_sparse_step', 1)
    dense = reader.integers('mlp_only_layers', ())
    return MoeConfig(
        num_experts=experts,
        experts_per_token=active,
        intermediate_size=reader.integer('moe_intermediate_size'),
        norm_topk=reader.flag('norm_topk_prob', False),
        sparse_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )


def _eos_ids(reader: ConfigReader) -> tuple[int, ...]:
    if isinstance(reader.values.get('eos_token_id'), list):
        return reader.integers('eos_token_id')
    single = reader.integer('eos_token_id', None, low=0)
    return () if single is None else (single,)


def _stored_dtype(folder: Path) -> str:
    stored = sorted({FLOATS[info.dtype] for info in tensor_shapes(folder).values() if info.dtype in FLOATS})
    if len(stored) != 1:
        raise CheckpointError('dtype', stored, f'missing from config.json, and the weights differ ({folder})')
    return stored[0]


def _headers(folder: Path) -> dict[Path, Header]:
    """The safetensors files of a folder and what each holds; complete according to the index if there is one."""
    if not os.path.isdir(folder):
        raise CheckpointError('folder', str(folder), 'not found or not readable; name a checkpoint folder')
    if os.path.isfile(folder / SINGLE):
        return {folder / SINGLE: _header(folder / SINGLE)}
    if os.path.isfile(folder / INDEX):
        return _indexed_headers(folder)
    pickles = sorted(path.name for pattern in ('*.bin', '*.pt', '*.pth') for path in folder.glob(pattern))
    remedy = f'has neither {SINGLE} nor {INDEX}'
    if not pickles:
        remedy += '; add the weights, or name the folder that has them'
    else:
        remedy += f'; {pickles[0]} is a pickle, which is never loaded: convert it to safetensors'
    raise CheckpointError('folder', str(folder), remedy)


def _indexed_headers(folder: Path) -> dict[Path, Header]:
    headers: dict[Path, Header] = {}
    holder: dict[str, Path] = {}
    for shard, promised in sorted(_promises(folder).items()):
        path = folder / shard
        if not os.path.isfile(path):
            raise CheckpointError('file', str(path), f'named in {INDEX} but not there; download it again')
        headers[path] = _header(path)
        if absent := sorted(promised - set(headers[path])):
            raise CheckpointError(absent[0], str(path), f'{INDEX} promises this tensor, the file has none')
        for name in headers[path]:
            if name in holder:
                raise CheckpointError(name, str(path), f'{holder[name].name} holds this tensor too; remove one of them')
            holder[name] = path
    return headers


def _promises(folder: Path) -> dict[str, set[str]]:
    """Shard -> names of the tensors that the index expects in it."""
    reader = read_json(folder / INDEX)
    promises: dict[str, set[str]] = {}
    for name, shard in reader.child('weight_map').values.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f'weight_map.{name}', shard, f'expected a file in the same folder ({reader.where})')
        promises.setdefault(shard, set()).add(name)
    if not promises:
        raise reader.error('weight_map', 'expected an object that maps tensor names to files')
    return promises


def _header(path: Path) -> Header:
    with _opened(path) as file:
        slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118 - not a mapping
        return {name: TensorInfo(tuple(part.get_shape()), part.get_dtype()) for name, part in slices}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework='pt', device='cpu') as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError('file', str(path), _damage(path, error)) from None


def _damage(path: Path, error: Exception) -> str:
    try:
        with path.open('rb') as file:
            pointer = file.read(64).startswith(b'version https://git-lfs')
    except OSError as reason:
        return f'cannot be read: {reason.strerror}'
    if pointer:
        return 'a Git LFS pointer, not the weights; run `git lfs pull` there'
    return f'truncated or damaged ({error}); download it again'


def _portions(header: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    """Names in groups of about MAPPED_BYTES; a larger tensor is a group of its own."""
    group: list[str] = []
    size = 0
    for name, info in header.items():
        if group and size + info.num_bytes > MAPPED_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += info.num_bytes
    if group:
        yield group

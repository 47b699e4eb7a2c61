"""The unmodified LMDeploy 0.18 engine on a CPU: importing this module puts stand-ins where LMDeploy wants a GPU.

LMDeploy always asks for device 'cuda'. Here that word means the CPU, streams and events are empty shells, and paged
attention and cache writes, the only operators without a portable version in LMDeploy, are done in plain torch. All
weights are fp32. Processes that LMDeploy spawns need it too: see processes.py.
"""

import contextlib
import math
import os
from types import SimpleNamespace
from typing import Any

os.environ['LMDEPLOY_ENABLE_CHECK_ENV'] = '0'

import torch
import torch.distributed
from torch import Tensor
from torch.overrides import TorchFunctionMode

GIBIBYTE = 1 << 30


# ---------------------------------------------------------------------------------------------- a GPU that is a CPU
class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Stream(Event):
    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


_STREAM = Stream()
_PROPERTIES = SimpleNamespace(
    major=9, minor=0, multi_processor_count=1, total_memory=8 * GIBIBYTE, uuid='cpu', name='cpu'
)
_STAND_INS = {
    'Stream': Stream,
    'Event': Event,
    'current_stream': lambda *_, **__: _STREAM,
    'stream': lambda _: contextlib.nullcontext(),
    'synchronize': lambda *_, **__: None,
    'empty_cache': lambda *_, **__: None,
    'current_device': lambda: 0,
    'set_device': lambda *_: None,
    'mem_get_info': lambda *_, **__: (GIBIBYTE, 8 * GIBIBYTE),
    'get_device_properties': lambda *_, **__: _PROPERTIES,
    'get_device_name': lambda *_, **__: 'cpu',
    'get_device_capability': lambda *_, **__: (9, 0),
    'device_count': lambda: 8,
}


def _here(value: Any) -> Any:
    if isinstance(value, str) and value.startswith('cuda'):
        return 'cpu'
    if isinstance(value, torch.device) and value.type == 'cuda':
        return torch.device('cpu')
    return value


class CpuInPlaceOfCuda(TorchFunctionMode):
    """Wherever a torch function is told a device, 'cuda' is understood as 'cpu'. Holds for one thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: _here(value) for key, value in (kwargs or {}).items()}
        if kwargs.get('pin_memory'):
            kwargs['pin_memory'] = False
        return func(*map(_here, args), **kwargs)


for name, stand_in in _STAND_INS.items():
    setattr(torch.cuda, name, stand_in)
torch.Tensor.cuda = lambda self, *_, **__: self
torch.Tensor.pin_memory = lambda self, *_, **__: self
torch.Tensor.record_stream = lambda self, *_: None
if not hasattr(torch._C, '_cuda_clearCublasWorkspaces'):
    torch._C._cuda_clearCublasWorkspaces = lambda: None
CpuInPlaceOfCuda().__enter__()


def _gloo(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if 'backend' in kwargs:
            kwargs['backend'] = 'gloo'
        kwargs.pop('device_id', None)
        return function(*args, **kwargs)

    return call


torch.distributed.new_group = _gloo(torch.distributed.new_group)
torch.distributed.init_process_group = _gloo(torch.distributed.init_process_group)

import lmdeploy.pytorch.config
import lmdeploy.pytorch.engine.config_builder
import lmdeploy.pytorch.engine.engine
import lmdeploy.pytorch.kernels.cuda
import lmdeploy.utils
from lmdeploy.pytorch.backends import selector
from lmdeploy.pytorch.backends.attention import AttentionImpl, AttentionMetadata, PagedAttentionBuildSpec
from lmdeploy.pytorch.backends.default import DefaultOpsBackend
from lmdeploy.pytorch.backends.moe import FusedMoEBuildSpec, FusedMoEImpl


# ----------------------------------------------------------------------------------------------------- operators
def fill_kv_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_start_loc: Tensor,
    q_seqlens: Tensor,
    kv_seq_length: Tensor,
    block_offsets: Tensor | None = None,
    **_: Any,
) -> None:
    """Rows of each request to the last places of its first kv_seq_length ones; the table must be wide enough."""
    size = k_cache.shape[1]
    assert block_offsets is not None
    for request, (start, rows, keys) in enumerate(
        zip(q_start_loc.tolist(), q_seqlens.tolist(), kv_seq_length.tolist())
    ):
        positions = torch.arange(keys - rows, keys)
        pages = block_offsets[request][positions // size].long()
        k_cache[pages, positions % size] = key[start : start + rows]
        v_cache[pages, positions % size] = value[start : start + rows]


class CpuAttention(AttentionImpl):
    def __init__(self, spec: PagedAttentionBuildSpec) -> None:
        self.scale = spec.scale or spec.head_dim**-0.5
        self.causal = spec.causal
        window = spec.sliding_window
        window = window[0] if isinstance(window, tuple) else window
        self.window = window if window and window > 0 else None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        attn_metadata: AttentionMetadata,
        **_: Any,
    ) -> Tensor:
        meta = attn_metadata
        if key is not None:
            fill_kv_cache(
                key, value, k_cache, v_cache,
                meta.q_start_loc, meta.q_seqlens, meta.kv_seqlens, block_offsets=meta.block_offsets,
            )  # fmt: skip
        size, out = k_cache.shape[1], query.new_zeros(*query.shape[:2], v_cache.shape[-1])
        lists = meta.q_start_loc.tolist(), meta.q_seqlens.tolist(), meta.kv_seqlens.tolist()
        for request, (start, rows, keys) in enumerate(zip(*lists)):
            pages = meta.block_offsets[request, : -(-keys // size)].long()
            group = query.shape[1] // k_cache.shape[2]
            k = k_cache[pages].flatten(0, 1)[:keys].repeat_interleave(group, 1)
            v = v_cache[pages].flatten(0, 1)[:keys].repeat_interleave(group, 1)
            mine = slice(start, start + rows)
            scores = torch.einsum('qhd,khd->hqk', query[mine].float(), k.float()) * self.scale
            at, there = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)[None]
            hidden = torch.zeros(rows, keys, dtype=torch.bool)
            if self.causal:
                hidden |= there > at
            if self.window is not None:
                hidden |= there < at - self.window
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            out[mine] = torch.einsum('hqk,khd->qhd', weights, v.float()).to(out.dtype)
        return out


class CpuExperts(FusedMoEImpl):
    def __init__(self, spec: FusedMoEBuildSpec) -> None:
        self.renormalize = spec.renormalize

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        gate_up_weights: Tensor,
        down_weights: Tensor,
        *_: Any,
        **__: Any,
    ) -> Tensor:
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        out = torch.zeros_like(hidden_states)
        for expert in range(len(gate_up_weights)):
            rows, choice = torch.where(topk_ids == expert)
            gate, up = (hidden_states[rows] @ gate_up_weights[expert].T).chunk(2, -1)
            mine = (torch.nn.functional.silu(gate) * up) @ down_weights[expert].T
            out.index_add_(0, rows, mine * topk_weights[rows, choice, None])
        return out


class CpuBackend(DefaultOpsBackend):
    @staticmethod
    def get_name() -> str:
        return 'cpu'

    @classmethod
    def build_op(cls, spec: Any, *, enable_deterministic: bool = False) -> Any:
        if isinstance(spec, PagedAttentionBuildSpec):
            return CpuAttention(spec)
        if isinstance(spec, FusedMoEBuildSpec):
            return CpuExperts(spec)
        return super().build_op(spec, enable_deterministic=enable_deterministic)

    @staticmethod
    def get_attention_metadata_cls() -> type:
        return AttentionMetadata

    @classmethod
    def update_step_context(cls, step_context: Any) -> Any:
        step_context.attn_metadata = AttentionMetadata(
            is_decoding=step_context.is_decoding,
            block_offsets=step_context.block_offsets,
            q_start_loc=step_context.q_start_loc,
            q_seqlens=step_context.q_seqlens,
            kv_seqlens=step_context.kv_seqlens,
            quant_policy=step_context.kv_quant_policy,
        )
        return step_context


# ------------------------------------------------------------------------------------------------ LMDeploy's seams
def _float32(update: Any) -> Any:
    def updated(config: Any, dtype: str, device_type: str = 'auto') -> Any:
        config = update(config, dtype, device_type=device_type)
        config.dtype = torch.float32
        return config

    return updated


def _on_cpu(entry: Any) -> Any:
    def run(*args: Any) -> Any:
        with CpuInPlaceOfCuda():
            return entry(*args)

    return run


selector._get_backend = lambda: CpuBackend
lmdeploy.pytorch.kernels.cuda.fill_kv_cache = fill_kv_cache
for module in (lmdeploy.utils, lmdeploy.pytorch.config):
    module.is_bf16_supported = lambda *_, **__: False
for module in (lmdeploy.utils, lmdeploy.pytorch.engine.config_builder):
    module.get_max_batch_size = lambda *_, **__: 4
lmdeploy.pytorch.config._update_torch_dtype = _float32(lmdeploy.pytorch.config._update_torch_dtype)
lmdeploy.pytorch.engine.engine.EngineChecker.handle = lambda self: None

import sys

from lmdeploy import pipeline as _pipeline  # noqa: F401 - makes the module of the same name

_threads = sys.modules['lmdeploy.pipeline']._EventLoopThread
_threads._thread_entry = _on_cpu(_threads._thread_entry)

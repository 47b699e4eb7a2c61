"""Targets and drafts for tests: random checkpoints written by transformers, loaded by the project's own loader."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from specdec.kernels.kv_cache import cache_slots
from specdec.kernels.paged_attention import RowLayout
from specdec.layers.cache_specs import CacheRoom, PagedCache
from specdec.layers.parallel import SINGLE
from specdec.models.checkpoint import draft_tensors, read_draft, read_target, tensors
from specdec.models.draft.block_draft import BlockDraft
from specdec.models.module_map import TARGETS
from specdec.models.target import Rows, TargetModel
from specdec.models.tensor_table import ignored_draft, ignored_target
from specdec.models.weights import WeightLoader

CPU = torch.device('cpu')
SMALL = {
    'vocab_size': 101,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 8,
    'max_position_embeddings': 256,
    'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0},
    'tie_word_embeddings': False,
    'bos_token_id': None,
    'eos_token_id': 100,
    'pad_token_id': None,
}
EXPERTS = {'num_experts': 6, 'num_experts_per_tok': 2, 'moe_intermediate_size': 24, 'decoder_sparse_step': 1}


def random_reference(seed: int = 0, moe: bool = False, **changes: Any) -> Any:
    """A transformers model whose every weight matters: attention is sharp, norms differ from 1, biases from 0."""
    settings = SMALL | (EXPERTS if moe else {}) | changes
    config = Qwen3MoeConfig(**settings) if moe else Qwen3Config(**settings)
    model = (Qwen3MoeForCausalLM if moe else Qwen3ForCausalLM)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith('norm.weight'):
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.5 if 'embed' in name else parameter.shape[-1] ** -0.5))
    return model


@dataclass(frozen=True, slots=True)
class Reference:
    """What transformers says of one prompt: logits [P, V] and the raw residual stream after each layer, -1 first."""

    logits: Tensor
    streams: dict[int, Tensor]


@torch.no_grad()
def reference_outputs(model: Any, ids: Sequence[int]) -> Reference:
    raw: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            raw[layer] = (output[0] if isinstance(output, tuple) else output).reshape(len(ids), -1).clone()

        return hook

    modules = [model.model.embed_tokens, *model.model.layers]
    handles = [module.register_forward_hook(keep(i - 1)) for i, module in enumerate(modules)]
    logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    return Reference(logits, raw)


def load_target(
    folder: Path, taps: tuple[int, ...] = (), dtype: torch.dtype = torch.float32, positions: int = 300
) -> TargetModel:
    config = read_target(folder)
    target = TARGETS[config.architecture](config, taps, positions, SINGLE, dtype, CPU)
    loader = WeightLoader(target.weights(), ignored_target(config), str(folder))
    loader.load(tensors(folder))
    loader.finish()
    return target


def load_draft(
    folder: Path, target_folder: Path, target: TargetModel, dtype: torch.dtype = torch.float32, positions: int = 300
) -> BlockDraft:
    config = read_draft(folder, read_target(target_folder))
    draft = BlockDraft(config, target.embedding, target.head, positions, SINGLE, dtype, CPU)
    loader = WeightLoader(draft.weights(), ignored_draft(config), str(folder))
    loader.load(draft_tensors(folder))
    loader.finish()
    return draft


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one request in a forward: their ids, and whether they are a prompt chunk or decoding rows."""

    request: int
    ids: tuple[int, ...]
    chunk: bool


@dataclass(slots=True)
class PagedRequests:
    """Requests with pages of their own, in no order, all but the used entries filled with garbage."""

    page_size: int
    capacities: tuple[int, ...]
    seed: int = 0
    lengths: list[int] = field(default_factory=list)
    table: Tensor = field(default_factory=lambda: torch.zeros(0))
    num_pages: int = 0

    def __post_init__(self) -> None:
        counts = [-(-capacity // self.page_size) for capacity in self.capacities]
        self.num_pages = 1 + sum(counts)
        pages = list(range(1, self.num_pages))
        random.Random(self.seed).shuffle(pages)
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for request, count in enumerate(counts):
            self.table[request, :count] = torch.tensor([pages.pop() for _ in range(count)])
        self.lengths = [0] * len(counts)

    def cache(self, model: TargetModel | BlockDraft) -> PagedCache:
        cache = model.cache_spec().allocate(CacheRoom(self.num_pages, self.page_size, 1), CPU)
        for pages in (*cache.k, *cache.v):
            pages.fill_(7.0)
        return cache

    def rows(self, pieces: Sequence[Piece]) -> Rows:
        """The packed rows of a forward in which every piece follows what its request has committed."""
        assert [p.chunk for p in pieces] == sorted((p.chunk for p in pieces), reverse=True), 'chunks come first'
        counts = [len(p.ids) for p in pieces]
        requests = torch.tensor([r for r, n in enumerate(counts) for _ in range(n)])
        contexts = torch.tensor([self.lengths[p.request] for p in pieces])
        positions = torch.cat([torch.arange(n) for n in counts]) + contexts[requests]
        table = self.table[[p.request for p in pieces]]
        layout = RowLayout(
            row_offsets=torch.tensor([0, *counts]).cumsum(0),
            contexts=contexts,
            page_table=table,
            chunk_rows=tuple(len(p.ids) for p in pieces if p.chunk),
            tile_rows=max((len(p.ids) for p in pieces if not p.chunk), default=1),
            page_size=self.page_size,
        )
        ids = torch.tensor([i for p in pieces for i in p.ids])
        slots = torch.tensor([1 + p.request for p in pieces])
        return Rows(ids, positions, cache_slots(table, requests, positions, self.page_size), slots, layout)

    def commit(self, request: int, count: int) -> None:
        self.lengths[request] += count

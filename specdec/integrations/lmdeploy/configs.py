"""The plug-in's configs: what users write, and what LMDeploy's engine and workers are given.

Both are subclasses of LMDeploy's own, so that every process that unpickles one imports the plug-in. The draft's
checkpoint is read here, once, by specdec's readers. Next: agent.py, what a worker makes of it.
"""

import copy
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lmdeploy.messages import SpeculativeConfig as HostSpeculativeConfig
from lmdeploy.pytorch.config import CacheConfig, DistConfig, ModelConfig, QuantizationConfig, SpecDecodeConfig
from lmdeploy.utils import get_model
from transformers import PretrainedConfig

from specdec.errors import ConfigError
from specdec.integrations.lmdeploy.patches import TARGETS
from specdec.models.checkpoint import read_draft
from specdec.models.configs import DraftConfig, TargetSizes
from specdec.models.draft_dialects import check_fit

logger = logging.getLogger('specdec')

METHODS = ('dflash', 'dspark')
HOST_METHOD = 'dflash'  # what LMDeploy's own builders know of either: a target with taps, one block per step
EMBEDDING = -1  # as a tap
TAPPED_BY_LMDEPLOY = ('Qwen3_5ForConditionalGeneration', 'Qwen3_5MoeForConditionalGeneration')
STOCK_DRAFT, STOCK_FILTERS, STOCK_SEEDS, STOCK_HISTORY = 'draft', 'filters', 'seeds', 'history'
BEHAVIOURS = (STOCK_DRAFT, STOCK_FILTERS, STOCK_SEEDS, STOCK_HISTORY)


@dataclass
class SpeculativeConfig(HostSpeculativeConfig):
    """LMDeploy's, with two changes. `num_speculative_tokens` None: as many as the draft was trained to propose.
    `stock`: behaviours to leave as LMDeploy has them. 'draft': its own DFlash draft, with its limits; 'filters': top-k,
    top-p and min-p on a step's last row only; 'seeds': drafts tested with a global generator; 'history': penalties and
    minimum lengths that miss tokens.
    """

    num_speculative_tokens: int | None = None
    stock: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stock = tuple(self.stock)
        if unknown := set(self.stock) - set(BEHAVIOURS):
            raise ConfigError('stock', sorted(unknown)[0], f'choose from {", ".join(BEHAVIOURS)}')
        if STOCK_DRAFT in self.stock and self.method != HOST_METHOD:
            raise ConfigError('stock', STOCK_DRAFT, 'LMDeploy has no draft of its own for this method')
        if self.num_speculative_tokens is not None:
            return
        if self.method not in METHODS or STOCK_DRAFT in self.stock:
            self.num_speculative_tokens = HostSpeculativeConfig.num_speculative_tokens
        else:  # settled here, because the server counts drafts by it in a process that never sees the draft
            self.num_speculative_tokens = read_draft(draft_folder(self.model)).default_tokens


@dataclass
class DraftingConfig(SpecDecodeConfig):
    """LMDeploy's, for a draft of specdec's. `positions`: the longest session, and what may be drafted beyond it."""

    draft: DraftConfig | None = None
    positions: int = 0
    stock: tuple[str, ...] = ()


def build_specdecode_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ConfigBuilder.build_specdecode_config: drafts of specdec's kinds are read here, others by LMDeploy."""

    def build(
        target_model: str,
        speculative_config: HostSpeculativeConfig | None,
        engine_config: Any,
        cache_config: CacheConfig,
        dist_config: DistConfig,
        trust_remote_code: bool = False,
    ) -> SpecDecodeConfig | None:
        stock = speculative_config.stock if isinstance(speculative_config, SpeculativeConfig) else ()
        ours = speculative_config is not None and speculative_config.method in METHODS and STOCK_DRAFT not in stock
        if not ours:
            return original(
                target_model, speculative_config, engine_config, cache_config, dist_config, trust_remote_code
            )
        _refuse(engine_config, dist_config)
        target = ModelConfig.from_pretrained(
            target_model,
            trust_remote_code=trust_remote_code,
            dtype=engine_config.dtype,
            dist_config=dist_config,
            spec_method=HOST_METHOD,
            num_spec_tokens=speculative_config.num_speculative_tokens,
            model_format=engine_config.model_format,
            hf_overrides=engine_config.hf_overrides,
            device_type=cache_config.device_type,
            block_size=cache_config.block_size,
        )
        folder = draft_folder(speculative_config.model, engine_config)
        draft = read_draft(folder)
        check_draft(draft, target, speculative_config, folder)
        num_drafts = speculative_config.num_speculative_tokens
        session_len = engine_config.session_len or target.llm_config.max_position_embeddings
        logger.info('%s: %d drafts a step, block of %d, taps %s', folder, num_drafts, draft.block_rows, draft.taps)
        return DraftingConfig(
            model=str(folder),
            method=HOST_METHOD,
            cache_config=draft_cache(cache_config),
            num_speculative_tokens=num_drafts,
            model_config=draft_model_config(draft, target, dist_config, cache_config.block_size),
            dist_config=copy.deepcopy(dist_config),
            target_layer_ids=draft.taps,
            mask_token_id=draft.mask_id,
            draft=draft,
            positions=session_len + max(2 * (num_drafts + 1), draft.block_rows),
            stock=stock,
        )

    return build


def draft_folder(model: str, engine_config: Any = None) -> Path:
    """Where the draft lies, fetched as LMDeploy fetches models where it is no folder."""
    if not model:
        raise ConfigError('model', model, 'name a draft checkpoint; bundled drafts are not served through LMDeploy')
    if os.path.isdir(model):
        return Path(model)
    where = (None, None) if engine_config is None else (engine_config.download_dir, engine_config.revision)
    return Path(get_model(model, *where))


def check_draft(draft: DraftConfig, target: ModelConfig, speculative: HostSpeculativeConfig, folder: Path) -> None:
    """ConfigError unless method, tokens and target are this draft's."""
    if draft.kind != speculative.method:
        raise ConfigError('method', speculative.method, f"{folder} is a {draft.kind} draft; use '{draft.kind}'")
    tokens = speculative.num_speculative_tokens
    if not 1 <= tokens <= draft.num_proposals:
        raise ConfigError('num_speculative_tokens', tokens, f'this draft proposes 1 to {draft.num_proposals} tokens')
    (architecture, *_) = target.hf_config.architectures
    if architecture not in (*TARGETS, *TAPPED_BY_LMDEPLOY):
        served = ', '.join((*TARGETS, *TAPPED_BY_LMDEPLOY))
        raise ConfigError('architectures', architecture, f'LMDeploy does not hand out its taps; served: {served}')
    if EMBEDDING in draft.taps and architecture not in TARGETS:
        raise ConfigError('target_layer_ids', EMBEDDING, f"LMDeploy's {architecture} cannot hand out its embedding")
    text = target.llm_config
    check_fit(draft, TargetSizes(text.hidden_size, text.vocab_size, text.num_hidden_layers), str(folder))


def _refuse(engine_config: Any, dist_config: DistConfig) -> None:
    for field, value in (('dp', dist_config.dp), ('ep', dist_config.ep)):
        if value != 1:
            raise ConfigError(field, value, 'drafts are served by one engine, tensor parallel or not; use 1')
    if int(engine_config.quant_policy):
        raise ConfigError('quant_policy', engine_config.quant_policy, 'LMDeploy verifies from plain caches only; use 0')
    if engine_config.empty_init:
        raise ConfigError('empty_init', True, "the draft's weights come from its folder; use False")


def draft_model_config(draft: DraftConfig, target: ModelConfig, dist: DistConfig, block_size: int) -> ModelConfig:
    """What LMDeploy's cache planning asks of a draft. fp16 targets get bf16 drafts: fused taps overflow fp16."""
    decoder = draft.decoder
    sharded = {
        'num_attention_heads': decoder.num_heads,
        'num_key_value_heads': decoder.num_kv_heads,
        'intermediate_size': decoder.intermediate_size,
    }
    for field, size in sharded.items():
        if size % dist.attn_tp:
            raise ConfigError('tp', dist.attn_tp, f"does not divide the draft's {field}={size}")
    described = PretrainedConfig(
        architectures=['SpecdecDraft'],
        hidden_size=decoder.hidden_size,
        num_hidden_layers=decoder.num_layers,
        num_attention_heads=decoder.num_heads,
        num_key_value_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        vocab_size=decoder.vocab_size,
    )
    config = ModelConfig(
        hidden_size=decoder.hidden_size,
        num_layers=decoder.num_layers,
        num_attention_heads=decoder.num_heads,
        num_key_value_heads=decoder.num_kv_heads,
        bos_token_id=None,
        eos_token_id=[],
        head_dim=decoder.head_dim,
        k_head_dim=decoder.head_dim,
        v_head_dim=decoder.head_dim,
        dtype=torch.bfloat16 if target.dtype == torch.float16 else target.dtype,
        vocab_size=decoder.vocab_size,
        hf_config=described,
        llm_config=described,
        dist_config=copy.deepcopy(dist),
        quant_config=QuantizationConfig(),
    )
    config.block_size = block_size  # not a field, but what ModelConfig.from_pretrained leaves there as well
    return config


def draft_cache(target: CacheConfig) -> CacheConfig:
    """The draft's pages: as many and as large as the target's, under the same numbers."""
    return CacheConfig(
        max_batches=target.max_batches,
        block_size=target.block_size,
        kernel_block_size=target.kernel_block_size,
        num_cpu_blocks=target.num_cpu_blocks,
        num_gpu_blocks=target.num_gpu_blocks,
        cache_max_entry_count=target.cache_max_entry_count,
        max_prefill_token_num=target.max_prefill_token_num,
        cudagraph_capture_batch_sizes=target.cudagraph_capture_batch_sizes,
        device_type=target.device_type,
        migration_backend=target.migration_backend,
    )

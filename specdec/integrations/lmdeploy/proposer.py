"""What LMDeploy's agent asks for drafts: its step is translated into specdec's, and the draft loaded beside a target.

Context of every verified row is written, rejected rows too: they lie behind the length that the next block sees, and
are overwritten before it grows over them. That context depends on nothing but the prefix, so LMDeploy's prefix cache
holds it as it holds the target's. Next: draft_runner.py.
"""

from pathlib import Path
from typing import Any

import torch
from lmdeploy.pytorch.distributed import get_dist_manager
from lmdeploy.pytorch.engine.cache_engine import CacheEngine
from lmdeploy.pytorch.model_inputs import ModelInputs, StepContextManager
from lmdeploy.pytorch.spec_decode.proposers.base import BaseSpecProposer, ProposalContext, ProposalMethod
from lmdeploy.pytorch.strategies.ar_spec.model_agent import ARSpecExtraInputs
from torch import Tensor, nn

from specdec.errors import ConfigError
from specdec.integrations.lmdeploy.configs import DraftingConfig
from specdec.integrations.lmdeploy.draft_runner import DraftModule, HostRows, even_rows
from specdec.layers.cache_specs import PagedCache
from specdec.layers.embedding import Head, Table
from specdec.layers.parallel import SINGLE, ParallelGroup
from specdec.models.checkpoint import draft_tensors
from specdec.models.draft.block_draft import BlockDraft
from specdec.models.tensor_table import ignored_draft
from specdec.models.weights import WeightLoader
from specdec.spec_decode.proposers import PROPOSERS


class HostProposer(BaseSpecProposer):
    """`model` is a DraftModule once built, a DraftRunner once the agent has wrapped it."""

    proposal_method = ProposalMethod.DIFFUSION  # LMDeploy's word for a proposer that is asked once per step

    def build_model(self, empty_init: bool, target_model: nn.Module | None = None, build_model_ctx: Any = None) -> None:
        if empty_init:
            raise ConfigError('empty_init', True, "the draft's weights come from its folder; sleep at level 1 only")
        assert target_model is not None, 'the target is built first'
        config: DraftingConfig = self.specdecode_config
        draft = load_draft(config, target_model, parallel_group(), torch.device(self.device))
        proposer = PROPOSERS[config.draft.kind](draft, config.num_speculative_tokens)
        self.model = DraftModule(proposer, config.positions, StepContextManager(build_model_ctx))
        self.target_model = target_model

    def get_target_hidden_size(self, model_config: Any) -> int:
        return model_config.hidden_size * len(self.specdecode_config.target_layer_ids)

    async def propose(
        self,
        model_inputs: ModelInputs,
        extra_inputs: ARSpecExtraInputs,
        sampling_inputs: Any,  # noqa: ARG002 - drafts are drawn greedily
        proposal_ctx: ProposalContext | None = None,
    ) -> ARSpecExtraInputs:
        """Absorb the step's rows and draft behind them; behind an unfinished prompt the drafts are zeros."""
        assert proposal_ctx is not None, 'the agent hands over its caches'
        return ARSpecExtraInputs(
            output_draft_token_ids=self.draft(model_inputs, extra_inputs, proposal_ctx.cache_engine),
            next_token_ids=extra_inputs.next_token_ids,
            num_rejected_tokens=extra_inputs.num_rejected_tokens,
            output_token_ids=extra_inputs.output_token_ids,
            logprobs=extra_inputs.logprobs,
        )

    @torch.inference_mode()
    def draft(self, inputs: ModelInputs, extra: ARSpecExtraInputs, cache_engine: CacheEngine) -> Tensor:
        """Drafts [B, K] int64 behind a step of LMDeploy's."""
        rows = host_rows(inputs, extra, draft_pages(cache_engine))
        if inputs.is_decoding:
            return self.model.decode(rows)
        unfinished = inputs.is_chunk and not inputs.is_last_chunk
        drafts = self.model(rows, drafting=not unfinished)
        return rows.anchors.new_zeros(len(rows.anchors), self.num_speculative_tokens) if drafts is None else drafts

    def warm_up(self, max_batches: int, taps_dtype: torch.dtype, cache_engine: CacheEngine) -> None:
        """Run a prompt, then capture decode steps; all of it on page 0, which is nobody's."""
        config: DraftingConfig = self.specdecode_config
        device, cache = torch.device(self.device), draft_pages(cache_engine)
        width = len(config.draft.taps) * config.draft.target_hidden_size
        rows_each = self.num_speculative_tokens + 1
        like = nobody(min(max_batches, 2), rows_each, width, taps_dtype, device, cache)
        self.model(like)
        self.model.capture(self.model.get_capture_batch_sizes(), like, rows_each)


def host_rows(inputs: ModelInputs, extra: ARSpecExtraInputs, cache: PagedCache) -> HostRows:
    """LMDeploy's step, its verdict in `extra`, without a look at the device's numbers."""
    taps = extra.target_hidden_states[0]
    batch, device = inputs.seq_length.shape[0], taps.device
    if inputs.is_decoding:
        requests, row_offsets = even_rows(batch, inputs.max_q_seqlen, device)
    else:
        row_offsets = torch.nn.functional.pad(inputs.seq_length.cumsum(0), (1, 0))
        numbers = torch.arange(batch, device=device)
        requests = numbers.repeat_interleave(inputs.seq_length, output_size=taps.shape[0])
    committed = inputs.seq_length
    if extra.num_rejected_tokens is not None:
        committed = committed - extra.num_rejected_tokens
    return HostRows(
        taps=taps,
        requests=requests,
        row_offsets=row_offsets,
        history=inputs.history_lengths,
        committed=committed,
        anchors=extra.next_token_ids,
        page_table=inputs.block_offsets,
        cache=cache,
    )


def nobody(
    batch: int, rows_each: int, width: int, dtype: torch.dtype, device: torch.device, cache: PagedCache
) -> HostRows:
    """Rows that belong to no request."""
    requests, row_offsets = even_rows(batch, rows_each, device)
    zeros = torch.zeros(batch, dtype=torch.int64, device=device)
    return HostRows(
        taps=torch.zeros(batch * rows_each, width, dtype=dtype, device=device),
        requests=requests,
        row_offsets=row_offsets,
        history=zeros,
        committed=zeros + rows_each,
        anchors=zeros,
        page_table=torch.zeros(batch, 1, dtype=torch.int32, device=device),
        cache=cache,
    )


def draft_pages(cache_engine: CacheEngine) -> PagedCache:
    """LMDeploy's allocation for the draft, which has the shape of ours."""
    layers = cache_engine.gpu_cache
    assert all(pages.is_contiguous() for layer in layers for pages in layer), 'kernels address entries by number'
    return PagedCache(tuple(layer[0] for layer in layers), tuple(layer[1] for layer in layers))


def parallel_group() -> ParallelGroup:
    """The ranks that share the draft's layers, those of the target's attention."""
    context = get_dist_manager().current_context()
    size = context.dist_config.attn_tp
    return SINGLE if size == 1 else ParallelGroup(context.attn_tp_group.rank, size, context.attn_tp_group.gpu_group)


def load_draft(config: DraftingConfig, target: nn.Module, group: ParallelGroup, device: torch.device) -> BlockDraft:
    """The draft in device memory, sharing the target's embedding and head where its file does not differ."""
    vocabulary, hidden = config.draft.decoder.vocab_size, config.draft.target_hidden_size
    embedding, head = target.get_input_embeddings().weight, target.lm_head.weight
    for field, weight in (('embed_tokens', embedding), ('lm_head', head)):
        if tuple(weight.shape) != (vocabulary, hidden) or not weight.is_floating_point():
            raise ConfigError(field, tuple(weight.shape), f'a draft needs the whole of it, {(vocabulary, hidden)}')
    folder = Path(config.model)
    draft = BlockDraft(
        config.draft, Table(embedding), Head(Table(head)), config.positions, group, config.model_config.dtype, device
    )
    loader = WeightLoader(draft.weights(), ignored_draft(config.draft), str(folder))
    loader.load(draft_tensors(folder))
    loader.finish()
    return draft

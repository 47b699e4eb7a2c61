"""LMDeploy's speculative agent with a draft of specdec's in it: one per rank, built with the target, asked every step.

What the agent does for a target's verdict (verdict.py) and for drafts (proposer.py) stands there; here is how LMDeploy
builds, warms up and resets it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lmdeploy.pytorch.config import BackendConfig, CacheConfig, MiscConfig, ModelConfig, SpecDecodeConfig
from lmdeploy.pytorch.distributed import DistContext
from lmdeploy.pytorch.engine.cache_engine.layout import ContiguousBlockCacheLayout
from lmdeploy.pytorch.engine.logits_process import FusedLogitsProcessor, SamplingInputs
from lmdeploy.pytorch.model_inputs import ModelInputs
from lmdeploy.pytorch.spec_decode.spec_agent import SpecModelAgent, _expand_sampling_inputs
from lmdeploy.pytorch.strategies.ar_spec.model_agent import ARSpecExtraInputs
from torch import Tensor

from specdec.integrations.lmdeploy.configs import BEHAVIOURS, STOCK_DRAFT, STOCK_HISTORY, DraftingConfig
from specdec.integrations.lmdeploy.draft_runner import DraftRunner
from specdec.integrations.lmdeploy.history import ExactSamplingStrategy, RecentTokens, penalised_ids, prompt_history
from specdec.integrations.lmdeploy.proposer import HostProposer
from specdec.integrations.lmdeploy.verdict import Rows, draw, drawing_rows, logprobs_of, processed


class DraftingAgent(SpecModelAgent):
    def __init__(self, specdecode_config: DraftingConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(specdecode_config, *args, **kwargs)
        # LMDeploy has just made its own proposer for the method, an empty shell until build_model.
        self.proposer = HostProposer(specdecode_config, device=self.device)
        self.proposer.guided_helper = self.guided_helper

        self.recent = RecentTokens()

    async def _rejection_sampling(
        self, model_inputs: ModelInputs, extra_inputs: ARSpecExtraInputs, sampling_inputs: SamplingInputs
    ) -> ARSpecExtraInputs:
        """LMDeploy's step from target logits to verdict, with verdict.py's rules for what tokens are drawn."""
        stock = self.specdecode_config.stock
        unfinished = model_inputs.is_chunk and not model_inputs.is_last_chunk
        if model_inputs.is_dummy or unfinished or set(BEHAVIOURS) - {STOCK_DRAFT} <= set(stock):
            return await super()._rejection_sampling(model_inputs, extra_inputs, sampling_inputs)
        decoding = model_inputs.is_decoding
        rows_each = self.num_spec_tokens + 1 if decoding else 1
        history, lengths = model_inputs.history_lengths, model_inputs.seq_length
        rows = drawing_rows(history, lengths, decoding, rows_each)
        settings = _expand_sampling_inputs(sampling_inputs, rows_each)
        drafts = extra_inputs.output_draft_token_ids
        sequences = [context['seq_id'] for context in sampling_inputs.session_ctx]
        if STOCK_HISTORY not in stock:
            self._with_history(settings, sampling_inputs, sequences, model_inputs, drafts, rows_each)

        helper = self.guided_helper
        helper.cleanup_sessions(sampling_inputs.session_to_cleanup)
        grammars = helper.get_processors(sampling_inputs.session_ctx, sampling_inputs.response_formats)
        scores, raw = await processed(extra_inputs.target_logits, settings, self.misc_config.logprobs_mode)
        if decoding:
            blocks = scores.view(rows.batch, rows_each, -1)
            await helper.apply_serial_bitmask(blocks, grammars, drafts, self.num_spec_tokens)
        else:
            helper.apply_bitmask(scores, await helper.prepare_bitmask(scores, grammars))
        next_tokens, tokens, rejected = self._verdict(scores, settings, rows, drafts, decoding)
        await helper.accept_rejection_sampled_tokens(grammars, rejected, tokens, next_tokens, rows_each - 1)

        self.recent.note(sequences, tokens)
        if decoding and STOCK_HISTORY not in stock:
            # LMDeploy takes one off for the step; the other tokens of the step count as well.
            emitted = rows_each - rejected
            sampling_inputs.num_ignore_eos = sampling_inputs.num_ignore_eos - (emitted - 1)
        return extra_inputs.clone(
            next_token_ids=next_tokens,
            last_token_indices=lengths.cumsum(0) - 1 - rejected,
            num_rejected_tokens=rejected,
            output_token_ids=tokens,
            target_logits=None,
            logprobs=logprobs_of(raw, tokens, sampling_inputs.max_num_logprobs),
        )

    @torch.inference_mode()
    def _verdict(
        self,
        scores: Tensor,
        settings: SamplingInputs,
        rows: Rows,
        drafts: Tensor | None,
        decoding: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Next tokens [B], emitted tokens [B, n] (NO_ID behind the last), rejected drafts [B]."""
        drawn = draw(scores, settings, rows, self.specdecode_config.stock)
        if not decoding:
            drawn = FusedLogitsProcessor(settings).sampling(scores) if drawn is None else drawn
            return drawn, drawn[:, None], torch.zeros_like(drawn)
        if drawn is None:
            blocks = scores.view(rows.batch, rows.rows_each, -1)
            tokens, rejected, next_tokens = self.rejection_sampler(blocks, drafts, settings)
        else:
            # Every row has its token already; LMDeploy's greedy comparison does the rest.
            picked = drawn.view(rows.batch, rows.rows_each)
            tokens, rejected, next_tokens = self.rejection_sampler._impl.forward_greedy(picked, drafts)
        return next_tokens, tokens, rejected

    @torch.inference_mode()
    def _with_history(
        self,
        settings: SamplingInputs,
        sampling_inputs: SamplingInputs,
        sequences: Sequence[int],
        model_inputs: ModelInputs,
        drafts: Tensor | None,
        rows_each: int,
    ) -> None:
        """Give each row its own past: ids for the repetition penalty, tokens until a stop is allowed."""
        step = torch.arange(rows_each, device=settings.num_ignore_eos.device).repeat(len(sequences))
        settings.num_ignore_eos = settings.num_ignore_eos - step
        known = sampling_inputs.generated_ids
        if settings.repetition_penalty is None or settings.max_repetition_ngram_size:
            return
        if model_inputs.is_decoding:
            anchors = model_inputs.input_ids.view(len(sequences), rows_each)[:, 0]
            recent = self.recent.of(sequences, known.device)
            settings.generated_ids = penalised_ids(known, recent, anchors, drafts)
        else:
            settings.generated_ids, settings.repetition_penalty = prompt_history(known, settings.repetition_penalty)

    def reset_runtime_state(self) -> None:
        super().reset_runtime_state()
        self.recent.clear()

    def build_cache_plan(self, cache_config: CacheConfig | None) -> int:
        """The draft's pages in a tensor per kind, which specdec's kernels expect; LMDeploy would lay keys and values of
        a page side by side. Returns bytes per page.
        """
        super().build_cache_plan(cache_config)
        if self.block_cache_plan is None:
            return 0
        layout = ContiguousBlockCacheLayout(self.block_cache_plan.tensor_specs, self.model_config.num_layers)
        self.block_cache_plan = replace(self.block_cache_plan, layout=layout)
        return self.block_cache_plan.logical_block_nbytes

    def build_graph_runner(self) -> None:
        with self.draft_context():
            self.proposer.model = DraftRunner(
                self.proposer.model,
                model_config=self.model_config,
                cache_config=self.cache_config,
                backend_config=self.backend_config,
                device=self.device,
            )

    @torch.inference_mode()
    def warmup(self, max_batches: int, target_model_config: ModelConfig) -> None:
        """Compile what prompts need, and capture the decode graphs."""
        with self.draft_context():
            self.proposer.warm_up(max_batches, target_model_config.dtype, self.cache_engine)


def build_spec_agent(original: Callable[..., Any]) -> Callable[..., Any]:
    """For LMDeploy's build_spec_agent: every rank gets a draft, since drafts are sharded as targets are."""

    def build(
        specdecode_config: SpecDecodeConfig | None,
        backend_config: BackendConfig,
        dist_ctx: DistContext,
        inputs_strategy: Any,
        agent_strategy: Any,
        misc_config: MiscConfig,
        device: str = 'cuda',
        guided_decoding_manager: Any = None,
    ) -> Any:
        common = {'misc_config': misc_config, 'device': device, 'guided_decoding_manager': guided_decoding_manager}
        if not isinstance(specdecode_config, DraftingConfig):
            return original(specdecode_config, backend_config, dist_ctx, inputs_strategy, agent_strategy, **common)
        return DraftingAgent(
            specdecode_config, backend_config, inputs_strategy, agent_strategy, dist_ctx=dist_ctx, **common
        )

    return build


def build_sampling_strategy(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ARSpecStrategyFactory.build_sampling_strategy: histories with their true lengths, for drafts of ours."""

    def build(factory: Any) -> Any:
        config = factory.specdecode_config
        if not isinstance(config, DraftingConfig) or STOCK_HISTORY in config.stock:
            return original(factory)
        return ExactSamplingStrategy(factory.pad_token_id, num_spec_tokens=config.num_speculative_tokens)

    return build

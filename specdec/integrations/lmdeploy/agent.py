"""LMDeploy's speculative agent with a draft of specdec's in it: one per rank, built with the target, asked every step.

What the agent does for a target's verdict (verdict.py) and for drafts (proposer.py) stands there; here is how LMDeploy
builds, warms up and resets it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lmdeploy.pytorch.config import BackendConfig, CacheConfig, MiscConfig, ModelConfig, SpecDecodeConfig
from lmdeploy.pytorch.distributed import DistContext
from lmdeploy.pytorch.engine.cache_engine.layout import ContiguousBlockCacheLayout
from lmdeploy.pytorch.spec_decode.spec_agent import SpecModelAgent

from specdec.integrations.lmdeploy.configs import DraftingConfig
from specdec.integrations.lmdeploy.draft_runner import DraftRunner
from specdec.integrations.lmdeploy.proposer import HostProposer


class DraftingAgent(SpecModelAgent):
    def __init__(self, specdecode_config: DraftingConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(specdecode_config, *args, **kwargs)
        # LMDeploy has just made its own proposer for the method, an empty shell until build_model.
        self.proposer = HostProposer(specdecode_config, device=self.device)
        self.proposer.guided_helper = self.guided_helper

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

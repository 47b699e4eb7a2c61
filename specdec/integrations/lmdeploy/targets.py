"""LMDeploy's targets where they hand out too few taps: subclasses, looked up by architecture in their place.

Without speculation they are LMDeploy's own. Taps: 0-based layers, after which the residual stream is read; -1 is the
embedding's output.
"""

from typing import Any

import torch
from lmdeploy.pytorch.models.patch import get_build_model_context
from lmdeploy.pytorch.models.qwen3 import Qwen3ForCausalLM
from lmdeploy.pytorch.models.qwen3_moe import Qwen3MoeForCausalLM
from torch import Tensor, nn

from specdec.integrations.lmdeploy.configs import EMBEDDING

HIDDEN, TAPS = 'hidden_states', 'aux_hidden_states'  # LMDeploy's names of a target's outputs


class TappedQwen3ForCausalLM(Qwen3ForCausalLM):
    """Qwen3, which has all taps but the embedding's."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: list[list[Tensor]],
        attn_metadata: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | dict[str, Tensor]:
        if EMBEDDING not in self.model.aux_hidden_state_layers:
            return super().forward(input_ids, position_ids, past_key_values, attn_metadata, inputs_embeds, **kwargs)
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        first = inputs_embeds.clone()  # LMDeploy's layers add into their input where they can
        output = super().forward(input_ids, position_ids, past_key_values, attn_metadata, inputs_embeds, **kwargs)
        if isinstance(output, Tensor):
            return {HIDDEN: output, TAPS: first}
        return {**output, TAPS: torch.cat([first, output[TAPS]], -1)}


class TappedQwen3MoeForCausalLM(Qwen3MoeForCausalLM):
    """Qwen3-MoE, which has no taps in LMDeploy: its layers are watched while they run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taps: tuple[int, ...] = get_build_model_context().spec_model_ctx.target_aux_hidden_state_layers
        self._tapped: list[Tensor] = []
        for layer in self.taps:
            if layer == EMBEDDING:
                self.model.embed_tokens.register_forward_hook(self._keep_embedding)
            else:
                self.model.layers[layer].register_forward_hook(self._keep_stream)

    def _keep_embedding(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self._tapped.append(output.clone())

    def _keep_stream(self, _module: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        hidden, residual = output
        self._tapped.append(hidden + residual)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | dict[str, Tensor]:
        self._tapped.clear()
        output = super().forward(*args, **kwargs)
        if not self.taps:
            return output
        taps = torch.cat(self._tapped, -1)
        self._tapped.clear()
        return {**({HIDDEN: output} if isinstance(output, Tensor) else output), TAPS: taps}

    def get_outputs_cudagraph(
        self, output_buffers: dict[str, Tensor], input_ids: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        """What a captured step leaves, without the rows of nobody."""
        outputs = super().get_outputs_cudagraph(output_buffers, input_ids, **kwargs)
        if TAPS in output_buffers:
            outputs[TAPS] = output_buffers[TAPS][:, : input_ids.size(-1)]
        return outputs

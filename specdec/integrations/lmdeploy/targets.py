"""LMDeploy's targets where they hand out too few taps: subclasses, looked up by architecture in their place.

Without speculation they are LMDeploy's own. Taps: 0-based layers, after which the residual stream is read; -1 is the
embedding's output.
"""

from typing import Any

import torch
from lmdeploy.pytorch.models.qwen3 import Qwen3ForCausalLM
from torch import Tensor

EMBEDDING = -1


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
        # LMDeploy's layers add into their input where they can.
        first = inputs_embeds.clone()
        output = super().forward(input_ids, position_ids, past_key_values, attn_metadata, inputs_embeds, **kwargs)
        if isinstance(output, Tensor):
            return {'hidden_states': output, 'aux_hidden_states': first}
        return {**output, 'aux_hidden_states': torch.cat([first, output['aux_hidden_states']], -1)}

"""The weights that mix residual streams around a sublayer, or into one at the end."""

import torch

from specdec.kernels.hyper_connections import MixWeights
from specdec.layers.weights import Destination
from specdec.models.deepseek_v4.config import DeepseekV4Config


class HyperConnection:
    """`mix` of a sublayer: 2 N + N N outputs and three scales; of a `head`: N outputs and one scale. All fp32."""

    def __init__(self, config: DeepseekV4Config, device: torch.device, head: bool = False) -> None:
        n = config.streams
        outputs = n if head else (2 + n) * n

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self.mix = MixWeights(
            fn=empty(outputs, n * config.hidden_size),
            base=empty(outputs),
            scale=empty(1 if head else 3),
            norm_eps=config.rms_norm_eps,
            eps=config.hc_eps,
            iterations=config.sinkhorn_iterations,
        )

    def weights(self, name: str) -> dict[str, Destination]:
        tensors = {'fn': self.mix.fn, 'base': self.mix.base, 'scale': self.mix.scale}
        return {f'{name}_{key}': Destination(t, tuple(t.shape)) for key, t in tensors.items()}

"""Attention with one latent head, low-rank queries and a grouped output projection.

The latent row is key and value at once; since it is rotated, the output is rotated back at the query's position.
"""

import torch
from torch import Tensor

from specdec.kernels.linear import linear
from specdec.kernels.ring import Sources, ring_write
from specdec.kernels.sink_attention import Compressed, sink_attention
from specdec.layers.weights import Destination
from specdec.models.deepseek_v4.caches import LayerCache
from specdec.models.deepseek_v4.compressor import Compressor, Indexer
from specdec.models.deepseek_v4.config import DeepseekV4Config
from specdec.models.deepseek_v4.norm import WideNorm, plain_norm
from specdec.models.deepseek_v4.rotary import Rotation
from specdec.models.deepseek_v4.rows import StepRows


class LatentAttention:
    """Projections and the attention over a window; what a layer sees beside it is `CompressedAttention`'s matter."""

    def __init__(self, config: DeepseekV4Config, dtype: torch.dtype, device: torch.device) -> None:
        self.heads, self.head_dim, self.groups = config.num_heads, config.head_dim, config.output_groups
        self.eps, self.scale = config.rms_norm_eps, config.head_dim**-0.5
        wide = self.heads * self.head_dim

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.query_down = empty(config.query_rank, config.hidden_size)
        self.query_norm = WideNorm(config.query_rank, self.eps, device)
        self.query_up = empty(wide, config.query_rank)
        self.latent = empty(self.head_dim, config.hidden_size)
        self.latent_norm = WideNorm(self.head_dim, self.eps, device)
        self.sinks = torch.empty(self.heads, dtype=torch.float32, device=device)
        self.output_down = empty(self.groups * config.output_rank, wide // self.groups)
        self.output_up = empty(config.hidden_size, self.groups * config.output_rank)

    def query_rows(self, x: Tensor) -> Tensor:
        """x [T, D] -> low-rank queries [T, q], normed."""
        return self.query_norm(linear(x, self.query_down))

    def latents(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Keys = values of rows x [T, D] -> [T, d], rotated."""
        return rotation.turn(self.latent_norm(linear(x, self.latent)))

    def attend(
        self,
        query_rows: Tensor,
        latents: Tensor,
        rotation: Rotation,
        ring: Tensor,
        window: Sources,
        compressed: Compressed | None,
    ) -> Tensor:
        """query_rows [T, q], latents of the step's rows, ring [S, R, d] -> [T, D]."""
        q = linear(query_rows, self.query_up).view(-1, self.heads, self.head_dim)
        q = rotation.turn(plain_norm(q, self.eps))
        out = rotation.turn_back(sink_attention(q, latents, ring, window, compressed, self.sinks, self.scale))
        grouped = out.reshape(out.shape[0], self.groups, -1)
        matrices = self.output_down.view(self.groups, -1, grouped.shape[-1])
        narrow = torch.bmm(grouped.transpose(0, 1), matrices.transpose(1, 2)).transpose(0, 1)
        return linear(narrow.flatten(1), self.output_up)

    def weights(self, name: str) -> dict[str, Destination]:
        tensors = {
            'wq_a.weight': self.query_down,
            'wq_b.weight': self.query_up,
            'wkv.weight': self.latent,
            'wo_a.weight': self.output_down,
            'wo_b.weight': self.output_up,
            'attn_sink': self.sinks,
        }
        return {
            **{f'{name}.{key}': Destination(t, tuple(t.shape)) for key, t in tensors.items()},
            **self.query_norm.weights(f'{name}.q_norm'),
            **self.latent_norm.weights(f'{name}.kv_norm'),
        }


class CompressedAttention:
    """A target layer's attention: the window and, with a `ratio`, compressed entries of everything before."""

    def __init__(self, config: DeepseekV4Config, ratio: int, dtype: torch.dtype, device: torch.device) -> None:
        self.ratio = ratio
        self.latent = LatentAttention(config, dtype, device)
        self.compressor = Compressor(config, ratio, config.head_dim, dtype, device) if ratio else None
        self.indexer = Indexer(config, dtype, device) if ratio == 4 else None

    def __call__(self, x: Tensor, rows: StepRows, cache: LayerCache) -> Tensor:
        """x [T, D] -> [T, D]; the step's rows enter the caches."""
        rotation = rows.compressed if self.ratio else rows.plain
        query_rows = self.latent.query_rows(x)
        latents = self.latent.latents(x, rotation)
        compressed = self._compressed(x, query_rows, rotation, rows, cache)
        out = self.latent.attend(query_rows, latents, rotation, cache.window.rows, rows.window, compressed)
        ring_write(cache.window.rows, latents, rows.places)
        return out

    def _compressed(
        self, x: Tensor, query_rows: Tensor, rotation: Rotation, rows: StepRows, cache: LayerCache
    ) -> Compressed | None:
        """The entries that rows see, those included that the step itself completes."""
        if self.compressor is None or cache.entries is None:
            return None
        windows, entries = rows.windows[self.ratio], rows.entries[self.ratio]
        self.compressor(x, windows, cache.entries)
        if self.indexer is not None and cache.keys is not None:
            entries = self.indexer(x, query_rows, rotation, windows, entries, cache.keys)
        return Compressed(cache.entries.pages, entries)

    def weights(self, name: str) -> dict[str, Destination]:
        found = self.latent.weights(name)
        if self.compressor is not None:
            found |= self.compressor.weights(f'{name}.compressor')
        if self.indexer is not None:
            found |= self.indexer.weights(f'{name}.indexer')
        return found

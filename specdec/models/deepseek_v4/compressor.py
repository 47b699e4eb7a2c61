"""Making compressed entries from a layer's rows, and the indexer that chooses among them."""

import torch
from torch import Tensor

from specdec.kernels.compressor import Entries, compress, write_entries
from specdec.kernels.indexer import choose_entries
from specdec.kernels.linear import linear
from specdec.kernels.ring import ring_write
from specdec.layers.weights import Destination
from specdec.models.deepseek_v4.caches import Partials, series
from specdec.models.deepseek_v4.config import DeepseekV4Config
from specdec.models.deepseek_v4.norm import WideNorm
from specdec.models.deepseek_v4.rotary import Rotation
from specdec.models.deepseek_v4.rows import Windows


class Compressor:
    """One entry of `width` channels for every `ratio` rows. `projection` stacks C's rows and Z's."""

    def __init__(
        self, config: DeepseekV4Config, ratio: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.overlap, channels = series(ratio) == 2, series(ratio) * width
        self.channels, self.dtype = channels, dtype
        self.projection = torch.empty(2 * channels, config.hidden_size, dtype=dtype, device=device)
        self.bias = torch.zeros(ratio, 2 * channels, dtype=torch.float32, device=device)  # of C it stays zero
        self.norm = WideNorm(width, config.rms_norm_eps, device)

    def __call__(self, x: Tensor, windows: Windows, cache: Partials) -> None:
        """Take the step's rows x [T, D] and write the entries that they complete."""
        rows = linear(x, self.projection).float() + self.bias[windows.phases]
        sums = compress(cache.ring.rows, rows, windows.rows, self.overlap)
        write_entries(cache.pages, windows.rotation.turn(self.norm(sums)), windows.targets)
        ring_write(cache.ring.rows, rows, windows.places)

    def weights(self, name: str) -> dict[str, Destination]:
        shape = (self.channels, self.projection.shape[1])
        bias = self.bias[:, self.channels :]
        return {
            f'{name}.wkv.weight': Destination(self.projection[: self.channels], shape),
            f'{name}.wgate.weight': Destination(self.projection[self.channels :], shape),
            f'{name}.ape': Destination(bias, tuple(bias.shape)),
            **self.norm.weights(f'{name}.norm'),
        }


class Indexer:
    """Which entries of a ratio-4 layer each row attends to: those whose keys score best."""

    def __init__(self, config: DeepseekV4Config, dtype: torch.dtype, device: torch.device) -> None:
        self.heads, self.width, self.topk = config.index_heads, config.index_dim, config.index_topk
        self.scale = (self.heads * self.width) ** -0.5
        self.compressor = Compressor(config, 4, self.width, dtype, device)
        self.queries = torch.empty(self.heads * self.width, config.query_rank, dtype=dtype, device=device)
        self.head_weights = torch.empty(self.heads, config.hidden_size, dtype=dtype, device=device)

    def __call__(
        self, x: Tensor, query_rows: Tensor, rotation: Rotation, windows: Windows, entries: Entries, cache: Partials
    ) -> Entries:
        """x [T, D], the low-rank queries [T, q] of the attention -> what is left of `entries`."""
        self.compressor(x, windows, cache)
        if entries.flat.shape[1] <= self.topk:
            return entries
        queries = rotation.turn(linear(query_rows, self.queries).view(-1, self.heads, self.width))
        weights = linear(x, self.head_weights).float() * self.scale
        return choose_entries(queries, weights, cache.pages, entries, self.topk)

    def weights(self, name: str) -> dict[str, Destination]:
        return {
            f'{name}.wq_b.weight': Destination(self.queries, tuple(self.queries.shape)),
            f'{name}.weights_proj.weight': Destination(self.head_weights, tuple(self.head_weights.shape)),
            **self.compressor.weights(f'{name}.compressor'),
        }

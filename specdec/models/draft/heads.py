"""DSpark's two small heads: the Markov chain over the block's tokens, and the confidence of each of them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.markov import ChainDraws, MarkovWeights, Pick, markov_chain
from specdec.layers.weights import Destination
from specdec.models.configs import DraftConfig


class MarkovHead:
    """Low-rank bias on the base logits that depends on the token before: kinds vanilla, gated and rnn."""

    def __init__(self, config: DraftConfig, offsets: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        assert config.markov is not None
        kind, rank, size = config.markov.kind, config.markov.rank, config.decoder.hidden_size

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        gate = (empty(rank, size + rank), empty(rank)) if kind == 'gated' else (None, None)
        joint = (empty(3 * rank, 2 * rank + size), empty(3 * rank)) if kind == 'rnn' else (None, None)
        w1, w2 = empty(config.decoder.vocab_size, rank), empty(config.draft_vocab_size, rank)
        self.chain_weights = MarkovWeights(w1, w2, kind, *gate, *joint, offsets)

    def chain(
        self,
        base_logits: Tensor,
        hidden: Tensor,
        lead: Tensor | None,
        anchors: Tensor,
        pick: Pick | None = None,
        draws: ChainDraws | None = None,
    ) -> tuple[Tensor, Tensor]:
        """kernels.markov.markov_chain with this head's weights."""
        return markov_chain(base_logits, hidden, lead, anchors, self.chain_weights, pick, draws)

    def embed(self, tokens: Tensor) -> Tensor:
        """Markov embeddings of target ids [...] -> [..., r]."""
        return F.embedding(tokens, self.chain_weights.w1)

    def weights(self, name: str) -> dict[str, Destination]:
        w = self.chain_weights
        tensors = {
            'markov_w1.weight': w.w1,
            'markov_w2.weight': w.w2,
            'gate_proj.weight': w.gate,
            'gate_proj.bias': w.gate_bias,
            'joint_proj.weight': w.joint,
            'joint_proj.bias': w.joint_bias,
        }
        return {f'{name}.{key}': Destination(t, tuple(t.shape)) for key, t in tensors.items() if t is not None}


class ConfidenceHead:
    """Probability that a proposal is accepted given that all before it were: sigmoid(w . [h; e] + b), in fp32.

    It reads the row and, `with_markov`, the embedding of the token before; never the proposed token itself, so that
    lengths chosen by it keep the output exact.
    """

    def __init__(self, config: DraftConfig, with_markov: bool, device: torch.device) -> None:
        rank = config.markov.rank if with_markov and config.markov else 0
        self.with_markov = with_markov
        self.weight = torch.empty(1, config.decoder.hidden_size + rank, dtype=torch.float32, device=device)
        self.bias = torch.empty(1, dtype=torch.float32, device=device)
        temperatures = config.confidence_temperatures or (1.0,) * config.num_proposals
        self.temperatures = torch.tensor(temperatures, dtype=torch.float32, device=device)

    def survival(self, hidden: Tensor, embeddings: Tensor | None) -> Tensor:
        """The chance that drafts 1..k are all accepted [B, K] fp32, each confidence at its calibrated temperature."""
        logits = self.logits(hidden, embeddings)
        return (logits / self.temperatures[: logits.shape[1]]).sigmoid().cumprod(-1)

    def logits(self, hidden: Tensor, embeddings: Tensor | None) -> Tensor:
        """hidden [B, K, H], Markov embeddings of the tokens before [B, K, r] or None -> [B, K] fp32."""
        features = hidden if embeddings is None or not self.with_markov else torch.cat([hidden, embeddings], -1)
        return F.linear(features.float(), self.weight, self.bias).squeeze(-1)

    def weights(self, name: str) -> dict[str, Destination]:
        return {
            f'{name}.proj.weight': Destination(self.weight, tuple(self.weight.shape)),
            f'{name}.proj.bias': Destination(self.bias, (1,)),
        }

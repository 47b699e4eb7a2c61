"""What a checkpoint says, as types. models/checkpoint.py is the only place that reads config.json into them.

Everything downstream (layers, models, memory plan) sees these dataclasses and never a raw dictionary.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from specdec.kernels.gated_delta_rule import DeltaHeads
from specdec.layers.rotary import RopeConfig


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A stack of Qwen3 decoder layers, of a target or of a draft."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    rope: RopeConfig
    max_position: int
    attention_bias: bool = False


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts in place of the dense MLP, in the layers where `sparse_layers` is True.

    `shared_size`: width of an expert that every token has, behind a gate; None without one.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    norm_topk: bool
    sparse_layers: tuple[bool, ...]
    shared_size: int | None = None


class TargetConfig(Protocol):
    """What the engine reads of any target's config. `dtype`: of the file. Pages have `page_size` tokens unless told
    otherwise, and always a multiple of `page_multiple`.
    """

    page_size: ClassVar[int]
    page_multiple: ClassVar[int]

    @property
    def architecture(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def max_position(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """What a draft must know of its target, whoever runs it."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    """A Qwen3 target, dense or with experts. `windows[l]` is layer l's sliding window, None = full attention."""

    page_size: ClassVar[int] = 64
    page_multiple: ClassVar[int] = 1

    architecture: str
    decoder: DecoderConfig
    windows: tuple[int | None, ...]
    tie_embeddings: bool
    dtype: str  # of the file: 'float32', 'bfloat16' or 'float16'
    moe: MoeConfig | None = None

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def max_position(self) -> int:
        return self.decoder.max_position


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """A target that mixes gated attention with the gated delta rule: Qwen3.5, dense or with experts, and Qwen3-Next.

    `attends[l]`: layer l is one of attention. `heads`, `conv_width`: those of the other layers. `fused_inputs`: their
    projections are two tensors, interleaved by key head, instead of four. `prefix`: in front of the tensors' names.
    `stacked_experts`: the file holds a layer's experts as one tensor.
    """

    page_size: ClassVar[int] = 64
    page_multiple: ClassVar[int] = 1

    architecture: str
    decoder: DecoderConfig
    attends: tuple[bool, ...]
    heads: DeltaHeads
    conv_width: int
    tie_embeddings: bool
    dtype: str
    moe: MoeConfig | None = None
    fused_inputs: bool = False
    prefix: str = 'model'
    stacked_experts: bool = False

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def max_position(self) -> int:
        return self.decoder.max_position


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Which keys a block row sees in one draft layer.

    `causal`: within the block only rows at or before its own. `window` W: only keys less than W positions away.
    `anchored`: the window is counted from the block's first row instead of each row's own (DeepSeek-V4).
    """

    causal: bool = False
    window: int | None = None
    anchored: bool = False


@dataclass(frozen=True, slots=True)
class MarkovConfig:
    kind: Literal['vanilla', 'gated', 'rnn']
    rank: int


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A block draft in any dialect, conventions turned into numbers.

    `taps`: target layers whose output is read, 0-based, -1 = the embedding. `block_rows` b: query rows as trained.
    `anchor_predicts`: row k predicts position anchor + k + 1 (g = b); else row k predicts its own position and row 0
    predicts nothing (g = b - 1). `default_tokens`: K where the user does not say. `confidence`: None, or whether the
    confidence head also reads the Markov embedding. `own_embedding`, `own_head`: the file may hold copies.
    `confidence_temperatures`: g of them, from a calibration (specdec.json), None for 1 everywhere.
    `input_scale`, `output_multiplier`, `softcap`: applied to block embeddings, to logits, and to logits after that.
    """

    dialect: Literal['zlab', 'deepspec', 'speculators', 'specforge']
    kind: Literal['dflash', 'dspark']
    decoder: DecoderConfig
    target_hidden_size: int
    taps: tuple[int, ...]
    block_rows: int
    anchor_predicts: bool
    default_tokens: int
    mask_id: int
    rules: tuple[LayerRule, ...]
    markov: MarkovConfig | None
    confidence_with_markov: bool | None
    draft_vocab_size: int
    own_embedding: bool
    own_head: bool
    dtype: str
    num_target_layers: int | None = None
    mask_embedding: bool = False
    input_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None
    confidence_temperatures: tuple[float, ...] | None = None

    @property
    def has_confidence(self) -> bool:
        return self.confidence_with_markov is not None

    @property
    def num_proposals(self) -> int:
        """g, the tokens that one block proposes."""
        return self.block_rows if self.anchor_predicts else self.block_rows - 1

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size != self.decoder.vocab_size


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What generation_config.json suggests; None = it says nothing. `eos_ids` fall back to config.json's."""

    eos_ids: tuple[int, ...] = ()
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

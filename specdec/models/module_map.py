"""Architecture -> class. Registering a model is one line here; engine/build.py alone reads these maps.

A target class is called with (config, taps, positions, group, dtype, device), a proposer class with (draft, K).
"""

from specdec.models.deepseek_v4.target import DeepseekV4Target
from specdec.models.hybrid.target import HybridTarget
from specdec.models.qwen3 import Qwen3Target

TARGETS = {
    'Qwen3ForCausalLM': Qwen3Target,
    'Qwen3MoeForCausalLM': Qwen3Target,
    'DeepseekV4ForCausalLM': DeepseekV4Target,
    'Qwen3_5ForCausalLM': HybridTarget,
    'Qwen3_5ForConditionalGeneration': HybridTarget,
    'Qwen3_5MoeForCausalLM': HybridTarget,
    'Qwen3_5MoeForConditionalGeneration': HybridTarget,
    'Qwen3NextForCausalLM': HybridTarget,
}

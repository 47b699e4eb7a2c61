"""Block speculative decoding for LLM serving: the public names; everything else is private while the version is 0.x.

They load nothing heavy (torch comes with the first model). Next: pipeline.py, where a user's call begins.
"""

from specdec.errors import CapacityError, CheckpointError, ConfigError, EngineError, RequestError, SpecdecError
from specdec.messages import ChatTemplateConfig, GenerationConfig, PytorchEngineConfig, Response, SpeculativeConfig
from specdec.pipeline import Pipeline, pipeline
from specdec.version import __version__

__all__ = [
    'CapacityError',
    'ChatTemplateConfig',
    'CheckpointError',
    'ConfigError',
    'EngineError',
    'GenerationConfig',
    'Pipeline',
    'PytorchEngineConfig',
    'RequestError',
    'Response',
    'SpecdecError',
    'SpeculativeConfig',
    '__version__',
    'pipeline',
]

"""DeepSeek-V4 and the DSpark heads bundled in its checkpoint, by mechanism. Formulas: docs/deepseek_v4.md.

Reading order: config, tensors (what a checkpoint holds), rows (what a step's rows see), norm, rotary,
hyper_connections, compressor, attention, moe, block (one layer), target, draft, caches.
"""

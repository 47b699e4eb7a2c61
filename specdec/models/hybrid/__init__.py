"""Qwen3.5 and Qwen3-Next targets: gated attention in some layers, the gated delta rule in the others.

config.py reads their config.json, attention.py and delta.py are the two kinds of layers, target.py is the whole.
"""

"""The product as torch has it."""

from torch.nn.functional import linear

__all__ = ['linear']

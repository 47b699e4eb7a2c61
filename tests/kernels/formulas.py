"""Formulas of the operators in double precision, one row at a time: what every implementation is compared with."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
DTYPES = [torch.float32, torch.bfloat16]


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """`found` in its own dtype against `expected` in double precision."""
    assert found.isfinite().all()
    tolerance = TOLERANCES[found.dtype] * scale
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance, rtol=tolerance)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """One head [hd] at a position: the pair (i, i + hd / 2) turns by position * theta^(-2 i / hd)."""
    half = x.shape[-1] // 2
    turned = x.double().clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / x.shape[-1])
        a, b = x[i].double(), x[i + half].double()
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def turned_heads(qkv: Tensor, norms: Tensor, eps: float, kv: int, positions: list[int], theta: float) -> list[Tensor]:
    """qkv [T, (q + 2 kv) * hd] -> normed and rotated q [T, q, hd] and k [T, kv, hd], and v [T, kv, hd]."""
    heads = qkv.double().view(qkv.shape[0], -1, norms.shape[1])
    num_turned = norms.shape[0]
    turned = torch.stack(
        [
            torch.stack([rotate(rms_norm(row[h], norms[h], eps), position, theta) for h in range(num_turned)])
            for row, position in zip(heads, positions, strict=True)
        ]
    )
    return [turned[:, : num_turned - kv], turned[:, num_turned - kv :], heads[:, num_turned:]]


def attend(q: Tensor, keys: Tensor, values: Tensor, sees: Callable[[int], bool], scale: float) -> Tensor:
    """One query row [heads, hd] over keys, values [L, kv, hd] of which it sees entry p where sees(p)."""
    visible = [p for p in range(keys.shape[0]) if sees(p)]
    group = q.shape[0] // keys.shape[1]
    rows = []
    for h in range(q.shape[0]):
        k, v = keys[visible, h // group].double(), values[visible, h // group].double()
        rows.append(((k @ q[h].double()) * scale).softmax(0) @ v)
    return torch.stack(rows)


def swiglu(x: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
    return gate / (1 + (-gate).exp()) * up

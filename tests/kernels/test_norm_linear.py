"""Norms and the products they are folded into."""

import pytest
import torch

from specdec.kernels.linear import linear, linear_add, norm_linear, norm_swiglu
from specdec.kernels.norm import rms_norm
from tests.kernels import formulas
from tests.kernels.formulas import DTYPES, close

EPS = 1e-6
SHAPES = [(1, 3, 5), (7, 33, 9), (65, 48, 1)]  # rows, inputs, outputs


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', [(5,), (1, 3), (7, 33), (2, 3, 8)])
@pytest.mark.parametrize('scale', [1e-4, 1.0, 300.0])
def test_rms_norm(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype, scale=scale), random(shape[-1], dtype=dtype)
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    close(out, formulas.rms_norm(x, weight, EPS))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert rms_norm(torch.zeros(2, 4), torch.ones(4), EPS).tolist() == [[0] * 4] * 2


@pytest.mark.parametrize('dtype', DTYPES)
def test_rms_norm_rounds_the_quotient_before_the_weight(dtype: torch.dtype) -> None:
    x, weight = random(64, 16, dtype=dtype), random(16, dtype=dtype)
    quotient = (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + EPS).rsqrt()).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, EPS), quotient * weight)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('biased', [False, True])
@pytest.mark.parametrize('shape', SHAPES)
def test_products(shape: tuple[int, int, int], biased: bool, dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    bias = random(outputs, dtype=dtype) if biased else None
    residual, norm = random(rows, outputs, dtype=dtype), random(inputs, dtype=dtype)
    plain = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    close(linear(x, weight, bias), plain)
    before = residual.clone()
    out = linear_add(x, weight, bias, residual)
    close(out, residual.double() + plain)
    assert torch.equal(residual, before), 'the residual is read only'
    normed = formulas.rms_norm(x, norm, EPS)
    close(
        norm_linear(x, norm, EPS, weight, bias),
        normed @ weight.double().T + (0 if bias is None else bias.double()),
    )


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', SHAPES)
def test_norm_swiglu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    x, norm = random(rows, inputs, dtype=dtype), random(inputs, dtype=dtype)
    gate_up = random(2 * outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    out = norm_swiglu(x, norm, EPS, gate_up)
    assert out.shape == (rows, outputs)
    close(out, formulas.swiglu(formulas.rms_norm(x, norm, EPS), gate_up), scale=2)


def test_swiglu_gate_comes_first() -> None:
    gate_up = torch.tensor([[1.0], [10.0]])
    out = norm_swiglu(torch.tensor([[2.0]]), torch.tensor([1.0]), 0.0, gate_up)
    assert out.item() == pytest.approx(1 / (1 + 2.718281828**-1) * 10, rel=1e-5)

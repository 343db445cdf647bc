from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cramlm.model import operations
from cramlm.model.encoder import attention_bias
from cramlm.model.operations import (
    Dropout,
    Mask,
    Rotation,
    add_norm,
    attend,
    attend_fused,
    drop,
    geglu,
    gelu,
    linear,
    norm_of_sum,
    splitmix64,
)

DROPOUT = Mask(0.3, 0x0123456789ABCDEF)


def plain_attention(
    qkv: torch.Tensor, bias: torch.Tensor, rotation: Rotation | None, heads: int, factors: torch.Tensor | None = None
) -> torch.Tensor:
    """The formula, a head at a time, with rotate_half as in Su et al. 2021 and transformers. factors: of the probabilities (R, H, L, L)."""
    width = qkv.shape[-1]
    size = width // 3 // heads
    results = []
    for head in range(heads):
        query, key, value = (qkv[..., part * width // 3 + head * size :][..., :size] for part in range(3))
        if rotation is not None:
            cos, sin = (torch.cat([table[:, :, 0], table[:, :, 0]], -1) for table in rotation)
            query, key = (x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin for x in (query, key))
        probabilities = (query @ key.transpose(1, 2) / size**0.5 + bias[:, 0]).softmax(-1)
        if factors is not None:
            probabilities = probabilities * factors[:, head]
        results.append(probabilities @ value)
    return torch.cat(results, dim=-1)


def dropout_factors(mask: Mask | None, kind: torch.dtype, rows: int, heads: int, length: int) -> torch.Tensor | None:
    """What the probabilities of that type are multiplied by, in float64."""
    if mask is None:
        return None
    kept = drop(torch.ones(rows, heads, length, length, dtype=kind), mask) != 0
    assert 0 < kept.double().mean() < 1
    return kept / (1 - torch.tensor(mask.rate, dtype=torch.float64))


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("mask", [None, DROPOUT])
def test_attention_of_gpus_and_its_gradient_equal_the_plain_formula(rotary: bool, mask: Mask | None) -> None:
    generator = torch.Generator().manual_seed(0)
    sequence = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
    qkv = torch.randn(2, 6, 3 * 8, generator=generator, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(2, 6, 1, 2, generator=generator, dtype=torch.float64)
    rotation = Rotation(angle.cos(), angle.sin()) if rotary else None
    bias = attention_bias(sequence, torch.float64, torch.zeros_like(sequence))
    upstream = torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    ours = attend_fused(qkv, bias, rotation, 2, mask)
    (our_gradient,) = torch.autograd.grad((ours * upstream).sum(), qkv)
    plain = plain_attention(qkv, bias, rotation, 2, dropout_factors(mask, qkv.dtype, 2, 2, 6))
    (plain_gradient,) = torch.autograd.grad((plain * upstream).sum(), qkv)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(our_gradient, plain_gradient)


def test_padding_attends_to_padding_only_and_stays_finite() -> None:
    sequence = torch.tensor([[0, 0, -1, -1], [-1, -1, -1, -1]])
    bias = attention_bias(sequence, torch.float32, torch.zeros_like(sequence))
    qkv = torch.randn(2, 4, 3 * 8, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(attend(qkv, bias, None, 2)).all()
    assert torch.isinf(bias[0, 0, 0, 2:]).all()
    assert (bias[1] == 0).all()


# of bf16: two roundings of 2^-8 in a row, and what they cancel; of float32: roundings of 2^-24 in sums of up to 90 numbers
TOLERANCES = {torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2}, torch.float32: {"atol": 5e-6, "rtol": 2e-6}}
COMPILED = list(TOLERANCES)


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Normal numbers that bf16 holds exactly, as float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def same_as_plain(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], inputs: list[torch.Tensor], types: list[torch.dtype]
) -> None:
    """The compiled form (inputs in `types`) has the values and gradients of the plain form, which float64 inputs take."""
    tolerance = TOLERANCES[torch.bfloat16 if torch.bfloat16 in types else torch.float32]
    values, gradients = [], []
    for kinds in ([torch.float64] * len(inputs), types):
        arguments = [x.to(kind).requires_grad_() for x, kind in zip(inputs, kinds, strict=True)]
        results = function(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        total = sum((result.double() * normal(*result.shape, seed=9 + number)).sum() for number, result in enumerate(results))
        values.append(results)
        gradients.append(torch.autograd.grad(total, arguments))
    for exact, ours, kind in zip([*values[0], *gradients[0]], [*values[1], *gradients[1]], [None] * len(values[0]) + types, strict=True):
        assert kind is None or ours.dtype == kind
        torch.testing.assert_close(ours.double(), exact, **tolerance)


@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("mask", [None, DROPOUT])
def test_attention_in_the_types_of_training_equals_the_plain_formula(kind: torch.dtype, rotary: bool, mask: Mask | None) -> None:
    sequence = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
    angle = normal(2, 6, 1, 2, seed=3).float()
    rotation = Rotation(angle.cos(), angle.sin()) if rotary else None

    def attention(qkv: torch.Tensor) -> torch.Tensor:
        bias = attention_bias(sequence, qkv.dtype, torch.zeros_like(sequence))
        if qkv.dtype == kind:
            return attend(qkv, bias, rotation, 2, mask)
        return plain_attention(qkv, bias, rotation, 2, dropout_factors(mask, kind, 2, 2, 6))

    same_as_plain(attention, [normal(2, 6, 3 * 8, seed=0)], [kind])


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("length", [6, 90])
def test_attention_in_float32_without_a_gradient_equals_the_plain_formula(length: int, rotary: bool) -> None:
    sequence = torch.arange(length).expand(3, length) // torch.tensor([[1000], [40], [4]])
    sequence = torch.where(torch.arange(length) < length - 2, sequence, -1)
    angle = normal(3, length, 1, 8, seed=3).float()
    rotation = Rotation(angle.cos(), angle.sin()) if rotary else None
    qkv, bias = normal(3, length, 3 * 64, seed=0), attention_bias(sequence, torch.float64, torch.zeros_like(sequence))
    ours = attend(qkv.float(), bias.float(), rotation, 4)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), plain_attention(qkv, bias, rotation, 4), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("slow_mkl", [True, False])
@pytest.mark.parametrize("rows", [(3, 11), (0,), (1,)])
def test_products_equal_the_plain_formula_with_and_without_a_gradient(
    rows: tuple[int, ...], slow_mkl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "_has_slow_mkl", lambda: slow_mkl)  # the processor's part of the choice
    x, weight, bias = normal(*rows, 64, seed=0), normal(48, 64, seed=1), normal(48, seed=2)
    for gradient in (False, True):
        for shift in (None, bias):
            with torch.set_grad_enabled(gradient):
                ours = linear(x.float(), weight.float(), None if shift is None else shift.float())
            plain = x @ weight.T + (0 if shift is None else shift)
            torch.testing.assert_close(ours.double(), plain, atol=2e-5, rtol=2e-6)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear(x.float(), weight.float(), None)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), x @ weight.T, atol=0.2, rtol=0.02)


@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.parametrize("function", [gelu, geglu])
def test_gelu_and_geglu_equal_the_plain_formula_also_for_large_values(
    function: Callable[[torch.Tensor], torch.Tensor], kind: torch.dtype
) -> None:
    same_as_plain(function, [4 * normal(3, 70, 90, seed=1)], [kind])


def test_gelu_and_its_gradient_in_float32_are_as_exact_as_torchs_for_every_size_of_number() -> None:
    sizes = torch.cat([torch.logspace(-30, 1, 20_000, dtype=torch.float64), torch.linspace(0, 14, 20_000, dtype=torch.float64)])
    x = torch.cat([sizes, -sizes, torch.tensor([1e30, -1e30])]).float()
    exact = x.double().requires_grad_()
    expected = torch.nn.functional.gelu(exact)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    ours = gelu(x.requires_grad_())
    (our_slope,) = torch.autograd.grad(ours.sum(), x)
    torch.testing.assert_close(ours.double(), expected, rtol=3e-6, atol=1e-6 * 2**-3)
    torch.testing.assert_close(our_slope.double(), slope, rtol=0, atol=4e-7)


@pytest.mark.parametrize("kind", COMPILED)
def test_residual_sums_with_their_norms_equal_the_plain_formulas(kind: torch.dtype) -> None:
    x, branch, weight, bias = 3 * normal(2, 5, 48, seed=1), normal(2, 5, 48, seed=2), normal(48, seed=3), normal(48, seed=4)
    types = [torch.float32, kind, torch.float32, torch.float32]
    same_as_plain(lambda x, branch, weight: add_norm(x, branch, weight, 1e-5), [x, branch, weight], types[:3])
    same_as_plain(lambda *arguments: norm_of_sum(*arguments, 1e-5), [x, branch, weight, bias], types)


@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_so(bad: float, kind: torch.dtype) -> None:
    x = torch.ones(1, 2, 8, dtype=kind)
    x[0, 1, 3] = bad
    x.requires_grad_()
    weight, ones = torch.ones(8), torch.ones(1, 2, 8)
    for result in (gelu(x), geglu(x), add_norm(ones, x, weight, 1e-5)[0], norm_of_sum(ones, x, weight, torch.zeros(8), 1e-5)[0]):
        assert torch.isfinite(result[0, 0]).all()
        assert not torch.isfinite(result[0, 1]).all()


KINDS = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_share_of_the_elements_is_dropped_and_the_rest_scaled(kind: torch.dtype, rate: float) -> None:
    x = torch.ones(200, 1000, dtype=kind)
    result = Dropout(rate, 7)(x)
    dropped = result == 0
    assert float(dropped.double().mean()) == pytest.approx(rate, abs=0.004)
    assert float(dropped.double().mean(0).max()) < rate + 0.2  # no whole column is dropped
    torch.testing.assert_close(result[~dropped], torch.full_like(result[~dropped], 1 / (1 - rate)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_dropped_where_the_element_was(kind: torch.dtype) -> None:
    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).to(kind).requires_grad_()
    result = Dropout(0.3, 5)(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(gradient * x.detach(), result.detach())


def test_a_pass_with_the_same_seed_has_the_same_masks() -> None:
    x = torch.ones(100, 100)
    one, again = Dropout(0.5, 3), Dropout(0.5, 3)
    for _ in range(2):
        assert torch.equal(again(x), one(x))
    assert Dropout(0.0, 1)(x) is x


def test_splitmix64_gives_the_numbers_of_its_reference_implementation() -> None:
    golden = 0x9E3779B97F4A7C15
    outputs = [splitmix64(call * golden) for call in range(3)]  # Vigna, splitmix64.c, x = 0
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(("kind", "rate"), [(torch.float32, 0.5), (torch.bfloat16, 0.1)])
def test_masks_of_parts_calls_and_seeds_are_independent_under_every_xor_of_the_index(kind: torch.dtype, rate: float) -> None:
    x = torch.ones(2**14, dtype=kind)
    masks = []
    for seed, part in itertools.product((3, 4), (0, 1)):
        dropout = Dropout(rate, seed, attention_rate=rate, part=part)
        masks += [(dropout(x) == 0).double().numpy() for _ in range(2)]
        masks += [(drop(x, dropout.attention()) == 0).double().numpy() for _ in range(2)]
    for one, other in itertools.combinations(masks, 2):
        assert np.abs(correlations_under_xor(one, other)).max() < 7 / 2**7  # 7 standard deviations of independent masks


def test_the_masks_of_activations_and_of_attention_depend_on_their_own_rate_alone() -> None:
    x = torch.ones(100, 100)
    both, activations, attention = (Dropout(rate, 3, attention_rate=other) for rate, other in ((0.5, 0.2), (0.5, 0.0), (0.0, 0.2)))
    for _ in range(2):
        assert torch.equal(both(x), activations(x))
        assert both.attention() == attention.attention()
        assert activations.attention() is None
        assert attention(x) is x


def correlations_under_xor(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Correlation of one[i] and other[i ^ s] for every s, by the Walsh-Hadamard transform."""
    spectra = [_walsh_hadamard((mask - mask.mean()) / mask.std()) for mask in (one, other)]
    return _walsh_hadamard(spectra[0] * spectra[1]) / len(one) ** 2


def _walsh_hadamard(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    half = 1
    while half < len(values):
        pairs = values.reshape(-1, 2, half)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
        half *= 2
    return values

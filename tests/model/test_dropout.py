from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cramlm.model.kernels.torch import Dropout, Mask, drop, splitmix64

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


def test_a_rate_of_zero_is_the_identity() -> None:
    x = torch.ones(3)
    assert Dropout(0.0, 1)(x) is x


def test_splitmix64_gives_the_numbers_of_its_reference_implementation() -> None:
    golden = 0x9E3779B97F4A7C15
    outputs = [splitmix64(call * golden) for call in range(3)]  # Vigna, splitmix64.c, x = 0
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(("kind", "rate"), [(torch.float32, 0.5), (torch.bfloat16, 0.1)])
def test_masks_of_parts_calls_and_seeds_are_independent_under_every_xor_of_the_index(kind: torch.dtype, rate: float) -> None:
    x = torch.ones(2**16, dtype=kind)
    masks = []
    for seed, part in itertools.product((3, 4), (0, 1)):
        dropout = Dropout(rate, seed, attention_rate=rate, part=part)
        masks += [(dropout(x) == 0).double().numpy() for _ in range(2)]
        masks += [(drop(x, attention_mask(dropout)) == 0).double().numpy() for _ in range(2)]
    for one, other in itertools.combinations(masks, 2):
        assert np.abs(correlations_under_xor(one, other)).max() < 7 / 2**8  # 7 standard deviations of independent masks


def test_the_masks_of_activations_and_of_attention_depend_on_their_own_rate_alone() -> None:
    x = torch.ones(100, 100)
    both, activations, attention = (Dropout(rate, 3, attention_rate=other) for rate, other in ((0.5, 0.2), (0.5, 0.0), (0.0, 0.2)))
    for _ in range(2):
        assert torch.equal(both(x), activations(x))
        assert attention_mask(both) == attention_mask(attention)
        assert activations.attention() is None
        assert attention(x) is x


def attention_mask(dropout: Dropout) -> Mask:
    mask = dropout.attention()
    assert mask is not None
    return mask


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

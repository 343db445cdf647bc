"""Compiled loops for the operations around matrix products in bf16 and float32 on a CPU, one pass over memory each.

PyTorch runs each of these as two to eight elementwise operations, whose cost on a CPU is the memory they move. Arithmetic is float32. numba
has no bf16: a number is its upper 16 bits, widened by a shift and rounded to nearest even by an addition. Every loop serves both types:
what differs (`_wide`, `_narrow`, `_round_into`, `_phi`, `_slope`) has a form for each type of array element. numba compiles a loop for a
type at its first call; all that the default encoder uses take 6 CPU seconds, once. Single-threaded; callers split the rows.

GELU's two factors are fitted by least maximum error (Lawson's iteration). In bf16 they are polynomials on [-4, 4] and [-4.5, 4.5], beyond
which they are constant: Phi is wrong by at most 6e-5 and the slope by 2e-4, where bf16 itself rounds by 2e-3 of the value. In float32
Phi(-a) = e^(-a^2 / 2) M(1 / (1 + a / 4)) for a >= 0, the form of Abramowitz and Stegun 7.1.26, with a polynomial M of degree 7 whose
relative error is 1.3e-7 up to a = 6. GELU and its derivative are within 4e-7 of the exact ones, as PyTorch's are; GELU of negative
numbers is within 2e-6 of its value there, where PyTorch's 1 + erf cancels.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from cramlm.storage.compiled import jit

_FAST = {"contract", "reassoc", "nsz", "arcp"}  # not nnan or ninf: values that are not finite must stay so, to be detected

# Phi(v) = 0.5 + v P(v^2) and d/dv v Phi(v) = 0.5 + v Q(v^2), lowest power first
_PHI = tuple(
    map(
        np.float32,
        (0.398847509, -0.0661753768, 0.00966487247, -0.00104820386, 8.06673095e-05, -4.10085911e-06, 1.2171079e-07, -1.58078072e-09),
    )
)
_SLOPE = tuple(
    map(
        np.float32,
        (
            0.797626137,
            -0.264925669,
            0.0586092996,
            -0.00881585966,
            0.000940542477,
            -7.12220667e-05,
            3.72194502e-06,
            -1.26805867e-07,
            2.52133208e-09,
            -2.21081698e-11,
        ),
    )
)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7 = _PHI
_Q0, _Q1, _Q2, _Q3, _Q4, _Q5, _Q6, _Q7, _Q8, _Q9 = _SLOPE
# the Mills ratio of the normal distribution, Phi(-a) e^(a^2 / 2), in powers of 1 / (1 + a / 4) from the first
_M1, _M2, _M3, _M4, _M5, _M6, _M7 = map(
    np.float32, (0.0983987400, 0.115735458, 0.0127712090, 0.302356375, -0.287425670, 0.351855119, -0.0936911662)
)
# 2^f on [0, 1], lowest power first, by the same fit
_E0, _E1, _E2, _E3, _E4, _E5 = map(np.float32, (0.999999925, 0.693153073, 0.240153617, 0.0558263176, 0.00898934034, 0.00187757667))
_LOG2_E = np.float32(1.4426950408889634)
_END, _SLOPE_END, _HALF, _ONE = np.float32(4.0), np.float32(4.5), np.float32(0.5), np.float32(1.0)
_QUARTER, _DENSITY = np.float32(0.25), np.float32(0.3989422804014327)


def _inlined(function):
    return jit(function, fastmath=_FAST, inline=True)


def _compiled(function):
    return jit(function, fastmath=_FAST)


def _by_type(function):
    """Give `function` the form that the decorated function returns for the types of its arguments, to be inlined by LLVM: numba's own
    inlining would take half as long again to compile.
    """
    return overload(function, jit_options={"fastmath": _FAST, "error_model": "numpy"})


def _wide(number):
    """An element of an array -> float32."""


@_by_type(_wide)
def _(number):
    if number is types.float32:
        return lambda number: number
    return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


def _narrow(value, array):
    """float32 -> an element of the array; to nearest even."""


@_by_type(_narrow)
def _(value, array):
    if array.dtype is types.float32:
        return lambda value, array: np.float32(value)

    def rounded(value, array):
        bits = np.float32(value).view(np.uint32)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & _ONE_BIT)) >> np.uint32(16))

    return rounded


_ONE_BIT = np.uint32(1)


def _round_into(array, index, value):
    """Store a float32 that is stored unrounded elsewhere, too: nothing in an array of float32, for which callers pass that other array."""


@_by_type(_round_into)
def _(array, index, value):
    if array.dtype is types.float32:
        return lambda array, index, value: None

    def store(array, index, value):
        array[index] = _narrow(value, array)

    return store


def _phi(number):
    """The normal distribution function of an element of an array, in float32."""


@_by_type(_phi)
def _(number):
    if number is types.float32:

        def exact(number):
            tail = _exp(-_HALF * number * number) * _mills(abs(number))
            return _ONE - tail if number > 0 else tail

        return exact

    def near(number):
        near = min(max(_wide(number), -_END), _END)
        u = near * near
        return _HALF + near * (_P0 + u * (_P1 + u * (_P2 + u * (_P3 + u * (_P4 + u * (_P5 + u * (_P6 + u * _P7)))))))

    return near


def _slope(number):
    """The derivative of GELU at an element of an array, in float32."""


@_by_type(_slope)
def _(number):
    if number is types.float32:
        return lambda number: _phi(number) + number * _DENSITY * _exp(-_HALF * number * number)

    def near(number):
        near = min(max(_wide(number), -_SLOPE_END), _SLOPE_END)
        u = near * near
        far = _Q5 + u * (_Q6 + u * (_Q7 + u * (_Q8 + u * _Q9)))
        return _HALF + near * (_Q0 + u * (_Q1 + u * (_Q2 + u * (_Q3 + u * (_Q4 + u * far)))))

    return near


@_inlined
def _mills(value):
    """Phi(-value) e^(value^2 / 2), value >= 0."""
    t = _ONE / (_ONE + _QUARTER * value)
    return t * (_M1 + t * (_M2 + t * (_M3 + t * (_M4 + t * (_M5 + t * (_M6 + t * _M7))))))


@_inlined
def _exp(value):
    """e^value for value <= 0, within 3e-7 of the value; 0 below the smallest normal number."""
    power = max(value, np.float32(-87.0)) * _LOG2_E
    whole = np.floor(power)
    part = power - whole
    scaled = _E0 + part * (_E1 + part * (_E2 + part * (_E3 + part * (_E4 + part * _E5))))
    return scaled * np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@_compiled
def gelu_forward(x, out):
    """x, out: (N,) bf16 or float32."""
    for i in range(len(x)):
        out[i] = _narrow(_wide(x[i]) * _phi(x[i]), out)


@_compiled
def gelu_backward(x, gradient, out):
    """All (N,) bf16 or float32."""
    for i in range(len(x)):
        out[i] = _narrow(_wide(gradient[i]) * _slope(x[i]), out)


@_compiled
def geglu_forward(x, out):
    """x: (P, 2 I), value then gate. out: (P, I). Both bf16 or float32."""
    positions, width = out.shape
    for p in range(positions):
        value, gate, row = x[p, :width], x[p, width:], out[p]
        for i in range(width):
            row[i] = _narrow(_wide(value[i]) * _phi(value[i]) * _wide(gate[i]), row)


@_compiled
def geglu_backward(x, gradient, out):
    """x, out: (P, 2 I). gradient: (P, I). All bf16 or float32."""
    positions, width = gradient.shape
    for p in range(positions):
        value, gate, upstream = x[p, :width], x[p, width:], gradient[p]
        d_value, d_gate = out[p, :width], out[p, width:]
        for i in range(width):
            d = _wide(upstream[i])
            d_gate[i] = _narrow(d * _wide(value[i]) * _phi(value[i]), d_gate)
            d_value[i] = _narrow(d * _wide(gate[i]) * _slope(value[i]), d_value)


@_compiled
def split_heads(qkv, cos, sin, scale, out):
    """Make queries, keys and values of each head contiguous, rotate queries and keys by the angle of their position, scale queries.

    qkv: (P, 3 H S) with P = R L. cos, sin: (P, S / 2) float32. out: (3, R, H, L, S). qkv and out bf16 or float32.
    """
    _, rows, heads, length, size = out.shape
    half = size // 2
    for r in range(rows):
        for at in range(length):
            p = r * length + at
            c, s = cos[p], sin[p]
            for h in range(heads):
                for part in range(2):
                    factor = scale if part == 0 else _ONE
                    source, target = qkv[p, (part * heads + h) * size :][:size], out[part, r, h, at]
                    for i in range(half):
                        one, other = _wide(source[i]) * factor, _wide(source[half + i]) * factor
                        target[i] = _narrow(one * c[i] - other * s[i], target)
                        target[half + i] = _narrow(other * c[i] + one * s[i], target)
                source, target = qkv[p, (2 * heads + h) * size :][:size], out[2, r, h, at]
                for i in range(size):
                    target[i] = source[i]


@_compiled
def merge_heads(split, cos, sin, scale, out):
    """The transpose of `split_heads`: gradients (3, R, H, L, S) -> (P, 3 H S), rotated back; bf16 or float32."""
    _, rows, heads, length, size = split.shape
    half = size // 2
    for r in range(rows):
        for at in range(length):
            p = r * length + at
            c, s = cos[p], sin[p]
            for h in range(heads):
                for part in range(2):
                    factor = scale if part == 0 else _ONE
                    source, target = split[part, r, h, at], out[p, (part * heads + h) * size :][:size]
                    for i in range(half):
                        one, other = _wide(source[i]) * factor, _wide(source[half + i]) * factor
                        target[i] = _narrow(one * c[i] + other * s[i], target)
                        target[half + i] = _narrow(other * c[i] - one * s[i], target)
                source, target = split[2, r, h, at], out[p, (2 * heads + h) * size :][:size]
                for i in range(size):
                    target[i] = source[i]


@_inlined
def _add(old, add, total, eps):
    """Write old + add, (D,), to `total`; return its mean and 1 / sqrt(variance + eps)."""
    width = np.float32(len(total))
    first = np.float32(0.0)
    for i in range(len(total)):
        value = old[i] + _wide(add[i])
        total[i] = value
        first += value
    middle = first / width
    second = np.float32(0.0)
    for i in range(len(total)):
        away = total[i] - middle
        second += away * away
    return middle, _ONE / np.sqrt(second / width + eps)


@_compiled
def add_norm_forward(x, branch, weight, eps, total, out, mean, spread):
    """total = x + branch; out = layer norm of total, times weight.

    x, total: (P, D) float32. branch, out: (P, D) bf16 or float32. weight: (D,) float32.
    mean, spread: (P,) float32, spread = 1 / sqrt(variance + eps).
    """
    positions, width = x.shape
    for p in range(positions):
        old, add, new, normed = x[p], branch[p], total[p], out[p]
        middle, factor = _add(old, add, new, eps)
        for i in range(width):
            normed[i] = _narrow((new[i] - middle) * factor * weight[i], normed)
        mean[p], spread[p] = middle, factor


@_compiled
def add_norm_backward(total, mean, spread, weight, d_total, d_out, d_x, d_branch, d_weight):
    """Gradients of `add_norm_forward`: d_x (P, D) float32, d_branch (P, D) bf16 (the same, rounded), in float32 d_x again, and d_weight
    (D,) float32, added to.

    d_total: (P, D) float32, from what used the sum. d_out: (P, D) bf16 or float32, from what used the norm.
    """
    positions, width = total.shape
    count = np.float32(width)
    for p in range(positions):
        value, upstream, through, result, rounded = total[p], d_total[p], d_out[p], d_x[p], d_branch[p]
        middle, factor = mean[p], spread[p]
        along, level = np.float32(0.0), np.float32(0.0)
        for i in range(width):
            normed = (value[i] - middle) * factor
            gradient = _wide(through[i])
            d_weight[i] += gradient * normed
            gradient *= weight[i]
            level += gradient
            along += gradient * normed
        level /= count
        along /= count
        for i in range(width):
            normed = (value[i] - middle) * factor
            gradient = upstream[i] + factor * (_wide(through[i]) * weight[i] - level - normed * along)
            result[i] = gradient
            _round_into(rounded, i, gradient)


@_compiled
def norm_of_sum_forward(x, branch, weight, bias, eps, out, rounded, mean, spread):
    """out = layer norm of x + branch, times weight, plus bias; rounded = the same in bf16. Shapes and types as in `add_norm_forward`."""
    positions, width = x.shape
    for p in range(positions):
        old, add, new, narrow = x[p], branch[p], out[p], rounded[p]
        middle, factor = _add(old, add, new, eps)
        for i in range(width):
            value = (new[i] - middle) * factor * weight[i] + bias[i]
            new[i] = value
            narrow[i] = _narrow(value, narrow)
        mean[p], spread[p] = middle, factor


@_compiled
def norm_of_sum_backward(x, branch, mean, spread, weight, d_out, d_rounded, d_x, d_branch, d_weight, d_bias):
    """Gradients of `norm_of_sum_forward`, from both outputs; d_weight and d_bias (D,) float32 are added to."""
    positions, width = x.shape
    count = np.float32(width)
    for p in range(positions):
        old, add, upstream, through, result, narrow = x[p], branch[p], d_out[p], d_rounded[p], d_x[p], d_branch[p]
        middle, factor = mean[p], spread[p]
        along, level = np.float32(0.0), np.float32(0.0)
        for i in range(width):
            normed = (old[i] + _wide(add[i]) - middle) * factor
            gradient = upstream[i] + _wide(through[i])
            d_bias[i] += gradient
            d_weight[i] += gradient * normed
            gradient *= weight[i]
            level += gradient
            along += gradient * normed
        level /= count
        along /= count
        for i in range(width):
            normed = (old[i] + _wide(add[i]) - middle) * factor
            gradient = factor * ((upstream[i] + _wide(through[i])) * weight[i] - level - normed * along)
            result[i] = gradient
            narrow[i] = _narrow(gradient, narrow)


@_compiled
def cross_entropy(logits, targets, weights, each, gradient):
    """each = -ln softmax(logits)[target]; gradient = weight x (softmax - one at the target).

    logits, gradient: (M, V) bf16 or float32, may be the same. targets: (M,) int64. weights, each: (M,) float32.
    """
    positions, width = logits.shape
    powers = np.empty(width, dtype=np.float32)
    for p in range(positions):
        row, result, target = logits[p], gradient[p], targets[p]
        largest = np.float32(-np.inf)
        for i in range(width):
            largest = max(largest, _wide(row[i]))
        total = np.float32(0.0)
        for i in range(width):
            power = _exp(_wide(row[i]) - largest)
            powers[i] = power
            total += power
        each[p] = np.log(total) + largest - _wide(row[target])
        factor = weights[p] / total
        for i in range(width):
            result[i] = _narrow(powers[i] * factor, result)
        result[target] = _narrow(powers[target] * factor - weights[p], result)


@_inlined
def _hashed(number, high, low):
    """32 random bits of an index under a key of 64 bits, in three rounds of xor-shift and multiply.

    `low` only permutes the indices (i ^ low): two keys with the same `high` give the same bits in another order. Two rounds follow `high`
    (the constants of lowbias32), because one leaves the bits of near values of `high` correlated.
    """
    value = np.uint32(number) ^ low
    value = np.uint32((value ^ (value >> np.uint32(16))) * np.uint32(0x85EBCA6B))  # numba would make 64 bits of it
    value = np.uint32((value ^ (value >> np.uint32(13))) + high)
    value = np.uint32((value ^ (value >> np.uint32(16))) * np.uint32(0x7FEB352D))
    value = np.uint32((value ^ (value >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(value ^ (value >> np.uint32(16)))


@_compiled
def drop(x, high, low, least, scale, out):
    """out = x * scale where the element's random number is at least `least`, else 0.

    x, out: (N,) bf16 or float32. high, low, least: uint32.
    """
    zero = np.float32(0.0)
    for i in range(len(x)):
        out[i] = _narrow(_wide(x[i]) * scale if _hashed(i, high, low) >= least else zero, out)

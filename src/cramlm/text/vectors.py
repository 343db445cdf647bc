"""Instructions for kernels that numba has no name for: 64 bytes classified at once, and bits counted. LLVM has them on every processor.

None of them checks bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import extending
from numba.core import types

WIDTH: Final = 64  # bytes classified at once, a bit each
_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_BYTES = ir.VectorType(_BYTE, WIDTH)


def intrinsic(define: Callable[..., Any]) -> Any:
    """Return numba's intrinsic; its type in numba has the first parameter, which callers do not pass."""
    return extending.intrinsic(define)


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any, kind: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.load(builder.bitcast(builder.gep(data, [index]), kind.as_pointer()), align=1)


def _splat(value: int) -> Any:
    return ir.Constant(_BYTES, [value] * WIDTH)


@intrinsic
def find_letters(typing: Any, text: Any, index: Any) -> Any:
    """Return a uint64 with bit i set if text[index + i] is an ASCII letter or digit, for the `WIDTH` bytes from `index` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = _load(context, builder, signature.args[0], arguments[0], arguments[1], _BYTES)
        letter = builder.icmp_unsigned("<", builder.sub(builder.or_(loaded, _splat(0x20)), _splat(ord("a"))), _splat(26))
        digit = builder.icmp_unsigned("<", builder.sub(loaded, _splat(ord("0"))), _splat(10))
        return builder.bitcast(builder.or_(letter, digit), _WORD)

    return types.uint64(text, types.int64), generate


@intrinsic
def find_beyond_ascii(typing: Any, text: Any, index: Any) -> Any:
    """Return a uint64 with bit i set if text[index + i] >= 128, for the `WIDTH` bytes from `index` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = _load(context, builder, signature.args[0], arguments[0], arguments[1], _BYTES)
        return builder.bitcast(builder.icmp_signed("<", loaded, _splat(0)), _WORD)

    return types.uint64(text, types.int64), generate


@intrinsic
def find_continuing(typing: Any, text: Any, index: Any) -> Any:
    """Return a uint64 with bit i set if text[index + i] continues a character of UTF-8, for the `WIDTH` bytes from `index` on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded = _load(context, builder, signature.args[0], arguments[0], arguments[1], _BYTES)
        return builder.bitcast(builder.icmp_signed("<", loaded, _splat(0xC0 - 256)), _WORD)

    return types.uint64(text, types.int64), generate


@intrinsic
def count_bits(typing: Any, bits: Any) -> Any:
    """Return the number of set bits of a uint64, int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def load_word(typing: Any, text: Any, index: Any) -> Any:
    """Return the eight bytes from text[index] on as a uint64, the first one lowest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _load(context, builder, signature.args[0], arguments[0], arguments[1], _WORD)

    return types.uint64(text, types.int64), generate


@intrinsic
def trailing_zeros(typing: Any, bits: Any) -> Any:
    """Return the number of zeros below the lowest set bit of a uint64, int64; 64 without a set bit."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate

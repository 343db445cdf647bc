"""Steps over 64 passages at once, in LLVM's vector types, because numba's loops over them come out 3 to 10 times as slow.

LLVM cuts the vectors to what the processor has (4 registers with AVX-512, 8 with AVX2, 16 with NEON). Places are counted in elements from
the array's start.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.cgutils import alloca_once_value, for_range_slice, get_or_insert_function
from numba.extending import intrinsic

CHUNK = 64
GROUP = 256  # rows whose sum fits 16 bits
assert GROUP * (2**8 - 1) < 2**16

_MASK = ir.IntType(CHUNK)
_WORD, _BYTE, _PLACE = ir.IntType(32), ir.IntType(8), ir.IntType(64)
_HALVES = ir.VectorType(ir.IntType(16), CHUNK)
_WORDS, _BYTES = ir.VectorType(_WORD, CHUNK), ir.VectorType(_BYTE, CHUNK)


@intrinsic
def reaching(typing, sums, place, least):
    """Bit i of the result (uint64): whether sums[place + i] >= least, for 64 of them (uint32)."""

    def build(context, builder, signature, arguments):
        pointer = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        return _compare(builder, _load(builder, pointer, _WORDS), arguments[2])

    return types.uint64(sums, types.intp, types.uint32), build


@intrinsic
def reaching_with(typing, sums, place, coarse, first_row, rows, start, end, shift, least):
    """As `reaching`, for the sums plus rows of `coarse` (uint8, 64 a row, counted from first_row), each sum of rows shifted left.

    The rows are rows[start:end]. Where their sum leaves 8 bits the bit is set, whatever it is. The sums stay as they are.
    """

    def build(context, builder, signature, arguments):
        add = get_or_insert_function(builder.module, ir.FunctionType(_BYTES, (_BYTES, _BYTES)), f"llvm.uadd.sat.v{CHUNK}i8")
        total = _sum_rows(context, builder, signature, arguments, _BYTES, lambda before, row: builder.call(add, [before, row]))
        full = builder.icmp_unsigned("==", total, ir.Constant(_BYTES, [255] * CHUNK))
        reached = _reaching_with(context, builder, signature, arguments, builder.zext(total, _WORDS))
        return builder.or_(reached, builder.bitcast(full, _MASK))

    return types.uint64(*_with_rows(sums, coarse, rows)), build


@intrinsic
def reaching_with_many(typing, sums, place, coarse, first_row, rows, start, end, shift, least):
    """As `reaching_with`, for any number of rows: GROUP rows are added in 16 bits, groups in 32; half as fast.

    sums[place + i] plus the shifted sum of the rows must be under 2 ** 32.
    """

    def build(context, builder, signature, arguments):
        *_, start, end, _, _ = arguments
        group = ir.Constant(_PLACE, GROUP)
        total = alloca_once_value(builder, ir.Constant(_WORDS, None))
        with for_range_slice(builder, start, end, group) as (first, _):
            last = builder.add(first, group)
            last = builder.select(builder.icmp_signed("<", last, end), last, end)
            within = (*arguments[:5], first, last, *arguments[7:])
            halves = _sum_rows(
                context, builder, signature, within, _HALVES, lambda before, row: builder.add(before, builder.zext(row, _HALVES))
            )
            builder.store(builder.add(builder.load(total), builder.zext(halves, _WORDS)), total)
        return _reaching_with(context, builder, signature, arguments, builder.load(total))

    return types.uint64(*_with_rows(sums, coarse, rows)), build


def _with_rows(sums, coarse, rows):
    return sums, types.intp, coarse, types.intp, rows, types.intp, types.intp, types.uint32, types.uint32


def _sum_rows(context, builder, signature, arguments, vector, add):
    _, _, coarse, first_row, row_numbers, start, end, _, _ = arguments
    total = alloca_once_value(builder, ir.Constant(vector, None))
    with for_range_slice(builder, start, end, ir.Constant(_PLACE, 1)) as (j, _):
        row = builder.load(_at(context, builder, signature.args[4], row_numbers, j))
        where = builder.mul(builder.add(first_row, row), ir.Constant(_PLACE, CHUNK))
        addend = _load(builder, _at(context, builder, signature.args[2], coarse, where), _BYTES)
        builder.store(add(builder.load(total), addend), total)
    return builder.load(total)


def _reaching_with(context, builder, signature, arguments, total):
    sums, place, *_, shift, least = arguments
    pointer = _at(context, builder, signature.args[0], sums, place)
    units = builder.shl(total, _spread(builder, shift))
    return _compare(builder, builder.add(_load(builder, pointer, _WORDS), units), least)


@intrinsic
def clear(typing, sums, place):
    """Set 64 sums to 0."""

    def build(context, builder, signature, arguments):
        pointer = _at(context, builder, signature.args[0], arguments[0], arguments[1])
        stored = builder.store(ir.Constant(_WORDS, None), builder.bitcast(pointer, _WORDS.as_pointer()))
        stored.align = 4
        return context.get_dummy_value()

    return types.void(sums, types.intp), build


@intrinsic
def lowest_bit(typing, mask):
    """Number of the lowest bit that is set; undefined for 0."""

    def build(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), build


def _at(context, builder, array_type, array, place):
    """Pointer to an element of a C-contiguous array."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [place])


def _load(builder, pointer, vector):
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = vector.element.width // 8
    return loaded


def _spread(builder, word):
    """A 32-bit number in every lane."""
    lane = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(lane, ir.Constant(_WORDS, ir.Undefined), ir.Constant(_WORDS, None))


def _compare(builder, values, least):
    return builder.bitcast(builder.icmp_unsigned(">=", values, _spread(builder, least)), _MASK)

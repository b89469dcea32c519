"""Small matrix products for compiled code: tiles of a few rows that stay in vector registers, as fast as a BLAS and without its calls.

The encoder of a drafter multiplies a handful of rows by many small matrices. `multiply` adds such a product to its output, from a matrix
that `pack` has laid out in panels. The vectors are LLVM's own, so the same code serves every instruction set. Knows nothing of models.

Example: `multiply(x.ctypes.data, 128, packed.ctypes.data, out.ctypes.data, 384, 16)` adds `x @ matrix` to `out`, packed = pack(matrix).
"""

from collections.abc import Callable
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Float32
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS = 4
"""Rows of a tile: buffers have a multiple of them."""


def _shape() -> tuple[int, int]:
    try:
        wide = bool(binding.get_host_cpu_features().get("avx512f"))
    except RuntimeError:  # a machine that LLVM does not know
        wide = False
    return (16, 4) if wide else (8, 3)


LANES, _MOST = _shape()
"""Numbers of a vector, and vectors side by side in a panel: with ROWS rows the sums fill the registers and no more."""


def padded(count: int, multiple: int = LANES) -> int:
    """Return the next multiple."""
    return -(-count // multiple) * multiple


def pack(matrix: Float32[np.ndarray, "K N"]) -> Float32[np.ndarray, " size"]:
    """Return the matrix in panels, one behind the other: columns padded to whole vectors, the rows of a panel without gaps."""
    depth, columns = matrix.shape
    wide = np.zeros((depth, padded(columns)), np.float32)
    wide[:, :columns] = matrix
    parts, begin = [], 0
    while begin < wide.shape[1]:
        width = LANES * _panel_vectors((wide.shape[1] - begin) // LANES)
        parts.append(wide[:, begin : begin + width].reshape(-1))
        begin += width
    return np.concatenate(parts)


@njit(cache=True)
@no_type_check
def _panel_vectors(left: int) -> int:
    """Return the width of the next panel in vectors: as wide as may be, but no narrow one at the end."""
    if left <= _MOST:
        return left
    return _MOST if left >= 2 * _MOST or left % _MOST == 0 else (left + 1) // 2


@no_type_check
def _tile(vectors: int) -> Callable[..., Any]:
    """Return an intrinsic that adds a tile of a product: c[r, :] += sum over k of a[r, k] * b[k, :], for ROWS rows.

    Its arguments are the addresses of a, b and c, their strides in numbers and the number of terms.
    """
    number, long, small = ir.FloatType(), ir.IntType(64), ir.IntType(32)
    vector = ir.VectorType(number, LANES)
    lanes = ir.Constant(ir.VectorType(small, LANES), [0] * LANES)

    @intrinsic
    def tile(typing_context, a, stride_a, b, stride_b, c, stride_c, terms):
        def generate(context, builder, signature, args):
            a, stride_a, b, stride_b, c, stride_c, terms = args
            a, b, c = (builder.inttoptr(address, number.as_pointer()) for address in (a, b, c))
            kind = ir.FunctionType(vector, [vector] * 3)
            add_product = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{LANES}f32")

            def at(base, stride, row, column):
                place = builder.add(builder.mul(stride, row), column)
                return builder.gep(base, [place])

            def vector_at(base, stride, row, v):
                return builder.bitcast(at(base, stride, row, long(v * LANES)), vector.as_pointer())

            sums = [[cgutils.alloca_once(builder, vector) for _ in range(vectors)] for _ in range(ROWS)]
            for r in range(ROWS):
                for v in range(vectors):
                    builder.store(builder.load(vector_at(c, stride_c, long(r), v), align=4), sums[r][v])
            with cgutils.for_range(builder, terms) as loop:
                right = [builder.load(vector_at(b, stride_b, loop.index, v), align=4) for v in range(vectors)]
                for r in range(ROWS):
                    one = builder.load(at(a, stride_a, long(r), loop.index))
                    one = builder.insert_element(vector(ir.Undefined), one, small(0))
                    every = builder.shuffle_vector(one, vector(ir.Undefined), lanes)
                    for v in range(vectors):
                        builder.store(builder.call(add_product, [every, right[v], builder.load(sums[r][v])]), sums[r][v])
            for r in range(ROWS):
                for v in range(vectors):
                    builder.store(builder.load(sums[r][v]), vector_at(c, stride_c, long(r), v), align=4)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), generate

    return tile


_tile_1, _tile_2, _tile_3, _tile_4 = (_tile(vectors) for vectors in (1, 2, 3, 4))


@njit(cache=True)
@no_type_check
def add_narrow(a: int, stride_a: int, b: int, stride_b: int, c: int, stride_c: int, terms: int, rows: int, vectors: int) -> None:
    """Add the product of two matrices to a third, the last two at most _MOST vectors wide; addresses, and strides in numbers."""
    for r in range(0, rows, ROWS):
        left, out = a + 4 * r * stride_a, c + 4 * r * stride_c
        if vectors == 4:
            _tile_4(left, stride_a, b, stride_b, out, stride_c, terms)
        elif vectors == 3:
            _tile_3(left, stride_a, b, stride_b, out, stride_c, terms)
        elif vectors == 2:
            _tile_2(left, stride_a, b, stride_b, out, stride_c, terms)
        else:
            _tile_1(left, stride_a, b, stride_b, out, stride_c, terms)


@njit(cache=True)
@no_type_check
def multiply(x: int, terms: int, packed: int, out: int, columns: int, rows: int) -> None:
    """Add `x` @ a packed matrix to `out`, addresses of matrices without gaps; rows are a multiple of ROWS, columns of LANES."""
    left = columns // LANES
    while left > 0:
        vectors = _panel_vectors(left)
        add_narrow(x, terms, packed, vectors * LANES, out, columns, terms, rows, vectors)
        packed += 4 * terms * vectors * LANES
        out += 4 * vectors * LANES
        left -= vectors

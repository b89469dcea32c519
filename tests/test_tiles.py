"""Products of packed matrices are numpy's, for every shape that leaves parts of a vector or of a panel empty."""

from __future__ import annotations

import numpy as np
import pytest

from spot_dlm.tiles import LANES, ROWS, add_narrow, multiply, pack, padded


@pytest.mark.parametrize("rows", [ROWS, 3 * ROWS, 16])
@pytest.mark.parametrize(
    ("terms", "columns"), [(1, 1), (7, 16), (64, 17), (33, 100), (128, 464), (464, 128), (20, 5 * LANES), (5, 7 * LANES)]
)
def test_products(rows: int, terms: int, columns: int) -> None:
    rng = np.random.default_rng(terms)
    x, matrix = rng.standard_normal((rows, terms)).astype(np.float32), rng.standard_normal((terms, columns)).astype(np.float32)
    packed, wide = pack(matrix), padded(columns)
    out = rng.standard_normal((rows, wide)).astype(np.float32)
    before = out.copy()
    multiply(x.ctypes.data, terms, packed.ctypes.data, out.ctypes.data, wide, rows)
    assert packed.size == terms * wide
    np.testing.assert_allclose(out[:, :columns] - before[:, :columns], x @ matrix, rtol=1e-3, atol=1e-4)
    assert (out[:, columns:] == before[:, columns:]).all()


@pytest.mark.parametrize("vectors", [1, 2, 3, 4])
def test_narrow_products_of_rows_with_gaps(vectors: int) -> None:
    rng = np.random.default_rng(vectors)
    left, right = rng.standard_normal((2 * ROWS, 9)).astype(np.float32), rng.standard_normal((6, vectors * LANES + 3)).astype(np.float32)
    out = np.zeros((2 * ROWS, vectors * LANES + 1), np.float32)
    add_narrow(left.ctypes.data, 9, right.ctypes.data, right.shape[1], out.ctypes.data, out.shape[1], 6, 2 * ROWS, vectors)
    np.testing.assert_allclose(out[:, :-1], left[:, :6] @ right[:, : vectors * LANES], rtol=1e-4, atol=1e-5)
    assert (out[:, -1] == 0).all()

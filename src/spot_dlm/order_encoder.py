"""The encoder of an order model while decoding: the same numbers as `OrderModel` has, for the CPU, as one compiled function.

A block has few positions, so what a drafter waits for is calls and weights that have left the caches. Here all weights lie in one block in
the order of their use, with the normalisation's folded in, and the last layer and the heads see masked positions only. Knows nothing of
features and scores.

Example: `OrderEncoder(model).run(encoded.positions, np.array([2, 3]))` has a row for each of two masked positions.
"""

from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numba import njit
from torch import Tensor
from torch.nn import functional

from spot_dlm.order_model import Layer, OrderModel
from spot_dlm.outputs import exp_negative, highest
from spot_dlm.tiles import LANES, ROWS, add_narrow, multiply, pack, padded


def _fold(weight: Tensor, bias: Tensor | None, norm: torch.nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return (matrix, bias) that act on the plain normalised input as the layer acts on the affine one."""
    own = weight @ norm.bias
    return (weight * norm.weight).t(), own if bias is None else own + bias


class OrderEncoder:
    """The transformer of an order model and its heads, with weights in one block; not thread-safe.

    Args:
        model: an order model of kind `order`, on the CPU.
    """

    def __init__(self, model: OrderModel) -> None:
        config, width = model.config, model.config.width
        matrices: list[Tensor] = [model.embed.weight.t()]
        biases: list[Tensor] = [model.embed.bias]
        distances: list[Tensor] = []
        scale = torch.ones(3 * width, 1)
        scale[:width] = (width // config.heads) ** -0.5
        for layer in model.layers:
            assert isinstance(layer, Layer)
            qkv, qkv_bias = _fold(layer.qkv.weight * scale, None, layer.attention_norm)
            up, up_bias = _fold(layer.up.weight, layer.up.bias, layer.feed_norm)
            matrices += [qkv, layer.out.weight.t(), up, layer.down.weight.t()]
            biases += [qkv_bias, up_bias]
            distances.append(layer.distance)
        heads, heads_bias = _fold(model.heads.weight, None, model.norm)
        self._num_heads = heads.shape[1]
        self._sizes = (width, config.heads, padded(config.hidden))
        packed = [pack(functional.pad(m, (0, 0, 0, padded(len(m)) - len(m))).numpy()) for m in (*matrices, heads)]
        self._weights = _aligned(sum(map(len, packed)))
        self._weights[:] = np.concatenate(packed)
        wide = [functional.pad(b, (0, padded(len(b)) - len(b))).numpy() for b in (*biases, heads_bias)]
        self._biases, self._distance = np.concatenate(wide), np.ascontiguousarray(torch.stack(distances).numpy())
        self._memory = _aligned(0)

    def run(self, positions: Float32[np.ndarray, "B L F"], masked: Int64[np.ndarray, " M"]) -> Float32[np.ndarray, "M H"]:
        """Return the heads' output at the masked rows of the B * L."""
        size, length, num_features = positions.shape
        width, _, hidden = self._sizes
        rows, wide = padded(size * length, ROWS) + ROWS, padded(width)
        needed = rows * (padded(num_features) + 3 * wide + padded(3 * width) + hidden)
        needed += padded(length, ROWS) * (padded(length) + 2 * LANES) * 4 + 4 * padded(width) * padded(length)
        if len(self._memory) < needed:
            self._memory = _aligned(needed)
        out = np.empty((padded(len(masked), ROWS), padded(self._num_heads)), np.float32)
        _run(positions, masked, self._weights, self._biases, self._distance, *self._sizes, self._memory, out)
        return out[: len(masked), : self._num_heads]


def _aligned(count: int) -> Float32[np.ndarray, " n"]:
    """Return numbers whose memory begins with a cache line."""
    return torch.zeros(count).numpy()


@njit(cache=True)
@no_type_check
def _whole(count: int) -> int:
    return -(-count // LANES) * LANES


@njit(cache=True)
@no_type_check
def _run(
    positions: np.ndarray,
    masked: np.ndarray,
    weights: np.ndarray,
    biases: np.ndarray,
    distance: np.ndarray,
    width: int,
    num_heads: int,
    hidden: int,
    memory: np.ndarray,
    out: np.ndarray,
) -> None:
    """Run the encoder; weights are embedding, (qkv, out, up, down) of each layer, heads; biases those of embedding, (qkv, up), heads.

    Whatever is needed between is a place in the memory; of the addresses that products take, `base` is that of place 0.
    """
    size, length, num_features = positions.shape
    wide, three, used, columns = _whole(width), _whole(3 * width), _whole(num_features), out.shape[1]
    rows = -(-size * length // ROWS) * ROWS
    room = rows + ROWS
    features = 0
    x = features + room * used
    normal, mixed, qkv = x + room * wide, x + 2 * room * wide, x + 3 * room * wide
    between = qkv + room * three
    scratch = between + room * hidden
    base, matrices, bias = np.intp(memory.ctypes.data), np.intp(weights.ctypes.data), 0
    flat = positions.reshape(-1)
    for r in range(size * length):
        _copy(flat, r * num_features, memory, features + r * used, num_features)
    _repeat(biases, bias, wide, rows, memory, x)
    multiply(base + 4 * features, used, matrices, base + 4 * x, wide, rows)
    matrices += 4 * used * wide
    bias += wide
    for layer in range(len(distance)):
        _normalise(memory, x, rows, width, wide, normal)
        _repeat(biases, bias, three, rows, memory, qkv)
        multiply(base + 4 * normal, wide, matrices, base + 4 * qkv, three, rows)
        _attend(memory, qkv, three, distance[layer], size, length, width, num_heads, scratch, mixed, wide)
        if layer + 1 == len(distance):  # nothing attends to what the last layer makes
            for r in range(len(masked)):
                _copy(memory, x + masked[r] * wide, memory, x + r * wide, wide)
                _copy(memory, mixed + masked[r] * wide, memory, mixed + r * wide, wide)
            rows = len(out)
        matrices += 4 * wide * three
        multiply(base + 4 * mixed, wide, matrices, base + 4 * x, wide, rows)
        matrices += 4 * wide * wide
        _normalise(memory, x, rows, width, wide, normal)
        _repeat(biases, bias + three, hidden, rows, memory, between)
        multiply(base + 4 * normal, wide, matrices, base + 4 * between, hidden, rows)
        _rectify(memory, between, rows * hidden)
        matrices += 4 * wide * hidden
        multiply(base + 4 * between, hidden, matrices, base + 4 * x, wide, rows)
        matrices += 4 * hidden * wide
        bias += three + hidden
    _normalise(memory, x, rows, width, wide, normal)
    _repeat(biases, bias, columns, rows, out.reshape(-1), 0)
    multiply(base + 4 * normal, wide, matrices, np.intp(out.ctypes.data), columns, rows)


@njit(cache=True)
@no_type_check
def _attend(
    memory: np.ndarray,
    qkv: int,
    stride: int,
    distance: np.ndarray,
    size: int,
    length: int,
    width: int,
    num_heads: int,
    scratch: int,
    mixed: int,
    out_stride: int,
) -> None:
    """Write every head's mixed values; a score has its distance's bias on top."""
    head, reach = width // num_heads, distance.shape[1] // 2
    wide, columns, high = _whole(length), _whole(head + 1), -(-length // ROWS) * ROWS
    keys, values = scratch, scratch + head * wide
    scores = values + length * columns
    heads, base, flat = scores + high * wide, np.intp(memory.ctypes.data), distance.reshape(-1)
    _clear(memory, keys, heads - keys)
    for j in range(length):
        memory[values + j * columns + head] = 1.0  # so that the sum of a row's weights comes with its values
    for start in range(0, size * length, length):
        for h in range(num_heads):
            query = qkv + start * stride + h * head
            for j in range(length):
                key = query + j * stride + width
                _copy(memory, key + width, memory, values + j * columns, head)
                _spread(memory, key, keys + j, wide, head)
            for i in range(length):
                near = max(0, i - reach)
                bias = h * distance.shape[1] + reach - i + near
                _copy(flat, bias, memory, scores + i * wide + near, min(length, i + reach + 1) - near)
                for j in range(near):
                    memory[scores + i * wide + j] = distance[h, 0]
                for j in range(i + reach + 1, length):
                    memory[scores + i * wide + j] = distance[h, 2 * reach]
            for v in range(0, wide, LANES):
                add_narrow(base + 4 * query, stride, base + 4 * (keys + v), wide, base + 4 * (scores + v), wide, head, high, 1)
            for i in range(length):
                _exponentiate(memory, scores + i * wide, length)
            _clear(memory, heads, high * columns)
            for v in range(0, columns, LANES):
                add_narrow(base + 4 * scores, wide, base + 4 * (values + v), columns, base + 4 * (heads + v), columns, length, high, 1)
            for i in range(length):
                _divide(memory, heads + i * columns, mixed + (start + i) * out_stride + h * head, head)


@njit(cache=True)
@no_type_check
def _copy(numbers: np.ndarray, source: int, memory: np.ndarray, out: int, count: int) -> None:
    s, o = np.uint64(source), np.uint64(out)  # unsigned here and below: a place is not counted from the end
    for k in range(np.uint64(count)):
        memory[o + k] = numbers[s + k]


@njit(cache=True)
@no_type_check
def _clear(memory: np.ndarray, at: int, count: int) -> None:
    a = np.uint64(at)
    for k in range(np.uint64(count)):
        memory[a + k] = 0.0


@njit(cache=True)
@no_type_check
def _repeat(numbers: np.ndarray, source: int, columns: int, rows: int, memory: np.ndarray, out: int) -> None:
    """Write a row several times."""
    for r in range(rows):
        _copy(numbers, source, memory, out + r * columns, columns)


@njit(cache=True)
@no_type_check
def _spread(memory: np.ndarray, source: int, out: int, stride: int, count: int) -> None:
    s, o, step = np.uint64(source), np.uint64(out), np.uint64(stride)
    for k in range(np.uint64(count)):
        memory[o + k * step] = memory[s + k]


@njit(cache=True)
@no_type_check
def _divide(memory: np.ndarray, source: int, out: int, count: int) -> None:
    """Divide a row by the number behind it."""
    s, o, share = np.uint64(source), np.uint64(out), np.float32(1) / memory[source + count]
    for k in range(np.uint64(count)):
        memory[o + k] = memory[s + k] * share


@njit(cache=True)
@no_type_check
def _rectify(memory: np.ndarray, at: int, count: int) -> None:
    a = np.uint64(at)
    for k in range(np.uint64(count)):
        memory[a + k] = max(memory[a + k], np.float32(0))


@njit(cache=True)
@no_type_check
def _exponentiate(memory: np.ndarray, at: int, count: int) -> None:
    """Take the exponentials of a row less its maximum."""
    a, top = np.uint64(at), highest(memory[at : at + count])
    for k in range(np.uint64(count)):
        memory[a + k] = exp_negative(memory[a + k] - top)


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
@no_type_check
def _normalise(memory: np.ndarray, x: int, rows: int, width: int, stride: int, out: int) -> None:
    """Write every row less its mean, divided by its deviation."""
    count = np.uint64(width)
    for r in range(rows):
        a, o = np.uint64(x + r * stride), np.uint64(out + r * stride)
        total, squares = np.float32(0), np.float32(0)
        for k in range(count):
            total += memory[a + k]
        mean = total / np.float32(width)
        for k in range(count):
            squares += (memory[a + k] - mean) * (memory[a + k] - mean)
        factor = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(1e-5))
        for k in range(count):
            memory[o + k] = (memory[a + k] - mean) * factor

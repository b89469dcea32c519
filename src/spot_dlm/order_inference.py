"""The order model while decoding: the same scores as `OrderModel.forward`, on the CPU, for many roots at once and in few calls.

All passes of a decode share it: one run of the encoder, then one compiled function for each root. Knows nothing of growth's result and of
training.

Example: `FastScorer(model)(encode(batch, depths=8), [root.masked], [look_ahead.tokens], [8])[0]` is what `growth.grow` takes.
"""

from collections.abc import Sequence
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numba import njit

from spot_dlm.features import NUM_LINEAR, NUM_TOKEN, Encoded
from spot_dlm.growth import Moving, OrderScores
from spot_dlm.order_encoder import OrderEncoder
from spot_dlm.order_model import NUM_DYNAMIC, OrderModel

_NO_HEADS = np.zeros((0, 0), np.float32)


class FastScorer:
    """Prepared weights of one order model; not thread-safe.

    Args:
        model: the order model, on the CPU.
    """

    @torch.inference_mode()
    def __init__(self, model: OrderModel) -> None:
        config, linear = model.config, model.linear
        self.config = config
        self._encoder = OrderEncoder(model) if config.kind == "order" else None
        none = torch.zeros(0)
        parts = [torch.zeros(config.depths, 0), torch.zeros(0, NUM_TOKEN), torch.zeros(config.depths, 0), torch.zeros(3, 0)]
        gates, dynamic = [torch.zeros(config.depths, 0), none], torch.zeros(2, 2, NUM_DYNAMIC)
        if config.kind == "order":
            parts = [model.depth, model.token_in.weight, model.token_depth + model.token_in.bias, model.token_out.weight]
            gates, dynamic = [model.gate_node, model.gate_out], model.dynamic
        self._rank, self._gate = parts[0].shape[1], gates[0].shape[1]
        common = [linear.token.weight, linear.token.bias, linear.pair, linear.last, *parts]
        self._tables, self._gates, self._dynamic = [], [], []
        for rounded in (0, 1):
            sharpness = model.sharpness[rounded]
            tables = [linear.weight[:, 0] + rounded * linear.weight[:, 1], *common, sharpness[None]]
            self._tables.append(torch.cat([t.reshape(-1) for t in tables]).numpy())
            self._gates.append(((gates[0] * sharpness).numpy(), gates[1].numpy()))
            self._dynamic.append(((dynamic[0] + rounded * dynamic[1]) * sharpness).numpy())

    def __call__(
        self,
        encoded: Encoded,
        masked: Sequence[Int64[np.ndarray, " _"]],
        tokens: Sequence[Int64[np.ndarray, "_ _ 2"]],
        depths: Sequence[int],
        token_branches: bool = True,
    ) -> list[OrderScores]:
        """Return the scores of the masked positions of B roots.

        Args:
            encoded: features of their states; depths beyond the last one are as that.
            masked: masked positions of each root.
            tokens: best and second-best token at each depth and each of these positions.
            depths: depths wanted of each.
            token_branches: give second-best tokens their probability, else none.
        """
        length, heads = encoded.positions.shape[1], _NO_HEADS
        if self._encoder is not None:
            every = [at + b * length for b, at in enumerate(masked)] if len(masked) > 1 else masked
            heads = self._encoder.run(encoded.positions, np.concatenate(every))
        scores, begin = [], 0
        for b, (at, some, wanted) in enumerate(zip(masked, tokens, depths, strict=True)):
            scores.append(self._score(encoded, b, at, some, wanted, heads, begin, token_branches))
            begin += len(at)
        return scores

    def _score(
        self,
        encoded: Encoded,
        b: int,
        masked: Int64[np.ndarray, " m"],
        tokens: Int64[np.ndarray, "E m 2"],
        depths: int,
        heads: Float32[np.ndarray, "M H"],
        begin: int,
        token_branches: bool,
    ) -> OrderScores:
        count, rounded, f32 = len(masked), int(encoded.rounded[b]), np.float32
        by_depth, by_pair = np.empty((2, depths, count), f32), np.empty((3, count, count), f32)
        by_gate, chances = np.empty((2, count, self._gate), f32), np.empty((depths, count, 2), f32)
        known, every = np.empty(count, f32), np.empty((depths, count, 2), np.int64)
        _finish(
            b, masked, begin, heads, encoded.linear, encoded.token, encoded.sure, encoded.effect, encoded.known, tokens,
            self._tables[rounded], self.config.depths, self._rank, self._gate, token_branches,
            by_depth, by_pair, by_gate, chances, known, every,
        )  # fmt: skip
        gate_node, gate_out = self._gates[rounded]
        if depths > len(gate_node):
            gate_node = gate_node[np.minimum(np.arange(depths), len(gate_node) - 1)]
        (base, sure), (pair, last, effect), (gate_commit, gate_position) = by_depth, by_pair, by_gate
        moving = None
        if self._encoder is not None:
            moving = Moving(sure, effect, known, float(encoded.known_root[b]), self._dynamic[rounded], bool(rounded))
        return OrderScores(masked, every, chances, base, pair, last, gate_node[:depths], gate_commit, gate_position, gate_out, moving)


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
@no_type_check
def _dot(one: np.ndarray, other: np.ndarray, count: int) -> np.float32:
    total = np.float32(0)
    for k in range(count):
        total += one[k] * other[k]
    return total


@njit(cache=True, error_model="numpy")
@no_type_check
def _finish(
    b, masked, begin, all_heads, linear, features, all_sure, all_effect, all_known, all_tokens,
    tables, depths, rank, gate, token_branches,
    by_depth, by_pair, by_gate, chances, known, tokens,
):  # fmt: skip
    """Fill the scores of root b from its rows of the heads' output (see `OrderModel.split`) and the features."""
    at, weight = _part(tables, 0, 2, NUM_LINEAR)
    at, kind_weight = _part(tables, at, 3, NUM_TOKEN)
    at, kind_bias = _part(tables, at, 1, 3)
    apart = (len(tables) - 1 - at - rank * (2 * depths + NUM_TOKEN + 3)) // 2
    at, pair_apart = _part(tables, at, 1, apart)
    at, last_apart = _part(tables, at, 1, apart)
    at, depth = _part(tables, at, depths, rank)
    at, token_in = _part(tables, at, rank, NUM_TOKEN)
    at, token_depth = _part(tables, at, depths, rank)
    at, token_out = _part(tables, at, 3, rank)
    count, gates, reach, sharpness, heads = len(masked), 5 * rank + 2 * gate, apart // 2, tables[-1], all_heads[begin:]
    for j in range(count):
        known[j] = all_known[b, masked[j]]
        row = heads[j]
        for g in range(gate):
            by_gate[0, j, g], by_gate[1, j, g] = row[5 * rank + g] * sharpness, row[5 * rank + gate + g] * sharpness
        for i in range(count):
            other, place = heads[i], min(max(masked[i] - masked[j], -reach), reach) + reach
            by_pair[0, j, i] = (pair_apart[0, place] + _dot(row[rank:], other[2 * rank :], rank)) * sharpness
            by_pair[1, j, i] = (last_apart[0, place] + _dot(row[3 * rank :], other[4 * rank :], rank)) * sharpness
            by_pair[2, j, i] = all_effect[b, masked[j], masked[i]] + _dot(row[gates + rank :], other[gates + 2 * rank :], rank)
    looked = linear.shape[1]
    by_token, mixed, kinds = np.empty((count, rank), np.float32), np.empty(rank, np.float32), np.empty(3, np.float32)
    for d in range(len(chances)):
        e, place = min(d, looked - 1), min(d, depths - 1)
        by_place = weight[0] + np.float32(place / 8) * weight[1]
        for i in range(count):
            given, seen = features[b, e, masked[i]], linear[b, e, masked[i]]
            if d < looked:
                for k in range(rank):
                    by_token[i, k] = heads[i, gates + k] + _dot(given, token_in[k], NUM_TOKEN)
            by_depth[0, d, i] = (_dot(seen, by_place, NUM_LINEAR) + _dot(depth[place], heads[i], rank)) * sharpness
            by_depth[1, d, i] = all_sure[b, e, masked[i]]
            for k in range(rank):
                mixed[k] = max(by_token[i, k] + token_depth[place, k], np.float32(0))
            for kind in range(3):
                kinds[kind] = kind_bias[0, kind] + _dot(given, kind_weight[kind], NUM_TOKEN) + _dot(mixed, token_out[kind], rank)
            top = max(kinds[0], max(kinds[1], kinds[2]))
            total = np.exp(kinds[0] - top) + np.exp(kinds[1] - top) + np.exp(kinds[2] - top)
            chances[d, i, 0] = np.exp(kinds[0] - top) / total
            chances[d, i, 1] = np.exp(kinds[1] - top) / total if token_branches else np.float32(0)
            for choice in range(2):
                tokens[d, i, choice] = all_tokens[min(d, len(all_tokens) - 1), i, choice]


@njit(cache=True)
@no_type_check
def _part(tables: np.ndarray, at: int, rows: int, columns: int) -> tuple[int, np.ndarray]:
    """Return where the next table begins, and this one."""
    return at + rows * columns, tables[at : at + rows * columns].reshape(rows, columns)

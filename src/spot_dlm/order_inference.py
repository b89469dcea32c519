"""The order model while decoding: the same scores as `OrderModel.forward`, on the CPU, for many roots at once and in few calls.

All passes of a decode share it: one run of the encoder, then one compiled function for each root. Knows nothing of growth's result and of
training.

Example: `FastScorer(model)(encode(batch, depths=8), [root.masked], [look_ahead], [8])[0]` is what `growth.grow` takes.
"""

from collections.abc import Sequence
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numba import njit

from spot_dlm.features import NUM_TOKEN, Encoded
from spot_dlm.growth import Moving, OrderScores
from spot_dlm.lookahead import LookAhead
from spot_dlm.order_encoder import OrderEncoder
from spot_dlm.order_model import OrderModel


class FastScorer:
    """Prepared weights of one order model; not thread-safe.

    Args:
        model: the order model, on the CPU.
    """

    @torch.inference_mode()
    def __init__(self, model: OrderModel) -> None:
        config = self.config = model.config
        linear = model.linear
        self._encoder = OrderEncoder(model) if config.kind == "order" else None
        self._relative = (linear.pair.numpy(), linear.last.numpy())
        sharpness, weight = model.sharpness.numpy(), linear.weight.numpy()
        self._sharpness = sharpness
        self._weight = [np.ascontiguousarray(weight[:, 0] + rounded * weight[:, 1]) for rounded in (0, 1)]
        self._kinds = (linear.token.weight.numpy(), linear.token.bias.numpy())
        shape = (config.depths, 0), (0, NUM_TOKEN), (config.depths, 0), (3, 0)
        self._tables = tuple(np.zeros(s, np.float32) for s in shape)
        gate_node, self._gate_out = np.zeros((config.depths, 0), np.float32), np.zeros(0, np.float32)
        if config.kind == "order":
            tables = (model.depth, model.token_in.weight, model.token_depth + model.token_in.bias, model.token_out.weight)
            self._tables = tuple(np.ascontiguousarray(t.numpy()) for t in tables)
            gate_node, self._gate_out = model.gate_node.numpy(), model.gate_out.numpy()
            dynamic = model.dynamic.numpy()
            self._dynamic = [(dynamic[0] + rounded * dynamic[1]) * sharpness[rounded] for rounded in (0, 1)]
        self._gate_node = [gate_node * sharpness[rounded] for rounded in (0, 1)]

    def __call__(
        self,
        encoded: Encoded,
        masked: Sequence[Int64[np.ndarray, " _"]],
        aheads: Sequence[LookAhead],
        depths: Sequence[int],
        token_branches: bool = True,
    ) -> list[OrderScores]:
        """Return the scores of the masked positions of B roots.

        Args:
            encoded: features of their states; depths beyond the last one are as that.
            masked: masked positions of each root.
            aheads: the look-ahead at these positions.
            depths: depths wanted of each.
            token_branches: give second-best tokens their probability, else none.
        """
        length = encoded.positions.shape[1]
        heads = np.zeros((sum(map(len, masked)), 0), np.float32)
        if self._encoder is not None:
            heads = self._encoder.run(encoded.positions, np.concatenate([at + b * length for b, at in enumerate(masked)]))
        ends = np.cumsum([len(at) for at in masked]).tolist()
        parts = zip(masked, aheads, depths, [0, *ends[:-1]], ends, strict=True)
        return [
            self._score(encoded, b, at, ahead, wanted, heads[begin:end], token_branches)
            for b, (at, ahead, wanted, begin, end) in enumerate(parts)
        ]

    def _score(
        self,
        encoded: Encoded,
        b: int,
        masked: Int64[np.ndarray, " m"],
        ahead: LookAhead,
        depths: int,
        heads: Float32[np.ndarray, "m H"],
        token_branches: bool,
    ) -> OrderScores:
        count, gate, f32 = len(masked), len(self._gate_out), np.float32
        rounded = int(encoded.rounded[b])
        tokens, chances = np.empty((depths, count, 2), np.int64), np.empty((depths, count, 2), f32)
        base, sure = np.empty((depths, count), f32), np.empty((depths, count), f32)
        pair, last, effect = np.empty((count, count), f32), np.empty((count, count), f32), np.empty((count, count), f32)
        gate_commit, gate_position, known = np.empty((count, gate), f32), np.empty((count, gate), f32), np.empty(count, f32)
        _finish(
            masked, heads, encoded.linear[b], encoded.token[b], encoded.sure[b], encoded.effect[b], encoded.known[b], ahead.tokens,
            self._weight[rounded], *self._kinds, *self._tables, *self._relative, self._sharpness[rounded],
            token_branches, tokens, chances, base, pair, last, gate_commit, gate_position, sure, effect, known,
        )  # fmt: skip
        at = np.minimum(np.arange(depths), self.config.depths - 1)
        moving = None
        if self._encoder is not None:
            moving = Moving(sure, effect, known, float(encoded.known_root[b]), self._dynamic[rounded], bool(rounded))
        gate_node = self._gate_node[rounded][at]
        return OrderScores(masked, tokens, chances, base, pair, last, gate_node, gate_commit, gate_position, self._gate_out, moving)


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
@no_type_check
def _dot(one: np.ndarray, other: np.ndarray) -> np.float32:
    total = np.float32(0)
    for k in range(len(one)):
        total += one[k] * other[k]
    return total


@njit(cache=True)
@no_type_check
def _finish(
    masked, heads, linear, features, all_sure, all_effect, all_known, ahead_tokens,
    weight, kind_weight, kind_bias, depth, token_in, token_depth, token_out, pair_apart, last_apart, sharpness,
    token_branches, tokens, chances, base, pair, last, gate_commit, gate_position, sure, effect, known,
):  # fmt: skip
    """Fill the scores of one root from the heads' output (see `OrderModel.split`) and the features."""
    count, (depths, rank), gate = len(masked), depth.shape, gate_commit.shape[1]
    gates, reach = 5 * rank + 2 * gate, len(pair_apart) // 2
    for j in range(count):
        at = masked[j]
        known[j] = all_known[at]
        row = heads[j]
        gate_commit[j] = row[5 * rank : 5 * rank + gate] * sharpness
        gate_position[j] = row[5 * rank + gate : gates] * sharpness
        for i in range(count):
            to, other = masked[i], heads[i]
            apart = min(max(to - at, -reach), reach) + reach
            pair[j, i] = (pair_apart[apart] + _dot(row[rank : 2 * rank], other[2 * rank : 3 * rank])) * sharpness
            last[j, i] = (last_apart[apart] + _dot(row[3 * rank : 4 * rank], other[4 * rank : 5 * rank])) * sharpness
            effect[j, i] = all_effect[at, to] + _dot(row[gates + rank : gates + 2 * rank], other[gates + 2 * rank : gates + 3 * rank])
    looked = len(linear)
    by_token, mixed, kinds = np.empty((count, rank), np.float32), np.empty(rank, np.float32), np.empty(3, np.float32)
    for d in range(len(base)):
        e, place = min(d, looked - 1), min(d, depths - 1)
        by_depth = weight[0] + np.float32(place / 8) * weight[1]
        for i in range(count):
            at = masked[i]
            if d < looked:
                for k in range(rank):
                    by_token[i, k] = heads[i, gates + k] + _dot(features[e, at], token_in[k])
            base[d, i] = (_dot(linear[e, at], by_depth) + _dot(depth[place], heads[i, :rank])) * sharpness
            for k in range(rank):
                mixed[k] = max(by_token[i, k] + token_depth[place, k], np.float32(0))
            for kind in range(3):
                kinds[kind] = kind_bias[kind] + _dot(features[e, at], kind_weight[kind]) + _dot(mixed, token_out[kind])
            top = max(kinds[0], max(kinds[1], kinds[2]))
            total = np.exp(kinds[0] - top) + np.exp(kinds[1] - top) + np.exp(kinds[2] - top)
            chances[d, i, 0] = np.exp(kinds[0] - top) / total
            chances[d, i, 1] = np.exp(kinds[1] - top) / total if token_branches else np.float32(0)
            sure[d, i] = all_sure[e, at]
            tokens[d, i] = ahead_tokens[min(d, len(ahead_tokens) - 1), i]

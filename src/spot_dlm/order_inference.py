"""One root at a time, fast: the order model's scores for a single draft on the CPU, with as few operations as possible.

The same function as `order_model.OrderModel` (to rounding), with normalisation weights folded into the matrices, biases per block length
prepared once, and heads on the masked positions only. Knows nothing of growth's result and of training.

Example: `FastScorer(model)(encoded, masked, look_ahead)` is what `growth.grow` takes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from spot_dlm.features import Encoded
from spot_dlm.growth import Moving, OrderScores
from spot_dlm.lookahead import LookAhead
from spot_dlm.order_model import Layer, LinearScore, OrderModel, relative_distances


@dataclass(frozen=True)
class _FastLayer:
    """A transformer layer's matrices, transposed for `x @ w`, the norms' weights folded in."""

    qkv: Float[Tensor, "W 3W"]
    qkv_bias: Float[Tensor, " 3W"]
    out: Float[Tensor, "W W"]
    up: Float[Tensor, "W F"]
    up_bias: Float[Tensor, " F"]
    down: Float[Tensor, "F W"]
    distance: Float[Tensor, "heads R"]


def _fold(weight: Tensor, bias: Tensor | None, norm: torch.nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return (matrix, bias) that act on the plain normalised input as the layer acts on the affine one."""
    own = weight @ norm.bias
    return (weight * norm.weight).t().contiguous(), own if bias is None else own + bias


class FastScorer:
    """Prepared weights of one order model; not thread-safe.

    Args:
        model: the order model, on the CPU.
    """

    @torch.inference_mode()
    def __init__(self, model: OrderModel) -> None:
        self.config = model.config
        self.linear: LinearScore = model.linear
        self._bias: dict[int, list[Tensor]] = {}
        self._relative: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._sharpness = model.sharpness.numpy()
        self._weight = model.linear.weight.numpy()
        self._kind_weight, self._kind_bias = model.linear.token.weight.t().contiguous(), model.linear.token.bias
        if model.config.kind == "linear":
            return
        self.embed, self.embed_bias = model.embed.weight.t().contiguous(), model.embed.bias
        self.layers = [self._prepare(layer) for layer in model.layers if isinstance(layer, Layer)]
        self.heads, self.heads_bias = _fold(model.heads.weight, None, model.norm)
        self.ends = model.split
        self.depth, self.gate_node, self.gate_out = model.depth, model.gate_node.numpy(), model.gate_out.numpy()
        self.dynamic = model.dynamic.numpy()
        self.token_in, self.token_out = model.token_in.weight.t().contiguous(), model.token_out.weight.t().contiguous()
        self.token_depth = model.token_depth + model.token_in.bias

    def _prepare(self, layer: Layer) -> _FastLayer:
        width = self.config.width
        scale = torch.ones(3 * width, 1)
        scale[:width] = (width // self.config.heads) ** -0.5
        qkv, qkv_bias = _fold(layer.qkv.weight * scale, None, layer.attention_norm)
        up, up_bias = _fold(layer.up.weight, layer.up.bias, layer.feed_norm)
        out, down = layer.out.weight.t().contiguous(), layer.down.weight.t().contiguous()
        return _FastLayer(qkv, qkv_bias, out, up, up_bias, down, layer.distance)

    def _biases(self, length: int) -> list[Tensor]:
        if length not in self._bias:
            at = relative_distances(length)
            self._bias[length] = [layer.distance[:, at].contiguous() for layer in self.layers]
        return self._bias[length]

    def _relatives(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        if length not in self._relative:
            at = relative_distances(length)
            self._relative[length] = (self.linear.pair[at].numpy(), self.linear.last[at].numpy())
        return self._relative[length]

    @torch.inference_mode()
    def __call__(self, encoded: Encoded, masked: Int64[np.ndarray, " m"], ahead: LookAhead, token_branches: bool = True) -> OrderScores:
        """Return the scores of one root's masked positions.

        Args:
            encoded: features of one state (batch size 1).
            masked: masked positions of the root.
            ahead: the look-ahead at these positions.
            token_branches: give second-best tokens their probability, else none.
        """
        depths, length = encoded.linear.shape[1:3]
        weight = self._weight[:, 0] + self._weight[:, 1] if encoded.rounded[0] else self._weight[:, 0]
        by_depth = weight[0] + np.minimum(np.arange(depths, dtype=np.float32), self.config.depths - 1)[:, None] * (
            weight[1] / np.float32(8)
        )
        base = np.einsum("dmk,dk->dm", encoded.linear[0].take(masked, axis=1), by_depth)
        pair, last = (table[masked[:, None], masked] for table in self._relatives(length))
        token = torch.from_numpy(encoded.token[0].take(masked, axis=1))
        kinds = torch.addmm(self._kind_bias, token.view(-1, token.shape[-1]), self._kind_weight)
        count = len(masked)
        moving = None
        if self.config.kind == "linear":
            gate_node, gate_commit = np.zeros((depths, 0), np.float32), np.zeros((count, 0), np.float32)
            gate_position, gate_out = gate_commit, np.zeros(0, np.float32)
        else:
            parts = self._heads(torch.from_numpy(encoded.positions[0]), masked)
            which = np.minimum(np.arange(depths), self.config.depths - 1)
            deep = depths <= self.config.depths
            base = base + (self.depth[:depths] if deep else self.depth[torch.from_numpy(which)]).mm(parts[0].t()).numpy()
            pair = pair + parts[1].mm(parts[2].t()).numpy()
            last = last + parts[3].mm(parts[4].t()).numpy()
            gate_node, gate_out = self.gate_node[which], self.gate_out
            gate_commit, gate_position = np.ascontiguousarray(parts[5].numpy()), np.ascontiguousarray(parts[6].numpy())
            effect = encoded.effect[0][masked[:, None], masked] + parts[8].mm(parts[9].t()).numpy()
            rounded = bool(encoded.rounded[0])
            dynamic = self.dynamic[0] + self.dynamic[1] if rounded else self.dynamic[0]
            dynamic = dynamic * self._sharpness[int(rounded)]
            sure, known = encoded.sure[0].take(masked, axis=1), encoded.known[0][masked]
            moving = Moving(sure, np.ascontiguousarray(effect, np.float32), known, float(encoded.known_root[0]), dynamic, rounded)
            mixed = (token.view(-1, token.shape[-1]) @ self.token_in).view(depths, count, -1)
            by_place = self.token_depth[:depths] if deep else self.token_depth[torch.from_numpy(which)]
            mixed.add_(by_place[:, None]).add_(parts[7])
            kinds.addmm_(mixed.relu_().view(-1, mixed.shape[-1]), self.token_out)
        chances = kinds.softmax(dim=-1).numpy().reshape(depths, count, 3)[:, :, :2].copy()
        if not token_branches:
            chances[..., 1] = 0
        tokens = ahead.tokens[np.minimum(np.arange(depths), len(ahead.tokens) - 1)]
        f32, sharp = np.float32, self._sharpness[int(encoded.rounded[0])]
        base, pair, last = base * sharp, pair * sharp, last * sharp
        gate_node, gate_commit, gate_position = gate_node * sharp, gate_commit * sharp, gate_position * sharp
        return OrderScores(
            masked, tokens, chances, np.ascontiguousarray(base, f32), np.ascontiguousarray(pair, f32), np.ascontiguousarray(last, f32),
            gate_node, gate_commit, gate_position, gate_out, moving,
        )  # fmt: skip

    def _heads(self, positions: Float[Tensor, "L F"], masked: Int64[np.ndarray, " m"]) -> tuple[Tensor, ...]:
        """Run the encoder over the block and the heads over its masked positions."""
        length, width = positions.shape[0], self.config.width
        heads = self.config.heads
        x = torch.addmm(self.embed_bias, positions, self.embed)
        for layer, bias in zip(self.layers, self._biases(length), strict=True):
            normal = functional.layer_norm(x, (width,))
            qkv = torch.addmm(layer.qkv_bias, normal, layer.qkv).view(length, 3, heads, width // heads).permute(1, 2, 0, 3)
            weights = torch.baddbmm(bias, qkv[0], qkv[1].transpose(1, 2)).softmax(dim=-1)
            mixed = torch.bmm(weights, qkv[2]).transpose(0, 1).reshape(length, width)
            x = torch.addmm(x, mixed, layer.out)
            normal = functional.layer_norm(x, (width,))
            x = torch.addmm(x, torch.addmm(layer.up_bias, normal, layer.up).relu_(), layer.down)
        normal = functional.layer_norm(x[torch.from_numpy(masked)], (width,))
        return torch.addmm(self.heads_bias, normal, self.heads).tensor_split(self.ends[:-1], dim=-1)

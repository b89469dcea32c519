"""The order model: from output distributions to scores of what the target commits next (method.md section 6, SPOT arXiv 2610.22543).

`OrderModel` is a small transformer over the block's positions on top of a linear score; `kind="linear"` is that score alone. Both end in
the additive form that `growth` expands without running a network per node. Vocabulary-free, so it transfers between targets. Knows
nothing of files, targets and training.

Example: `OrderModel(OrderConfig())(inputs(encode(batch, depths=8)))`.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from spot_dlm.features import NUM_LINEAR, NUM_POSITION, NUM_TOKEN, Encoded
from spot_dlm.outputs import MAX_SURENESS

Kind = Literal["order", "linear"]
MAX_PARAMETERS = 620_000
NUM_DYNAMIC = 4
_RELATIVE = 32
"""Distances beyond it share a bias."""


@dataclass(frozen=True)
class OrderConfig:
    """Sizes of an order model; depths beyond `depths` count as the last one, for training sees no deeper.

    Raises:
        ValueError: naming the field, the value and what is allowed.
    """

    kind: Kind = "order"
    width: int = 128
    layers: int = 3
    heads: int = 8
    hidden: int = 464
    rank: int = 24
    gate: int = 32
    depths: int = 16

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r} is unknown; choose one of {', '.join(get_args(Kind))}")
        for name in ("width", "layers", "heads", "hidden", "rank", "gate", "depths"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a whole number of at least 1")
        at_least = self.layers * (4 * self.width**2 + 2 * self.width * self.hidden) + self.width * self.rank + self.depths * self.gate
        if self.kind == "order" and at_least > MAX_PARAMETERS:
            raise ValueError(
                f"the order model would have over {at_least} parameters, at most {MAX_PARAMETERS} are allowed; make it smaller"
            )
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")


class Scores(NamedTuple):
    """Additive scores of B roots, over all L positions of the block; see `growth.OrderScores` for their sum.

    `token` are logits of what a committed position turns out to hold: the best stale token, the second, another (a miss). From
    `sure` on: the sureness expected at a node, moved by the effects of its commits, see `dynamic_features`.
    """

    base: Float[Tensor, "B D L"]
    pair: Float[Tensor, "B L L"]
    last: Float[Tensor, "B L L"]
    gate_node: Float[Tensor, "B D H"]
    gate_commit: Float[Tensor, "B L H"]
    gate_position: Float[Tensor, "B L H"]
    gate_out: Float[Tensor, " H"]
    token: Float[Tensor, "B D L 3"]
    sure: Float[Tensor, "B D L"]
    effect: Float[Tensor, "B L L"]
    known: Float[Tensor, "B L"]
    known_root: Float[Tensor, " B"]
    dynamic: Float[Tensor, "B 2 4"]
    rounded: Float[Tensor, " B"]


class Inputs(NamedTuple):
    """`features.Encoded` as tensors."""

    positions: Float[Tensor, "B L F"]
    linear: Float[Tensor, "B D L K"]
    token: Float[Tensor, "B D L M"]
    sure: Float[Tensor, "B D L"]
    effect: Float[Tensor, "B L L"]
    known: Float[Tensor, "B L"]
    known_root: Float[Tensor, " B"]
    rounded: Float[Tensor, " B"]


def inputs(encoded: Encoded, device: torch.device | str = "cpu") -> Inputs:
    """Return features as tensors on a device."""
    return Inputs(*(torch.from_numpy(getattr(encoded, name)).to(device) for name in Inputs._fields))


def relative_distances(length: int) -> Int64[Tensor, "L L"]:
    """Return the index of the bias for every pair (from, to) of positions."""
    at = torch.arange(length)
    return (at[None, :] - at[:, None]).clamp(-_RELATIVE, _RELATIVE) + _RELATIVE


class LinearScore(nn.Module):
    """A logistic order model: one weight per feature, another at rounded confidences, both changing linearly with the depth."""

    def __init__(self, depths: int) -> None:
        super().__init__()
        self.depths = depths
        self.weight = nn.Parameter(torch.zeros(2, 2, NUM_LINEAR))
        self.pair = nn.Parameter(torch.zeros(2 * _RELATIVE + 1))
        self.last = nn.Parameter(torch.zeros(2 * _RELATIVE + 1))
        self.token = nn.Linear(NUM_TOKEN, 3)
        with torch.no_grad():  # the confidence order, and tokens that hold
            self.weight[0, 0, 1], self.weight[0, 0, 2], self.weight[0, 1, 2] = 2.0, -2.0, -6.0
            self.token.weight.zero_()
            self.token.weight[0, 0] = 1.0
            self.token.bias.copy_(torch.tensor([3.0, 0.0, 0.0]))

    def forward(self, linear: Float[Tensor, "B D L K"], rounded: Float[Tensor, " B"]) -> Float[Tensor, "B D L"]:
        """Return the score of every position at every depth."""
        depth = torch.arange(linear.shape[1], device=linear.device, dtype=linear.dtype).clamp(max=self.depths - 1) / 8
        by_kind = self.weight[:, 0] + rounded[:, None, None] * self.weight[:, 1]  # [B, 2, K]
        weight = by_kind[:, :1] + depth[:, None] * by_kind[:, 1:]  # [B, D, K]
        return (linear @ weight[..., None])[..., 0]


class Layer(nn.Module):
    """Pre-norm attention with a learned bias per relative distance, then a feed-forward part."""

    def __init__(self, config: OrderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = 0.0
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.distance = nn.Parameter(torch.zeros(config.heads, 2 * _RELATIVE + 1))
        self.feed_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width, bias=False)
        for last in (self.out, self.down):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, x: Float[Tensor, "B L W"], distances: Int64[Tensor, "L L"]) -> Float[Tensor, "B L W"]:
        """Apply the layer."""
        size, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(size, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        bias = self.distance[:, distances].to(query.dtype)
        weights = (query @ key.transpose(-1, -2)) * (width // self.heads) ** -0.5 + bias
        mixed = weights.softmax(dim=-1).to(value.dtype) @ value
        x = x + self._drop(self.out(mixed.transpose(1, 2).reshape(size, length, width)))
        return x + self._drop(self.down(functional.relu(self.up(self.feed_norm(x)))))

    def _drop(self, x: Float[Tensor, "B L W"]) -> Float[Tensor, "B L W"]:
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x


class OrderModel(nn.Module):
    """Scores of what comes next; zero-initialised on top of the linear score, so that training can only add to it.

    Raises:
        ValueError: if the sizes exceed the parameter budget.
    """

    def __init__(self, config: OrderConfig) -> None:
        super().__init__()
        self.config = config
        self.linear = LinearScore(config.depths)
        self.sharpness = nn.Buffer(torch.ones(2))
        """Factor of every score, for exact and for rounded confidences; set after training so that reach probabilities are right."""
        if config.kind == "order":
            self.embed = nn.Linear(NUM_POSITION, config.width)
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.heads = nn.Linear(config.width, self.split[-1], bias=False)
            self.depth = nn.Parameter(torch.zeros(config.depths, config.rank))
            self.gate_node = nn.Parameter(torch.zeros(config.depths, config.gate))
            self.gate_out = nn.Parameter(torch.zeros(config.gate))
            self.dynamic = nn.Parameter(torch.zeros(2, 2, NUM_DYNAMIC))
            self.token_in = nn.Linear(NUM_TOKEN, config.rank)
            self.token_depth = nn.Parameter(torch.zeros(config.depths, config.rank))
            self.token_out = nn.Linear(config.rank, 3, bias=False)
            self._initialise()
        count = sum(p.numel() for p in self.parameters())
        if count > MAX_PARAMETERS:
            raise ValueError(f"the order model would have {count} parameters, at most {MAX_PARAMETERS} are allowed; make it smaller")

    @property
    def split(self) -> list[int]:
        """Where the head's parts end: depth, pair (2), last (2), gate (2), token, effect (2)."""
        r, g = self.config.rank, self.config.gate
        sizes = [r, r, r, r, r, g, g, r, r, r]
        return [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def _initialise(self) -> None:
        nn.init.normal_(self.heads.weight, std=0.05)
        ends = self.split
        with torch.no_grad():  # one factor of every product is zero, so that the untrained network adds nothing
            self.heads.weight[ends[0] : ends[1]] = 0
            self.heads.weight[ends[2] : ends[3]] = 0
            self.heads.weight[ends[7] : ends[8]] = 0
            self.dynamic[0, 1] = torch.tensor([1.0, -2.0, 1.0, 0.0])  # where effects are known, their order counts
            nn.init.normal_(self.gate_node, std=0.1)
            self.token_out.weight.zero_()

    @property
    def num_parameters(self) -> int:
        """Parameters, at most MAX_PARAMETERS."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, given: Inputs) -> Scores:
        """Run once per pass; O(L) tokens through the network, nothing per node."""
        linear, token, rounded = given.linear, given.token, given.rounded
        (size, depths, length), device = linear.shape[:3], linear.device
        distances = relative_distances(length).to(device)
        with torch.autocast(device.type, enabled=False):
            base = self.linear(linear, rounded)
            kinds = self.linear.token(token)
        pair, last = self.linear.pair[distances][None], self.linear.last[distances][None]
        if self.config.kind == "linear":
            none = linear.new_zeros(size, length, 0)
            shape = (size, length, length)
            parts = (none.new_zeros(size, depths, 0), none, none, none.new_zeros(0), kinds)
            dynamic = none.new_zeros(size, 2, NUM_DYNAMIC)
            return self._sharpened(Scores(base, pair.expand(shape), last.expand(shape), *parts, *given[3:7], dynamic, rounded))
        with torch.autocast(device.type, enabled=False):
            x = self.embed(given.positions)
        for layer in self.layers:
            x = layer(x, distances)
        parts = self.heads(self.norm(x)).float().tensor_split(self.split[:-1], dim=-1)
        with torch.autocast(device.type, enabled=False):
            which = torch.arange(depths, device=device).clamp(max=self.config.depths - 1)
            base = base + self.depth[which] @ parts[0].transpose(-1, -2)
            pair = pair + parts[1] @ parts[2].transpose(-1, -2)
            last = last + parts[3] @ parts[4].transpose(-1, -2)
            mixed = self.token_in(token) + self.token_depth[which][:, None] + parts[7][:, None]
            kinds = kinds + self.token_out(functional.relu(mixed))
            effect = given.effect + parts[8] @ parts[9].transpose(-1, -2)
            dynamic = self.dynamic[0] + rounded[:, None, None] * self.dynamic[1]
        heads = (self.gate_node[which].expand(size, -1, -1), parts[5], parts[6], self.gate_out, kinds)
        return self._sharpened(Scores(base, pair, last, *heads, given.sure, effect, given.known, given.known_root, dynamic, rounded))

    def _sharpened(self, scores: Scores) -> Scores:
        """Multiply all scores by the sharpness; the gate's by its inputs, for relu is homogeneous."""
        factor = self.sharpness[scores.rounded.long()][:, None, None]
        names = ("base", "pair", "last", "gate_node", "gate_commit", "gate_position", "dynamic")
        return scores._replace(**{name: getattr(scores, name) * factor for name in names})


def path_scores(
    scores: Scores, path: Int64[Tensor, "B D"], masked: Bool[Tensor, "B L"]
) -> tuple[Float[Tensor, "B D L"], Bool[Tensor, "B D L"]]:
    """Return the scores of all positions along given paths, and which positions remain: the sum that `growth` forms node by node.

    Args:
        scores: of B roots.
        path: [B, D] positions committed at depth 0, 1, ... (any value where the block has ended).
        masked: positions masked in the roots.
    """
    size, depths = path.shape
    length = masked.shape[1]
    taken = functional.one_hot(path, length).to(scores.base.dtype)  # [B, D, L]
    before = torch.cat((taken.new_zeros(size, 1, length), taken.cumsum(1)[:, :-1]), dim=1)
    total = scores.base[:, :depths] + before @ scores.pair
    total = total + torch.cat((taken.new_zeros(size, 1, length), taken[:, :-1] @ scores.last), dim=1)
    if scores.gate_out.shape[0]:
        node = scores.gate_node[:, :depths] + before @ scores.gate_commit
        hidden = functional.relu(node[:, :, None] + scores.gate_position[:, None])
        total = total + hidden @ scores.gate_out
    remaining = masked[:, None] & (before == 0)
    if scores.dynamic.abs().sum() > 0:
        known = (scores.known_root[:, None] + (before @ scores.known[..., None])[..., 0]) / (1 + before.sum(dim=-1))
        weight = scores.dynamic[:, None, 0] + known[..., None] * scores.dynamic[:, None, 1]  # [B, D, 4]
        moved = dynamic_features(scores.sure[:, :depths] + before @ scores.effect, remaining, scores.rounded)
        total = total + (moved * weight[:, :, None]).sum(dim=-1)
    return total, remaining


def dynamic_features(
    sure: Float[Tensor, "B D L"], remaining: Bool[Tensor, "B D L"], rounded: Float[Tensor, " B"]
) -> Float[Tensor, "B D L 4"]:
    """Return features of the sureness expected at a node: itself, its place in the rule's order, whether first, 1 / (1 + place)."""
    sure = sure.clamp(0.0, MAX_SURENESS)
    with torch.no_grad():
        chance = (1 - torch.exp(-sure)).to(torch.bfloat16).to(sure.dtype)
        rank = torch.where(rounded[:, None, None] > 0, chance, sure).masked_fill(~remaining, -torch.inf)
        length = sure.shape[-1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=sure.device).triu(1)  # [j, i]: j before i
        one, other = rank[..., None, :], rank[..., :, None]  # of i, of j
        ahead = (other > one) | ((other == one) & earlier)
        place = (ahead & remaining[..., :, None]).sum(dim=-2).to(sure.dtype)
    return torch.stack((sure / 4, place / 8, (place == 0).to(sure.dtype), 1 / (1 + place)), dim=-1)

"""The trained network: a small Qwen3 (RMSNorm, rotary, qk-norm, SwiGLU, tied head) or a relative, written for fast training on a CPU.

Without norms of heads it is a Llama, with biases too a Qwen2, with experts a Qwen3-MoE; parameter names are those of transformers'
classes but for the experts, which are one wide layer here (zoo/layouts.py). Knows nothing of data or optimizers.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network; the default, the shipped target, has about 1.9 million parameters.

    Args:
        num_key_heads: heads of keys and values, each for `num_heads / num_key_heads` queries; 0: as many as queries.
        intermediate_size: hidden units of the feed-forward layer, or of each expert.
        qk_norm: normalise every query and key head.
        qkv_bias: biases of queries, keys and values.
        num_experts: 0: one dense feed-forward layer.
        experts_per_token: experts that see a row; their weights are their softmax probabilities, which need not add up to 1.
        tied: the embedding is the head.
    """

    vocab_size: int = 768
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 6
    num_key_heads: int = 0
    head_dim: int = 32
    intermediate_size: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 4096
    qk_norm: bool = True
    qkv_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    tied: bool = True

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_heads or self.num_heads

    def to_dict(self) -> dict[str, float]:
        """Return the sizes as a plain dictionary for a checkpoint."""
        return asdict(self)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, 1, S, head_dim] of the rotary embedding for absolute `positions` [B, S]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=positions.device) / config.head_dim
    angles = positions[..., None].float() / config.rope_theta**exponent
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [B, heads, S, head_dim]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention, with a norm on every query and key head if the sizes ask for it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner, outer = config.num_heads * config.head_dim, config.key_heads * config.head_dim
        self.config = config
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, outer, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, outer, bias=config.qkv_bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Attend within x [B, S, d] where the bool mask [B, 1, S, S] allows."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.config.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        group = self.config.num_heads // self.config.key_heads
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position of x on its own."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """SwiGLU experts behind a softmax router, computed as one wide layer; names `gate`, `gate_proj`, ... hold all experts in order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        wide = config.num_experts * config.intermediate_size
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.down_proj = nn.Linear(wide, config.hidden_size, bias=False)
        self.shares: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Send every position of x to its experts; `shares` keeps their probabilities for the balancing loss."""
        self.shares = functional.softmax(self.gate(x), dim=-1)
        chosen = self.shares.topk(self.config.experts_per_token, dim=-1)
        weights = torch.zeros_like(self.shares).scatter(-1, chosen.indices, chosen.values)
        hidden = functional.silu(self.gate_proj(x)) * self.up_proj(x)
        hidden = hidden.unflatten(-1, (self.config.num_experts, -1)) * weights[..., None]
        return self.down_proj(hidden.flatten(-2))

    def balance(self) -> Tensor:
        """Return the balancing loss of the last pass: number of experts times the sum of (share of rows x mean probability), 1 at best."""
        assert self.shares is not None, "balance needs a pass before it"
        shares = self.shares.flatten(0, -2)
        chosen = torch.zeros_like(shares).scatter(-1, shares.topk(self.config.experts_per_token, dim=-1).indices, 1.0)
        return self.config.num_experts * (chosen.mean(0) / self.config.experts_per_token * shares.mean(0)).sum()


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Experts(config) if config.num_experts else MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Apply attention and feed-forward with residuals."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class BlockDiffusionModel(nn.Module):
    """A denoiser; which position a row of logits predicts is the batch's affair."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.02 if "embed" in name or "lm_head" in name else weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=scale)
            if name.endswith(".bias"):
                nn.init.zeros_(weight)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)

    def hidden(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return final hidden states [B, S, d] for ids [B, S] at absolute positions [B, S] under a bool mask [B, 1, S, S]."""
        cos, sin = rotary(positions, self.config)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits for hidden states."""
        return functional.linear(hidden, self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight)

    def balance(self) -> Tensor:
        """Return the mean balancing loss of the experts' layers in the last pass."""
        return torch.stack([layer.mlp.balance() for layer in self.model.layers if isinstance(layer.mlp, Experts)]).mean()

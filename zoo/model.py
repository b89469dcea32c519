"""The trained network: a small Qwen3 (RMSNorm, rotary, qk-norm, SwiGLU, tied head) written for fast training on a CPU.

Parameter names are those of transformers' Qwen3ForCausalLM, so a state dict is a checkpoint. Knows nothing of data or optimizers.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network; `num_parameters` of the default is about 1.9 million."""

    vocab_size: int = 768
    hidden_size: int = 192
    num_layers: int = 4
    num_heads: int = 6
    head_dim: int = 32
    intermediate_size: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 4096

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
    """Multi-head attention with a norm on every query and key head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner = config.num_heads * config.head_dim
        self.config = config
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """Attend within x [B, S, d] where the bool mask [B, 1, S, S] allows."""
        batch, length, _ = x.shape
        heads = (batch, length, self.config.num_heads, self.config.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
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


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
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
    """A same-position denoiser: the logits of a row predict that very row."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = 0.02 if "embed" in name else weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=scale)
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
        """Return logits for hidden states through the tied head."""
        return functional.linear(hidden, self.model.embed_tokens.weight)

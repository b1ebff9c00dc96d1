"""The blocks that families share, and a decoder of them.

Shapes: B batch, S tokens, D width.
"""

from typing import Any

from torch import Tensor

from solotune.models.attention import Attention, Context
from solotune.models.decoder import Block, Decoder
from solotune.models.feed_forward import GatedFeedForward
from solotune.models.norm import RMSNorm
from solotune.models.rope import Rotary
from solotune.models.settings import Settings


class PreNormBlock(Block):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, s: Settings, index: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(s)
        self.self_attn = make_attention(s, index)
        self.post_attention_layernorm = make_norm(s)
        self.mlp = make_feed_forward(s)

    def layer(self, x_BSD: Tensor, context: Context) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), context)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD), context)


class PostNormBlock(Block):
    """x + norm(attention(x)), then x + norm(feed_forward(x))."""

    def __init__(self, s: Settings, index: int) -> None:
        super().__init__()
        self.self_attn = make_attention(s, index)
        self.post_attention_layernorm = make_norm(s)
        self.mlp = make_feed_forward(s)
        self.post_feedforward_layernorm = make_norm(s)

    def layer(self, x_BSD: Tensor, context: Context) -> Tensor:
        x_BSD = x_BSD + self.post_attention_layernorm(self.self_attn(x_BSD, context))
        return x_BSD + self.post_feedforward_layernorm(self.mlp(x_BSD, context))


class SandwichNormBlock(Block):
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x)))."""

    def __init__(self, s: Settings, index: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(s)
        self.self_attn = make_attention(s, index)
        self.post_attention_layernorm = make_norm(s)
        self.pre_feedforward_layernorm = make_norm(s)
        self.mlp = make_feed_forward(s)
        self.post_feedforward_layernorm = make_norm(s)

    def layer(self, x_BSD: Tensor, context: Context) -> Tensor:
        y_BSD = self.self_attn(self.input_layernorm(x_BSD), context)
        x_BSD = x_BSD + self.post_attention_layernorm(y_BSD)
        y_BSD = self.mlp(self.pre_feedforward_layernorm(x_BSD), context)
        return x_BSD + self.post_feedforward_layernorm(y_BSD)


def make_norm(s: Settings) -> RMSNorm:
    return RMSNorm(s.hidden_size, s.rms_norm_eps, offset=s.norm_offset)


def make_attention(s: Settings, index: int) -> Attention:
    return Attention(
        s.hidden_size,
        num_heads=s.num_attention_heads,
        num_kv_heads=s.num_key_value_heads,
        head_dim=s.head_dim,
        index=index,
        bias=s.attention_bias,
        output_bias=s.output_bias,
        scale=s.attention_scale,
        rope=s.rope_of_layer[index],
        window=s.window_of_layer[index],
        soft_cap=s.attention_soft_cap,
        norm_over=s.norm_over,
        norm_eps=s.rms_norm_eps,
        norm_offset=s.norm_offset,
        fused=s.fused,
    )


def make_feed_forward(s: Settings) -> GatedFeedForward:
    return GatedFeedForward(
        s.hidden_size,
        s.intermediate_size,
        bias=s.mlp_bias,
        activation=s.activation,
        fused=s.fused,
    )


def build_decoder(
    config: dict[str, Any],
    s: Settings,
    block: type[PreNormBlock] | type[PostNormBlock] | type[SandwichNormBlock] = PreNormBlock,
) -> Decoder:
    """Return the decoder of these settings, unfilled; `config` is what they were read from."""
    return Decoder(
        [block(s, index) for index in range(s.num_hidden_layers)],
        norm=make_norm(s),
        rotaries=[Rotary(s.head_dim, rope) for rope in s.ropes],
        vocab_size=s.vocab_size,
        width=s.hidden_size,
        tied=s.tie_word_embeddings,
        cache_heads=s.num_key_value_heads,
        head_dim=s.head_dim,
        config=config,
        embedding_scale=s.embedding_scale,
        logit_soft_cap=s.logit_soft_cap,
    )

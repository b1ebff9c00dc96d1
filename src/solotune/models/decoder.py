"""The decoder: embedding, a list of blocks, final norm, output weight.

It and the memory features know of a block only `block(hidden, context) -> hidden`; what a block is
made of is a family's own file. The model returns hidden states: the loss takes the output weight as
an argument, so that the logits of a batch never exist at once.

Shapes: B batch, S tokens, D width, V vocabulary, M segments a row.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from solotune.models.attention import Context, KVCache
from solotune.models.embedding import Embedding
from solotune.models.linear import Linear
from solotune.models.output import AdaptedOutput, multiply, rounded_in_place
from solotune.models.rope import Rotary, sequence_lengths


class Block(nn.Module):
    """Base of every block: `layer(x_BSD, context)` is the family's; checkpointing is ours.

    With `checkpointing` set, only the block's input is kept for backward and the rest is computed
    again. It is a property of the block and not a wrapper, so parameter names never change, and
    `compile` sees the recomputation inside its graph (0.63 of the eager time against 0.71).
    """

    checkpointing: bool = False
    kept_outputs: tuple[torch._ops.OpOverload, ...] = ()  # operators not to run a second time

    def layer(self, x_BSD: Tensor, context: Any) -> Tensor:
        raise NotImplementedError

    def forward(self, x_BSD: Tensor, context: Any) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            # No block draws random numbers, so there is no generator state to keep.
            keep = {}
            if self.kept_outputs:
                make = create_selective_checkpoint_contexts
                keep["context_fn"] = partial(make, list(self.kept_outputs))
            return checkpoint(
                self.layer, x_BSD, context, use_reentrant=False, preserve_rng_state=False, **keep
            )
        return self.layer(x_BSD, context)


class Decoder(nn.Module):
    """A causal language model without its loss.

    Parameter names are Hugging Face's without `model.` (`layers.0.self_attn.q_proj.weight`).
    `config` is the parsed config.json it was built from. Tied: there is no `lm_head`, unless it is
    adapted.
    `logit_soft_cap` c, which the loss is built with, bounds logits: c * tanh(logit / c).
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        norm: nn.Module,
        rotaries: Sequence[Rotary],
        vocab_size: int,
        width: int,
        tied: bool,
        cache_heads: int,
        head_dim: int,
        config: dict[str, Any],
        embedding_scale: float = 1.0,
        logit_soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocab_size, width, scale=embedding_scale)
        self.layers = nn.ModuleList(blocks)
        self.norm = norm
        self.rotaries = nn.ModuleList(rotaries)
        self.lm_head = None if tied else Linear(width, vocab_size, bias=False)
        self.tied = tied
        self.config = config
        self.logit_soft_cap = logit_soft_cap
        self.new_rows: tuple[int, ...] = ()  # of the embedding; no checkpoint has them yet
        self._cache_shape = (cache_heads, head_dim)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.layers

    @property
    def output_weight(self) -> Tensor:
        """The projection to the vocabulary, (V, D): the embedding itself where tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def head(self) -> Tensor | AdaptedOutput:
        """The output layer as the loss takes it: `output_weight`, unless it is adapted."""
        return self.output_weight if self.lm_head is None else self.lm_head.output

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def trains_embedding(self) -> bool:
        """Whether the gradient of the lookup is wanted, by its weight or by an adapter's."""
        return any(p.requires_grad for p in self.embed_tokens.parameters())

    def add_tokens(self, new_ids: Sequence[int], *, rows: int = 0) -> None:
        """Make room for new tokens, on meta: the embedding has at least `rows` rows.

        `new_ids` may have rows already, of padding. The rows of new tokens are filled from the
        others where weights are loaded.
        """
        old = len(self.embed_tokens.weight)
        self.new_rows = tuple(sorted({*new_ids, *range(old, rows)}))
        if rows <= old:
            return
        for layer in (self.embed_tokens, self.lm_head):
            if layer is not None:
                weight = layer.weight
                layer.weight = nn.Parameter(
                    weight.new_empty(rows, weight.size(1)), requires_grad=weight.requires_grad
                )
        self.embed_tokens.num_embeddings = rows
        self.config = self.config | {"vocab_size": rows}

    def add_tied_output(self) -> None:
        """Make `lm_head` a layer that has the embedding's own weight, so that it can be adapted."""
        rows, width = self.embed_tokens.weight.shape
        with torch.device("meta"):
            self.lm_head = Linear(width, rows, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def to_hf_key(self, name: str) -> str:
        """Return the name that the parameter `name` has in a Hugging Face folder."""
        return name if name.startswith("lm_head.") else f"model.{name}"

    @torch.no_grad()
    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Return x_BSD, outside autograd.

        The caller asks for its gradient and hands it to `add_embedding_gradient`. Only so is the
        sum the same in every schedule: with tied weights autograd would mix lookup and head
        gradients in the order in which it happens to meet them.
        """
        return self.embed_tokens(tokens_BS)

    def round_head_gradient(self) -> None:
        """Give the head's gradient, which micro-batches sum in fp32, the dtype of its weight."""
        weight = self.output_weight
        if weight.grad is not None and weight.grad.dtype != weight.dtype:
            weight.grad = rounded_in_place(weight.grad, weight.dtype)

    @torch.no_grad()
    def add_embedding_gradient(self, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Add the lookup's gradient, given (tokens_BS, x_grad_BSD) of each micro-batch in order.

        The head's gradient is complete before, and rounded.
        """
        self.round_head_gradient()
        if not self.trains_embedding:
            return
        for tokens_BS, grad_BSD in pairs:
            if grad_BSD is not None:  # None: a micro-batch without a target
                self.embed_tokens.add_gradient(tokens_BS, grad_BSD)

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        """Return logits_BSV of a few positions; a loss makes its own, a chunk at a time."""
        logits_BSV = multiply(hidden_BSD, self.head)
        cap = self.logit_soft_cap
        return logits_BSV if cap is None else cap * (logits_BSV.float() / cap).tanh()

    def context(
        self,
        positions_BS: Tensor,
        segments_BM: Tensor | None,
        cache: KVCache | None = None,
        *,
        key: int | None = None,
    ) -> Context:
        """Return what all blocks share in this batch; `key` lets adapters drop, by its number."""
        lengths_BS = None
        if any(rotary.by_length for rotary in self.rotaries):
            if cache is not None:  # keys stay as they were turned, so by the longest they can get
                lengths_BS = torch.full_like(positions_BS, cache.max_tokens)
            elif segments_BM is not None:
                lengths_BS = sequence_lengths(segments_BM, positions_BS.size(1))
        angles = tuple(rotary(positions_BS, lengths_BS) for rotary in self.rotaries)
        key_on_host = None if key is None else torch.tensor(key, device="cpu")
        return Context(positions_BS, segments_BM, angles, cache, key_on_host)

    def hidden_states(
        self,
        x_BSD: Tensor,
        context: Context,
        *,
        around_block: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Tensor:
        """Return the normed hidden states of the last block, (B, S, D).

        `around_block` is entered around each block: what autograd saves there can be moved.
        """
        for block in self.blocks:
            with around_block():
                x_BSD = block(x_BSD, context)
        return self.norm(x_BSD)

    def new_cache(self, batch: int, max_tokens: int) -> KVCache:
        """Return an empty cache for `batch` rows of at most `max_tokens` positions."""
        weight = self.embed_tokens.weight
        return KVCache(
            len(self.layers),
            batch,
            max_tokens,
            *self._cache_shape,
            dtype=weight.dtype,
            device=weight.device,
        )

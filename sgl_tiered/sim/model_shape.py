"""The shape of one model, and what follows from it: parameters, FLOPs, KV bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Experts", "LatentAttention", "ModelShape"]


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward part of a mixture of experts.

    Attributes:
        num: routed experts of a layer.
        num_active: of them, those that a token passes.
        ffn_size: of one expert.
        num_shared: experts that every token passes, of the same size.
        num_dense_layers: first layers that have one plain feed-forward part instead.
    """

    num: int
    num_active: int
    ffn_size: int
    num_shared: int = 0
    num_dense_layers: int = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): one vector for all heads.

    Attributes:
        kv_rank: of the latent vector that is cached.
        query_rank: of the queries; 0 where they are not compressed.
        rope_size: per head, the part that is rotated; its key is cached once.
        nope_size: per head, the part that is not.
        value_size: per head.
    """

    kv_rank: int
    query_rank: int
    rope_size: int
    nope_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model.

    Attributes:
        name: as published.
        num_layers, hidden_size, ffn_size, num_heads, num_kv_heads, head_size, vocab:
            as in the configuration.
        gated_ffn: three matrices (Llama) or two (OPT) in the feed-forward part.
        tied_embedding: the output matrix is the input embedding.
        max_tokens: context window.
        source: where the numbers come from.
        weight_bytes_per_param: 2 for 16-bit weights.
        experts: None for a dense model. A pass is taken to read all of them: true of
            batches of some dozen tokens, too slow for a single request.
        latent: None for attention with heads of keys and values.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab: int
    gated_ffn: bool
    tied_embedding: bool
    max_tokens: int
    source: str
    weight_bytes_per_param: int = 2
    experts: Experts | None = None
    latent: LatentAttention | None = None

    @property
    def attention_width(self) -> int:
        """Query heads * head size; the mean of keys and values where they differ."""
        if self.latent is None:
            return self.num_heads * self.head_size
        latent = self.latent
        widths = latent.nope_size + latent.rope_size + latent.value_size
        return self.num_heads * widths // 2

    @property
    def num_params(self) -> int:
        """Parameters of all matrices, embeddings included."""
        copies = 1 if self.tied_embedding else 2
        return (
            self._num_layer_params(all_experts=True)
            + copies * self.vocab * self.hidden_size
        )

    @property
    def num_compute_params(self) -> int:
        """Parameters that every token passes: the layers and the output matrix."""
        return self._num_layer_params(all_experts=False) + self.vocab * self.hidden_size

    def _num_layer_params(self, *, all_experts: bool) -> int:
        """Return the parameters of all layers, with all experts or those of a token."""
        matrix = (3 if self.gated_ffn else 2) * self.hidden_size
        attention = self.num_layers * self._num_attention_params
        if (experts := self.experts) is None:
            return attention + self.num_layers * matrix * self.ffn_size
        num_sparse = self.num_layers - experts.num_dense_layers
        num = experts.num if all_experts else experts.num_active
        ffn = experts.num_dense_layers * matrix * self.ffn_size
        ffn += num_sparse * matrix * experts.ffn_size * (num + experts.num_shared)
        return attention + ffn + num_sparse * self.hidden_size * experts.num

    @property
    def _num_attention_params(self) -> int:
        """Parameters of the attention of one layer."""
        hidden = self.hidden_size
        if (latent := self.latent) is None:
            return (
                2 * hidden * (self.attention_width + self.num_kv_heads * self.head_size)
            )
        query = self.num_heads * (latent.nope_size + latent.rope_size)
        up = self.num_heads * (latent.nope_size + latent.value_size)
        rank = latent.query_rank
        return (
            (rank * (hidden + query) if rank else hidden * query)
            + hidden * (latent.kv_rank + latent.rope_size)
            + latent.kv_rank * up
            + self.num_heads * latent.value_size * hidden
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_params * self.weight_bytes_per_param

    @property
    def kv_token_bytes(self) -> int:
        """What is cached of one token over all layers, 16 bits each."""
        if self.latent is not None:
            return 2 * self.num_layers * (self.latent.kv_rank + self.latent.rope_size)
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_size

    def kv_copies(self, num_ranks: int) -> float:
        """Return how often a token's KV is there under tensor parallelism.

        A head of keys is the least that a rank has, and a latent vector has no heads:
        every rank holds all of it.
        """
        if self.latent is not None:
            return float(num_ranks)
        return max(1.0, num_ranks / self.num_kv_heads)

    @property
    def decode_flops_per_token(self) -> int:
        """Operations of one new token with one of its context, over all layers.

        Latent attention multiplies with the latent vector itself (DeepSeek-V2, section
        2.1.2), so more than its heads have.
        """
        if self.latent is None:
            return 4 * self.num_layers * self.attention_width
        widths = 2 * self.latent.kv_rank + self.latent.rope_size
        return 2 * self.num_layers * self.num_heads * widths

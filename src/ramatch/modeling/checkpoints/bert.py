"""Hugging Face text towers without a vision tower: BERT, RoBERTa and XLM-RoBERTa, DistilBERT; mean-pooled, as sentence
encoders are, so poolers are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..backbone import TowerConfig
from .files import Names, Tensors, activation, transformer_sizes

EMBEDDED = {"tokens.weight": "embeddings.word_embeddings.weight", "positions": "embeddings.position_embeddings.weight"}
STEM = {"stem": "embeddings.LayerNorm"}
NORMS = {"ln1": "attention.output.LayerNorm", "ln2": "output.LayerNorm"}
BERT = Names(
    "encoder.layer.{}.",
    NORMS | {"out": "attention.output.dense", "fc1": "intermediate.dense", "fc2": "output.dense"},
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    STEM,
    EMBEDDED,
)
DISTILBERT = Names(
    "transformer.layer.{}.",
    {
        "ln1": "sa_layer_norm",
        "ln2": "output_layer_norm",
        "out": "attention.out_lin",
        "fc1": "ffn.lin1",
        "fc2": "ffn.lin2",
    },
    ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    STEM,
    EMBEDDED,
)


def bert_config(raw: dict[str, Any]) -> TowerConfig:
    """From a BERT config.json."""
    vocab, context = raw.get("vocab_size", 30522), raw.get("max_position_embeddings", 512)
    return TowerConfig(**transformer_sizes(raw), norm="post", vocab=vocab, context=context, pool="mean")


def roberta_config(raw: dict[str, Any]) -> TowerConfig:
    """From a RoBERTa or XLM-RoBERTa config.json, whose positions begin after that of the padding token."""
    base = bert_config({"vocab_size": 50265, "max_position_embeddings": 514, "layer_norm_eps": 1e-5} | raw)
    return replace(base, context=base.context - first_position(raw))


def first_position(raw: dict[str, Any]) -> int:
    """RoBERTa's first row of positions that is in use."""
    padding = raw.get("pad_token_id")
    return (1 if padding is None else padding) + 1


def distilbert_config(raw: dict[str, Any]) -> TowerConfig:
    """From a DistilBERT config.json."""
    sizes = (raw.get("dim", 768), raw.get("n_layers", 6), raw.get("n_heads", 12), raw.get("hidden_dim", 3072))
    vocab, context = raw.get("vocab_size", 30522), raw.get("max_position_embeddings", 512)
    act = activation(raw.get("activation", "gelu"))
    return TowerConfig(*sizes, act, 1e-12, norm="post", vocab=vocab, context=context, pool="mean")


def bert(t: Tensors) -> dict[str, Tensor]:
    """A BERT or RoBERTa."""
    return BERT(t) | {"types": t["embeddings.token_type_embeddings.weight"][0]}


def distilbert(t: Tensors) -> dict[str, Tensor]:
    """A DistilBERT, which has no token types."""
    words = t["embeddings.word_embeddings.weight"]
    return DISTILBERT(t) | {"types": words.new_zeros(words.shape[1])}

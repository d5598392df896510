"""Small random models of transformers whose attention is their own, and layers that write theirs as others do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from hugging_face_models import BART, SIZES, T5, N, made, tokens
from torch import Tensor, nn
from transformers.models.blip.configuration_blip import BlipTextConfig
from transformers.models.blip.modeling_blip_text import BlipTextModel

AUTO = transformers.AutoModel
_SHORT = {name: size for name, size in SIZES.items() if not name.endswith("token_id")} | {"pad_token_id": 0}


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _text(length: int = 14) -> dict[str, Tensor]:
    return {"input_ids": tokens(2, length)}


def _pair(length: int = 14) -> dict[str, Tensor]:
    return {"input_ids": tokens(2, length), "decoder_input_ids": tokens(2, 9)}


def _blip() -> nn.Module:
    torch.manual_seed(0)
    config = BlipTextConfig(**_SHORT, is_decoder=False, encoder_hidden_size=32)
    config._attn_implementation = "eager"
    return BlipTextModel(config, add_pooling_layer=False).eval()


def _funnel() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.FunnelConfig(vocab_size=N, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=48)
    return transformers.FunnelModel(config).eval()


def _of(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: made(getattr(transformers, f"{name}Config")(**sizes), AUTO)


_TIMES = {"past_values": (2, 14), "past_time_features": (2, 14, 1)}
_TIMES |= {"future_values": (2, 4), "future_time_features": (2, 4, 1)}


def _times() -> dict[str, Tensor]:
    return {name: _drawn(*shape) for name, shape in _TIMES.items()} | {"past_observed_mask": torch.ones(2, 14)}


_SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_SEVERAL = {"vocab_size": N, "hidden_size": 32, "num_attention_heads": 4}
#: Families that attend by functions of their own, with how each is built and what it reads.
RECORDED: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "bigbird, full": (_of("BigBird", **_SHORT, attention_type="original_full"), _text),
    "deberta": (_of("Deberta", **_SHORT, relative_attention=True, pos_att_type=["c2p", "p2c"]), _text),
    "deberta v2": (_of("DebertaV2", **_SHORT, relative_attention=True, pos_att_type=["c2p", "p2c"]), _text),
    "roformer": (_of("RoFormer", **_SHORT, embedding_size=32), _text),
    "xlnet": (_of("XLNet", vocab_size=N, d_model=32, n_layer=2, n_head=4, d_inner=48), _text),
    "mpnet": (_of("MPNet", **_SHORT), _text),
    "bloom": (_of("Bloom", **_SEVERAL, n_layer=2), _text),
    "gpt-neo": (
        _of("GPTNeo", vocab_size=N, hidden_size=32, num_layers=2, num_heads=4, window_size=5,
            attention_types=[[["global", "local"], 1]], max_position_embeddings=64), _text),
    "funnel": (_funnel, _text),
    "convbert": (_of("ConvBert", **_SHORT, embedding_size=32), _text),
    "nystromformer, whole": (
        _of("Nystromformer", **_SHORT, num_landmarks=16, segment_means_seq_len=16), lambda: _text(16)),
    "swinv2": (_of("Swinv2", **_SWIN), lambda: {"pixel_values": _drawn(2, 3, 32, 32)}),
    "blip, text": (_blip, _text),
    "perceiver": (
        _of("Perceiver", num_latents=6, d_latents=32, d_model=24, num_blocks=1, num_self_attends_per_block=2,
            num_self_attention_heads=4, num_cross_attention_heads=4, vocab_size=N),
        lambda: {"inputs": _drawn(2, 10, 24)}),
    "informer": (
        _of("Informer", prediction_length=4, context_length=12, lags_sequence=[1, 2], d_model=16, encoder_layers=2,
            decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=16,
            decoder_ffn_dim=16, num_time_features=1), _times),
    "falcon": (_of("Falcon", **_SEVERAL, num_hidden_layers=2), _text),
    "fsmt": (
        _of("FSMT", langs=["en", "de"], src_vocab_size=N, tgt_vocab_size=N,
            **{name: size for name, size in BART.items() if not name.endswith("id") and name != "vocab_size"}), _pair),
    "tapas": (_of("Tapas", **_SHORT), _text),
    "openai-gpt": (_of("OpenAIGPT", vocab_size=N, n_positions=64, n_embd=32, n_layer=2, n_head=4), _text),
}  # fmt: skip
#: Families whose attention is not one matrix of softmaxes: which modules of theirs are reported.
REPORTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], str, int]] = {
    "longformer": (_of("Longformer", **_SHORT, attention_window=4), lambda: _text(16), "LongformerSelfAttention", 2),
    "bigbird": (
        _of("BigBird", **_SHORT, attention_type="block_sparse", block_size=4, num_random_blocks=1), lambda: _text(64),
        "BigBirdBlockSparseAttention", 2),
    "nystromformer": (
        _of("Nystromformer", **_SHORT, num_landmarks=4, segment_means_seq_len=16), lambda: _text(16),
        "NystromformerSelfAttention", 2),
    "longt5": (
        _of("LongT5", **T5, local_radius=3), _pair, "LongT5LocalAttention", 2),
    "bigbird-pegasus": (
        _of("BigBirdPegasus", **(BART | {"max_position_embeddings": 128}), block_size=4, num_random_blocks=1),
        lambda: _pair(64), "BigBirdPegasusBlockSparseAttention", 2),
    "rwkv": (
        _of("Rwkv", vocab_size=N, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32), _text,
        "RwkvSelfAttention", 2),
}  # fmt: skip


def attentions(output: Any) -> list[Tensor]:
    """Return the weights that a model returned, of all its parts."""
    parts = (getattr(output, name, None) or () for name in (
        "attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"))  # fmt: skip
    return [each for part in parts for each in part if each is not None]


class Layer(nn.Module):
    """Self-attention of 2 heads over rows (B, L, 8); classes below differ in how they write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.project = nn.Linear(8, 24)
        self.expected = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        with torch.no_grad():
            self.expected = (query @ key.mT / 2).softmax(-1)
        return self.attend(query, key, value).transpose(1, 2).flatten(2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError


class Einsum(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.einsum("bhld,bhsd->bhls", query, key).div(2).softmax(-1)
        return torch.einsum("bhls,bhsd->bhld", weights, value)


class OtherOrder(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.einsum("bhld,bhsd->bhls", query, key).div(2).softmax(-1)
        return torch.einsum("bshd,bhls->blhd", value.transpose(1, 2), weights).transpose(1, 2)


class Transposed(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / 2).softmax(-1)
        return (value.mT @ weights.mT).mT


class Flat(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (each.flatten(0, 1) for each in (query, key, value))
        weights = torch.baddbmm(torch.zeros(1), query, key.mT, beta=0, alpha=0.5).softmax(-1)
        return torch.bmm(weights, value).unflatten(0, (-1, 2))


class Cast(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / 2).double().softmax(-1, dtype=torch.float64).to(query.dtype)
        return torch.matmul(weights.contiguous().clone(), value)


class Dropped(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = F.dropout((query @ key.mT / 2).softmax(-1), 0.4, training=True)
        return weights.view(-1, *weights.shape[-2:]).bmm(value.reshape(-1, *value.shape[-2:])).view(value.shape)


class HeadMask(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.tensor([0.0, 1.0])[:, None, None]
        self.expected = self.expected * mask
        return ((query @ key.mT / 2).softmax(-1) * mask) @ value


class TalkingHeads(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / 2).softmax(-1)
        mixed = self.mix(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        self.expected = mixed.detach().clone()
        return mixed @ value


class Gated(Layer):
    """As ConViT: one softmax of contents and one of places, in shares of a gate, normalized again."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        gate, L = torch.tensor([0.3, 0.8])[:, None, None], query.shape[2]
        places = torch.arange(L).sub(torch.arange(L)[:, None]).abs().neg().float().expand(1, 2, L, L)
        weights = (1 - gate) * (query @ key.mT / 2).softmax(-1) + gate * places.softmax(-1)
        weights = weights / weights.sum(-1, keepdim=True)
        self.expected = weights.detach().clone()
        return weights @ value


class Modules(Layer):
    """Its softmax and its products are modules, as SqueezeBERT's are."""

    class Product(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return one @ other

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.read, self.softmax = self.Product(), self.Product(), nn.Softmax(-1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.read(self.softmax(self.scores(query, key.mT) / 2), value)


_PARTIAL = functools.partial(F.scaled_dot_product_attention, scale=0.5)
_TABLE = {"sdpa": F.scaled_dot_product_attention}


class Partial(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _PARTIAL(query, key, value)


class Table(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _TABLE["sdpa"](query, key, value)


class Default(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, by: Any = F.scaled_dot_product_attention) -> Tensor:
        return by(query, key, value)


class Closure(Layer):
    def __init__(self) -> None:
        super().__init__()
        function = F.scaled_dot_product_attention

        def by(*given: Tensor) -> Tensor:
            return function(*given)

        self.by = by

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.by(query, key, value)


LAYERS = [Einsum, OtherOrder, Transposed, Flat, Cast, Dropped, HeadMask, TalkingHeads, Gated, Modules, Partial, Table,
          Default, Closure]  # fmt: skip

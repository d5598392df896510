"""Small random models of transformers, of every family whose attention differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    T5Config,
)

transformers.utils.logging.set_verbosity_error()
N, L = 60, 14
SIZES = {"vocab_size": N, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64, "initializer_range": 0.4}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
DECODERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(vocab_size=N, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.4,
                               bos_token_id=None, eos_token_id=None),
    "llama, grouped": lambda: LlamaConfig(**GROUPED),
    "mistral, sliding": lambda: MistralConfig(**GROUPED, sliding_window=5),
    "gemma 2, softcap": lambda: Gemma2Config(**GROUPED, **ALTERNATING, attn_logit_softcapping=3.0),
    "gemma 3": lambda: Gemma3TextConfig(**GROUPED, **ALTERNATING),
    "gpt-oss, sinks": lambda: GptOssConfig(**GROUPED, **ALTERNATING, num_local_experts=2, num_experts_per_tok=1,
                                           rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "llama 4, chunks": lambda: Llama4TextConfig(**GROUPED, attention_chunk_size=5, num_local_experts=2,
                                                num_experts_per_tok=1, intermediate_size_mlp=48),
}  # fmt: skip
T5 = {"vocab_size": N, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "initializer_factor": 1.0}
T5 |= {"decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
BART = {"vocab_size": N, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
BART |= {"init_std": 0.2, "decoder_start_token_id": 2, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
BART |= {"forced_eos_token_id": None}
PAIRED: dict[str, Callable[[], Any]] = {"t5": lambda: T5Config(**T5), "bart": lambda: BartConfig(**BART)}


def made(config: Any, auto: Any = AutoModelForCausalLM, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").to(dtype).eval()
    for name, each in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(each)
    return model


def tokens(batch: int = 2, length: int = L) -> Tensor:
    return torch.randint(1, N, (batch, length), generator=torch.Generator().manual_seed(1))

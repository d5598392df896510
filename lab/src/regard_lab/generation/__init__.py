"""Output of a trained model: generation, beam search, sampling, forced scores, and predictions for lines of text."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab.generation.beam_search import Hypothesis, SearchOptions, search
    from regard_lab.generation.continuous_batching import AttentionRequest, Batcher
    from regard_lab.generation.generation import Generated, generate, stream
    from regard_lab.generation.predictions import Note, Prediction, PredictionOptions
    from regard_lab.generation.prompt_search import search_prompts
    from regard_lab.generation.quantization import pack_weights, quantize
    from regard_lab.generation.requests import Request, StopRules, Token, TokenAttention
    from regard_lab.generation.sampling import GenerationOptions, SamplingOptions
    from regard_lab.generation.sequence_model import (
        SequenceModel,
        attention_maps,
        attention_weights,
        pad_to_device,
        posteriors,
        score_targets,
    )
    from regard_lab.generation.speculative import Drafter, ModelDrafter, NGramDrafter, Speculator
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.generation.beam_search": "Hypothesis SearchOptions search",
            "regard_lab.generation.continuous_batching": "AttentionRequest Batcher",
            "regard_lab.generation.generation": "Generated generate stream",
            "regard_lab.generation.predictions": "Note Prediction PredictionOptions",
            "regard_lab.generation.prompt_search": "search_prompts",
            "regard_lab.generation.quantization": "pack_weights quantize",
            "regard_lab.generation.requests": "Request StopRules Token TokenAttention",
            "regard_lab.generation.sampling": "GenerationOptions SamplingOptions",
            "regard_lab.generation.sequence_model": (
                "SequenceModel attention_maps attention_weights pad_to_device posteriors score_targets"
            ),
            "regard_lab.generation.speculative": "Drafter ModelDrafter NGramDrafter Speculator",
        },
    )

__all__ = [
    "AttentionRequest",
    "Batcher",
    "Drafter",
    "Generated",
    "GenerationOptions",
    "Hypothesis",
    "ModelDrafter",
    "NGramDrafter",
    "Note",
    "Prediction",
    "PredictionOptions",
    "Request",
    "SamplingOptions",
    "SearchOptions",
    "SequenceModel",
    "Speculator",
    "StopRules",
    "Token",
    "TokenAttention",
    "attention_maps",
    "attention_weights",
    "generate",
    "pack_weights",
    "pad_to_device",
    "posteriors",
    "quantize",
    "score_targets",
    "search",
    "search_prompts",
    "stream",
]

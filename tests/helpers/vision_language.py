"""Small random vision–language models of transformers with their processors, built without downloads or torchvision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

transformers.utils.logging.set_verbosity_error()
SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
TEXT: dict[str, Any] = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 160}
#: Tokens that Idefics 3 puts before a tile.
TILES = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]


def tokenizer_of(*special: str, **named: str) -> Any:
    """Return a tokenizer of characters."""
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", "\n", *map(chr, range(32, 127))]
    inner = Tokenizer(models.WordLevel({each: i for i, each in enumerate(vocabulary)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        extra_special_tokens=named or list(special),
    )  # fmt: skip
    made.add_tokens(list(special), special_tokens=True)
    return made


def without_video(kind: type) -> Any:
    """Return a class of processors that does without a video processor, which needs torchvision."""
    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})


def save(model: Any, processor: Any, path: Path) -> None:
    """Write a model and its processor to a folder, as a hub's folders are."""
    model.save_pretrained(path)
    if getattr(processor, "video_processor", True) is not None:
        processor.save_pretrained(path)
        return
    processor.image_processor.save_pretrained(path)
    processor.tokenizer.save_pretrained(path)
    given = {name: getattr(processor, name) for name in ("image_seq_length",) if hasattr(processor, name)}
    (path / "processor_config.json").write_text(json.dumps(given))
    if processor.chat_template is not None:
        (path / "chat_template.jinja").write_text(processor.chat_template)


def _qwen(version: str, patch: int) -> tuple[nn.Module, Any]:
    image_processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, size={"shortest_edge": 64, "longest_edge": 64 * 48}
    )
    tokenizer = tokenizer_of("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    processor = without_video(getattr(transformers, f"Qwen{version}VLProcessor"))(image_processor, tokenizer, None)
    seeing = {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": patch, "intermediate_size": 16}
    seeing |= {"out_hidden_size": 16, "embed_dim": 16, "mlp_ratio": 1, "spatial_merge_size": 2}
    seeing |= {"window_size": 16, "fullatt_block_indexes": [0]} if version == "2_5_" else {}
    seeing |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16} if version == "3" else {}
    seeing |= {"hidden_size": 16}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    names = {f"{each}_token_id": tokenizer.convert_tokens_to_ids(f"<|{kind}|>") for each, kind in (
        ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end")
    )}  # fmt: skip
    config = getattr(transformers, f"Qwen{version}VLConfig")(
        vision_config=seeing, text_config=TEXT | {"rope_parameters": rope, "pad_token_id": 0}, **names
    )
    return getattr(transformers, f"Qwen{version}VLForConditionalGeneration")(config), processor


def _llava(strategy: str) -> tuple[nn.Module, Any]:
    image_processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    tokenizer = tokenizer_of("<image>")
    processor = transformers.LlavaProcessor(
        image_processor, tokenizer, patch_size=8, vision_feature_select_strategy=strategy, num_additional_image_tokens=1
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SMALL, image_size=32, patch_size=8),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), vision_feature_select_strategy=strategy,
        vision_feature_layer=-1,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config), processor


def _internvl() -> tuple[nn.Module, Any]:
    image_processor = transformers.GotOcr2ImageProcessorPil(
        crop_to_patches=True, size={"height": 32, "width": 32}, max_patches=6
    )
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>"}
    tokenizer = tokenizer_of(**named, context_image_token="<IMG_CONTEXT>")
    processor = without_video(transformers.InternVLProcessor)(image_processor, tokenizer, None, image_seq_length=16)
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**SMALL, image_size=[32, 32], patch_size=[4, 4]),
        text_config=transformers.Qwen2Config(**TEXT), downsample_ratio=0.5,
        image_token_id=tokenizer.context_image_token_id,
    )  # fmt: skip
    return transformers.InternVLForConditionalGeneration(config), processor


def _gemma3() -> tuple[nn.Module, Any]:
    image_processor = transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = tokenizer_of(**named)
    processor = transformers.Gemma3Processor(image_processor, tokenizer, image_seq_length=16)
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**TEXT),
        vision_config=transformers.SiglipVisionConfig(**SMALL, image_size=32, patch_size=4, vision_use_head=False),
        mm_tokens_per_image=16, image_token_index=tokenizer.image_token_id,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config)
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # zero in new models
    return model, processor


def _paligemma() -> tuple[nn.Module, Any]:
    image_processor = transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32})
    image_processor.image_seq_length = 16
    processor = transformers.PaliGemmaProcessor(image_processor, tokenizer_of())
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**SMALL, image_size=32, patch_size=8, vision_use_head=False),
        text_config=transformers.GemmaConfig(**TEXT | {"vocab_size": 1400}), image_token_index=processor.image_token_id,
        projection_dim=16,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config), processor


def _idefics3() -> tuple[nn.Module, Any]:
    image_processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 32}
    )
    tokenizer = tokenizer_of("<image>", "<fake_token_around_image>", "<global-img>", *TILES)
    processor = transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=16)
    config = transformers.Idefics3Config(
        image_token_id=processor.image_token_id, scale_factor=2, text_config=transformers.LlamaConfig(**TEXT),
        vision_config={**SMALL, "image_size": 32, "patch_size": 4}, pad_token_id=0,
    )  # fmt: skip
    return transformers.Idefics3ForConditionalGeneration(config), processor


def _mllama() -> tuple[nn.Module, Any]:
    image_processor = transformers.MllamaImageProcessorPil(size={"height": 32, "width": 32}, max_image_tiles=4)
    tokenizer = tokenizer_of("<|image|>")
    processor = transformers.MllamaProcessor(image_processor, tokenizer)
    seeing = {"hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2}
    seeing |= {"intermediate_size": 16, "image_size": 32, "patch_size": 8, "max_num_tiles": 4}
    seeing |= {"intermediate_layers_indices": [0], "vision_output_dim": 32}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.MllamaConfig(
        vision_config=seeing, image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
        text_config=TEXT | {"cross_attention_layers": [1], "rope_parameters": rope, "pad_token_id": 0},
    )  # fmt: skip
    return transformers.MllamaForConditionalGeneration(config), processor


#: How to make a model of each family with its processor.
FAMILIES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "qwen2_vl": lambda: _qwen("2", 4),
    "qwen2_5_vl": lambda: _qwen("2_5_", 4),
    "qwen3_vl": lambda: _qwen("3", 4),
    "llava": lambda: _llava("default"),
    "llava, all tokens": lambda: _llava("full"),
    "internvl": _internvl,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "idefics3": _idefics3,
    "mllama": _mllama,
}


def family(name: str) -> tuple[Any, Any]:
    """Return a random model of a family, in evaluation mode, and its processor."""
    torch.manual_seed(0)
    model, processor = FAMILIES[name]()
    return model.eval(), processor

"""Inputs that a tiny model may take: by what its parameters are called, and for some classes their own."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

B, L = 2, 12

Inputs = dict[str, Any]


class Draw:
    """Random tensors, the same ones each time."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(2)

    def tokens(self) -> Tensor:
        """Return tokens (B, L), none of which is a special one."""
        return torch.randint(62, 98, (B, L), generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        """Return normal numbers."""
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers from 0 to 1."""
        return torch.rand(shape, generator=self.generator)


def candidates(model: PreTrainedModel) -> Iterator[Inputs]:
    """Yield inputs that the model may take, the likeliest first."""
    draw, name = Draw(), type(model).__name__
    for pattern, make in OWN:
        if re.fullmatch(pattern, name):
            yield make(model.config, draw)
    yield from _by_names(model, draw)


def _by_names(model: PreTrainedModel, draw: Draw) -> Iterator[Inputs]:
    config, names = model.config, inspect.signature(model.forward).parameters
    tokens, normal = draw.tokens, draw.normal
    text: Inputs = {"input_ids": tokens()} if "input_ids" in names else {}
    paired: Inputs = {name: tokens() for name in ("decoder_input_ids", "qformer_input_ids") if name in names}
    vision = getattr(config, "vision_config", config)
    channels, size = _image(vision)
    image = {"pixel_values": normal(B, channels, size, size)}
    bins = getattr(config, "num_mel_bins", getattr(config, "feature_size", 16)) or 16
    frames = 2 * (getattr(config, "max_source_positions", None) or 32)
    width = _width(config)
    width_of_sound = next(
        (getattr(config, n) for n in ("feature_projection_input_dim", "input_feat_per_channel") if hasattr(config, n)),
        160,
    )
    if text:
        yield text | paired
        yield {name: t[:, None].repeat(1, 2, 1) for name, t in text.items()}  # two choices
        yield {name: torch.cat([t[:, 1:], torch.full((B, 1), _end(config))], 1) for name, t in text.items()}
        if "use_cache" in names:
            yield text | {"use_cache": False}
        if "bbox" in names:
            yield text | paired | {"bbox": torch.zeros(B, L, 4, dtype=torch.long)}
        if "pixel_values" in names:
            yield text | paired | image
            yield from (paired | given for given in text_and_images(model, draw))
    if "pixel_values" in names:
        yield image | paired
        yield {"pixel_values": normal(B, 4, channels, size, size)} | paired
        yield {
            "pixel_values": normal(
                8,
                channels * getattr(vision, "temporal_patch_size", 2) * vision.patch_size**2
                if isinstance(getattr(vision, "patch_size", None), int)
                else 8,
            )
        }
        frames_each = getattr(config, "num_frames", getattr(config, "frames_per_clip", 2))
        yield {"pixel_values": normal(B, frames_each, channels, size, size)} | text
    if "pixel_values_videos" in names:
        videos = {"pixel_values_videos": normal(B, getattr(config, "frames_per_clip", 2), channels, size, size)}
        yield videos
        yield text | videos
    if "input_features" in names:
        yield {"input_features": normal(B, bins, frames)} | paired
        yield {"input_features": normal(B, frames, bins)} | paired
        yield {"input_features": normal(B, frames, width_of_sound)} | paired
    if "input_values" in names:
        yield {"input_values": normal(B, 1600)} | paired
        yield {"input_values": normal(B, 1, 1600)} | paired
        yield {"input_values": normal(B, 1, 1600)} | text
        yield {"input_values": normal(B, getattr(config, "max_length", None) or 64, bins)}
    if "past_values" in names:
        yield {
            "past_values": normal(B, getattr(config, "context_length", 32), getattr(config, "num_input_channels", 1))
        }
    if "inputs_embeds" in names:
        yield {"inputs_embeds": normal(B, L, width)}
        if "encoder_hidden_states" in names:
            yield {"inputs_embeds": normal(B, L, width), "encoder_hidden_states": normal(B, L, width)}
    if "hidden_states" in names:
        yield {"hidden_states": normal(B, L, width)}
    if "grid_thw" in names:
        yield from _of_a_grid(config, names, draw)
    if "inference_session" in names:
        yield _tracked_video(model, draw)


def _width(config: PretrainedConfig) -> int:
    widths = (getattr(config, name, None) for name in ("hidden_size", "d_model", "embed_dim", "n_embd", "dim"))
    return next((width for width in widths if isinstance(width, int)), 32)


def _end(config: PretrainedConfig) -> int:
    """Return the token that ends a sequence."""
    end = getattr(config, "eos_token_id", None)
    return end if isinstance(end, int) else 2


def text_and_images(model: PreTrainedModel, draw: Draw) -> Iterator[Inputs]:
    """Yield texts in which tokens stand for the parts of an image, and the images."""
    config, names = model.config, inspect.signature(model.forward).parameters
    vision = getattr(config, "vision_config", config)
    channels, size = _image(vision)
    places = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    place = next((token for token in places if token is not None), 0)
    for parts in (4, 1, 16):
        tokens = torch.randint(62, 98, (B, max(L, parts + 8)), generator=draw.generator)
        tokens[:, 1 : 1 + parts] = place
        text: Inputs = {"input_ids": tokens}
        kinds = ("token_type_ids", "mm_token_type_ids")
        text |= {name: (tokens == place).long() for name in kinds if name in names}
        if "image_grid_thw" in names:
            side, depth = 2 * getattr(vision, "spatial_merge_size", 2), getattr(vision, "temporal_patch_size", 1)
            patches = draw.normal(B * side * side, channels * depth * getattr(vision, "patch_size", 8) ** 2)
            yield text | {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, side, side]] * B)}
        for images in ((B, channels, size, size), (B, 1, channels, size, size)):
            yield text | {"pixel_values": draw.normal(*images)}


def _image(vision: PretrainedConfig) -> tuple[int, int]:
    """Return the channels and the side of an image."""
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else (size[0] if isinstance(size, (list, tuple)) else 32)
    return getattr(vision, "num_channels", getattr(vision, "in_channels", 3)) or 3, size


def _of_a_grid(config: PretrainedConfig, names: Any, draw: Draw) -> Iterator[Inputs]:
    """Yield the patches of two images of different sizes, in rows, and how many there are in each direction."""
    merge = getattr(config, "spatial_merge_size", 2)
    side = 2 * merge
    grid = torch.tensor([[1, side, side], [1, side, 2 * side]])
    given: Inputs = {"grid_thw": grid}
    if "merge_sizes" in names:
        given["merge_sizes"] = torch.tensor([merge, merge])
    channels = getattr(config, "in_channels", getattr(config, "num_channels", 3))
    for name in ("hidden_states", "pixel_values"):
        for depth in (getattr(config, "temporal_patch_size", 2), 1) if name in names else ():
            yield {name: draw.normal(3 * side * side, channels * depth * config.patch_size**2)} | given


def _tracked_video(model: PreTrainedModel, draw: Draw) -> Inputs:
    """Return the second frame of a video, and the session that remembers an object of the first one."""
    names = vars(sys.modules[type(model).__module__])
    session_type = next(value for name, value in names.items() if name.endswith("VideoInferenceSession"))
    size = model.config.prompt_encoder_config.image_size
    video = draw.normal(2, 3, size, size)
    session = session_type(video=video, video_height=size, video_width=size, dtype=torch.float32)
    points, labels = draw.uniform(1, 1, 2, 2) * size, torch.tensor([[[1, 0]]])
    prompt = {"point_coords": points, "point_labels": labels}
    session.add_point_inputs(session.obj_id_to_idx(1), 0, prompt)
    session.obj_with_new_inputs = [1]
    with torch.no_grad():
        model(inference_session=session, frame_idx=0)
    return {"inference_session": session, "frame_idx": 1}


def _time_series(config: Any, draw: Draw) -> Inputs:
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return {
        "past_values": draw.normal(B, past),
        "past_time_features": draw.normal(B, past, config.num_time_features),
        "past_observed_mask": torch.ones(B, past),
        "future_values": draw.normal(B, future),
        "future_time_features": draw.normal(B, future, config.num_time_features),
    }


def _time_series_rows(config: Any, draw: Draw) -> Inputs:
    return {"inputs_embeds": draw.normal(B, L, config.feature_size)}


def _time_series_decoder(config: Any, draw: Draw) -> Inputs:
    rows = draw.normal(B, config.prediction_length, config.feature_size)
    return {"inputs_embeds": rows, "encoder_hidden_states": draw.normal(B, L, config.d_model)}


def _times_fm(config: Any, draw: Draw) -> Inputs:
    length = 4 * config.patch_length
    padding = torch.zeros(B, length, dtype=torch.long)
    padding[1, : config.patch_length] = 1
    given = {"past_values": draw.normal(B, length), "past_values_padding": padding}
    return given | ({"freq": torch.zeros(B, 1, dtype=torch.long)} if hasattr(config, "freq_size") else {})


def _forecast(_: Any, draw: Draw) -> Inputs:
    return {"past_values": [draw.normal(40), draw.normal(64)]}


def _audio_codec(config: Any, draw: Draw) -> Inputs:
    hop, frames = 320, 8
    bins = config.semantic_model_config.feature_projection_input_dim
    return {"input_values": draw.normal(B, 1, hop * frames), "input_features": draw.normal(B, frames, bins)}


def _rotated_rows(config: Any, draw: Draw) -> Inputs:
    angles = draw.normal(L, config.hidden_size // config.num_attention_heads)
    return {"hidden_states": draw.normal(B, L, config.hidden_size), "position_embeddings": (angles.cos(), angles.sin())}


def _flat_patches(config: Any, draw: Draw) -> Inputs:
    vision = getattr(config, "vision_config", config)
    places = torch.stack([torch.arange(L) // 4, torch.arange(L) % 4], -1).expand(B, L, 2)
    patches = torch.cat([places.float() + 1, draw.normal(B, L, vision.patch_embed_hidden_size)], -1)
    text = {"decoder_input_ids": draw.tokens()} if hasattr(config, "vision_config") else {}
    return {"flattened_patches": patches} | text


def _detection(config: Any, draw: Draw) -> Inputs:
    maps = [draw.normal(B, config.encoder_hidden_dim, side, side) for side in (4, 2, 1)]
    return {"inputs_embeds": maps}


def _detection_without_a_mixer(config: Any, draw: Draw) -> Inputs:
    sides = zip(config.encoder_in_channels, (4, 2, 1))
    return {"inputs_embeds": [draw.normal(B, channels, side, side) for channels, side in sides]}


def _detection_decoder(config: Any, draw: Draw) -> Inputs:
    shapes = [(8, 8), (4, 4), (2, 2), (1, 1)][: config.num_feature_levels]
    sizes = torch.tensor([height * width for height, width in shapes])
    return {
        "inputs_embeds": draw.normal(B, config.num_queries, config.d_model),
        "encoder_hidden_states": draw.normal(B, int(sizes.sum()), config.d_model),
        "reference_points": draw.uniform(B, config.num_queries, 4),
        "spatial_shapes": torch.tensor(shapes),
        "spatial_shapes_list": shapes,
        "level_start_index": sizes.cumsum(0) - sizes,
    }


def _deformable_decoder(config: Any, draw: Draw) -> Inputs:
    given = _detection_decoder(config, draw) | {"valid_ratios": torch.ones(B, config.num_feature_levels, 2)}
    return given | {"object_queries_position_embeddings": draw.normal(B, config.num_queries, config.d_model)}


def _deformable_encoder(config: Any, draw: Draw) -> Inputs:
    given = _deformable_decoder(config, draw)
    rows = given["encoder_hidden_states"]
    names = ("spatial_shapes", "spatial_shapes_list", "level_start_index", "valid_ratios")
    places = draw.normal(*rows.shape)
    return {"inputs_embeds": rows, "spatial_position_embeddings": places} | {name: given[name] for name in names}


def _reading_order(_: Any, draw: Draw) -> Inputs:
    corner = draw.uniform(B, L, 2) * 400
    boxes = torch.cat([corner, corner + 100], -1).long()
    return {"boxes": boxes, "labels": torch.zeros(B, L, dtype=torch.long), "mask": torch.ones(B, L, dtype=torch.bool)}


def _prompted_image(config: Any, draw: Draw) -> Inputs:
    size = config.prompt_encoder_config.image_size
    points = draw.uniform(B, 1, 2, 2) * size
    return {
        "pixel_values": draw.normal(B, 3, size, size),
        "input_points": points,
        "input_labels": torch.tensor([1, 0]).expand(B, 1, 2),
    }


def _speech_and_text(config: Any, draw: Draw) -> Inputs:
    return _speech(config.audio_config, draw) | {"input_ids": draw.tokens()}


def _speech(config: Any, draw: Draw) -> Inputs:
    return {"input_values": draw.normal(B, 1, 16 * math.prod(config.dac_config.downsampling_ratios))}


def _audio_video(config: Any, draw: Draw) -> Inputs:
    video = config.video_config
    size, frames = video.vision_config.image_size, 4
    return _speech(config.audio_config, draw) | {"pixel_values_videos": draw.normal(B, frames, 3, size, size)}


def _protein(config: Any, draw: Draw) -> Inputs:
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    def whole(below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=draw.generator)

    tokens, atoms = 6, 18
    zeros, of_token = torch.zeros(B, tokens, dtype=torch.long), (torch.arange(atoms) // 3).expand(B, atoms)
    return {
        "token_index": torch.arange(tokens).expand(B, -1),
        "residue_index": torch.arange(tokens).expand(B, -1),
        "asym_id": zeros,
        "sym_id": zeros,
        "entity_id": zeros,
        "mol_type": zeros,
        "res_type": whole(20, B, tokens),
        "token_bonds": torch.zeros(B, tokens, tokens, 1),
        "attention_mask": torch.ones(B, tokens, dtype=torch.bool),
        "atom_inputs": EsmFold2AtomInputs(
            ref_pos=draw.normal(B, atoms, 3),
            ref_charge=torch.zeros(B, atoms),
            atom_attention_mask=torch.ones(B, atoms, dtype=torch.bool),
            ref_element=whole(20, B, atoms),
            ref_atom_name_chars=whole(20, B, atoms, 4),
            ref_space_uid=of_token,
            atom_to_token=of_token,
        ),
        "lm_hidden_states": draw.normal(
            B, tokens, config.esmc_config.num_hidden_layers + 1, config.esmc_config.hidden_size
        ),
    }


def _tiles(config: Any, draw: Draw) -> Inputs:
    seen = torch.ones(B, 1, config.max_num_tiles, dtype=torch.long)
    seen[1, :, 1:] = 0
    images = draw.normal(B, 1, config.max_num_tiles, config.num_channels, config.image_size, config.image_size)
    ratios = torch.tensor([[len(config.supported_aspect_ratios)], [1]])
    return {"pixel_values": images, "aspect_ratio_ids": ratios, "aspect_ratio_mask": seen}


def _page(config: Any, draw: Draw) -> Inputs:
    corner = torch.randint(0, 400, (B, L, 2), generator=draw.generator)
    images = draw.normal(B, 3, config.input_size, config.input_size)
    return {"input_ids": draw.tokens(), "bbox": torch.cat([corner, corner + 100], -1), "pixel_values": images}


def _two_images(_: Any, draw: Draw) -> Inputs:
    return {"pixel_values": draw.uniform(B, 2, 3, 64, 64)}


def _idefics(config: Any, draw: Draw) -> Inputs:
    size = config.vision_config.image_size
    seen = torch.ones(B, L, 2, dtype=torch.long)
    seen[:, : L // 2, 1] = 0  # the second image stands in the middle of the text
    images = draw.normal(B, 2, 3, size, size)
    return {"input_ids": draw.tokens(), "pixel_values": images, "image_attention_mask": seen}


def _udop(config: Any, draw: Draw) -> Inputs:
    corner = draw.uniform(B, L, 2) / 2
    boxes = torch.cat([corner, corner + 0.25], -1)
    images = draw.normal(B, 3, config.image_size, config.image_size)
    return {"input_ids": draw.tokens(), "bbox": boxes, "pixel_values": images}


def _draft(config: Any, draw: Draw) -> Inputs:
    noise = draw.normal(B, config.block_size, config.hidden_size)
    context = draw.normal(B, L, config.hidden_size * len(config.target_layer_ids))
    keep = torch.ones(B, L + config.block_size, dtype=torch.long)
    keep[1, :4] = 0
    return {"noise_embeds": noise, "context_hidden_states": context, "attention_mask": keep}


#: What makes the inputs of classes whose names match.
OWN: tuple[tuple[str, Callable[[Any, Draw], Inputs]], ...] = (
    (r"(TimeSeriesTransformer|Informer)(Model|ForPrediction)", _time_series),
    (r"(TimeSeriesTransformer|Informer)Encoder", _time_series_rows),
    (r"(TimeSeriesTransformer|Informer)Decoder", _time_series_decoder),
    (r"TimesFm(2_5)?Model", _times_fm),
    (r"TimesFm(2_5)?ModelForPrediction", _forecast),
    (r"(NeuCodec|Xcodec2)Model", _audio_codec),
    (r"(DINOv3ViT|Sapiens2)Encoder", _rotated_rows),
    (r"Pix2Struct(VisionModel|ForConditionalGeneration)", _flat_patches),
    (r"(LightGlue|EfficientLoFTR).*", _two_images),
    (r"Idefics(Model|ForVisionText2Text)", _idefics),
    (r"UdopEncoderModel", _udop),
    (r"UdopStack", lambda config, draw: _udop(config, draw) | {"use_cache": False}),
    (
        r"Udop(Model|ForConditionalGeneration)",
        lambda config, draw: _udop(config, draw) | {"decoder_input_ids": draw.tokens()},
    ),
    (r"MuseGlimmerAssistantModel", _draft),
    (r"(RTDetr|RTDetrV2|DFine|Deimv2|PPDocLayoutV\d)HybridEncoder", _detection),
    (r"Deimv2LiteEncoder", _detection_without_a_mixer),
    (r"(RTDetr|RTDetrV2|DFine|Deimv2|PPDocLayoutV\d)Decoder", _detection_decoder),
    (r"DeformableDetrEncoder", _deformable_encoder),
    (r"DeformableDetrDecoder", _deformable_decoder),
    (r"PPDocLayoutV2ReadingOrder", _reading_order),
    (r"(Sam|SamHQ|Sam2|Sam3Tracker|EdgeTam)Model", _prompted_image),
    (r"PPOCRV5.*(Model|ForTextRecognition)", lambda _, draw: {"pixel_values": draw.normal(B, 3, 96, 160)}),
    (r"PPOCRV6.*(Model|ForTextRecognition)", lambda _, draw: {"pixel_values": draw.normal(B, 3, 48, 160)}),
    (r"PeAudioEncoder", _speech),
    (r"PeAudio(FrameLevel)?Model", _speech_and_text),
    (r"PeAudioVideoEncoder", _audio_video),
    (
        r"PeAudioVideoModel",
        lambda config, draw: _audio_video(config.audio_video_config, draw) | {"input_ids": draw.tokens()},
    ),
    (r"LayoutLMv3.*", _page),
    (r"EsmFold2Model", _protein),
    (r"MllamaVisionModel", _tiles),
)

"""Processors of transformers, which turn images and texts into a model's inputs; torchvision is not needed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from regard_lab.models.folders import CONFIG, file_error, read_json
from regard_lab.models.hugging_face.hosted import reading_folder

#: Files in which a processor is described.
_FILES = ("processor_config.json", "preprocessor_config.json")


def load_processor(folder: Path) -> Any:
    """Load the processor of a model that reads images and texts; never downloads or runs code from the folder.

    Without torchvision, images are processed with Pillow, and a processor for videos too loses its part for videos.

    Raises
    ------
    ModelFileError
        If there is none, or transformers cannot load it.
    """
    import transformers

    if not any((folder / name).is_file() for name in _FILES):
        expected = f"hold a processor, {' or '.join(_FILES)} (processor.save_pretrained writes it)"
        raise file_error(folder, expected, "neither file")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with reading_folder(folder, "hold a processor that transformers loads"):
        made = None if find_spec("torchvision") is not None else _without_video(folder, transformers)
        if made is None:
            return transformers.AutoProcessor.from_pretrained(folder, **options)
        image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        described, _ = made.get_processor_dict(folder, **options)
        described = {name: each for name, each in described.items() if name not in made.get_attributes()}
        return made.from_args_and_dict([image_processor, tokenizer, None], described)


def load_feature_extractor(folder: Path) -> Any:
    """Load what turns a recording into a speech model's inputs; never downloads or runs code from the folder.

    Raises
    ------
    ModelFileError
        If there is none, or transformers cannot load it.
    """
    import transformers

    with reading_folder(folder, "hold a feature extractor that transformers loads"):
        return transformers.AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _without_video(folder: Path, transformers: Any) -> Any:
    """Return the class of a processor for videos too, which accepts none; None for processors without videos.

    transformers checks the class of a video processor, and has none without torchvision, even where none is needed.
    """
    classes: dict[str, str] = dict(transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES)
    described = read_json(folder / CONFIG)
    kind = described.get("model_type") if isinstance(described, dict) else None
    made = getattr(transformers, classes.get(str(kind), ""), None)
    if made is None or made.get_attributes() != ["image_processor", "tokenizer", "video_processor"]:
        return None
    return type(made.__name__, (made,), {"check_argument_for_proper_class": lambda *_: None})

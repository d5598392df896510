"""Data to learn from: files that a user names, pairs, captions, labels and documents, and batches of them."""

from typing import TYPE_CHECKING

from regard._utils.lazy import lazy

if TYPE_CHECKING:
    from regard_lab._options import read_toml
    from regard_lab.data.batches import Augmentation, Batch, Batches, ImageBatch, ImageBatches, LabelBatch, LabelBatches
    from regard_lab.data.captions import CaptionBatches, FeatureGrids, Grids, PixelGrids, plain_caption, read_captions
    from regard_lab.data.corruption import corrupt_spans, hide_spans, mask_tokens
    from regard_lab.data.documents import read_documents
    from regard_lab.data.images import (
        ImageFileError,
        Images,
        Preprocessing,
        decode_image,
        open_images,
        read_image,
        resize_image,
    )
    from regard_lab.data.labelled import (
        LabelledImages,
        LabelledTexts,
        read_labelled,
        read_labelled_images,
        split_labelled,
    )
    from regard_lab.data.packing import (
        IGNORE_INDEX,
        LanguageBatch,
        LanguageBatches,
        PackedBatches,
        StreamBatches,
        TokenShards,
        write_shards,
    )
    from regard_lab.data.pairs import Count, Pairs, read_pairs, read_texts, split_pairs
else:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "regard_lab.data.batches": "Augmentation Batch Batches ImageBatch ImageBatches LabelBatch LabelBatches",
            "regard_lab.data.captions": "CaptionBatches FeatureGrids Grids PixelGrids plain_caption read_captions",
            "regard_lab.data.corruption": "corrupt_spans hide_spans mask_tokens",
            "regard_lab.data.documents": "read_documents",
            "regard_lab.data.images": (
                "ImageFileError Images Preprocessing decode_image open_images read_image resize_image"
            ),
            "regard_lab.data.labelled": (
                "LabelledImages LabelledTexts read_labelled read_labelled_images split_labelled"
            ),
            "regard_lab.data.packing": (
                "IGNORE_INDEX LanguageBatch LanguageBatches PackedBatches StreamBatches TokenShards write_shards"
            ),
            "regard_lab.data.pairs": "Count Pairs read_pairs read_texts split_pairs",
            "regard_lab._options": "read_toml",
        },
    )

__all__ = [
    "IGNORE_INDEX",
    "Augmentation",
    "Batch",
    "Batches",
    "CaptionBatches",
    "Count",
    "FeatureGrids",
    "Grids",
    "ImageBatch",
    "ImageBatches",
    "ImageFileError",
    "Images",
    "LabelBatch",
    "LabelBatches",
    "LabelledImages",
    "LabelledTexts",
    "LanguageBatch",
    "LanguageBatches",
    "PackedBatches",
    "Pairs",
    "PixelGrids",
    "Preprocessing",
    "StreamBatches",
    "TokenShards",
    "corrupt_spans",
    "decode_image",
    "hide_spans",
    "mask_tokens",
    "open_images",
    "plain_caption",
    "read_captions",
    "read_documents",
    "read_image",
    "read_labelled",
    "read_labelled_images",
    "read_pairs",
    "read_texts",
    "read_toml",
    "resize_image",
    "split_labelled",
    "split_pairs",
    "write_shards",
]

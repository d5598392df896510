"""The cost of recording what a model with Qwen3-VL's attention looks at in a video.

    python -m benchmarks.frames [--frames 16] [--layers 2] [--rounds 3] [--precision float16]

A random Qwen3-VL whose language model has the attention of Qwen3-VL-8B (width 4096, 32 heads of width 128, 8 heads of
keys), in ``--layers`` of its 36 layers. It reads ``--frames`` frames of 832 × 1024 pixels, two of which make 832
tokens, and a question of 64 tokens, whose queries are kept: ``capture(model, queries=64)``. Each layer costs and keeps
the same, so 36 layers keep 36 / layers times as much. Feed-forward networks are narrowed (512 instead of 12,288 wide)
and the vision tower has one small layer; both make the model faster and the share of recording larger than they are in
truth. Times are CPU seconds of one thread, by the median ratio of neighbouring turns. Extra memory is the growth of the
process's peak between a run without recording and the first one with it.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from typing import Any

import torch
from torch import nn

from benchmarks.decoding import interleaved
from regard.inspect import capture

#: Rows and columns of tokens of two frames, tokens of the question, and layers of the true model.
ROWS, COLS, QUESTION, LAYERS = 26, 32, 64, 36
#: Token ids: images, videos, the begin and end of either.
IMAGE, VIDEO, START, END = range(4)


def random_model(layers: int) -> nn.Module:
    """Return a random model with Qwen3-VL-8B's attention."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "num_hidden_layers": layers, "intermediate_size": 512, "vocab_size": 1024, "pad_token_id": 5,
        "rope_parameters": {"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 5e6},
    }  # fmt: skip
    seeing = {"depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": 4096}
    seeing |= {"deepstack_visual_indexes": []}
    names = dict(zip(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"), range(4)))
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(vision_config=seeing, text_config=text, **names)).eval()


def video(frames: int) -> dict[str, Any]:
    """Return the inputs of a video and a question."""
    steps = frames // 2
    ids = [6, *[each for _ in range(steps) for each in (7, START, *[VIDEO] * ROWS * COLS, END)], *[8] * QUESTION]
    tokens = torch.tensor([ids])
    return {
        "input_ids": tokens, "mm_token_type_ids": 2 * (tokens == VIDEO).long(),
        "pixel_values_videos": torch.randn(steps * 4 * ROWS * COLS, 3 * 2 * 16 * 16),
        "video_grid_thw": torch.tensor([[steps, 2 * ROWS, 2 * COLS]]),
    }  # fmt: skip


@torch.no_grad()
def main(arguments: list[str]) -> None:
    """Measure, and print the result."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("frames", 16), ("layers", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="float16")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, inputs = random_model(given.layers), video(given.frames)
    options = {"layers": ["model.language_model"], "queries": QUESTION, "precision": given.precision}

    def alone() -> torch.Tensor:
        found: torch.Tensor = model(**inputs, use_cache=False, logits_to_keep=1).logits
        return found

    kept: list[int] = []

    def recorded() -> torch.Tensor:
        with capture(model, **options) as record:
            found = alone()
        kept.append(record.nbytes)
        return found

    before = alone()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert torch.equal(before, recorded())
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    seconds = interleaved({"alone": alone, "recorded": recorded}, given.rounds)
    pairs = list(zip(seconds["alone"], seconds["recorded"]))
    ratio = statistics.median(after[1] / first[1] for first, after in pairs)
    tokens = inputs["input_ids"].shape[1]
    print(f"{given.frames} frames, {tokens} tokens, {given.layers} layers, {given.precision}")
    print(f"time: {statistics.median(each[1] for each, _ in pairs):.1f} s alone, {100 * (ratio - 1):+.1f} % recorded")
    whole = kept[0] * LAYERS / given.layers
    print(f"record: {kept[0] / 1e6:.1f} MB of {given.layers} layers, {whole / 1e6:.0f} MB of {LAYERS}")
    print(f"peak memory: {extra / 1e3:+.1f} MB (of {given.layers} layers)")
    print(f"all weights of {LAYERS} layers in float32: {4 * LAYERS * 32 * tokens**2 / 1e9:.0f} GB")


if __name__ == "__main__":
    main(sys.argv[1:])

"""``regard look``: what a model in a folder attends to in a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import rejected
from regard.cli.messages import ascii_only, echo, note, report_errors, require_writable
from regard.inspect import Alignment, Record, capture, draw, legend, save_html, save_png
from regard.models import DecoderLM, EncoderLM, load
from regard.models.folders import CONFIG, ModelFileError, read_json
from regard.models.hugging_face.reading import FAMILIES
from regard.text.tokenizer import Tokenizer

#: Heads whose entropies stand side by side.
_SHOWN = 16


def run(
    folder: Path,
    text: str,
    *,
    layer: int | None,
    head: int | None,
    png: Path | None,
    html: Path | None,
    out: Path | None,
) -> None:
    """Tell how spread the attention of each head is, and draw that of one head, or of a layer's mean."""
    with report_errors("hf"):
        require_writable(png, html, out)
        if head is not None and layer is None:
            raise rejected("look", "--head", "come with --layer", "it alone")
        model, tokenizer = _model(folder), Tokenizer.load(folder)
        if not tokenizer.encode(text):
            raise rejected("look", "--text", "have a token", repr(text))
        numbers = tokenizer.encode(text, specials=True)
        with capture(model) as record, torch.no_grad():
            model(torch.tensor([numbers]))
        if not len(record):
            raise rejected("look", "FOLDER", "be a model that attends to something", type(model).__name__)
        tokens = tuple(tokenizer.tokens(numbers))
        drawn = png is not None or html is not None
        chosen = _drawn(record, tokens, layer, head, whatever=drawn) if layer is not None or drawn else None
    if chosen is None:
        _tell(record, len(tokens))
    else:
        echo(draw(chosen, ascii_only=ascii_only()))
        echo(f"\n{legend(ascii_only=ascii_only())}; {chosen.title}")
    with report_errors("plot"):
        for path, write in ((png, save_png), (html, save_html)):
            if path is not None and chosen is not None:
                write([chosen], path)
                note(f"regard: {path} is written")
        if out is not None:
            record.save(out)
            note(f"regard: {out} is written; regard.inspect.Record.load reads it")


def _model(folder: Path) -> nn.Module:
    """Return a language model without what scores labels: of ours, or of any family that transformers knows."""
    described = read_json(folder / CONFIG)
    kind = described.get("model_type") if isinstance(described, dict) else None
    if kind is None or any(kind in family.types for family in FAMILIES):
        loaded = load(folder, dtype=torch.float32)
        return loaded if isinstance(loaded, EncoderLM | DecoderLM) else loaded.model
    import transformers
    from safetensors import SafetensorError

    transformers.utils.logging.disable_progress_bar()
    try:
        model: Any = transformers.AutoModel.from_pretrained(
            folder, attn_implementation="sdpa", dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise rejected("look", "FOLDER", "be a model that transformers loads", reason, ModelFileError) from None
    if model.config.is_encoder_decoder:
        expected = "be a model that reads one text (regard translate --alignment shows what translators look at)"
        raise rejected("look", "FOLDER", expected, kind)
    return model.eval()


def _drawn(
    record: Record, tokens: tuple[str, ...], layer: int | None, head: int | None, *, whatever: bool
) -> Alignment:
    """Return the picture of a head, or of a layer's mean; of the layer with the least spread where none is named."""
    if layer is None and whatever:
        layer = min(range(len(record)), key=lambda each: float(record[each].entropy().mean()))
    assert layer is not None
    run = record[layer]
    if head is not None and not 0 <= head < run.shape[1]:
        raise rejected("look", "--head", f"be below {run.shape[1]}, as many as the layer has", head)
    weights: Tensor = run.weights(batch=0).mean(0) if head is None else run.weights(batch=0, head=head)
    which = "mean of its heads" if head is None else f"head {head}"
    return Alignment(tokens, tokens, weights.clamp(0, 1), f"layer {layer} ({run.name}), {which}")


def _tell(record: Record, count: int) -> None:
    """Print how spread the attention of each head is."""
    heads = max(run.shape[1] for run in record)
    echo(f"{len(record)} layers of {heads} heads, {count} tokens; entropy in nats, mean over tokens")
    echo("layer" + "".join(f"{f'h{i}':>5}" for i in range(min(heads, _SHOWN))) + ("  ..." if heads > _SHOWN else ""))
    for i, run in enumerate(record):
        entropies = run.entropy().mean((0, 2)).tolist()
        echo(f"{i:>5}" + "".join(f"{each:5.2f}" for each in entropies[:_SHOWN]))
    echo("\nLow is sharp. --layer 0 --head 0 draws a head, --png FILE a picture of it, --out FILE keeps the record.")

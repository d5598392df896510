"""Beam search of a translation Transformer, compared with CTranslate2 on the same weights.

    python -m benchmarks.beam_search --model FOLDER --lines FILE [--beams 5] [--sentences 64] [--alone 16] [--rounds 7]

FOLDER holds a trained Transformer with pre- or post-norm layers; FILE has one source per line. Each library translates
all sentences as one batch, and then the first few one at a time, without a length penalty. Both must assign the same
log-probabilities before anything is timed; *same* is the share of identical translations (the searches stop by
different rules). They take turns; ratios are medians over neighbouring turns, of wall-clock time and of CPU time, which
other programs disturb less. Weights are packed as ``regard translate`` packs them. int8 weights make a different model.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decoding import interleaved
from benchmarks.machine import ROOT, facts
from regard_lab.generation import (
    SearchOptions,
    SequenceModel,
    pack_weights,
    pad_to_device,
    quantize,
    score_targets,
    search,
)
from regard_lab.models import END, TransformerEncoderDecoder
from regard_lab.text import UNKNOWN

RESULTS = ROOT / "benchmarks/results/beam-search.json"
#: How sentences are translated.
TOGETHER, ALONE = "at once", "one at a time"
#: Log-probabilities of a sentence, in nats, differ by less.
_NEAR = 1e-3
Numbers = list[list[int]]


def _norm(spec: Any, module: nn.Module) -> None:
    spec.gamma, spec.beta = _array(module.weight), _array(module.bias)


def _linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _array(weight)
    if bias is not None:
        spec.bias = _array(bias)


def _array(values: Any) -> Any:
    return values.detach().float().numpy().copy()


def _attention(spec: Any, module: Any, to_itself: bool) -> None:
    weight, bias, E = module.in_proj_weight, module.in_proj_bias, module.embed_dim
    cuts = [0, 3 * E] if to_itself else [0, E, 3 * E]
    for linear, start, end in zip(spec.linear, cuts, cuts[1:]):
        _linear(linear, weight[start:end], None if bias is None else bias[start:end])
    _linear(spec.linear[-1], module.out_proj.weight, module.out_proj.bias)


def write_ctranslate2(model: TransformerEncoderDecoder, folder: Path) -> None:
    """Write a model so that CTranslate2 reads it; its tokens are called by their numbers."""
    from ctranslate2.specs import transformer_spec
    from ctranslate2.specs.common_spec import Activation

    config = model.config
    activation = {"relu": Activation.RELU, "gelu": Activation.GELU}[config.activation]
    made = transformer_spec.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers), config.heads, pre_norm=config.norm == "pre",
        activation=activation,
    )  # fmt: skip
    longest = 1024
    waves = _array(model.target_positions.encoding(longest, device=torch.device("cpu"), dtype=torch.float32))
    source = model.target_embedding if model.source_embedding is None else model.source_embedding
    made.encoder.embeddings[0].weight = _array(source.weight)
    made.decoder.embeddings.weight = _array(model.target_embedding.weight)
    for stack, layers, end in ((made.encoder, model.encoder, model.encoder_norm),
                               (made.decoder, model.decoder, model.decoder_norm)):  # fmt: skip
        stack.scale_embeddings = True
        stack.position_encodings.encodings = waves
        if config.norm == "pre":
            _norm(stack.layer_norm, end)
        for spec, layer in zip(stack.layer, layers):
            _attention(spec.self_attention, layer.self_attn, True)
            _norm(spec.self_attention.layer_norm, layer.norm1)
            if stack is made.decoder:
                _attention(spec.attention, layer.multihead_attn, False)
                _norm(spec.attention.layer_norm, layer.norm2)
            _norm(spec.ffn.layer_norm, layer.norm3 if stack is made.decoder else layer.norm2)
            _linear(spec.ffn.linear_0, layer.linear1.weight, layer.linear1.bias)
            _linear(spec.ffn.linear_1, layer.linear2.weight, layer.linear2.bias)
    weight, bias = model.projection
    _linear(made.decoder.projection, weight, bias)
    for register, size in ((made.register_source_vocabulary, config.sources),
                           (made.register_target_vocabulary, config.targets)):  # fmt: skip
        register([_name(i) for i in range(size)])
    made.config.decoder_start_token = made.config.bos_token = made.config.eos_token = _name(END)
    made.config.unk_token = _name(UNKNOWN)
    made.config.layer_norm_epsilon = 1e-5
    made.validate()
    made.save(str(folder))


def _name(number: int) -> str:
    return f"t{number}"


def ours(model: TransformerEncoderDecoder, sources: Numbers, options: SearchOptions) -> Numbers:
    """Return regard's translations."""
    return [list(best[0].numbers) for best in search(model, *pad_to_device(model, sources), options)]


def one_by_one(translate: Callable[[Numbers], Numbers], sources: Numbers) -> Numbers:
    """Return the translations of sentences that are each a batch of their own."""
    return [translate([each])[0] for each in sources]


def theirs(translator: Any, sources: Numbers, options: SearchOptions) -> Numbers:
    """Return CTranslate2's translations."""
    most = max(int(options.ratio * len(each)) for each in sources) + options.extra
    lines = translator.translate_batch(
        [[_name(i) for i in each] for each in sources], beam_size=options.beams, length_penalty=0.0,
        max_decoding_length=most, max_batch_size=0,
    )  # fmt: skip
    return [[int(each[1:]) for each in line.hypotheses[0]] for line in lines]


def compared(
    model: SequenceModel, sources: Numbers, options: SearchOptions, rounds: int, threads: int, alone: int
) -> dict[str, Any]:
    """Return the timings of each contender, for all sentences at once and for the first ones alone."""
    import ctranslate2

    torch.set_num_threads(threads)
    transformer = copy.deepcopy(model.model)
    assert isinstance(transformer, TransformerEncoderDecoder)
    narrow = quantize(transformer)
    with tempfile.TemporaryDirectory() as folder:
        write_ctranslate2(transformer, Path(folder))
        translators = {
            name: ctranslate2.Translator(folder, compute_type=name, inter_threads=1, intra_threads=threads)
            for name in ("float32", "int8")
        }
    pack_weights(transformer)
    contenders: dict[str, Callable[[Numbers], Numbers]] = {
        "CTranslate2": lambda some: theirs(translators["float32"], some, options),
        "regard": lambda some: ours(transformer, some, options),
        "regard, int8": lambda some: ours(narrow, some, options),
        "CTranslate2, int8": lambda some: theirs(translators["int8"], some, options),
    }
    pairs = [each for each in zip(sources, contenders["regard"](sources)) if all(each)]
    named = ([[_name(i) for i in each] for each in side] for side in zip(*pairs))
    scored = [sum(each.log_probs) for each in translators["float32"].score_batch(*named)]
    apart = max(abs(a - b) for a, b in zip(scored, score_targets(transformer, pairs)))
    if apart > _NEAR:
        raise SystemExit(f"log-probabilities differ by {apart:.2g}")
    single = {name: partial(one_by_one, translate) for name, translate in contenders.items()}
    return {
        TOGETHER: timed(contenders, sources, rounds),
        ALONE: timed(single, sources[:alone], rounds),
    }


def timed(contenders: dict[str, Callable[[Numbers], Numbers]], sources: Numbers, rounds: int) -> dict[str, Any]:
    """Return each contender's time, its ratio to CTranslate2's, and how many translations are those of regard."""
    written = {name: translate(sources) for name, translate in contenders.items()}
    same = {name: sum(map(list.__eq__, lines, written["regard"])) / len(sources) for name, lines in written.items()}
    seconds = interleaved({name: partial(translate, sources) for name, translate in contenders.items()}, rounds)
    rows: dict[str, Any] = {}
    for name, each in seconds.items():
        base = seconds["CTranslate2"]
        ratios = [[b[i] / a[i] for a, b in zip(each, base)] for i in (0, 1)]
        rows[name] = {
            "seconds": statistics.median(a for a, _ in each), "processor": statistics.median(b for _, b in each),
            "speed": statistics.median(ratios[0]), "speed by processor": statistics.median(ratios[1]),
            "same": same[name], "tokens": sum(map(len, written[name])), "sentences": len(sources),
        }  # fmt: skip
    return rows


def report(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    assert __doc__ is not None
    lines = ["# Beam search of a Transformer", "", __doc__.partition("\n\n")[2].partition("\n\n")[2].strip(), ""]
    lines += [result["model"], ""]
    found = ((threads, how, rows) for threads, both in result["threads"].items() for how, rows in both.items())
    for threads, how, rows in found:
        count = rows["regard"]["sentences"]
        lines += [f"{threads} thread{'s' * (threads != '1')}, {count} sentences {how}:", ""]
        lines += ["| | seconds | CPU seconds | speed, CTranslate2 = 1 | by CPU time | same | tokens |",
                  "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
        for name, row in rows.items():
            lines.append(
                f"| {name} | {row['seconds']:.2f} | {row['processor']:.2f} | {row['speed']:.2f}× | "
                f"{row['speed by processor']:.2f}× | {row['same']:.0%} | {row['tokens']:,} |"
            )
        lines.append("")
    machine = result["machine"]
    return "\n".join([*lines, f"{machine['CPU']}, {machine['cores']} cores, {result['date']}"]) + "\n"


def main(arguments: list[str]) -> None:
    """Compare, and write the report."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--alone", type=int, default=16)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    model = SequenceModel.load(given.model)
    raw = given.lines.read_bytes()
    text = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode()
    encoded = model.source.encode_all(text.splitlines()[: given.sentences])
    sources = [each.tolist() for each in map(encoded.__getitem__, range(len(encoded)))]
    options = SearchOptions(beams=given.beams, length_penalty=0.0)
    config = model.model.config
    shape = f"{config.encoder_layers} + {config.decoder_layers} layers × {config.width}, {config.norm}-norm"
    summary = f"{shape}, {config.targets:,} tokens; {len(sources)} sentences, {sum(map(len, sources)):,} tokens, "
    threads = {str(each): compared(model, sources, options, given.rounds, each, given.alone) for each in given.threads}
    result = {"model": summary + f"beams of {given.beams}.", "threads": threads, "machine": facts()}
    result["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(report(result), encoding="utf-8")
    print(report(result))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Tokens per second of greedy decoding, compared with ``generate`` of transformers on the same weights.

    python -m benchmarks.decoding [--models llama gpt2] [--batches 1 8] [--rounds 5] [--new 128] [--threads 2]

Random models of 6 layers of width 512, a prompt of 128 tokens and 128 new ones. Both must generate the same tokens
before anything is timed. They take turns; ratios are medians over neighbouring turns, of wall-clock time and of CPU
time, which other programs disturb less. Variants: weights packed for the CPU, int8 weights, and a shared prompt cached
once.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import ROOT, facts
from regard_lab.generation import GenerationOptions, generate, pack_weights, quantize
from regard_lab.models import DecoderLM, DecoderLMConfig

RESULTS = ROOT / "benchmarks/results/decoding.json"
LAYERS, WIDTH, HEADS, PROMPT, NEW, VOCABULARY = 6, 512, 8, 128, 128, 32000


def llama() -> tuple[nn.Module, DecoderLM]:
    """Return a random Llama and ours with its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=1408,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            max_position_embeddings=1024,
            rms_norm_eps=1e-5,
        )
    ).eval()
    ours = DecoderLM(
        DecoderLMConfig.preset(
            "llama-7b",
            vocabulary=VOCABULARY,
            width=WIDTH,
            layers=LAYERS,
            heads=HEADS,
            kv_heads=HEADS // 2,
            feedforward=1408,
            max_length=1024,
        )
    ).eval()
    given = dict(theirs.named_parameters())
    copied = {"embedding.weight": given["model.embed_tokens.weight"], "output.weight": given["lm_head.weight"]}
    copied["norm.weight"] = given["model.norm.weight"]
    for i in range(LAYERS):
        old, new = f"model.layers.{i}.", f"blocks.{i}."
        qkv = [given[f"{old}self_attn.{name}_proj.weight"] for name in "qkv"]
        copied |= {
            f"{new}attention.qkv.weight": torch.cat(qkv),
            f"{new}attention.out.weight": given[f"{old}self_attn.o_proj.weight"],
            f"{new}attention_norm.weight": given[f"{old}input_layernorm.weight"],
            f"{new}feed_forward_norm.weight": given[f"{old}post_attention_layernorm.weight"],
        }
        for name in ("gate", "up", "down"):
            copied[f"{new}feed_forward.{name}.weight"] = given[f"{old}mlp.{name}_proj.weight"]
    ours.load_state_dict(copied)
    return theirs, ours


def gpt2() -> tuple[nn.Module, DecoderLM]:
    """Return a random GPT-2 and ours with its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=1024,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    ours = DecoderLM(
        DecoderLMConfig.preset("gpt2", vocabulary=VOCABULARY, width=WIDTH, layers=LAYERS, heads=HEADS)
    ).eval()
    given = dict(theirs.named_parameters())
    copied = {"embedding.weight": given["transformer.wte.weight"]}
    copied["positions.learned.weight"] = given["transformer.wpe.weight"]
    names = {"attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out"}
    names |= {"mlp.c_fc": "feed_forward.up", "mlp.c_proj": "feed_forward.down"}
    names |= {"ln_1": "attention_norm", "ln_2": "feed_forward_norm"}
    for end in ("weight", "bias"):
        copied[f"norm.{end}"] = given[f"transformer.ln_f.{end}"]
        for i in range(LAYERS):
            for old, new in names.items():
                values = given[f"transformer.h.{i}.{old}.{end}"]
                copied[f"blocks.{i}.{new}.{end}"] = values.t() if values.dim() == 2 else values
    ours.load_state_dict(copied)
    return theirs, ours


MODELS: dict[str, Callable[[], tuple[nn.Module, DecoderLM]]] = {"llama": llama, "gpt2": gpt2}


def their_tokens(model: Any, prompts: Tensor, new: int, **more: Any) -> list[list[int]]:
    """Return the tokens that transformers generates."""
    wanted = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    written = model.generate(prompts, attention_mask=torch.ones_like(prompts), **wanted, **more)
    return written[:, prompts.shape[1] :].tolist()


def our_tokens(model: DecoderLM, prompts: Tensor, new: int) -> list[list[int]]:
    """Return the tokens that regard generates."""
    return [each.numbers for each in generate(model, prompts.tolist(), GenerationOptions(max_new_tokens=new))]


def interleaved(turns: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of each turn, and the processor's, round by round."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, run in turns.items():
            started = time.perf_counter(), time.process_time()
            run()
            seconds[name].append((time.perf_counter() - started[0], time.process_time() - started[1]))
    return seconds


def compared(name: str, batch: int, rounds: int, static: bool, new: int) -> list[dict[str, Any]]:
    """Return the timings of each contender for one model and batch."""
    torch.manual_seed(0)
    theirs, ours = MODELS[name]()
    theirs.requires_grad_(False)
    prompts = torch.randint(5, VOCABULARY, (batch, PROMPT))
    if our_tokens(ours, prompts, 16) != their_tokens(theirs, prompts, 16):
        raise SystemExit(f"{name}: the tokens differ")
    packed = copy.deepcopy(ours)
    pack_weights(packed)
    narrow = quantize(ours)
    common = prompts[:1].expand(batch, -1).clone()
    common[:, -1] = prompts[:, -1]
    turns: dict[str, Callable[[], object]] = {
        "transformers": lambda: their_tokens(theirs, prompts, new),
        "regard": lambda: our_tokens(ours, prompts, new),
        "regard, packed weights": lambda: our_tokens(packed, prompts, new),
        "regard, int8": lambda: our_tokens(narrow, prompts, new),
    }
    if batch > 1:
        turns["regard, common prompt"] = lambda: our_tokens(packed, common, new)
    if static:
        turns["transformers, static cache"] = lambda: their_tokens(
            theirs, prompts, new, cache_implementation="static", disable_compile=True
        )
    interleaved(turns, 1)
    seconds = interleaved(turns, rounds)
    rows = []
    for each, times in seconds.items():
        pairs = list(zip(seconds["transformers"], times))
        ratio, work = (statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
        rate = batch * new / statistics.median(time for time, _ in times)
        rows.append({"model": name, "batch": batch, "contender": each, "tokens/s": rate, "ratio": ratio, "work": work})
        print(f"{name:6} batch {batch}: {each:27} {rate:8.1f} tokens/s {ratio:6.2f} × ({work:.2f} ×)", flush=True)
    return rows


def report(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    assert __doc__ is not None
    lines = ["# Greedy decoding of language models", "", __doc__.partition("\n\n")[2].partition("\n\n")[2].strip(), ""]
    lines += ["| model | batch | | tokens/s | speed, transformers = 1 | by CPU time |"]
    lines += ["| --- | ---: | --- | ---: | ---: | ---: |"]
    for row in result["rows"]:
        lines.append(
            f"| {row['model']} | {row['batch']} | {row['contender']} | {row['tokens/s']:.0f} | {row['ratio']:.2f}× | "
            f"{row['work']:.2f}× |"
        )
    machine = result["machine"]
    footer = f"{result['threads']} threads of {machine['CPU']}, {machine['cores']} cores, {result['date']}"
    return "\n".join([*lines, "", footer]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--static", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    rows = [
        row
        for name in arguments.models
        for batch in arguments.batches
        for row in compared(name, batch, arguments.rounds, arguments.static, arguments.new)
    ]
    result = {"rows": rows, "threads": arguments.threads, "machine": facts(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    arguments.out.with_suffix(".md").write_text(report(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

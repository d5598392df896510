"""The commands of the lab, with their flags; each imports its implementation when it runs."""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from regard_cli.messages import Command, JsonOutput, fail, json_option, report_errors
from regard_lab.cli.evaluate_tasks import evaluate
from regard_lab.cli.flags import IMAGE_PANELS, with_flags
from regard_lab.cli.plan import PlanOptions
from regard_lab.cli.train_tasks import train
from regard_lab.generation.predictions import PredictionOptions
from regard_lab.generation.sampling import GenerationOptions
from regard_lab.tasks.classification.options import ImageClassificationOptions
from regard_lab.tasks.translation.options import ExperimentOptions
from regard_lab.text.unknown import MAX_UNKNOWN

# The ``regard caption`` command ---------------------------------------------------------------------------------------


describe = typer.Typer()


@describe.command(cls=Command)
@with_flags(
    PredictionOptions, "search.beams", "search.n_best", "search.length_penalty", "search.no_repeat", "search.sample",
    "search.temperature", "search.top_k", "search.top_p", "search.seed",
    short={"search.n_best": "Show this many captions, each after its score."},
)  # fmt: skip
def caption(
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGE...", help="Image files; - is an image from standard input.")
    ],
    model: Annotated[list[Path], typer.Option(help="Folder of a captioner; may be repeated to compare several.")],
    given: dict[str, Any],
    attention: Annotated[
        Path | None,
        typer.Option("--plot", "--attention", help="Draw where each word attended to this file: .png, .svg, .pdf."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the attention to this self-contained HTML file.")] = None,
    as_json: Annotated[str | None, json_option("one line of JSON per image, with attention")] = None,
) -> None:
    """Caption images and show where each word attended."""
    from regard_lab.cli.caption import run

    with report_errors("regard-lab[vision]"):
        options = PredictionOptions.from_dotted(given)
    run(images, models=model, options=options, attention=attention, html=html, json=JsonOutput(as_json))


# The ``regard look`` command ------------------------------------------------------------------------------------------


inspector = typer.Typer()
_look_command = partial(inspector.command, cls=Command)


@_look_command(
    epilog="MODEL is a Hugging Face or regard folder, or FILE.py:FUNCTION, which returns a model and its inputs."
)
def look(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model folder, or FILE.py:FUNCTION.")],
    text: Annotated[str | None, typer.Option(help="Input text.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Input image, instead of --text or with it; repeat it for a model that reads several."),
    ] = None,
    audio: Annotated[
        Path | None, typer.Option(help="Recording for a speech model: a WAV file, or with soundfile FLAC, Ogg and MP3.")
    ] = None,
    video: Annotated[
        Path | None,
        typer.Option(help="Folder with the frames of a video as images, for Qwen2-VL and its kin, with --text."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Text for the decoder of an encoder–decoder; by default, what the model generates."),
    ] = None,
    recurrences: Annotated[
        bool, typer.Option("--recurrences", help="Also show linear attention and recurrences, as effective weights.")
    ] = False,
    browser: Annotated[bool, typer.Option("--browser", "-b", help="Open the inspector in the browser.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the inspector to this HTML file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Save the recorded attention to this file, for regard view.")] = None,
    layer: Annotated[
        str | None,
        typer.Option(help="Draw the attention of this layer in the terminal: its number on the page, or its name."),
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="With --layer: draw this head, counted from 0, not the mean over heads.")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Color scale of drawings: even (compared with an even split over the visible keys; the default), "
            "absolute, row (relative to each row) or log."
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="Compare with this record, token by token: another model, or another text."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the attention of --layer, or of the sharpest layer, to this file: .png, .svg, .pdf."),
    ] = None,
) -> None:
    """Show what a model attends to in a text, an image or a recording."""
    from regard_lab.cli.look import run

    run(
        model, text=text, images=image or [], target=target, layer=layer, head=head, plot=plot, scale=scale,
        compare=compare, audio=audio, video=video, html=html, out=out, browser=browser, recurrences=recurrences,
    )  # fmt: skip


# The commands of this package -----------------------------------------------------------------------------------------


app = typer.Typer()

_command = partial(app.command, cls=Command)

MODEL = Path("regard-demo/model")
#: The included model.
TRANSLATOR = Path("english-french")
#: The options of `regard compare` that have flags.
COMPARED = (
    "data.data", "data.targets", "data.valid", "data.valid_targets", "preset", "training.steps", "training.seed",
)  # fmt: skip
COMPARED_IMAGES = (
    "data.images", "data.side", "data.gray", "augmentation.flip", "augmentation.shift", "training.epochs",
    "training.batch_examples", "training.learning_rate",
)  # fmt: skip
#: Default training time of the demo, in seconds.
_TRAINING = 170.0


@_command()
def demo(
    context: typer.Context,
    sentences: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SENTENCE]...", help="English sentences to translate instead of the examples."),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train a model that pronounces English words instead, and try it.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="With --train: stop training this many seconds after the start (170); evaluation follows.", min=1
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures and, with --train, the model.")] = Path(
        "regard-demo"
    ),
    seed: Annotated[int | None, typer.Option(help="With --train: the random seed.", min=0, max=2**31 - 1)] = None,
) -> None:
    """Translate English to French and show which words each word attended to."""
    if seconds is not None and not math.isfinite(seconds):
        raise fail(f"demo: --seconds must be finite, got {seconds}.")
    if train and sentences:
        raise fail(f"demo: sentences cannot be combined with --train, got {sentences[0][:60]!r}.")
    for name, value in (("--seconds", seconds), ("--seed", seed)):
        if not train and value is not None:
            raise fail(f"demo: {name} requires --train.")
    started = context.obj if isinstance(context.obj, float) else time.monotonic()
    if train:
        from regard_lab.cli import demo_training

        demo_training.run(deadline=started + (seconds or _TRAINING), out=out, seed=seed or 0)
    else:
        from regard_lab.cli.demo import run

        run(sentences or [], out=out)


@_command()
def pronounce(
    words: Annotated[
        list[str], typer.Argument(metavar="WORD...", help="Words to pronounce; - is words from standard input.")
    ],
    model: Annotated[
        Path, typer.Option(help="Folder of a pronunciation model; regard demo --train trains one.")
    ] = MODEL,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Draw which letters each phoneme attended to.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the alignments to this file: .png, .svg, .pdf.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the alignments to this self-contained HTML file.")] = None,
    as_json: Annotated[str | None, json_option("JSON with the attention weights")] = None,
) -> None:
    """Pronounce words with a trained model."""
    from regard_lab.cli.pronounce import run

    with report_errors("regard-lab[pronunciation]"):
        if "-" in words:
            words = [word for each in words for word in (sys.stdin.read().split() if each == "-" else [each])]
    run(words, model=model, alignment=alignment, plot=plot, html=html, json=JsonOutput(as_json))


app.add_typer(train, name="train")
app.add_typer(evaluate, name="evaluate")


@_command(epilog="Without a PROMPT, the model starts a new text; - reads the prompt from standard input.")
@with_flags(GenerationOptions, unset=True)
def generate(
    model: Annotated[Path, typer.Option(help="Folder of a language model, of regard or Hugging Face.")],
    given: dict[str, Any],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Texts to continue.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text, also inside a word; may be repeated.")
    ] = None,
    max_unknown: Annotated[
        float, typer.Option(help="Refuse a prompt if the vocabulary lacks a larger share of its characters.")
    ] = MAX_UNKNOWN,
    beams: Annotated[
        int,
        typer.Option(help="Beam size; above 1, search for the most likely text instead of sampling.", min=1, max=1000),
    ] = 1,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Speculative decoding, which is faster: guesses come from the smaller model in this folder, or with "
            "lookup from earlier text."
        ),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="8-bit weights: faster, slightly different output.")] = False,
    alignment: Annotated[
        bool, typer.Option("--alignment", help="Draw which tokens each new token attended to.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the attention to this file: .png, .svg, .pdf.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the attention to this self-contained HTML file.")] = None,
    as_json: Annotated[str | None, json_option("one line of JSON per text")] = None,
) -> None:
    """Continue a text with a language model."""
    from regard_lab.cli.generate import run

    run(
        prompts or [], model=model, given=given, stop=stop or [], beams=beams, draft=draft, int8=int8,
        alignment=alignment, plot=plot, html=html, json=JsonOutput(as_json), max_unknown=max_unknown,
    )  # fmt: skip


@_command()
@with_flags(ImageClassificationOptions, *COMPARED_IMAGES, unset=True, panels=IMAGE_PANELS)
@with_flags(ExperimentOptions, *COMPARED, unset=True)
def compare(
    task: Annotated[
        str, typer.Argument(help="What to train: translation, pronunciation, language-model or image-classification.")
    ],
    attention: Annotated[
        str,
        typer.Option(
            help="Mechanisms to compare, separated by commas, such as additive,local,transformer; for language models, "
            "such as softmax,gated-delta; for images, such as none,se,cbam."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the models and results.")],
    given: dict[str, Any],
    options: Annotated[
        Path | None, typer.Option(help="TOML file with options, such as regard train --show-options prints.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set any option of regard train --show-options, such as training.clip=0.5.",
        ),
    ] = None,
) -> None:
    """Train attention mechanisms on the same data, steps and seed; compare quality, size, speed and memory."""
    from regard_lab.cli.compare import run

    run(task, attention, out=out, options=options, given=given, settings=settings or [])


@_command()
@with_flags(PredictionOptions)
def translate(
    given: dict[str, Any],
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Sentences; by default or with -, lines of standard input."),
    ] = None,
    model: Annotated[
        Path, typer.Option(help="Folder of a translation model; english-french is included.")
    ] = TRANSLATOR,
    references: Annotated[
        list[str] | None,
        typer.Option("--given", help="Align and score this translation instead of generating one; once per text."),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="8-bit weights: faster, slightly different output.")] = False,
    alignment: Annotated[bool, typer.Option("--alignment", help="Draw which words each word attended to.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Draw tokens instead of words.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the alignments to this file: .png, .svg, .pdf.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the alignments to this self-contained HTML file.")] = None,
    as_json: Annotated[str | None, json_option("one line of JSON per text, with attention weights")] = None,
    keep_unknown: Annotated[
        bool,
        typer.Option("--keep-unknown", help="Write <unk> for unknown words instead of copying them from the source."),
    ] = False,
) -> None:
    """Translate sentences and show which words the model attended to."""
    from regard_lab.cli.translate import run

    with report_errors("regard-lab"):
        drawn = alignment or plot is not None or html is not None
        if tokens and not drawn:
            raise fail("translate: --tokens requires --alignment, --plot or --html.")
        shown = {"alignment": drawn or as_json is not None, "replace_unknown": not keep_unknown}
        chosen = PredictionOptions.from_dotted(given | shown)
    run(
        texts or [], references=references or [], model=model, options=chosen, int8=int8, alignment=alignment,
        words=not tokens, plot=plot, html=html, json=JsonOutput(as_json),
    )  # fmt: skip


@_command()
def classify(
    model: Annotated[Path, typer.Option(help="Folder of a classifier.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]...", help="Texts or image files; by default or with -, lines of standard input."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Instead of TEXT: file of lines, or folder or tar archive of images.")
    ] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Lines hold two texts to classify together, text TAB text.")
    ] = False,
    top: Annotated[int | None, typer.Option(help="Show this many labels, the most likely first.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Batch size; lower it if memory runs out.", min=1)] = 128,
    as_json: Annotated[str | None, json_option("one line of JSON per input, with all labels")] = None,
) -> None:
    """Classify texts, images or the tokens of a text; print each label with its probability."""
    from regard_lab.cli.classify import run

    run(texts or [], model=model, data=data, pairs=pairs, top=top, batch=batch, json=JsonOutput(as_json))


@_command()
def fill_mask(
    model: Annotated[Path, typer.Option(help="Folder of a masked language model, such as BERT.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]...",
            help="Texts with the model's mask, such as [MASK]; by default or with -, lines of standard input.",
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Instead of TEXT: file of lines.")] = None,
    top: Annotated[int, typer.Option(help="Show this many tokens per mask, the most likely first.", min=1)] = 5,
    batch: Annotated[int, typer.Option(help="Batch size in texts; lower it if memory runs out.", min=1)] = 32,
    as_json: Annotated[str | None, json_option("one line of JSON per text")] = None,
) -> None:
    """Predict the most likely tokens for each mask in a text, as in "to be or not to [MASK]", with probabilities.

    Prints one line per mask; ▁ stands for a space before a token.
    """
    from regard_lab.cli.fill_mask import run

    run(texts or [], model=model, data=data, top=top, batch=batch, json=JsonOutput(as_json))


@_command()
def embed(
    model: Annotated[Path, typer.Option(help="Folder of any text model, or of a Sentence Transformers model.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Texts; by default or with -, lines of standard input."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Instead of TEXT: file of lines.")] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="Vector of a text from its tokens: mean, first, last or max; by default, as the folder says, or mean."
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1; by default, as the folder says."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the vectors to this file: .npy, .tsv or .jsonl.")] = None,
    batch: Annotated[int, typer.Option(help="Batch size in texts; lower it if memory runs out.", min=1)] = 128,
    as_json: Annotated[str | None, json_option("one line of JSON per text")] = None,
) -> None:
    """Compute an embedding of each text from a model's last layer; print one line of numbers per text."""
    from regard_lab.cli.embed import run

    run(
        texts or [],
        model=model,
        data=data,
        pooling=pooling,
        normalize=normalize,
        out=out,
        batch=batch,
        json=JsonOutput(as_json),
    )


@_command(
    epilog="A line of links such as 0-0 1-2 links the first words of both sentences, and the second word with the "
    "third. Punctuation marks count as words. A pair that cannot be aligned gives an empty line. --method is "
    "intersection, union, grow-diag, grow-diag-final or grow-diag-final-and."
)
def align(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="File of sentence pairs, source TAB target; with --targets, of sources; - is standard input.",
        ),
    ],
    targets: Annotated[str | None, typer.Option(help="File of target sentences, one line per source.")] = None,
    model: Annotated[Path | None, typer.Option(help="Align with the attention of this translation model.")] = None,
    back: Annotated[Path | None, typer.Option(help="With --model: a model for the other direction.")] = None,
    aligner: Annotated[
        str | None, typer.Option(help="Without --model: lexical, or eflomal if installed; both learn from DATA alone.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="How to combine the links of both directions; see below.")
    ] = "grow-diag-final-and",
    tokenized: Annotated[
        bool,
        typer.Option("--tokenized", help="Words are what spaces separate. Needed to align Chinese or Japanese words."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File for the links; by default, standard output.")] = None,
) -> None:
    """Align the words of sentences and their translations, in Pharaoh format: 0-0 1-2."""
    from regard_lab.cli.align import run

    run(
        data, targets, model=model, back=back, aligner=aligner, method=method, tokenized=tokenized, out=out
    )  # fmt: skip


app.add_typer(describe)
app.add_typer(inspector)


@_command(epilog="1 GB = 10⁹ bytes, 1 TFLOP/s = 10¹² operations per second.")
@with_flags(PlanOptions)
def plan(
    given: dict[str, Any],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="Published model, such as gpt3, bert-large or llama-7b; else --layers and --width."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Change the model's config, such as kv_heads=8."),
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Compare our parameter counts with those of published models, and exit.")
    ] = False,
    as_json: Annotated[str | None, json_option("JSON")] = None,
) -> None:
    """Estimate what training a model takes: parameters, FLOPs, memory, parallel layouts, time."""
    from regard_lab.cli.plan import run

    run(name, given=given, settings=settings or [], table=table, json=JsonOutput(as_json))

"""The commands of this package."""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from regard_cli.messages import Command, fail, report_errors
from regard_lab.cli.describe import describe
from regard_lab.cli.flags import with_flags
from regard_lab.cli.inspector import inspector
from regard_lab.cli.plan_options import PlanOptions
from regard_lab.cli.train_tasks import train
from regard_lab.generation.predictions import PredictionOptions
from regard_lab.generation.sampling import GenerationOptions
from regard_lab.tasks.classification.image_options import ImageClassificationOptions
from regard_lab.tasks.translation.options import ExperimentOptions

app = typer.Typer()

_command = partial(app.command, cls=Command)

MODEL = Path("regard-demo/model")
#: Comes with the package.
TRANSLATOR = Path("english-french")
#: What may be asked of a comparison by flags.
COMPARED = (
    "data.data", "data.targets", "data.valid", "data.valid_targets", "preset", "training.steps", "training.seed",
)  # fmt: skip
COMPARED_IMAGES = (
    "data.images", "data.side", "data.gray", "augmentation.flip", "augmentation.shift", "training.epochs",
    "training.batch_examples", "training.learning_rate",
)  # fmt: skip
#: Seconds of the demonstration's training.
_TRAINING = 170.0


@_command()
def demo(
    context: typer.Context,
    sentences: Annotated[
        list[str] | None, typer.Argument(metavar="[SENTENCE]...", help="English sentences of your own.")
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Learn to pronounce English words on this machine instead.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            help="With --train: until so many seconds after the start, 170 by default; evaluation comes on top.", min=1
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for pictures, and with --train the model.")] = Path("regard-demo"),
    seed: Annotated[
        int | None, typer.Option(help="With --train: of parameters, dropout and batches.", min=0, max=2**31 - 1)
    ] = None,
) -> None:
    """Translate English to French, and show which words each word looked at."""
    if seconds is not None and not math.isfinite(seconds):
        raise fail(f"demo: --seconds must be finite, got {seconds}.")
    if train and sentences:
        raise fail(f"demo: sentences must not be given with --train, got {sentences[0][:60]!r}.")
    for name, value in (("--seconds", seconds), ("--seed", seed)):
        if not train and value is not None:
            raise fail(f"demo: {name} must come with --train, got it alone.")
    started = context.obj if isinstance(context.obj, float) else time.monotonic()
    if train:
        from regard_lab.cli import demo_training

        demo_training.run(deadline=started + (seconds or _TRAINING), out=out, seed=seed or 0)
    else:
        from regard_lab.cli.demo import run

        run(sentences or [], out=out)


@_command()
def pronounce(
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="Words to pronounce; - reads them from stdin.")],
    model: Annotated[Path, typer.Option(help="Folder of a saved model.")] = MODEL,
    alignment: Annotated[bool, typer.Option("--alignment", help="Draw which letters each phoneme looked at.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the alignments to this picture: .png, .svg, .pdf.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the alignments to this self-contained HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, alignment weights included.")] = False,
) -> None:
    """Pronounce words with a saved model, without training."""
    from regard_lab.cli.pronounce import run

    with report_errors("regard-lab[pronunciation]"):
        if "-" in words:
            words = [word for given in words for word in (sys.stdin.read().split() if given == "-" else [given])]
    run(words, model=model, alignment=alignment, plot=plot, html=html, as_json=as_json)


app.add_typer(train, name="train")


@_command(epilog="Without a PROMPT the model begins a text; - reads one from standard input.")
@with_flags(GenerationOptions, unset=True)
def generate(
    model: Annotated[Path, typer.Option(help="Folder of a model: of a run, or of Hugging Face.")],
    given: dict[str, Any],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Texts to go on with.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    beams: Annotated[int, typer.Option(help="Search with so many beams.", min=1, max=1000)] = 1,
    draft: Annotated[
        str | None, typer.Option(help="A smaller model's folder, or lookup: propose tokens, to be faster.")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Weights in 8 bits: faster, and not the same.")] = False,
    alignment: Annotated[bool, typer.Option("--alignment", help="Draw which tokens each new one looked at.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw that to this picture: .png, .svg, .pdf.")] = None,
    html: Annotated[Path | None, typer.Option(help="Draw that to this HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line each.")] = False,
) -> None:
    """Let a language model go on with a text, token by token."""
    from regard_lab.cli.generate import run

    run(
        prompts or [], model=model, given=given, stop=stop or [], beams=beams, draft=draft, int8=int8,
        alignment=alignment, plot=plot, html=html, as_json=as_json,
    )  # fmt: skip


@_command()
@with_flags(ImageClassificationOptions, *COMPARED_IMAGES, unset=True)
@with_flags(ExperimentOptions, *COMPARED, unset=True)
def compare(
    task: Annotated[str, typer.Argument(help="translation, pronunciation or image-classification.")],
    attention: Annotated[str, typer.Option(help="Such as additive,local,transformer; of images none,se,eca,cbam.")],
    out: Annotated[Path, typer.Option(help="Folder of the models and results.")],
    given: dict[str, Any],
    options: Annotated[Path | None, typer.Option(help="A TOML file of options of training.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any option, as training.clip=0.5.")
    ] = None,
) -> None:
    """Train several mechanisms on the same data, steps and seed, and compare quality, size, speed and memory."""
    from regard_lab.cli.compare import run

    run(task, attention, out=out, options=options, given=given, settings=settings or [])


@_command()
@with_flags(PredictionOptions)
def translate(
    given: dict[str, Any],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Lines; without any, or -, stdin.")
    ] = None,
    model: Annotated[Path, typer.Option(help="Folder of a model; english-french comes along.")] = TRANSLATOR,
    references: Annotated[
        list[str] | None,
        typer.Option("--given", help="A text's translation: show its alignment, write none. For each text."),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Weights in 8 bits: faster, and not the same.")] = False,
    alignment: Annotated[bool, typer.Option("--alignment", help="Draw which words each word looked at.")] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Draw tokens instead of words.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the alignments to this picture: .png, .svg, .pdf.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the alignments to this self-contained HTML file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, a line each, attention weights included.")
    ] = False,
    keep_unknown: Annotated[
        bool, typer.Option("--keep-unknown", help="Write only what the vocabulary can spell, no source words.")
    ] = False,
) -> None:
    """Translate lines with a model, and show which words it looked at."""
    from regard_lab.cli.translate import run

    with report_errors("regard-lab"):
        drawn = alignment or plot is not None or html is not None
        if tokens and not drawn:
            raise fail("translate: --tokens must come with --alignment, --plot or --html, got it alone.")
        shown = {"alignment": drawn or as_json, "replace_unknown": not keep_unknown}
        chosen = PredictionOptions.from_dotted(given | shown)
    run(
        texts or [], references=references or [], model=model, options=chosen, int8=int8, alignment=alignment,
        words=not tokens, plot=plot, html=html, as_json=as_json,
    )  # fmt: skip


@_command()
def classify(
    model: Annotated[Path, typer.Option(help="Folder of a classifier.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Texts (without any, or -, lines of stdin), or images."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A file of lines, or a folder or tar archive of images, in place of them.")
    ] = None,
    pairs: Annotated[bool, typer.Option("--pairs", help="Two texts in a line, with a tab between them.")] = False,
    top: Annotated[int | None, typer.Option(help="Show so many labels, the likeliest first.", min=1)] = None,
    batch: Annotated[int, typer.Option(help="Texts or images at once; lower it where memory is short.", min=1)] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line each, with all labels.")] = False,
) -> None:
    """Name the label of each text or image, or of each token of a text, with its probability."""
    from regard_lab.cli.classify import run

    run(texts or [], model=model, data=data, pairs=pairs, top=top, batch=batch, as_json=as_json)


@_command()
def fill_mask(
    model: Annotated[Path, typer.Option(help="Folder of a model of masked tokens, such as BERT.")],
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Texts with the model's mask; without any, or -, lines of stdin."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="A file of lines in place of them.")] = None,
    top: Annotated[int, typer.Option(help="Tokens for each mask, the likeliest first.", min=1)] = 5,
    batch: Annotated[int, typer.Option(help="Texts at once; lower it where memory is short.", min=1)] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each text.")] = False,
) -> None:
    """Name the likeliest tokens for each mask in a text, as in "to be or not to [MASK]", with their probabilities.

    A line for each mask; a space before a token is shown as ▁.
    """
    from regard_lab.cli.fill_mask import run

    run(texts or [], model=model, data=data, top=top, batch=batch, as_json=as_json)


@_command()
def embed(
    model: Annotated[Path, typer.Option(help="Folder of any model of text, or of Sentence Transformers.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; without any, or -, lines of stdin.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="A file of lines in place of them.")] = None,
    pooling: Annotated[
        str | None,
        typer.Option(help="mean, first, last or max of a text's tokens; as the folder says, or mean."),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1; as the folder says, or not."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file: .npy, .tsv or .jsonl.")] = None,
    batch: Annotated[int, typer.Option(help="Texts at once; lower it where memory is short.", min=1)] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each text.")] = False,
) -> None:
    """Make a vector of each text from the rows that leave a model's last layer; a line of numbers for each."""
    from regard_lab.cli.embed import run

    run(
        texts or [], model=model, data=data, pooling=pooling, normalize=normalize, out=out, batch=batch, as_json=as_json
    )


@_command(
    epilog="--method may be intersection, union, grow-diag, grow-diag-final or grow-diag-final-and. Words are counted "
    "from 0: what a reader calls a word, and signs. A line that cannot be aligned is empty."
)
def align(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Pairs separated by a tab; with --targets the sources.")],
    targets: Annotated[str | None, typer.Option(help="Targets, a line for each source.")] = None,
    model: Annotated[Path | None, typer.Option(help="A translator whose attention aligns.")] = None,
    back: Annotated[Path | None, typer.Option(help="With --model: a translator of the other direction.")] = None,
    aligner: Annotated[
        str | None, typer.Option(help="Without --model, learns from DATA: lexical; or eflomal, if installed.")
    ] = None,
    method: Annotated[str, typer.Option(help="How both directions are joined.")] = "grow-diag-final-and",
    tokenized: Annotated[bool, typer.Option("--tokenized", help="Words are what spaces separate.")] = False,
    out: Annotated[Path | None, typer.Option(help="File for the links; standard output by default.")] = None,
) -> None:
    """Link the words of sentences with those of their translations, in Pharaoh's format: 0-0 1-2."""
    from regard_lab.cli.align import run

    run(
        data, targets, model=model, back=back, aligner=aligner, method=method, tokenized=tokenized, out=out
    )  # fmt: skip


@_command()
@with_flags(PredictionOptions, "search.beams", "search.length_penalty", "precision", "batch")
def evaluate(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Pairs separated by a tab (with --targets the sources), image and caption too. Or text; or text, tab, "
            "label; or a folder of images for each label.",
        ),
    ],
    given: dict[str, Any],
    targets: Annotated[str | None, typer.Option(help="Targets, a line for each source.")] = None,
    model: Annotated[Path, typer.Option(help="Folder of a model; english-french comes along.")] = TRANSLATOR,
    tokenized: Annotated[
        bool, typer.Option("--tokenized", help="Also BLEU of words between spaces; --links count these.")
    ] = False,
    links: Annotated[
        str | None, typer.Option(help="Links of DATA's words: how well attention agrees; nothing is written.")
    ] = None,
    back: Annotated[Path | None, typer.Option(help="With --links: a translator of the other direction.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the output: a line for each source, repeated ones once.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    per: Annotated[
        str | None, typer.Option(help="A document: file, line, paragraph.", rich_help_panel="Language models")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a window.", rich_help_panel="Language models")] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens it moves on by; half of it.", rich_help_panel="Language models")
    ] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Lines of text, tab, text, tab, label.", rich_help_panel="Classifiers")
    ] = False,
    images: Annotated[
        str | None, typer.Option(help="Folder or .tar of the images in DATA.", rich_help_panel="Captioners")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="A file of their features.", rich_help_panel="Captioners")
    ] = None,
) -> None:
    """Score a translator, a captioner, a language model or a classifier.

    By BLEU and chrF, PER and WER, or links; by ROUGE-L and CIDEr-D; by perplexity and bits per byte; by accuracy, F1
    and Matthews.
    """
    from regard_lab.cli.evaluate import run
    from regard_lab.cli.evaluate_language import TextReading

    with report_errors("regard-lab[train]"):
        options = PredictionOptions.from_dotted(given)
    run(
        data, targets, model=model, options=options, tokenized=tokenized, out=out, as_json=as_json, links=links,
        back=back, reading=TextReading(per, length, stride, pairs), images=images, features=features,
    )  # fmt: skip


app.add_typer(describe)
app.add_typer(inspector)


@_command(epilog="A GB is 10⁹ bytes. --table alone shows published models beside what is counted here.")
@with_flags(PlanOptions)
def plan(
    given: dict[str, Any],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="gpt3, bert-large, llama-7b, ...")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Of its config: kv_heads=8.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Show published models.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what training a model takes: parameters, operations, memory, layouts, time."""
    from regard_lab.cli.plan import run

    run(name, given=given, settings=settings or [], table=table, as_json=as_json)

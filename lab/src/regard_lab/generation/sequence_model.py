"""Encoder–decoders with their vocabularies: translate texts, score given targets, replace unknown words.

Dimensions: T target tokens, S source tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._utils.errors import described, fitting, rejected, unknown_name
from regard_lab.data.batches import length_batches
from regard_lab.generation.beam_search import Hypothesis, Restriction, search
from regard_lab.generation.predictions import (
    Note,
    Prediction,
    PredictionOptions,
    join_sentences,
    merge_duplicates,
    with_alternatives,
)
from regard_lab.models import RecurrentConfig, TransformerConfig
from regard_lab.models.base import END, EncoderDecoder
from regard_lab.models.folders import (
    CONFIG,
    build_model,
    file_error,
    load_config,
    load_json,
    load_weights,
    save_model,
)
from regard_lab.models.packed_weight import PackedWeight
from regard_lab.models.registry import MODELS
from regard_lab.text.ragged import pad
from regard_lab.text.rewriting import Copy, Placed, Rewriting, Rewritten, is_placeholder
from regard_lab.text.vocabulary import (
    FIRST,
    UNKNOWN,
    SubwordVocabulary,
    SymbolVocabulary,
    Vocabulary,
    Word,
    group_tokens,
)
from regard_lab.text.words import PARAGRAPHS, locate_tokens, normalize, sentences
from regard_lab.training.objectives import cross_entropy

# Replace unknown words by the source words with the most attention ----------------------------------------------------


def words_of_tokens(vocabulary: Vocabulary, text: str, tokens: int) -> list[str]:
    """Return, for each token, the word of the text that contains it, without surrounding punctuation."""
    text = normalize(text, vocabulary.lowercase)
    words = [(word, len(vocabulary.encode(word))) for word in text.split()]
    words_of = [word for word, tokens in words for _ in range(tokens)]
    words_of = list(text) if len(words_of) < tokens else words_of  # each character is a token, spaces included
    signs = "".join(sign for sign in set(text) if unicodedata.category(sign).startswith("P"))
    return [word.strip(signs) or word for word in words_of]


def restore_words(vocabulary: Vocabulary, text: str, numbers: Sequence[int]) -> list[Word]:
    """Return the words of a text's tokens; words with unknown tokens are copied from the text."""
    words = vocabulary.words(numbers)
    if UNKNOWN not in numbers:
        return words
    whole = words_of_tokens(vocabulary, text, len(numbers))
    unknown = [UNKNOWN in numbers[word.tokens.start : word.tokens.stop] for word in words]
    return [replace(word, text=whole[word.tokens.start]) if new else word for word, new in zip(words, unknown)]


def words_of_source(
    vocabulary: Vocabulary, text: str, numbers: Sequence[int], placed: Placed | None = None
) -> list[Word]:
    """Return the words of a text that a model read, as ranges of its tokens.

    Parameters
    ----------
    vocabulary : Vocabulary
    text : str
        As users see it.
    numbers : sequence of int
    placed : Placed, optional
        The text as the model read it, if it was rewritten.
    """
    if placed is None:
        return restore_words(vocabulary, text, numbers)
    assert isinstance(vocabulary, SubwordVocabulary)
    decoded, spans = vocabulary.placed(numbers)
    if UNKNOWN in numbers:
        decoded, spans = locate_tokens(placed.text, decoded, spans, [number == UNKNOWN for number in numbers])
    shift = len(decoded) - len(decoded.lstrip(" "))
    origins = [placed.origin(max(start - shift, 0), max(stop - shift, 0)) for start, stop in spans]
    return group_tokens(normalize(text), origins)


def replace_unknown(
    vocabulary: Vocabulary, numbers: Sequence[int], words: Sequence[Word], whole: Sequence[str], alignment: Tensor
) -> tuple[str, list[Word]]:
    """Return a text and its words, with unknown words replaced by the source words with the most attention.

    Parameters
    ----------
    vocabulary : Vocabulary
    numbers : sequence of int (T,)
        Target token ids.
    words : sequence of Word
        The words of the target, as ranges of its tokens.
    whole : sequence of str (S,)
        For each source token, the word that contains it.
    alignment : Tensor (T, S)
    """
    most = alignment.argmax(-1).tolist()  # (T,)
    known: list[int] = []
    replaced, replacements = [], []
    for word in words:
        own = list(numbers[word.tokens.start : word.tokens.stop])
        if UNKNOWN in own:
            word = replace(word, text=whole[most[word.tokens.start + own.index(UNKNOWN)]])
            replacements.append(" " * vocabulary.tokens(own[:1])[0].startswith("▁") + word.text)
            own = [UNKNOWN]
        known += own
        replaced.append(word)
    return vocabulary.decode(known, replacements), replaced


# Forced decoding: scores and attention of given targets ---------------------------------------------------------------
# Dimensions: A attention maps, T target tokens, S source tokens.


#: The token ids of a source and of a target.
Numbers = tuple[Sequence[int], Sequence[int]]


def pad_to_device(model: EncoderDecoder, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return sequences as a padded tensor (B, S) with their lengths (B,), on the model's device."""
    device = next(model.parameters()).device
    numbers, lengths = pad(sequences)
    return numbers.to(device), lengths.to(device)


@torch.no_grad()
def score_targets(model: EncoderDecoder, pairs: Sequence[Numbers]) -> list[float]:
    """Return the log-probability of each target, including its end mark."""
    sources = pad_to_device(model, [source for source, _ in pairs])
    target, _ = pad_to_device(model, [[*target, END] for _, target in pairs])
    before = torch.cat([target.new_full((len(pairs), 1), END), target[:, :-1]], 1)
    weight, bias = model.projection
    weight = weight.unpacked() if isinstance(weight, PackedWeight) else weight
    _, each = cross_entropy(model.features(*sources, before), (weight, bias), target)  # (B, T)
    return list(each.double().sum(1).tolist())


@torch.no_grad()
def attention_maps(model: EncoderDecoder, pairs: Sequence[Numbers]) -> list[Tensor]:
    """Return the attention weights (A, T, S) of each target on its source."""
    if not pairs:
        return []
    source, lengths = pad_to_device(model, [source for source, _ in pairs])
    target, _ = pad_to_device(
        model, [[END, *target] for _, target in pairs]
    )  # through the step that reads the last token
    weights = model.align(source, lengths, target).cpu()
    return [each[:, : len(target), : len(source)] for each, (source, target) in zip(weights, pairs)]


def attention_weights(model: EncoderDecoder, pairs: Sequence[Numbers], name: str | None) -> list[Tensor]:
    """Return the weights (T, S) of one attention map, or the mean of all maps, for each pair."""
    place = slice(None) if name is None else [model.maps.index(name)]
    return [each[place].mean(0) for each in attention_maps(model, pairs)]


@torch.no_grad()
def posteriors(model: EncoderDecoder, pairs: Sequence[Numbers], name: str | None) -> list[Tensor]:
    """Return the posterior attention (T, S) of one map, or of the mean of all maps, for each pair."""
    if not pairs:
        return []
    source, lengths = pad_to_device(model, [source for source, _ in pairs])
    target, _ = pad_to_device(model, [[END, *target] for _, target in pairs])
    written, _ = pad_to_device(model, [[*target, END] for _, target in pairs])
    posterior = model.posterior(source, lengths, target, written, name).cpu()
    return [each[: len(target), : len(source)] for each, (source, target) in zip(posterior, pairs)]


# From search hypotheses to predictions --------------------------------------------------------------------------------
# Dimensions: A attention maps, T target tokens, S source tokens.


_NOTHING = Hypothesis((), -torch.inf, -torch.inf)


#: Minimum number of tokens of a translation to judge its confidence: a few words often have several good translations.
_JUDGED = 6
#: The text of the note "unusual".
UNUSUAL = "the text is unlike those that the model learned from, and its translation may be wrong"


@dataclass(frozen=True)
class Line:
    """An input line with its tokens and the hypotheses of a search."""

    text: str
    numbers: list[int]
    notes: tuple[Note, ...] = ()
    hypotheses: list[Hypothesis] = field(default_factory=list)
    #: The text as the model reads it, if the model rewrites texts.
    rewritten: Rewritten | None = None

    def missing(self, model: SequenceModel, hypothesis: Hypothesis) -> list[Copy]:
        """Return what a hypothesis should copy and does not."""
        if self.rewritten is None or not self.rewritten.copies:
            return []
        written = {model.placeholders.get(number) for number in hypothesis.numbers}
        return [copy for mark, copy in self.rewritten.copies.items() if mark not in written]

    def with_hypotheses(self, model: SequenceModel, hypotheses: Sequence[Hypothesis]) -> Line:
        """Return the line with hypotheses: first those that copy all they should, each group best first."""
        ranked = sorted(hypotheses, key=lambda each: len(self.missing(model, each)))
        return replace(self, hypotheses=ranked or [_NOTHING])


def detokenize(model: SequenceModel, batch: Sequence[Line], options: PredictionOptions) -> Iterator[Prediction]:
    """Yield the prediction for each line."""
    wanted = [
        (line.numbers, each.numbers)
        for line in batch
        for each in line.hypotheses
        if options.alignment or (options.replace_unknown and UNKNOWN in each.numbers)
    ]
    weights = iter(attention_maps(model.model, wanted) if model.model.maps else [None] * len(wanted))
    for line in batch:
        predictions = []
        for each in line.hypotheses:
            unknown = options.replace_unknown and UNKNOWN in each.numbers
            alignment = next(weights) if options.alignment or unknown else None
            predictions.append(_prediction(model, line, each, alignment, options))
        yield (
            with_alternatives(predictions)
            if options.search.sample
            else merge_duplicates(predictions, options.search.n_best)
        )


def _prediction(
    model: SequenceModel, line: Line, hypothesis: Hypothesis, alignment: Tensor | None, options: PredictionOptions
) -> Prediction:
    """Return a prediction, with the alignment (A, T, S) if requested."""
    if line.rewritten is not None:
        return _restored(model, line, line.rewritten, hypothesis, alignment)
    text, words, aligning = model.target.decode(hypothesis.numbers), None, model.aligning
    if options.replace_unknown and alignment is not None and UNKNOWN in hypothesis.numbers:
        words = model.target.words(hypothesis.numbers)
        read = words_of_tokens(model.source, line.text, len(line.numbers))
        weights = alignment.mean(0) if aligning is None else alignment[model.model.maps.index(aligning)]
        text, words = replace_unknown(model.target, hypothesis.numbers, words, read, weights)
    prediction = Prediction(
        line.text,
        text,
        tuple(model.source.tokens(line.numbers)),
        tuple(model.target.tokens(hypothesis.numbers)),
        hypothesis.score,
        hypothesis.normalized,
        notes=line.notes,
    )
    if not options.alignment:
        return prediction
    target_words = model.target.words(hypothesis.numbers) if words is None else words
    return replace(
        prediction,
        maps=model.model.maps,
        alignment=alignment,
        aligning=aligning,
        source_words=tuple(restore_words(model.source, line.text, line.numbers)),
        words=tuple(target_words),
    )


#: Returns the labels in pictures of the token ids of a text.
Showing = Callable[[Sequence[int]], tuple[str, ...]]


def _shown_tokens(vocabulary: Vocabulary, copies: Mapping[str, Copy] | None, numbers: Sequence[int]) -> tuple[str, ...]:
    tokens = vocabulary.tokens(numbers)
    return tuple(tokens if copies is None else (Rewriting.shown(token, copies) for token in tokens))


def _restored(
    model: SequenceModel, line: Line, read: Rewritten, hypothesis: Hypothesis, alignment: Tensor | None
) -> Prediction:
    """Return the prediction of a model that rewrites texts: its words and marks as users see them."""
    assert model.rewriting is not None and isinstance(model.target, SubwordVocabulary)
    decoded, places = model.target.placed(hypothesis.numbers)
    shift = len(decoded) - len(decoded.lstrip(" "))
    written = model.rewriting.write(decoded[shift:], read)
    notes = list(line.notes)
    if missing := line.missing(model, hypothesis):
        left_out = ", ".join(repr(copy.text) for copy in missing)
        notes.append(Note("missing", f"the translation leaves out {left_out}"))
    prediction = Prediction(
        line.text,
        written.text.strip(),
        _shown_tokens(model.source, read.copies, line.numbers),
        _shown_tokens(model.target, read.copies, hypothesis.numbers),
        hypothesis.score,
        hypothesis.normalized,
    )
    if model.is_unusual(prediction):
        notes.append(Note("unusual", UNUSUAL))
    prediction = replace(prediction, notes=tuple(notes))
    if alignment is None:
        return prediction
    spans = [written.image(max(start - shift, 0), stop - shift) for start, stop in places]
    return replace(
        prediction,
        maps=model.model.maps,
        alignment=alignment,
        aligning=model.aligning,
        source_words=tuple(words_of_source(model.source, line.text, line.numbers, read.placed)),
        words=tuple(group_tokens(written.text, spans)),
    )


# A trained model with its vocabularies: saved, loaded, and put to lines of text ---------------------------------------
# Dimensions: A attention maps, T target tokens, S source tokens.


FORMAT, VERSION = "regard.sequences", 1
SOURCE, TARGET, REWRITING = "source.json", "target.json", "rewriting.json"
#: Dtypes for stored parameters. Computation is in float32.
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class SequenceModel:
    """A model with its vocabularies.

    Parameters
    ----------
    model : EncoderDecoder
        Put into evaluation mode.
    source, target : Vocabulary
        What turns texts into the numbers that it reads, and back those that it writes.
    about : mapping, optional
        What else is worth knowing of it, as JSON can hold it; saved with the model.
    rewriting : Rewriting, optional
        How texts are rewritten before the model reads them, and restored behind it.

    Raises
    ------
    ValueError
        If a vocabulary does not have the size that the model has for it, or texts are rewritten of a vocabulary without
        subwords.

    Examples
    --------
    >>> from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder
    >>> from regard_lab.text.vocabulary import SymbolVocabulary
    >>> letters, phonemes = SymbolVocabulary.train(["cat"]), SymbolVocabulary.train(["K AE T"], separator=" ")
    >>> config = RecurrentConfig(len(letters), len(phonemes), encoder=8, decoder=8)
    >>> model = SequenceModel(RecurrentEncoderDecoder(config), letters, phonemes)
    >>> [prediction.source for prediction in model.predict(["cat", "", "act"])]
    ['cat', '', 'act']
    """

    def __init__(
        self,
        model: EncoderDecoder,
        source: Vocabulary,
        target: Vocabulary,
        about: Mapping[str, Any] | None = None,
        rewriting: Rewriting | None = None,
    ) -> None:
        for name, size, vocabulary in (
            ("source", model.config.sources, source),
            ("target", model.config.targets, target),
        ):
            if size != len(vocabulary):
                raise rejected("SequenceModel", name, f"have the {size} symbols that the model knows", len(vocabulary))
            if rewriting is not None and not isinstance(vocabulary, SubwordVocabulary):
                raise rejected("SequenceModel", name, "have subwords where texts are rewritten", str(vocabulary))
        self.model = model.eval()
        self.source, self.target = source, target
        self.about = dict(about or {})
        self.rewriting = rewriting
        #: Placeholders by target token id; each refers to the same placeholder in the source.
        self.placeholders: dict[int, str] = {}
        if rewriting is not None:
            pieces = ((number, target.tokens([number])[0].removeprefix("▁")) for number in range(FIRST, len(target)))
            known = {number: piece for number, piece in pieces if is_placeholder(piece)}
            read = {piece for piece in known.values() if UNKNOWN not in source.encode(piece)}
            self.placeholders = {number: piece for number, piece in known.items() if piece in read}

    def __repr__(self) -> str:
        parameters = sum(each.numel() for each in self.model.parameters())
        return f"SequenceModel({type(self.model).__name__}, {parameters:,} parameters, {self.source} → {self.target})"

    @property
    def kind(self) -> str:
        """The model's name in :data:`MODELS`.

        Raises
        ------
        TypeError
            If the model is of another class.
        """
        for name, (_, kind) in MODELS.items():
            if type(self.model) is kind:
                return name
        names = " or ".join(kind.__name__ for _, kind in MODELS.values())
        raise rejected("save", "model", f"be a {names}", type(self.model).__name__, TypeError)

    @property
    def aligning(self) -> str | None:
        """The attention map that aligns words best, guided or selected in training; None if unknown."""
        maps, known = self.model.maps, self.about.get("aligning")
        return maps[0] if len(maps) == 1 else known if known in maps else None

    @property
    def max_lengths(self) -> tuple[int | None, int | None]:
        """Maximum source and target lengths in symbols; None for no limit."""
        config = self.model.config
        if isinstance(config, TransformerConfig):
            bounded = config.positions == "learned" or config.score == "location"
            return (
                (config.max_length, max(1, config.max_length - 1)) if bounded else (None, None)
            )  # the start mark counts
        bounded = isinstance(config, RecurrentConfig) and config.attention == "location"
        return (config.max_length if bounded else None, None)

    def is_unusual(self, prediction: Prediction) -> bool:
        """Return whether a source or its translation is unlike what the model learned from, if it knows its limits.

        These are ``about["usual"]``: the least ``confidence`` of a prediction, and the least share of ``known`` words.
        """
        limits = self.about.get("usual")
        if not limits or self.rewriting is None or not prediction.source.strip():
            return False
        known = self.rewriting.known_share(prediction.source)
        doubtful = len(prediction.tokens) >= _JUDGED and prediction.confidence < limits["confidence"]
        return doubtful or known < limits["known"]

    def save(self, folder: str | Path, *, dtype: str = "float32") -> Path:
        """Write everything to a folder; see :meth:`load`.

        Parameters
        ----------
        folder : str or Path
            Created if missing. Existing files are replaced, or kept unchanged if the disk is full.
        dtype : {"float32", "float16", "bfloat16"}
            Storage dtype of the parameters.

        Raises
        ------
        OSError
            If it cannot be written.
        ValueError
            If a parameter is not finite.
        """
        if dtype not in DTYPES:
            raise unknown_name("save", "dtype", dtype, DTYPES)
        head = {"format": FORMAT, "version": VERSION, "kind": self.kind}
        config = head | {"model": asdict(self.model.config), "dtype": dtype, "about": self.about}
        others = {SOURCE: self.source.to_json(), TARGET: self.target.to_json()}
        if self.rewriting is not None:
            others[REWRITING] = self.rewriting.to_json()
        return save_model(folder, self.model, config, others=others, dtype=DTYPES[dtype])

    @classmethod
    def load(cls, folder: str | Path) -> SequenceModel:
        """Read a model from the folder that :meth:`save` wrote.

        Raises
        ------
        ModelFileError
            If a file is missing, unreadable, truncated, modified, of another format or version, or inconsistent with
            the others.
        """
        path = Path(folder) / CONFIG
        config = load_config(folder, kind=FORMAT, version=VERSION)
        for name, known in (("kind", sorted(MODELS)), ("dtype", sorted(DTYPES))):
            if not isinstance(config.get(name), str) or config[name] not in known:
                raise file_error(path, f"have a {name!r} among {', '.join(known)}", repr(config.get(name))[:60])
        if not isinstance(config.get("about"), dict):
            raise file_error(path, "have an object 'about'", repr(config.get("about"))[:60])
        source, target = (
            Vocabulary.from_json(load_json(folder, name, config), str(Path(folder) / name)) for name in (SOURCE, TARGET)
        )
        model = build_model(path, *MODELS[config["kind"]], config.get("model")).to(DTYPES[config["dtype"]])
        sizes = (model.config.sources, model.config.targets)
        if sizes != (len(source), len(target)):
            expected = f"have sources {len(source)} and targets {len(target)}, the sizes of {SOURCE} and {TARGET}"
            raise file_error(path, expected, f"{sizes[0]} and {sizes[1]}")
        load_weights(folder, model, config)
        rewriting = None
        if isinstance(config.get("files"), dict) and REWRITING in config["files"]:
            rewriting = Rewriting.from_json(load_json(folder, REWRITING, config), str(Path(folder) / REWRITING))
        return cls(model.float(), source, target, config["about"], rewriting)

    def predict(
        self, lines: Iterable[str], options: PredictionOptions | None = None, *, first: int = 1
    ) -> list[Prediction]:
        """Translate each line, and return the predictions in the same order.

        With ``options.split``, the model translates a line sentence by sentence. Lines of similar lengths are batched,
        but the results do not depend on the batch. An empty line gives an empty prediction.

        Parameters
        ----------
        lines : iterable of str
        options : PredictionOptions, optional
        first : int
            Number of the first line in error messages.

        Raises
        ------
        ValueError
            If a line is too long and ``options.too_long`` is ``"refuse"``.
        TypeError
            If ``lines`` is a str, a line is not a str, or the options have the wrong type.
        """
        if isinstance(lines, str):
            raise rejected("predict", "lines", "be a list of lines", "a str", TypeError)
        options, texts = PredictionOptions() if options is None else options, list(lines)
        if not isinstance(options, PredictionOptions):
            raise rejected("predict", "options", "be PredictionOptions", described(options), TypeError)
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise rejected("predict", f"line {first + i}", "be a str", described(text), TypeError)
        parts = [self._parts(text, options) for text in texts]
        numbers = [first + i for i, each in enumerate(parts) for _ in each]
        predictions = iter(self._written([part for each in parts for part in each], numbers, options))
        count, ranked = options.search.n_best, not options.search.sample
        return [
            join_sentences(text, list(islice(predictions, len(each))), count, ranked=ranked)
            for text, each in zip(texts, parts)
        ]

    def _written(self, texts: Sequence[str], places: Sequence[int], options: PredictionOptions) -> list[Prediction]:
        """Return the predictions for texts; ``places`` are their line numbers for error messages."""
        usable = set(self.placeholders.values())
        rewritten = [None if self.rewriting is None else self.rewriting.read(text, usable) for text in texts]
        numbers = self.source.encode_all(
            text if each is None else each.placed.text for text, each in zip(texts, rewritten)
        )
        read = [
            replace(self._read(text, numbers[i].tolist(), options, places[i]), rewritten=rewritten[i])
            for i, text in enumerate(texts)
        ]
        predictions = [Prediction(line.text, notes=line.notes) for line in read]
        bounds = [bound for bound in (options.search.max_length, self.max_lengths[1]) if bound]
        narrow = options.precision == "bfloat16"
        unknown = options.search.unknown and options.replace_unknown and self._replaces() and self.rewriting is None
        searching = replace(options.search, max_length=min(bounds, default=0), unknown=unknown)
        with self._evaluating(options):
            for rows in self._batches(read, options):
                # Of a text with something to copy, other hypotheses count too if the best does not copy it.
                copies = any(line.rewritten is not None and line.rewritten.copies for line in (read[i] for i in rows))
                pool = searching.n_best
                if copies and not searching.sample:
                    pool = max(pool, searching.beams)
                while rows:
                    sources = pad_to_device(self.model, [read[i].numbers for i in rows])
                    allowed = self._allowed([read[i] for i in rows], sources[0].device)
                    with torch.autocast(sources[0].device.type, torch.bfloat16, enabled=narrow):
                        hypotheses = search(self.model, *sources, searching, pool=pool, restriction=allowed)
                    batch = [read[i].with_hypotheses(self, each) for i, each in zip(rows, hypotheses)]
                    for i, each in zip(rows, detokenize(self, batch, options)):
                        predictions[i] = each
                    # Hypotheses with the same text are merged, so search again with a larger pool.
                    full = [i for i, each in zip(rows, hypotheses) if len(each) == pool]
                    rows = [i for i in full if 1 + len(predictions[i].alternatives) < searching.n_best]
                    pool *= 2
        return predictions

    def _batches(self, read: Sequence[Line], options: PredictionOptions) -> Iterator[list[int]]:
        """Yield rows to search for together: those with something to copy by themselves."""
        copying = [line.rewritten is not None and bool(line.rewritten.copies) for line in read]
        for which in (False, True):
            rows = [i for i, copies in enumerate(copying) if copies == which]
            for batch in length_batches([len(read[i].numbers) for i in rows], options.batch):
                yield [rows[i] for i in batch]

    def _allowed(self, lines: Sequence[Line], device: torch.device) -> Restriction | None:
        """Return that of placeholders, only those of its source may be written."""
        if not self.placeholders:
            return None
        marks = list(self.placeholders.values())
        rows = [[line.rewritten is not None and mark in line.rewritten.copies for mark in marks] for line in lines]
        return Restriction(torch.tensor(list(self.placeholders), device=device), torch.tensor(rows, device=device))

    def align(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        options: PredictionOptions | None = None,
        *,
        first: int = 1,
    ) -> list[Prediction]:
        """Score and align existing translations, as if the model had generated them.

        With ``options.split``, a line and its target are aligned sentence by sentence if they have the same number of
        sentences.

        Parameters
        ----------
        sources, targets : iterable of str
            The same number of each; pairs with an empty side are not aligned.
        options : PredictionOptions, optional
            Of the search options, only the length penalty matters.
        first : int
            Number of the first line in error messages.

        Returns
        -------
        list of Prediction
            ``text`` is the given target.

        Raises
        ------
        ValueError
            If the numbers of sources and targets differ, or if a line is too long and ``options.too_long`` is
            ``"refuse"``.
        TypeError
            If ``sources`` or ``targets`` is a str.

        Examples
        --------
        >>> from regard_lab import pretrained
        >>> (pair,) = pretrained.load().align(["I love you."], ["Je t'aime."])
        >>> [word.text for word in pair.words], tuple(pair.alignment.shape)
        (['Je', "t'aime", '.'], (9, 5, 5))
        """
        texts, given = list(sources), list(targets)
        if isinstance(sources, str) or isinstance(targets, str):
            raise rejected("align", "sources and targets", "be lists of lines", "a str", TypeError)
        if len(texts) != len(given):
            raise rejected("align", "targets", f"be as many as sources, {len(texts):,}", f"{len(given):,}")
        options = replace(options or PredictionOptions(), alignment=True, replace_unknown=False)
        parts = []
        for text, target in zip(texts, given):
            read, given_parts = self._parts(text, options), self._parts(target, options)
            parts.append(list(zip(read, given_parts)) if len(read) == len(given_parts) else [(text, target)])
        places = [first + i for i, each in enumerate(parts) for _ in each]
        predictions = iter(self._given([pair for each in parts for pair in each], places, options))
        lines = (join_sentences(text, list(islice(predictions, len(each)))) for text, each in zip(texts, parts))
        return [replace(line, text=target) for line, target in zip(lines, given)]

    def _given(
        self, pairs: Sequence[tuple[str, str]], places: Sequence[int], options: PredictionOptions
    ) -> list[Prediction]:
        texts, given = [text for text, _ in pairs], [target for _, target in pairs]
        rewritten: list[tuple[Rewritten, Rewritten] | tuple[None, None]] = [
            (None, None) if self.rewriting is None else self.rewriting.read_pair(*pair) for pair in pairs
        ]
        numbers, wanted = (
            vocabulary.encode_all(text if read is None else read.placed.text for text, read in zip(side, read_as))
            for vocabulary, side, read_as in zip((self.source, self.target), (texts, given), zip(*rewritten))
        )
        most = self.max_lengths[1]
        for i in range(len(given)):
            if most is not None and len(wanted[i]) > most:
                raise rejected("align", f"target {places[i]}", f"have at most {most} tokens", len(wanted[i]))
        read = [
            replace(self._read(text, numbers[i].tolist(), options, places[i]), rewritten=rewritten[i][0])
            for i, text in enumerate(texts)
        ]
        predictions = [Prediction(line.text, notes=line.notes) for line in read]
        counts = zip((len(line.numbers) for line in read), wanted.lengths.tolist())
        lengths = [max(both) if all(both) else 0 for both in counts]
        with self._evaluating(options):
            for rows in length_batches(lengths, options.batch):
                both = [(read[i].numbers, wanted[i].tolist()) for i in rows]
                scores = score_targets(self.model, both)
                hypotheses = [
                    Hypothesis(tuple(target), score, score / float(options.search.penalty(len(target) + 1)))
                    for (_, target), score in zip(both, scores)
                ]
                batch = [replace(read[i], hypotheses=[each]) for i, each in zip(rows, hypotheses)]
                for i, each in zip(rows, detokenize(self, batch, options)):
                    written = rewritten[i][1]
                    placed = None if written is None else written.placed
                    words = words_of_source(self.target, given[i], wanted[i].tolist(), placed)
                    predictions[i] = replace(each, text=given[i], words=tuple(words), notes=read[i].notes)
        return predictions

    def tokenize_pair(self, source: str, target: str) -> tuple[tuple[list[int], Showing], tuple[list[int], Showing]]:
        """Return the numbers of a source and of a target, each with what shows tokens of it to users.

        Parameters
        ----------
        source, target : str
        """
        texts: tuple[str, str] = (source, target)
        copies: list[Mapping[str, Copy] | None] = [None, None]
        if self.rewriting is not None:
            read = self.rewriting.read_pair(source, target)
            texts = read[0].placed.text, read[1].placed.text
            copies = [each.copies for each in read]
        made = []
        for vocabulary, text, copied in zip((self.source, self.target), texts, copies):
            made.append((vocabulary.encode(text), partial(_shown_tokens, vocabulary, copied)))
        return made[0], made[1]

    def stream(
        self, lines: Iterable[str], options: PredictionOptions | None = None, *, ahead: int = 1024
    ) -> Iterator[Prediction]:
        """Translate an endless stream of lines, and yield the predictions in the same order.

        Parameters
        ----------
        lines : iterable of str
            For example standard input; line ends are stripped.
        options : PredictionOptions, optional
        ahead : int
            Number of lines to read at a time. More lines give better batches; with 1, each line is translated before
            the next one is read.

        Raises
        ------
        ValueError
            As in :meth:`predict`, after yielding the predictions of earlier blocks.
        """
        if ahead < 1:
            raise rejected("stream", "ahead", "be at least 1", ahead)
        texts, first = (line.rstrip("\r\n") for line in lines), 1
        while block := list(islice(texts, ahead)):
            yield from self.predict(block, options, first=first)
            first += len(block)

    def _parts(self, text: str, options: PredictionOptions) -> list[str]:
        """Return the sentences of a line, or the whole line if the model reads whole lines."""
        split = self.about.get("lines") != PARAGRAPHS if options.split is None else options.split
        return [text] if not split or isinstance(self.source, SymbolVocabulary) else sentences(text)

    def _read(self, text: str, numbers: list[int], options: PredictionOptions, number: int) -> Line:
        most = min(options.max_length, self.max_lengths[0] or options.max_length)
        if len(numbers) <= most:
            return Line(text, numbers)
        if options.too_long == "refuse":
            raise rejected("predict", f"line {number}", f"have at most {most} tokens", len(numbers))
        cut = Note("truncated", f"truncated to the first {most} of {len(numbers)} tokens")
        return Line(text, numbers[:most], (cut,))

    def _replaces(self) -> bool:
        """Return whether source words can replace unknown symbols; not in pronunciation models."""
        read, written = (getattr(vocabulary, "separator", None) for vocabulary in (self.source, self.target))
        return bool(self.model.maps) and (read, written) != ("", " ")

    @contextmanager
    def _evaluating(self, options: PredictionOptions) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        lower = f"lower batch (now {options.batch}) or beams (now {options.search.beams})"
        try:
            with fitting(f"predict: out of memory: {lower}."):
                yield
        finally:
            self.model.train(training)

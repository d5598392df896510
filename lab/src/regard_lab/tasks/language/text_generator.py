"""Text generation with a language model and its tokenizer, and the attention of each new token."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from regard._utils.constraints import Number
from regard._utils.errors import RegardWarning, rejected
from regard.inspect._view.plots import Alignment
from regard_lab.generation.continuous_batching import AttentionRequest
from regard_lab.generation.generation import Generated
from regard_lab.generation.generation import stream as stream_tokens
from regard_lab.generation.prompt_search import search_prompts
from regard_lab.generation.quantization import pack_weights, quantize
from regard_lab.generation.requests import Stops, Token, TokenAttention
from regard_lab.generation.sampling import GenerationOptions
from regard_lab.generation.speculative import Drafter, Speculator
from regard_lab.models import DecoderLM
from regard_lab.models.hugging_face.hosted import HostedWriter
from regard_lab.tasks.folders import check_tokenizer, load_with_tokenizer
from regard_lab.text.tokenizer import Tokenizer
from regard_lab.text.unknown import MAX_UNKNOWN, UnknownCharacters


@dataclass(frozen=True)
class GeneratedText:
    """The text generated for a prompt.

    Attributes
    ----------
    prompt, text : str
        The prompt, and the generated text without it, up to the stop text.
    end : str
        Why generation ended: ``"stop"`` or ``"length"``.
    prompt_numbers, numbers : tuple of int
        The tokens of both; those of the text end before the token in which a stop text begins.
    log_probability : float or None
        Log-probability of the generated tokens in nats, if known.
    attended : tuple of TokenAttention
        The attention of each token, if requested.
    """

    prompt: str
    text: str
    end: str
    prompt_numbers: tuple[int, ...]
    numbers: tuple[int, ...]
    log_probability: float | None = None
    attended: tuple[TokenAttention, ...] = ()


class TextGenerator:
    """A decoder-only language model with its tokenizer.

    Parameters
    ----------
    model : DecoderLM or HostedWriter
    tokenizer : Tokenizer

    Examples
    --------
    >>> from regard_lab.models import DecoderLMConfig
    >>> tokenizer = Tokenizer.learn([], kind="bytes")
    >>> generator = TextGenerator(DecoderLM(DecoderLMConfig(len(tokenizer), width=16)), tokenizer)
    >>> (written,) = generator.generate(["Once"], GenerationOptions(max_new_tokens=5))
    >>> len(written.numbers), written.end
    (5, 'length')
    """

    def __init__(self, model: DecoderLM | HostedWriter, tokenizer: Tokenizer) -> None:
        check_tokenizer(model, tokenizer, "TextGenerator", "tokenizer")
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def load(cls, folder: str | Path, *, dtype: torch.dtype | None = None, int8: bool = False) -> TextGenerator:
        """Load the model and tokenizer from a regard or Hugging Face folder.

        On a CPU, float32 weights are packed for decoding (``regard_lab.generation.quantization.pack_weights``) or
        quantized (``quantize``). You cannot train or save such a model.

        Parameters
        ----------
        folder : str or Path
        dtype : torch.dtype, optional
            Dtype of the weights; as stored by default.
        int8 : bool, default False
            Quantize the weights to 8 bits: faster, with slightly different output.

        Raises
        ------
        ModelFileError, ValueError
            If there is no such model, its files are damaged, or it does not generate text.
        """
        what = "a text generator: a decoder, or an encoder–decoder of transformers"
        dtype = torch.float32 if int8 and dtype is None else dtype
        kinds: tuple[type[DecoderLM | HostedWriter], ...] = (DecoderLM, HostedWriter)
        model, tokenizer = load_with_tokenizer(folder, kinds, what, "generate", dtype)
        if isinstance(model, HostedWriter):
            if int8:
                got = f"{type(model.module).__name__}, which runs in transformers"
                raise rejected("generate", "--int8", "be left out unless regard implements the model", got)
            return cls(model, tokenizer)
        if int8:
            return cls(quantize(model), tokenizer)
        pack_weights(model)
        return cls(model, tokenizer)

    @property
    def answers(self) -> bool:
        """Whether texts answer prompts instead of continuing them: True for an encoder–decoder."""
        return isinstance(self.model, HostedWriter) and self.model.is_pair

    def generate(
        self,
        prompts: Sequence[str],
        options: GenerationOptions | None = None,
        *,
        stop: Sequence[str] = (),
        attention: AttentionRequest | None = None,
        drafter: Drafter | DecoderLM | HostedWriter | None = None,
        say: Callable[[int, str], None] | None = None,
        max_unknown: float = MAX_UNKNOWN,
    ) -> list[GeneratedText]:
        """Generate ``options.samples`` texts for each prompt; those of a prompt follow each other.

        Parameters
        ----------
        prompts : sequence of str
        options : GenerationOptions, optional
        stop : sequence of str
            Texts at which generation stops, besides the end-of-text token: found in the generated text, wherever the
            borders of tokens are, and cut from it; or names of special tokens, such as ``<|im_end|>``.
        attention : AttentionRequest, optional
            Attention weights to return with each token.
        drafter : Drafter or DecoderLM, optional
            Speculative decoding: the drafter proposes tokens, and the model checks several at a time.
        say : callable, optional
            Called as ``say(request, text)`` with new text as soon as it is final.
        max_unknown : float, default 0.2
            The largest share of a prompt's characters that the vocabulary may lack.

        Raises
        ------
        ValueError
            If an argument is invalid, the vocabulary cannot spell a stop text, or lacks too many of a prompt's
            characters.

        Warns
        -----
        RegardWarning
            If the vocabulary lacks characters of a prompt.
        """
        options = GenerationOptions() if options is None else options
        numbers = self._read(prompts, max_unknown)
        written = [Generated() for _ in range(len(prompts) * options.samples)]
        for token in self._stream(numbers, options, self._stops(stop), attention, drafter):
            written[token.request].take(token)
            self._note_length(numbers[token.request // options.samples], written[token.request])
            if say is not None and token.text:
                say(token.request, token.text)
        return [
            GeneratedText(
                prompts[i // options.samples],
                each.text,
                each.end,
                tuple(numbers[i // options.samples]),
                tuple(each.numbers),
                sum(each.log_probabilities) if each.log_probabilities else None,
                tuple(each.attended),
            )
            for i, each in enumerate(written)
        ]

    def search(
        self, prompts: Sequence[str], beams: int, options: GenerationOptions, *, max_unknown: float = MAX_UNKNOWN
    ) -> list[GeneratedText]:
        """Return the best beam search result for each prompt.

        Parameters
        ----------
        prompts : sequence of str
        beams : int
        options : GenerationOptions
            Only ``max_new_tokens`` applies.
        max_unknown : float, default 0.2
            As in :meth:`generate`.
        """
        numbers = self._read(prompts, max_unknown)
        found = search_prompts(self.model, numbers, self._ends, beams=beams, max_new_tokens=options.max_new_tokens)
        made = []
        for prompt, given, (best, *_) in zip(prompts, numbers, found):
            end = "length" if len(best.numbers) >= options.max_new_tokens else "stop"
            decoder = self.tokenizer.decode_stream(() if self.answers else given)
            text = "".join([*map(decoder.push, best.numbers), decoder.close()])
            made.append(GeneratedText(prompt, text, end, tuple(given), tuple(best.numbers), best.score))
        return made

    def encode(self, prompt: str) -> list[int]:
        """Tokenize a prompt with the tokenizer's begin token; an empty prompt gives only a begin or end token."""
        numbers = self.tokenizer.encode(prompt, specials=True) if prompt else []
        if self.answers and numbers:  # an encoder reads the end token, too
            return numbers
        if self.tokenizer.end is not None and numbers[-1:] == [self.tokenizer.end]:
            numbers = numbers[:-1]  # the model continues the prompt
        if numbers:
            return numbers
        begin = self.tokenizer.end if self.tokenizer.begin is None else self.tokenizer.begin
        if begin is None:
            raise rejected("generate", "prompt", "have at least 1 token: the tokenizer has no begin token", "none")
        return [begin]

    def _read(self, prompts: Sequence[str], max_unknown: float) -> list[list[int]]:
        """Tokenize prompts; report characters that the vocabulary lacks, and raise if they are too many."""
        most = Number(ge=0, le=1)("generate", "max_unknown", max_unknown)
        unknown = UnknownCharacters()
        for i, prompt in enumerate(prompts, start=1):
            own = UnknownCharacters.of(self.tokenizer, [prompt])
            if own.share > most:
                which = f"in prompt {i}, " if len(prompts) > 1 else ""
                remedy = f"to generate anyway, raise --max-unknown (max_unknown), which is {most:g}"
                raise ValueError(f"generate: {which}{own}; {remedy}.")
            unknown += own
        if unknown:
            warnings.warn(f"generate: {unknown}", RegardWarning, stacklevel=3)
        return [self.encode(prompt) for prompt in prompts]

    def _stops(self, stop: Sequence[str]) -> Stops:
        """Return where generation stops; raise if the vocabulary cannot spell a stop text."""
        if isinstance(stop, str):
            raise rejected("generate", "stop", "be a list of texts", repr(stop), TypeError)
        stops: list[int | str | Sequence[int]] = list(self._ends)
        for text in stop:
            special = self.tokenizer.encode(text, parse_specials=True)
            if special and not self.tokenizer.decode(special):  # names of special tokens, which no text shows
                stops.append(special)
                continue
            spelled = self.tokenizer.decode(self.tokenizer.encode(text))
            if self.tokenizer.unknown_characters(text) or text.strip(" ") not in spelled:
                got = f"{text!r}, which it spells {spelled!r}"
                raise rejected("generate", "stop", "be text that the model's vocabulary can spell", got)
            stops.append(text)
        return stops

    @property
    def _ends(self) -> list[int]:
        """The end-of-text tokens of the tokenizer and of a hosted model's generation config."""
        own = self.model.ends if isinstance(self.model, HostedWriter) else []
        return sorted({*own, *([] if self.tokenizer.end is None else [self.tokenizer.end])})

    def _note_length(self, prompt: Sequence[int], written: Generated) -> None:
        """Warn when a text exceeds the model's maximum length, unless learned positions make that an error."""
        max_length = self.model.config.max_length
        length = len(written.numbers) + (0 if self.answers else len(prompt))
        if length == max_length + 1 and self.model.config.positions in ("rotary", "other"):
            message = (
                f"generate: the text is longer than the model's maximum length of {max_length:,} tokens, so its "
                "quality may drop: lower --max-new-tokens (max_new_tokens), or use a shorter prompt"
            )
            warnings.warn(message, RegardWarning, stacklevel=3)

    def _stream(
        self,
        numbers: list[list[int]],
        options: GenerationOptions,
        stops: Stops,
        attention: AttentionRequest | None,
        drafter: Drafter | DecoderLM | HostedWriter | None,
    ) -> Iterator[Token]:
        if drafter is None:
            return stream_tokens(
                self.model, numbers, options, stops, log_probabilities=True, attention=attention,
                decoder=self.tokenizer.decode_stream,
            )  # fmt: skip
        if attention is not None:
            raise rejected("generate", "attention", "be left out with a drafter", "both")
        return self._speculated(numbers, options, stops, drafter)

    def _speculated(
        self,
        numbers: list[list[int]],
        options: GenerationOptions,
        stops: Stops,
        drafter: Drafter | DecoderLM | HostedWriter,
    ) -> Iterator[Token]:
        for each in (self.model, drafter):
            if isinstance(each, HostedWriter):
                got = f"{type(each.module).__name__}, which runs in transformers"
                raise rejected("generate", "--draft", "be left out unless regard implements both models", got)
        assert isinstance(self.model, DecoderLM) and not isinstance(drafter, HostedWriter)
        speculator = Speculator(self.model, drafter, decoder=self.tokenizer.decode_stream)
        for i, prompt in enumerate(numbers):
            for sample in range(options.samples):
                for token in speculator.stream(prompt, options, stops, sample=sample):
                    yield replace(token, request=i * options.samples + sample)


def earlier_tokens(written: GeneratedText, tokenizer: Tokenizer) -> Alignment:
    """Return the attention of each new token to earlier tokens, as an alignment to draw.

    Parameters
    ----------
    written : GeneratedText
        With the mean of the weights over all layers and heads.
    tokenizer : Tokenizer
    """
    source = [*written.prompt_numbers, *written.numbers[:-1]]
    weights = torch.zeros(len(written.numbers), len(source))
    for row, each in enumerate(written.attended):
        if each.weights.dim() != 1 or each.indices is not None:
            raise rejected("earlier_tokens", "written", "have the mean of all weights", "others")
        weights[row, : len(each.weights)] = each.weights
    shown = tokenizer.tokens(source), tokenizer.tokens(written.numbers)
    return Alignment(tuple(shown[0]), tuple(shown[1]), weights)

"""Requests end where their text has a stop text, wherever the borders of tokens are, and show no part of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

from language_models import small_model

from regard_lab.generation.continuous_batching import Batcher
from regard_lab.generation.generation import generate, stream
from regard_lab.generation.requests import Request, StopRules, Stops, Token
from regard_lab.generation.sampling import GenerationOptions, SamplingOptions
from regard_lab.generation.speculative import NGramDrafter, Speculator
from regard_lab.text.tokenizer import ByteStream, Tokenizer

#: The bytes of each token: beginnings, ends and neighbours of what stops.
PIECES = [b"a", b"b", b"ab", b"ba", b" ", b" a", "é".encode(), "é".encode()[:1], "é".encode()[1:] + b"a", b""]


def shown(
    numbers: Sequence[int], stops: Stops, pieces: Sequence[bytes] = PIECES, most: int | None = None
) -> list[Token]:
    """Return the tokens of a request that are shown, for tokens that come in this order."""
    rules = StopRules.of(stops, lambda prompt: ByteStream(pieces.__getitem__))
    request = Request(0, [0], GenerationOptions(), rules, 0, len(numbers) if most is None else most)
    found: list[Token] = []
    for number in numbers:
        found += request.take(Token(0, number))
        if found and found[-1].end:
            return found
    return found


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the text before the stop text that is complete first, by trying each length."""
    for length in range(len(text) + 1):
        ended = [stop for stop in stops if text[:length].endswith(stop)]
        if ended:
            return text[: length - max(map(len, ended))]
    return None


def test_the_text_ends_exactly_before_the_first_stop_text() -> None:
    for seed in range(200):
        drawn = random.Random(seed)
        numbers = drawn.choices(range(len(PIECES)), k=drawn.randint(1, 12))
        stops = ["".join(drawn.choices("ab é", k=drawn.randint(1, 4))) for _ in range(drawn.randint(0, 3))]
        whole = b"".join(PIECES[number] for number in numbers).decode(errors="replace")
        tokens, wanted = shown(numbers, stops), first_stop(whole, stops)
        assert "".join(token.text for token in tokens) == (whole if wanted is None else wanted), seed
        assert [token.end for token in tokens[:-1]] == [None] * (len(tokens) - 1), seed
        assert tokens[-1].end == ("length" if wanted is None else "stop"), seed
        kept = [token.token for token in tokens if token.token is not None]
        assert kept == numbers[: len(kept)] and (wanted is not None or kept == numbers), seed
        if wanted is not None:
            decoded = b"".join(PIECES[number] for number in kept).decode(errors="replace")
            assert wanted.startswith(decoded), f"{seed}: no token shows a part of the stop text"


def test_what_may_begin_a_stop_text_is_held_back() -> None:
    steps: list[list[str]] = []
    request = Request(
        0, [0], GenerationOptions(), StopRules.of(["aab"], lambda prompt: ByteStream(PIECES.__getitem__)), 0, 9
    )
    for number in (4, 0, 0, 0, 4, 0, 2):
        steps.append([token.text for token in request.take(Token(0, number))])
    assert steps == [[" "], [], [], ["a"], ["a", "a", " "], [], [""]]


def test_a_stop_text_may_lie_in_one_token_or_in_several() -> None:
    pieces = [b"he ", b" said", b"sa", b"id", b" so"]
    assert [(token.token, token.text) for token in shown([0, 1, 4], ["said"], pieces)] == [(0, "he "), (None, " ")]
    assert [(token.token, token.text) for token in shown([0, 2, 3, 4], ["said"], pieces)] == [(0, "he "), (None, "")]
    assert [token.token for token in shown([0, 2, 4], ["said"], pieces)] == [0, 2, 4]
    both = [shown(numbers, ["id so", "said"], pieces) for numbers in ([0, 1, 4], [0, 2, 3, 4])]
    assert ["".join(token.text for token in each) for each in both] == ["he  ", "he "], "the first that is complete"


def test_stop_tokens_and_sequences_end_a_text_too() -> None:
    tokens = shown([0, 1, 7, 3, 4], [3, "xyz"])
    assert [(token.token, token.end, token.text) for token in tokens] == [
        (0, None, "a"), (1, None, "b"), (7, None, ""), (None, "stop", "\ufffd")
    ]  # fmt: skip
    tokens = shown([0, 4, 1, 4], [[4, 1]])
    assert [(token.token, token.end) for token in tokens] == [(0, None), (None, "stop")]
    last = shown([0, 0], ["aa"])
    assert [(token.token, token.end, token.text) for token in last] == [(None, "stop", "")], "also at full length"


def test_every_way_of_generating_stops_alike() -> None:
    """A random model writes bytes; the stop texts are parts of what it writes without them."""
    tokenizer = Tokenizer.learn([], kind="bytes")
    model = small_model(vocabulary=len(tokenizer), std=0.5)
    decoder = tokenizer.decode_stream
    prompts = [[3, 1, 4], [65, 66], [200]]
    for temperature, k in product((0.0, 1.5), range(3)):
        sampling = SamplingOptions(temperature=temperature, top_k=5 if temperature else 0)
        options = GenerationOptions(max_new_tokens=30, sampling=sampling)
        whole = [each.text for each in generate(model, prompts, options, decoder=decoder)]
        stops = [text[5 + k : 7 + k] for text in whole]
        wanted = [first_stop(text, stops) for text in whole]
        assert None not in wanted
        together = generate(model, prompts, options, stops, decoder=decoder, log_probabilities=True)
        assert [each.text for each in together] == wanted and {each.end for each in together} == {"stop"}
        assert all(len(each.numbers) == len(each.log_probabilities) for each in together)
        few = ["", "", ""]
        for token in stream(model, prompts, options, stops, slots=2, chunk=2, decoder=decoder):
            few[token.request] += token.text
            assert wanted[token.request].startswith(few[token.request])
        assert few == wanted
        batcher = Batcher(model, 2, decoder=decoder)
        for prompt in prompts:
            batcher.add(prompt, options, stops)
        texts = ["", "", ""]
        for token in (token for step in batcher for token in step):
            texts[token.request] += token.text
        assert texts == wanted
        if not temperature:
            speculator = Speculator(model, NGramDrafter(), decoder=decoder)
            drafted = ["".join(each.text for each in speculator.stream(prompt, options, stops)) for prompt in prompts]
            assert drafted == wanted

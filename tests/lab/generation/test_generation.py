"""What is generated is what the model says, token by token, for prompts of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from language_models import KINDS, LINEAR, greedy, small_model

from regard_lab.generation.continuous_batching import AttentionRequest
from regard_lab.generation.generation import SHARED, generate, stream
from regard_lab.generation.sampling import GenerationOptions, SamplingOptions

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [2, 7, 1]]
FREE = GenerationOptions(max_new_tokens=9, sampling=SamplingOptions(temperature=1.0))


@pytest.mark.parametrize("kind", [*KINDS, LINEAR], ids=str)
def test_the_likeliest_tokens_are_written(kind: dict[str, Any]) -> None:
    model = small_model(**kind)
    found = generate(model, PROMPTS, GenerationOptions(max_new_tokens=12))
    assert [each.numbers for each in found] == [greedy(model, prompt, 12) for prompt in PROMPTS]
    assert {each.end for each in found} == {"length"}


def test_log_probabilities_are_the_models() -> None:
    model = small_model()
    found = generate(model, PROMPTS, FREE, log_probabilities=True)
    for prompt, each in zip(PROMPTS, found):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *each.numbers]]))[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(each.numbers)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(each.log_probabilities), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention_is_told_over_all_earlier_tokens(kind: dict[str, Any]) -> None:
    from regard import AuxRequest

    model = small_model(**kind)
    for prompt, each in zip(PROMPTS, generate(model, PROMPTS, FREE, attention=AttentionRequest(average=False))):
        aux: list[Any] = []
        with torch.no_grad():
            model.features(torch.tensor([[*prompt, *each.numbers]]), aux=aux, return_aux=AuxRequest(weights=True))
        whole = torch.stack([layer.weights[0] for layer in aux])  # (A, H, S, S)
        for i, attended in enumerate(each.attended):
            at = len(prompt) + i
            torch.testing.assert_close(attended.weights, whole[:, :, at - 1, :at], rtol=1e-4, atol=1e-4)


def test_attention_is_told_averaged_or_only_the_largest() -> None:
    model = small_model()
    every = generate(model, PROMPTS, FREE, attention=AttentionRequest(average=False))
    mean = generate(model, PROMPTS, FREE, attention=AttentionRequest())
    most = generate(model, PROMPTS, FREE, attention=AttentionRequest(average=False, topk=1))
    both = generate(model, PROMPTS, FREE, attention=AttentionRequest(topk=1))
    for i in range(len(PROMPTS)):
        for a, b, c, d in zip(*(each[i].attended for each in (every, mean, most, both))):
            torch.testing.assert_close(b.weights, a.weights.mean((0, 1)))
            assert c.indices is not None and d.indices is not None
            assert torch.equal(c.indices[..., 0], a.weights.argmax(-1))
            assert int(d.indices[0]) == int(b.weights.argmax())


def test_a_stop_token_is_not_shown() -> None:
    model = small_model()
    whole = greedy(model, PROMPTS[0], 20)
    stop = whole[5]
    (found,) = generate(model, PROMPTS[:1], stop=[stop])
    assert (found.numbers, found.end) == (whole[: whole.index(stop)], "stop")


def test_no_part_of_a_stop_sequence_is_shown() -> None:
    model = small_model()
    (whole,) = generate(model, PROMPTS[:1], FREE)
    tokens = whole.numbers
    shown = list(stream(model, PROMPTS[:1], FREE, [tokens[3:6], [tokens[1], 50 - 1, 49]]))
    assert [token.token for token in shown[:-1]] == tokens[:3]
    assert (shown[-1].token, shown[-1].end) == (None, "stop")
    # A beginning that does not become one is shown after all.
    (other,) = generate(model, PROMPTS[:1], FREE, [[*tokens[2:4], (tokens[4] + 1) % 50]])
    assert other.numbers == tokens
    (last,) = generate(model, PROMPTS[:1], FREE, [[tokens[-1], 0]])
    assert (last.numbers, last.end) == (tokens, "length")


def test_samples_do_not_depend_on_the_company() -> None:
    model = small_model()
    alone = [generate(model, [prompt], FREE)[0].numbers for prompt in PROMPTS]
    together = [each.numbers for each in generate(model, PROMPTS, FREE)]
    few = [each.numbers for each in generate(model, PROMPTS[::-1], FREE, slots=2, chunk=2)][::-1]
    assert alone == together == few
    several = generate(model, PROMPTS, FREE.with_changes({"samples": 3}))
    assert [each.numbers for each in several[::3]] == alone
    assert several[0].numbers != several[1].numbers != several[2].numbers


def test_options_apply_to_a_repeated_token() -> None:
    model = small_model()
    options = GenerationOptions(max_new_tokens=20, sampling=SamplingOptions(repetition_penalty=50.0))
    numbers = generate(model, [[3]], options)[0].numbers
    assert len(set(numbers)) > 15


def test_a_common_beginning_is_read_once() -> None:
    model = small_model(max_length=2 * SHARED)
    common = torch.randint(50, (SHARED + 5,)).tolist()
    prompts = [common, [*common, 3], [*common, 4, 1]]
    found = [each.numbers for each in generate(model, prompts, GenerationOptions(max_new_tokens=6))]
    assert found == [greedy(model, prompt, 6) for prompt in prompts]


def test_learned_positions_end_what_is_written() -> None:
    model = small_model(max_length=10)
    (found,) = generate(model, [PROMPTS[0]])
    assert (len(found.numbers), found.end) == (3, "length")
    assert found.numbers[:3] == greedy(model, PROMPTS[0], 3)


def test_an_iterator_that_is_closed_leaves_nothing_behind() -> None:
    model = small_model().train()
    steps = stream(model, PROMPTS)
    next(steps)
    assert model.training and torch.is_grad_enabled()
    steps.close()  # type: ignore[attr-defined]
    assert model.training and len(generate(model, PROMPTS, FREE)) == 3


def test_text_appears_with_the_tokens() -> None:
    class Letters:
        def __init__(self, before: Sequence[int]) -> None:
            self.count = len(before)

        def push(self, number: int) -> str:
            self.count += 1
            return chr(97 + number % 26)

        def close(self) -> str:
            return f"({self.count})"

    model = small_model()
    shown = ["", "", ""]
    options = GenerationOptions(max_new_tokens=3)
    for token in stream(model, PROMPTS, options, decoder=Letters):
        shown[token.request] += token.text
    assert [each[3:] for each in shown] == ["(11)", "(4)", "(6)"], "a decoder knows the prompt"
    assert [each.text for each in generate(model, PROMPTS, options, decoder=Letters)] == shown
    assert [each.text for each in generate(model, PROMPTS, options)] == ["", "", ""]


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], r"generate: prompt must have at least 1 token, got none\."),
        ([3, 50], r"generate: prompt must hold tokens from 0 to 49, got 50\."),
        ("text", r"generate: prompt must be a list of token ids, got 'text'\."),
        ([0] * 11, r"generate: prompt must have at most 10 tokens, the model's maximum length, got 11\."),
    ],
    ids=str,
)
def test_wrong_prompts_are_one_sentence(prompt: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        generate(small_model(max_length=10), [[1], prompt])


def test_wrong_arguments_are_one_sentence() -> None:
    model = small_model()
    with pytest.raises(TypeError, match=r"generate: stop must be a list of tokens, texts or lists of tokens, got 5\."):
        generate(model, PROMPTS, stop=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"generate: stop must not be empty, got \[\]\."):
        generate(model, PROMPTS, stop=[[]])
    with pytest.raises(ValueError, match=r"generate: stop must hold tokens unless a decoder is given, got 'the'\."):
        generate(model, PROMPTS, stop=["the"])
    with pytest.raises(ValueError, match=r"samples has no effect at temperature 0; set sampling\.temperature\."):
        GenerationOptions(samples=2)
    with torch.no_grad():
        model.embedding.weight[7] = torch.nan
    with pytest.raises(ValueError, match=r"generate: model must return logits without NaN, got nan\."):
        generate(model, [[3]])
    assert generate(model, []) == []

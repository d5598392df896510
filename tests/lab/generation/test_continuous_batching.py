"""Requests that join and leave get what each gets alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from language_models import KINDS, LINEAR, greedy, small_model
from pairwise import across

from regard_lab.generation.continuous_batching import AttentionRequest, Batcher
from regard_lab.generation.sampling import GenerationOptions


@pytest.mark.campaign(keep=20)
@across({"prefix": [[], [1, 2, 3]], "chunk": [None, 1, 5], "kind": [*KINDS, LINEAR]})
def test_each_request_gets_what_it_gets_alone(kind: dict[str, Any], chunk: int | None, prefix: list[int]) -> None:
    model, draw = small_model(**kind), random.Random(0)
    if prefix and not model.keeps_all:
        with pytest.raises(ValueError, match="prefix must be empty for a model with a window or linear attention"):
            Batcher(model, prefix=prefix)
        return
    batcher = Batcher(model, 3, chunk=chunk, prefix=prefix, log_probabilities=True)
    prompts = [prefix + [draw.randrange(50) for _ in range(draw.choice((1, 2, 5, 5, 9, 14)))] for _ in range(8)]
    lengths = [draw.choice((1, 3, 9)) for _ in prompts]
    written: dict[int, list[Any]] = {i: [] for i in range(8)}
    left = list(zip(prompts, lengths))
    for step in range(1000):
        if left and (step < 4 or step % 2):
            prompt, length = left.pop(0)
            batcher.add(prompt, GenerationOptions(max_new_tokens=length))
        for token in batcher.step():
            written[token.request].append(token.token)
        if not left and not len(batcher):
            break
    assert [written[i] for i in range(8)] == [greedy(model, *each) for each in zip(prompts, lengths)]


def test_a_long_prompt_does_not_keep_the_others_waiting() -> None:
    model = small_model()
    batcher = Batcher(model, 2, chunk=4)
    first = batcher.add([1, 2], GenerationOptions(max_new_tokens=12))
    assert [token.request for token in batcher.step()] == [first]
    second = batcher.add([3] * 21, GenerationOptions(max_new_tokens=3))
    steps = [[token.request for token in batcher.step()] for _ in range(6)]
    assert steps[:4] == [[first]] * 4 and steps[5] == [first, second]


@pytest.mark.parametrize("kind", [{}, LINEAR], ids=str)
def test_a_request_is_cancelled_wherever_it_is(kind: dict[str, Any]) -> None:
    model = small_model(**kind)
    batcher = Batcher(model, 2, chunk=2)
    prompts = [[3, 1], [4], [1, 5], [9, 2, 6]]
    numbers = [batcher.add(prompt, GenerationOptions(max_new_tokens=6)) for prompt in prompts]
    seen: dict[int, list[int | None]] = {number: [] for number in numbers}
    for token in batcher.step():
        seen[token.request].append(token.token)
    batcher.cancel(numbers[0])
    batcher.cancel(numbers[2])
    for step in batcher:
        for token in step:
            seen[token.request].append(token.token)
    assert len(seen[0]) == 1 and seen[2] == []
    assert [seen[i] for i in (1, 3)] == [greedy(model, prompts[i], 6) for i in (1, 3)]


@pytest.mark.parametrize("kind", [{}, LINEAR], ids=str)
def test_what_failed_is_tried_again(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(**kind)
    batcher = Batcher(model, 2)
    batcher.add([3, 1, 4], GenerationOptions(max_new_tokens=6))
    written: list[int | None] = []
    features = type(model).features
    for step in range(12):
        if step % 2:
            with monkeypatch.context() as patch:
                patch.setattr(model.blocks[1], "forward", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                if len(batcher):
                    with pytest.raises(KeyboardInterrupt):
                        batcher.step()
        else:
            written += [token.token for token in batcher.step()]
    assert written == greedy(model, [3, 1, 4], 6) and type(model).features is features


def test_wrong_arguments_are_one_sentence() -> None:
    with pytest.raises(TypeError, match="Batcher: model must be a DecoderLM, got"):
        Batcher(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Batcher: slots must be an int of at least 1, got 0"):
        Batcher(small_model(), 0)
    with pytest.raises(ValueError, match="Batcher: prefix must be empty for a model with a window"):
        Batcher(small_model(window=4), prefix=[1, 2])
    with pytest.raises(ValueError, match="generate: attention must be None for linear attention"):
        Batcher(small_model(**LINEAR), attention=AttentionRequest())
    with pytest.raises(ValueError, match="generate: prompt must begin with the prefix and be longer"):
        Batcher(small_model(), prefix=[1, 2]).add([1, 2])

"""Two records compared token by token, against loops over all pairs of tokens in float64."""

from __future__ import annotations

import json
from difflib import SequenceMatcher

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from regard.inspect import Record, capture, compare_tokens


def recorded(words: list[str], heads: int = 2, seed: int = 0, *, layers: int = 1) -> Record:
    x = torch.randn(1, heads, len(words), 4, generator=torch.Generator().manual_seed(seed))
    model = torch.nn.Module()
    with capture(model) as record:
        for _ in range(layers):
            F.scaled_dot_product_attention(2 * x, x, x, is_causal=True)
    return record.describe(words)


@pytest.mark.slow
@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=9), st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)
)
def test_distances_are_those_of_loops(one: list[str], other: list[str]) -> None:
    first, second = recorded(one), recorded(other, seed=1)
    (found,) = compare_tokens(first, second)
    pairs = [
        (block.a + i, block.b + i)
        for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
        for i in range(block.size)
    ]
    assert found.places == tuple(pairs) and found.tokens == tuple(one[i] for i, _ in pairs)
    assert found.distance.shape == (2, len(pairs))
    weights = [record[0].weights(batch=0).double().tolist() for record in (first, second)]
    partner = dict(pairs)
    for head in range(2):
        for m, (i, j) in enumerate(pairs):
            total = 0.0
            for a in range(len(one)):
                total += abs(weights[0][head][i][a] - (weights[1][head][j][partner[a]] if a in partner else 0.0))
            total += sum(weights[1][head][j][b] for b in range(len(other)) if b not in partner.values())
            assert float(found.distance[head, m]) == pytest.approx(total / 2, abs=1e-5)
    for m, ((i, _), (here, _)) in enumerate(zip(pairs, found.largest)):
        head = int(found.distance[:, m].argmax())
        row = weights[0][head][i]
        assert here == (one[row.index(max(row))], pytest.approx(max(row), abs=1e-6))


def test_a_record_is_like_itself() -> None:
    record = recorded(["the", "cat", "sat"])
    (found,) = compare_tokens(record, record)
    assert not found.distance.any() and found.names == record.layers * 2
    assert json.loads(json.dumps(found.as_dict()))["places"] == [[0, 0], [1, 1], [2, 2]]


def test_models_with_other_heads_are_compared_by_their_means() -> None:
    first, second = recorded(["a", "b"]), recorded(["a", "b"], heads=4, seed=2)
    (found,) = compare_tokens(first, second)
    means = [record[0].weights(batch=0).mean(0) for record in (first, second)]
    torch.testing.assert_close(found.distance, (means[0] - means[1]).abs().sum(-1)[None] / 2)


def test_texts_without_a_token_in_common() -> None:
    (found,) = compare_tokens(recorded(["a"]), recorded(["b", "c"]))
    assert found.tokens == () and found.distance.shape == (2, 0)


def test_layers_are_matched_by_number_where_names_differ() -> None:
    def named(name: str) -> Record:
        model = torch.nn.ModuleDict({name: torch.nn.MultiheadAttention(4, 1, batch_first=True)})
        with capture(model) as record:
            model[name](*[torch.ones(1, 2, 4)] * 3)
        return record

    (found,) = compare_tokens(named("a"), named("b"))
    assert found.names == ("a", "b")
    with pytest.raises(ValueError, match="records must have layers of the same names or number, got 1 and 0"):
        compare_tokens(named("a"), Record({}, torch.float32))
    with pytest.raises(TypeError, match="compare_tokens: records must be two Records, got 3"):
        compare_tokens(named("a"), 3)  # type: ignore[arg-type]

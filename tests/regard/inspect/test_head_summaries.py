"""What heads do, in words: heads whose pattern is known, heads without one, and numbers from loops in float64."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pages import Page
from torch import Tensor, nn

from regard.inspect import HeadSummary, Measure, Record, Text, ablate, capture, summarize_heads

#: Sentences with repeated words, special tokens and punctuation.
_LINES = (
    "<s> the cat sat on the mat , and the dog saw the cat . </s>",
    "the bird sang on the roof , and the cat left .",
)
WORDS = " ".join(_LINES).split()
TEXT = Text(tuple(WORDS), (0, 15))
N = len(WORDS)


def recorded(weights: Tensor, *, keep: str = "rows", text: Text | tuple[Text, Text] = TEXT, topk: int = 4) -> Record:
    """A record of weights (H, L, S), which are a softmax of their logarithms."""
    H, L, S = weights.shape
    zeros = [torch.zeros(1, H, size, 1) for size in (L, S, S)]
    with capture(keep=keep, topk=topk) as record:
        F.scaled_dot_product_attention(zeros[0], zeros[1], zeros[2], attn_mask=weights.double().log().float()[None])
    return record.describe(*((text,) if isinstance(text, Text) else text))


def seen(L: int, S: int, *, causal: bool = True) -> Tensor:
    return torch.ones(L, S).tril(S - L) if causal else torch.ones(L, S)


def toward(targets: list[set[int]], visible: Tensor, share: float = 0.9) -> Tensor:
    """Rows that give a share of their weight to their targets, if they see any, and spread the rest evenly."""
    rows = visible / visible.sum(-1, keepdim=True).clamp_min(1)
    for i, keys in enumerate(targets):
        found = [key for key in sorted(keys) if 0 <= key < visible.shape[1] and visible[i, key]]
        if found:
            rows[i] *= 1 - share
            rows[i, found] += share / len(found)
    return rows


def others(i: int, *, after: bool = False) -> set[int]:
    found = {j for j in range(N) if j != i and WORDS[j] == WORDS[i]}
    return {j + 1 for j in found} - {i} if after else found


SEPARATORS = {i for i, word in enumerate(WORDS) if i and word in (",", ".", "</s>")}
PATTERNS = {
    "self": [{i} for i in range(N)],
    "previous": [{i - 1} for i in range(N)],
    "next": [{i + 1} for i in range(N)],
    "first": [{0} for _ in range(N)],
    "separator": [SEPARATORS for _ in range(N)],
    "duplicate": [others(i) or {0} for i in range(N)],
    "induction": [others(i, after=True) or {0} for i in range(N)],
}


#: The patterns of keys that causal queries see.
SEEN = [name for name in PATTERNS if name != "next"]


def by_loops(weights: Tensor, visible: Tensor, name: str, text: Text = TEXT) -> tuple[float, float, int]:
    """A share, its chance and the number of queries, from the definitions, in float64."""
    tokens, found = text.tokens, []
    L, S = weights.shape
    rows, seen = weights.tolist(), visible.tolist()
    for i in range(L):
        at = i + S - L
        keys = {
            "self": {at}, "previous": {at - 1}, "next": {at + 1}, "first": {0}, "separator": SEPARATORS,
            "duplicate": {j for j in range(S) if j != at and tokens[j] == tokens[at]},
            "induction": {j for j in range(1, S) if j - 1 != at != j and tokens[j - 1] == tokens[at]},
        }[name]  # fmt: skip
        sight = {j for j in range(S) if seen[i][j]}
        if 0 < len(keys & sight) < len(sight) and sum(rows[i]) > 0:
            found.append((sum(rows[i][j] for j in keys & sight), len(keys & sight) / len(sight)))
    n = max(len(found), 1)
    return sum(one for one, _ in found) / n, sum(one for _, one in found) / n, len(found)


@pytest.mark.parametrize(("name", "causal"), [(name, False) for name in PATTERNS] + [(name, True) for name in SEEN])
def test_a_head_of_each_pattern(name: str, causal: bool) -> None:
    visible = seen(N, N, causal=causal)
    weights = toward(PATTERNS[name], visible)
    (found,) = summarize_heads(recorded(weights[None]))
    assert found.label == name and found.score > 0.8
    score, chance, count = by_loops(weights.double(), visible, name)
    assert found.measures[name].queries == count
    assert found.score == pytest.approx(score, abs=1e-5)
    assert found.measures[name].chance == pytest.approx(chance, abs=1e-5)
    assert f"{score:.2f} of its weight" in found.text and found.text.startswith("attends to ")


def test_a_second_label_says_where_the_rest_goes() -> None:
    visible = seen(N, N)
    first, previous, induction = (toward(PATTERNS[name], visible, 1.0) for name in ("first", "previous", "induction"))
    weights = torch.stack(
        [
            0.7 * first + 0.2 * previous + 0.1 * visible / visible.sum(-1, keepdim=True),
            0.9 * first + 0.1 * visible / visible.sum(-1, keepdim=True),
            0.95 * induction + 0.05 * previous,
        ]
    )
    two, one, other = summarize_heads(recorded(weights))
    assert (two.label, two.second, one.label, one.second) == ("first", "previous", "first", "")
    shares = [by_loops(weights[0].double(), visible, name)[0] for name in ("first", "previous")]
    sentence = "attends to the first token: {:.2f} of its weight, then to the previous token: {:.2f}"
    assert two.text == sentence.format(*shares)
    assert (other.label, other.second) == ("induction", "")


@pytest.mark.slow
@given(st.integers(0, 10**6), st.booleans(), st.integers(1, N))
def test_all_shares_are_those_of_loops(seed: int, causal: bool, L: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    visible = seen(L, N, causal=causal)
    logits = 2 * torch.randn(2, L, N, generator=generator)
    weights = logits.masked_fill(visible == 0, -torch.inf).softmax(-1)
    found = summarize_heads(recorded(weights))
    for head, each in enumerate(found):
        for name, one in each.measures.items():
            if name in PATTERNS and (L == N or name in ("first", "separator")):
                score, chance, count = by_loops(weights[head].double(), visible, name)
                # Which keys are visible is inferred from the weights: a few rows do not show all of them.
                assert one.queries == count or L < N
                if one.queries == count == L == N:
                    assert one.score == pytest.approx(score, abs=1e-5) and one.chance == pytest.approx(chance, abs=1e-5)


@pytest.mark.slow
def test_random_heads_have_no_label() -> None:
    generator = torch.Generator().manual_seed(0)
    labels: Counter[str] = Counter()
    for spread in (1.5, 3.0, 30.0):
        for causal in (True, False):
            logits = spread * torch.randn(300, N, N, generator=generator)
            weights = logits.masked_fill(seen(N, N, causal=causal) == 0, -torch.inf).softmax(-1)
            labels.update(each.label for each in summarize_heads(recorded(weights)))
    assert labels == {"": 1800}


def test_an_even_head_and_one_at_a_fixed_distance() -> None:
    visible = seen(N, N)
    even = toward([set()] * N, visible)
    third = toward([{i - 3} for i in range(N)], visible, 0.4)
    spread, position = summarize_heads(recorded(torch.stack([even, third])))
    assert spread.label == "uniform" and position.label == "positional"
    assert spread.text == "spreads its weight evenly: 1.00 of the largest possible entropy"
    most = int(third[1:].argmax(-1).eq(torch.arange(1, N) - 3).sum())  # the first query sees only itself
    assert position.score == pytest.approx(most / (N - 1))
    assert position.text.startswith("depends on position: its largest weight is 3 tokens before the query for 0.9")


@pytest.mark.parametrize("causal", [True, False])
def test_padding_and_queries_that_see_nothing(causal: bool) -> None:
    visible = seen(N, N, causal=causal)
    visible[:, -5:] = 0
    visible[-5:] = 0
    weights = toward(PATTERNS["previous"], visible)
    (found,) = summarize_heads(recorded(weights[None]))
    score, chance, count = by_loops(weights.double(), visible, "previous")
    one = found.measures["previous"]
    assert found.label == "previous" and one.queries == count
    assert one.score == pytest.approx(score, abs=1e-5) and one.chance == pytest.approx(chance, abs=1e-5)


@pytest.mark.parametrize("left", [False, True])
def test_queries_of_padding_do_not_count(left: bool) -> None:
    x = torch.eye(40)[None, None].expand(2, 1, 40, 40)
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, slice(0, 10) if left else slice(30, 40)] = False
    with capture() as record:
        F.scaled_dot_product_attention(60 * x.roll(-1, 3), x, x, real[:, None, None, :])
    whole, part = (summarize_heads(record, batch=batch)[0] for batch in range(2))
    assert whole.measures["previous"].queries == 39 and part.measures["previous"].queries == 29
    assert whole.label == part.label == "previous"


def test_rows_with_a_cache_stand_at_the_end() -> None:
    weights = toward(PATTERNS["previous"], seen(N, N))[-12:]
    record = recorded(weights[None])
    record[0].reads = "self"  # as the inputs of a module show
    (found,) = summarize_heads(record)
    assert found.label == "previous" and found.measures["previous"].queries == 12


def test_cross_attention_has_no_places_in_common() -> None:
    class Cross(nn.Module):
        def forward(self, weights: Tensor) -> Tensor:
            L, S = weights.shape
            q, k = torch.zeros(1, 1, L, 1), torch.zeros(1, 1, S, 1)
            return F.scaled_dot_product_attention(q, k, k, attn_mask=weights.log()[None, None])

    model = nn.ModuleDict({"cross_attn": Cross()})
    weights = toward([{0}] * 20, torch.ones(20, N))
    with capture(model) as record:
        model["cross_attn"](weights)
    record.describe(TEXT, [f"t{i}" for i in range(20)])
    (found,) = summarize_heads(record)
    assert set(found.measures) == {"first", "separator", "uniform"} and found.label == "first"


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 5), (1, 3, 3), (1, 2, 0), (2, 5, 1), (1, 0, 3)])
def test_few_tokens_have_no_label(shape: tuple[int, int, int]) -> None:
    with capture() as record:
        H, L, S = shape
        query, key = (torch.zeros(1, H, size, 4) for size in (L, S))
        F.scaled_dot_product_attention(query, key, key)
    assert [each.label for each in summarize_heads(record)] == [""] * shape[0]
    assert all(each.score == 0 and each.text for each in summarize_heads(record))


def test_more_queries_than_keys() -> None:
    weights = toward([{0}] * 60, torch.ones(60, 8))
    record = recorded(weights[None], text=(Text(tuple("abcdefgh")), Text(tuple("x" * 60))))
    record.texts, record[0].reads = (), "self"
    (found,) = summarize_heads(record, relations={"its x": [(0, 0)]})
    assert found.label == "first" and set(found.measures) == {"first", "uniform"}


def test_summaries_give_lower_bounds() -> None:
    weights = torch.stack([toward(PATTERNS[name], seen(N, N), 0.95) for name in ("previous", "first", "induction")])
    whole, kept = summarize_heads(recorded(weights)), summarize_heads(recorded(weights, keep="summaries"))
    for exact, bound in zip(whole, kept):
        assert exact.label == bound.label and ": at least 0." in bound.text
        for name, one in bound.measures.items():
            assert one.score <= exact.measures[name].score + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_a_summary_of_an_even_head_and_of_one_that_sees_few_keys(causal: bool) -> None:
    length = 200
    even = seen(length, length, causal=causal)
    few = even * (torch.rand(length, length, generator=torch.Generator().manual_seed(0)) < 0.1) + torch.eye(length)
    weights = torch.stack([each / each.sum(-1, keepdim=True) for each in (even, few)])
    record = recorded(weights, keep="summaries", text=Text(tuple(f"t{i}" for i in range(length))))
    one, other = summarize_heads(record)
    assert one.label == "uniform" and one.score == pytest.approx(1, abs=0.01)
    assert other.label == "" and other.measures["uniform"].score < 0.8


def test_a_record_without_texts_has_no_labels_of_tokens() -> None:
    record = recorded(toward(PATTERNS["previous"], seen(N, N))[None])
    record.texts = ()
    (found,) = summarize_heads(record)
    assert found.label == "previous" and not {"separator", "duplicate", "induction"} & set(found.measures)


def test_long_texts_are_read_in_part() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3000, 64, generator=generator)
    with capture() as record:
        F.scaled_dot_product_attention(8 * x.roll(1, 0)[None, None], x[None, None], x[None, None], is_causal=True)
    (found,) = summarize_heads(record)
    assert found.label == "previous" and found.measures["previous"].queries in (255, 256)
    (few,) = summarize_heads(record, queries=20)
    assert few.label == "previous" and few.measures["previous"].queries <= 20


@torch.no_grad()
def test_an_ablated_head_and_chosen_layers() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with ablate(model, 1, head=2), capture(model) as record:
        model(torch.randn(3, 12, 16))
    found = summarize_heads(record, layers=[1], batch=2)
    assert len(found) == 4 and {each.layer for each in found} == {"layers.1.self_attn"}
    assert found[2].label == "" and found[2].text == "no known pattern: too few tokens"
    assert str(found[0]).startswith("layers.1.self_attn, head 0: ")


class TestRelations:
    VERBS = tuple((i, (7 * i) % 17) for i in range(1, 24))

    def weights(self, share: float) -> Tensor:
        targets = [{dict(self.VERBS).get(i, 0)} for i in range(N)]
        return toward(targets, seen(N, N, causal=False), share)

    def test_a_head_that_finds_a_relation(self) -> None:
        (found,) = summarize_heads(recorded(self.weights(0.9)[None]), relations={"its verb": self.VERBS})
        assert found.label == "its verb" and found.score == 1
        assert found.text == "attends to its verb: its largest weight, for 1.00 of 23 tokens"

    def test_a_fixed_distance_is_no_relation(self) -> None:
        weights = toward(PATTERNS["previous"], seen(N, N, causal=False))
        (found,) = summarize_heads(
            recorded(weights[None]), relations={"its article": [(i, i - 1) for i in range(1, N)]}
        )
        assert found.label == "previous" and found.measures["its article"].score == 1
        assert not found.measures["its article"].is_supported

    def test_few_cases_support_nothing(self) -> None:
        (found,) = summarize_heads(recorded(self.weights(0.9)[None]), relations={"its verb": self.VERBS[:3]})
        assert found.label == ""

    def test_tokens_that_are_not_there(self) -> None:
        with pytest.raises(ValueError, match=rf"relations\['its verb'\] must be tokens below {N}, got \(0, 99\)"):
            summarize_heads(recorded(self.weights(0.9)[None]), relations={"its verb": [(0, 99)]})


@given(st.integers(1, 40), st.floats(0, 1), st.floats(0.01, 0.99))
def test_the_bound_holds_for_coins(n: int, score: float, chance: float) -> None:
    """At least the probability of so many heads in n throws."""
    heads = math.ceil(score * n - 1e-9)
    tail = math.fsum(math.comb(n, k) * chance**k * (1 - chance) ** (n - k) for k in range(heads, n + 1))
    assert Measure(score, chance, n).log_probability() >= math.log(max(tail, 1e-300)) - 1e-6


def test_what_is_wrong_is_said() -> None:
    record = recorded(toward(PATTERNS["first"], seen(N, N))[None])
    for wrong, message in (
        ({"queries": 0}, "queries must be an int of at least 1, got 0"),
        ({"batch": 1}, "batch must be below 1, the batch size, got 1"),
        ({"layers": [3]}, "layer must be the number or the name of 0, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            summarize_heads(record, **wrong)


def test_the_page_has_the_summaries() -> None:
    weights = torch.stack([toward(PATTERNS[name], seen(N, N)) for name in ("first", "previous")])
    weights = torch.cat([weights, weights.new_tensor([[[0.7]], [[0.3]]]).mul(weights).sum(0, keepdim=True)])
    weights = torch.cat([weights, torch.full((1, N, N), 5.0).tril().pow(torch.rand(N, N)).tril().softmax(-1)])
    record = recorded(weights)
    found = summarize_heads(record)
    heads = Page(str(record.to_html())).described["heads"]
    for each, head in zip(found, heads, strict=True):
        expected = {"label": each.label, "score": round(each.score, 4), "text": each.text}
        if each.second:
            expected["second"] = [each.second, round(each.measures[each.second].score, 4)]
        assert head.get("summary") == (expected if each.label else None)
    assert isinstance(found[0], HeadSummary) and heads[0]["summary"]["label"] == "first"
    assert heads[2]["summary"]["second"][0] == "previous"

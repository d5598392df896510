"""Every wrong argument gets one sentence: which argument, what was expected, what came."""

# ruff: noqa: E501 (messages are read best whole)

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard import AuxRequest, engines, masks, normalizers, scores
from regard._utils.errors import described

Q, K, V = torch.zeros(2, 8, 12, 64), torch.zeros(2, 8, 9, 64), torch.zeros(2, 8, 9, 16)
TRUE = torch.ones((), dtype=torch.bool)
NAN, INF = math.nan, math.inf


def yes(*shape: int) -> Tensor:
    return TRUE.expand(shape)


def called(query: Any = Q, key: Any = K, value: Any = V, *rest: Any, **named: Any) -> Callable[[], object]:
    return lambda: regard.attention(query, key, value, *rest, **named)


def constant(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> None:
    return None


def twice(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.stack((score, score))


def always(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> bool:
    return True


# fmt: off
DENSE = "must be a dense float16, bfloat16, float32 or float64 tensor, got"
FIT = "attn_mask must have shape (L, S) = (12, 9), (H, L, S) = (8, 12, 9) or (B, H, L, S) = (2, 8, 12, 9); 1 broadcasts, got"
MASK_KIND = "attn_mask must be a Mask, a mask_mod(b, h, q_idx, kv_idx), a BlockMask, or a bool or float tensor, got"
MASK_DTYPE = "attn_mask must be a bool tensor (True = may attend) or a float tensor (added to the score; -inf hides), got"
MASK_MOD = "attn_mask must be a Mask, a tensor, or a mask_mod(b, h, q_idx, kv_idx) that returns a bool tensor, got"
SCORE = "score must be a name, a Score or a score_mod(score, b, h, q_idx, kv_idx), got"
SCORE_MOD = "score must be a name, a Score or a score_mod(score, b, h, q_idx, kv_idx) that returns a float tensor, got"
SCORES = f"score must be one of {', '.join(map(repr, sorted(scores.base.TABLE)))}, got"
NORMALIZERS = f"normalizer must be one of {', '.join(map(repr, sorted(normalizers.base.TABLE)))}, got"
CANNOT = "engine must be able to run this call, got"
LEAD = "key and value must have leading dimensions that broadcast with query's, got"
UNSTATED = "align must be given if the numbers of queries and keys differ: 'upper_left' (query 0 is at key 0) or 'lower_right' (the last query is at the last key), got None (12 queries, 9 keys)."

Row = tuple[Callable[[], object], type[Exception], str]

TENSORS: list[Row] = [
    (called(None), TypeError, "query must be a tensor, got None."),
    (called(Q.numpy()), TypeError, "query must be a tensor, got a numpy float32 array (torch.from_numpy makes it a tensor)."),
    (called(key=[1.0]), TypeError, "key must be a tensor, got an object of type list."),
    (called(value="v"), TypeError, "value must be a tensor, got 'v'."),
    (called(Q.int()), TypeError, f"query {DENSE} an int32 tensor of shape (2, 8, 12, 64)."),
    (called(key=K.bool()), TypeError, f"key {DENSE} a bool tensor of shape (2, 8, 9, 64)."),
    (called(value=V.to(torch.complex64)), TypeError, f"value {DENSE} a complex64 tensor of shape (2, 8, 9, 16)."),
    (called(*[K.to(torch.float8_e4m3fn)] * 3), TypeError, f"query {DENSE} a float8_e4m3fn tensor of shape (2, 8, 9, 64)."),
    (called(Q[0, 0].to_sparse()), TypeError, f"query {DENSE} a sparse_coo one."),
    (called(torch.tensor(1.0)), ValueError, "query must have at least 2 dimensions, (..., heads, length, width), got ()."),
    (called(key=K[0, 0, 0]), ValueError, "key must have at least 2 dimensions, (..., heads, length, width), got (64,)."),
    (called(key=K[..., :32]), ValueError, "key must have query's head width 64, got 32 (query (2, 8, 12, 64), key (2, 8, 9, 32))."),
    (called(*(t[0, 0] for t in (Q, K[..., :32], V))), ValueError, "key must have query's head width 64, got 32 (query (12, 64), key (9, 32))."),
    (called(value=V[:, :, :5]), ValueError, "value must have key's length 9, got 5 (key (2, 8, 9, 64), value (2, 8, 5, 16))."),
    (called(key=K.double()), TypeError, "key must have query's dtype torch.float32, got torch.float64."),
    (called(value=V.half()), TypeError, "value must have query's dtype torch.float32, got torch.float16."),
    (called(key=K.to("meta")), ValueError, "key must be on query's device cpu, got meta."),
    (called(Q.to("meta"), K.to("meta")), ValueError, "value must be on query's device meta, got cpu."),
]

HEADS: list[Row] = [
    (called(Q, K[:, :4], V[:, :4]), ValueError, "key must have query's 8 heads (or enable_gqa=True), got 4 (query (2, 8, 12, 64), key (2, 4, 9, 64))."),
    (called(Q, K[:, :3], V[:, :3]), ValueError, "key must have query's 8 heads, got 3 (query (2, 8, 12, 64), key (2, 3, 9, 64))."),
    (called(Q[:, :4]), ValueError, "key must have query's 4 heads, got 8 (query (2, 4, 12, 64), key (2, 8, 9, 64))."),
    (called(Q, K[:, :0], V[:, :0]), ValueError, "key must have query's 8 heads, got 0 (query (2, 8, 12, 64), key (2, 0, 9, 64))."),
    (called(Q, K[:, :3], V[:, :3], enable_gqa=True), ValueError, "key must have a number of heads that divides query's 8, got 3 (query (2, 8, 12, 64), key (2, 3, 9, 64))."),
    (called(Q[:, :4], enable_gqa=True), ValueError, "key must have a number of heads that divides query's 4, got 8 (query (2, 4, 12, 64), key (2, 8, 9, 64))."),
    (called(value=V[:, :4]), ValueError, "value must have key's 8 heads, got 4 (key (2, 8, 9, 64), value (2, 4, 9, 16))."),
    (called(key=K[:1].expand(3, -1, -1, -1)), ValueError, f"{LEAD} query (2, 8, 12, 64), key (3, 8, 9, 64), value (2, 8, 9, 16)."),
    (called(Q.expand(4, -1, -1, -1, -1), K.expand(3, -1, -1, -1, -1)), ValueError, f"{LEAD} query (4, 2, 8, 12, 64), key (3, 2, 8, 9, 64), value (2, 8, 9, 16)."),
]

MASKS: list[Row] = [
    (called(attn_mask=torch.ones(12, 9, dtype=torch.int64)), TypeError, f"{MASK_DTYPE} an int64 tensor of shape (12, 9); if 1 = may attend, pass it as tensor.bool()."),
    (called(attn_mask=torch.ones(12, 9, dtype=torch.uint8)), TypeError, f"{MASK_DTYPE} a uint8 tensor of shape (12, 9); if 1 = may attend, pass it as tensor.bool()."),
    (called(attn_mask=torch.zeros(12, 9, dtype=torch.complex64)), TypeError, f"{MASK_DTYPE} a complex64 tensor of shape (12, 9)."),
    (called(attn_mask=np.ones((12, 9), bool)), TypeError, f"{MASK_KIND} a numpy bool array (torch.from_numpy makes it a tensor)."),
    (called(attn_mask=[[True]]), TypeError, f"{MASK_KIND} an object of type list; torch.tensor makes it a tensor."),
    (called(attn_mask="causal"), TypeError, f"{MASK_KIND} 'causal'; names are functions of regard.masks, such as masks.causal()."),
    (called(attn_mask=True), TypeError, f"{MASK_KIND} True."),
    (called(attn_mask=masks.Band), TypeError, f"{MASK_KIND} the class Band (make an instance: Band(...))."),
    (called(attn_mask=masks.causal), TypeError, "attn_mask must be a mask, got the function masks.causal; call it: masks.causal(…)."),
    (called(attn_mask=always), TypeError, f"{MASK_MOD} the function always, which returned True for one pair."),
    (called(attn_mask=yes(2, 9)), ValueError, f"{FIT} (2, 9); for key padding, use masks.key_padding."),
    (called(attn_mask=yes(2, 12, 9)), ValueError, f"{FIT} (2, 12, 9); for one matrix per sequence, unsqueeze(1)."),
    (called(attn_mask=yes(16, 12, 9)), ValueError, f"{FIT} (16, 12, 9); for one matrix per sequence and head, unflatten(0, (2, 8))."),
    (called(attn_mask=yes(12, 12)), ValueError, f"{FIT} (12, 12)."),
    (called(attn_mask=yes(9, 12)), ValueError, f"{FIT} (9, 12)."),
    (called(attn_mask=yes(8, 2, 12, 9)), ValueError, f"{FIT} (8, 2, 12, 9)."),
    (called(Q[:, :2], K[:, :2], V[:, :2], yes(2, 12, 9)), ValueError, "attn_mask must be (1, H, L, S) or (B, 1, L, S), as there are 2 heads and sequences: unsqueeze(0) or (1), got (2, 12, 9)."),
    (called(attn_mask=yes(9)), ValueError, "attn_mask must have shape (L, S), (H, L, S) or (B, H, L, S), got (9,); for the same keys in all queries, unsqueeze(0) makes it (1, S)."),
    (called(attn_mask=TRUE), ValueError, "attn_mask must have shape (L, S), (H, L, S) or (B, H, L, S), got ()."),
    (called(attn_mask=yes(3, 2, 8, 12, 9)), ValueError, "attn_mask must broadcast to (..., H, L, S) = (2, 8, 12, 9), got (3, 2, 8, 12, 9)."),
    (called(attn_mask=yes(12, 9).to("meta")), ValueError, "attn_mask must hold tensors on the query's device cpu, got one on meta."),
    (called(attn_mask=masks.causal()), ValueError, f"masks.causal: {UNSTATED}"),
    (called(attn_mask=masks.window(1, 0)), ValueError, f"masks.window: {UNSTATED}"),
    (called(attn_mask=masks.padding(torch.ones(3, dtype=torch.long))), ValueError, "masks.padding: lengths must have one entry per sequence (2), or per query (2, 12), got (3,)."),
]

NUMBERS: list[Row] = [
    (called(is_causal=None), TypeError, "is_causal must be a bool, got None."),
    (called(is_causal=1), TypeError, "is_causal must be a bool, got 1."),
    (called(is_causal=yes(12, 9)), TypeError, "is_causal must be a bool, got a bool tensor of shape (12, 9)."),
    (called(enable_gqa="no"), TypeError, "enable_gqa must be a bool, got 'no'."),
    (called(dropout_p=-0.1), ValueError, "dropout_p must be a probability in [0, 1], got -0.1."),
    (called(dropout_p=2), ValueError, "dropout_p must be a probability in [0, 1], got 2."),
    (called(dropout_p=NAN), ValueError, "dropout_p must be a probability in [0, 1], got nan."),
    (called(dropout_p=True), TypeError, "dropout_p must be a probability in [0, 1], got True."),
    (called(dropout_p=None), TypeError, "dropout_p must be a probability in [0, 1], got None."),
    (called(dropout_p=torch.tensor([0.1])), TypeError, "dropout_p must be a probability in [0, 1], got a float32 tensor of shape (1,)."),
    (called(dropout_p=torch.tensor(1.5)), ValueError, "dropout_p must be a probability in [0, 1], got 1.5."),
    (called(scale=torch.tensor(0.1, requires_grad=True)), TypeError, "scale must be a finite number or None, got a float32 tensor of shape () that requires gradients (a learned factor multiplies the query)."),
    (called(scale=INF), ValueError, "scale must be a finite number or None, got inf."),
    (called(scale=NAN), ValueError, "scale must be a finite number or None, got nan."),
    (called(K, K, K, scale=-INF), ValueError, "scale must be a finite number or None, got -inf."),
    (called(scale="1"), TypeError, "scale must be a finite number or None, got '1'."),
    (called(scale=True), TypeError, "scale must be a finite number or None, got True."),
    (called(scale=1j), TypeError, "scale must be a finite number or None, got an object of type complex."),
    (called(softcap=-1.0), ValueError, "softcap must be a positive finite number, got -1.0."),
    (called(softcap=0), ValueError, "softcap must be a positive finite number, got 0."),
    (called(softcap=NAN), ValueError, "softcap must be a positive finite number, got nan."),
    (called(softcap=INF), ValueError, "softcap must be a positive finite number, got inf."),
    (called(softcap="3"), TypeError, "softcap must be a positive finite number, got '3'."),
]

PARTS: list[Row] = [
    (called(score="scaled_dott"), ValueError, f"{SCORES} 'scaled_dott' (did you mean 'scaled_dot'?)."),
    (called(score="zzz"), ValueError, f"{SCORES} 'zzz'."),
    (called(score="additive"), ValueError, "score must be an instance with parameters, regard.scores.Additive(...), got 'additive'."),
    (called(score=scores.Additive), TypeError, f"{SCORE} the class Additive (make an instance: Additive(...))."),
    (called(score=3), TypeError, f"{SCORE} 3."),
    (called(score=torch.ones(3)), TypeError, f"{SCORE} a float32 tensor of shape (3,)."),
    (called(score=normalizers.Softmax()), TypeError, f"{SCORE} an object of type Softmax."),
    (called(score=masks.causal()), TypeError, f"{SCORE} an object of type Band."),
    (called(score=nn.Linear(3, 3)), TypeError, f"{SCORE_MOD} an object of type Linear: Linear.forward() takes 2 positional arguments but 6 were given."),
    (called(score=always), TypeError, f"{SCORE_MOD} the function always: always() takes 4 positional arguments but 5 were given."),
    (called(score=constant), TypeError, f"{SCORE_MOD} the function constant, which returned None for one pair."),
    (called(score=scores.General(torch.ones(64, 63))), ValueError, "score General's weight must have shape (64, 64) or (8, 64, 64), got (64, 63)."),
    (called(score=scores.General(torch.ones(64, 64, device="meta"))), ValueError, "score must hold tensors on query's device cpu, got meta."),
    (called(score=scores.Additive(torch.ones(4), torch.ones(4, 63), torch.ones(4, 64))), ValueError, "query must have w_q's width 63, got 64 (query (2, 8, 12, 64))."),
    (called(score=scores.Additive(torch.ones(7, 64))), ValueError, "score Additive's w_v must have one entry per query head (8), got (7, 64)."),
    (called(score=scores.Gaussian(torch.ones(63))), ValueError, "score Gaussian's bandwidth must have shape () or (64,), query's head width, got (63,)."),
    (called(normalizer="softmx"), ValueError, f"{NORMALIZERS} 'softmx' (did you mean 'softmax'?)."),
    (called(normalizer=normalizers.Softmax), TypeError, "normalizer must be a name or a Normalizer, got the class Softmax (make an instance: Softmax(...))."),
    (called(normalizer=None), TypeError, "normalizer must be a name or a Normalizer, got None."),
    (called(normalizer=scores.Dot()), TypeError, "normalizer must be a name or a Normalizer, got an object of type Dot."),
    (called(engine="strreaming"), ValueError, "engine must be one of 'auto', 'flex', 'fused', 'reference', 'sdpa', 'streaming', 'triton', got 'strreaming' (did you mean 'streaming'?)."),
    (called(engine=engines.Streaming), TypeError, "engine must be a name or an Engine, got the class Streaming (make an instance: Streaming(...))."),
    (called(engine=None), TypeError, "engine must be a name or an Engine, got None."),
    (called(engine="sdpa", normalizer="sparsemax"), ValueError, f"{CANNOT} 'sdpa': softmax only, not Sparsemax."),
    (called(engine="sdpa", softcap=2.0), ValueError, f"{CANNOT} 'sdpa': no softcap."),
    (called(engine="sdpa", score=scores.Additive(torch.ones(64))), ValueError, f"{CANNOT} 'sdpa': Additive is not a dot product of features of the query and of the key."),
    (called(Q.double(), K.double(), V.double(), engine="sdpa", score="gaussian"), ValueError, f"{CANNOT} 'sdpa': as a dot product, the Gaussian loses digits to cancellation and needs a dtype wider than float64."),
    (called(engine="streaming", normalizer="gumbel"), ValueError, f"{CANNOT} 'streaming': Gumbel declares no streaming rule (Normalizer.streams)."),
    (called(return_aux=True), TypeError, "return_aux must be an AuxRequest or None, got True."),
    (called(return_aux={"lse": True}), TypeError, "return_aux must be an AuxRequest or None, got an object of type dict."),
    (called(return_aux=AuxRequest), TypeError, "return_aux must be an AuxRequest or None, got the class AuxRequest (make an instance: AuxRequest(...))."),
    (lambda: regard.explain(Q, K, V, return_aux=3), TypeError, "return_aux must be an AuxRequest or None, got 3."),
]

ELSEWHERE: list[Row] = [
    (lambda: AuxRequest(topk=-1), ValueError, "AuxRequest: topk must be an int of at least 0, got -1."),
    (lambda: AuxRequest(topk=1.5), TypeError, "AuxRequest: topk must be an int of at least 0, got 1.5."),
    (lambda: AuxRequest(topk=2**31), ValueError, "AuxRequest: topk must be below 2**31, got 2147483648."),
    (lambda: AuxRequest(topk=True), TypeError, "AuxRequest: topk must be an int of at least 0, got True."),
    (lambda: AuxRequest(lse="no"), ValueError, "AuxRequest: lse must be a bool or 'grad', got 'no'."),
    (lambda: AuxRequest(weights=1), TypeError, "AuxRequest: weights must be a bool, got 1."),
    (lambda: scores.Additive(None), TypeError, "Additive: w_v must be a float tensor (C,) or (H, C), got None."),
    (lambda: scores.Additive(torch.ones(3), [1]), TypeError, "Additive: w_q must be a float tensor (3, E) or (H, 3, E), got an object of type list."),
    (lambda: scores.General(torch.ones(4, 4).int()), TypeError, "General: weight must be a float tensor (Eq, Ek) or (H, Eq, Ek), got an int32 tensor of shape (4, 4)."),
    (lambda: scores.Cosine(-1.0), ValueError, "Cosine: temperature must be a positive finite number or a tensor, got -1.0."),
    (lambda: scores.Gaussian(0.0), ValueError, "Gaussian: bandwidth must be a positive finite number or a tensor, got 0.0."),
    (lambda: scores.Boxcar(True), TypeError, "Boxcar: width must be a positive finite number or a tensor, got True."),
    (lambda: scores.ScoreMod(3), TypeError, "ScoreMod: score_mod must be callable, got 3."),
    (lambda: scores.ScoreMod(constant, scores.Dot), TypeError, "ScoreMod: base must be a Score or None, got the class Dot (make an instance: Dot(...))."),
    (lambda: normalizers.Entmax(1.0), ValueError, "Entmax: alpha must be a finite number above 1 (1 is softmax), got 1.0."),
    (lambda: normalizers.Gumbel("cold"), TypeError, "Gumbel: temperature must be a positive finite number, got 'cold'."),
    (lambda: engines.Reference(torch.float16), ValueError, "Reference: dtype must be torch.float32, torch.float64 or None, got torch.float16."),
]
# fmt: on


@pytest.mark.parametrize(("call", "kind", "message"), [*TENSORS, *HEADS, *MASKS, *NUMBERS, *PARTS, *ELSEWHERE])
def test_one_sentence(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    whole = message if message.partition(" ")[0].endswith(":") else f"attention: {message}"
    assert str(caught.value) == whole


def test_what_a_score_mod_returns_must_fit() -> None:
    with pytest.raises(
        TypeError, match=r"attention: score must be .* that returns a float tensor.* the function twice, which .*\(2,\)"
    ):
        called(score=twice)()


def test_a_mask_of_five_dimensions_is_told_as_it_came() -> None:
    with pytest.raises(ValueError, match=r"got \(1, 2, 8, 12, 8\)"):
        called(*(t.unsqueeze(0) for t in (Q, K, V)), yes(1, 2, 8, 12, 8))()


def test_a_named_engine_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for engine in engines.TABLE.values():
        kind = type(engine)
        run = kind.run
        monkeypatch.setattr(kind, "run", lambda self, problem, run=run: ran.append(self.name) or run(self, problem))
    refused = {
        "sdpa": ({"normalizer": "sparsemax"}, {"softcap": 1.0}, {"score": "boxcar"}),
        "streaming": ({"normalizer": "gumbel"}, {"normalizer": "sampled"}),
    }
    for name, calls in refused.items():
        for named in calls:
            with pytest.raises(ValueError, match=f"{CANNOT} '{name}': "):
                called(engine=name, **named)()
    assert ran == []
    called(engine="reference", normalizer="sparsemax")()
    assert ran == ["reference"]


@pytest.mark.parametrize("mask", [yes(12, 9), masks.window(3, 0, offset=0), masks.sinks(4)])
def test_is_causal_holds_together_with_a_mask(mask: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(t.shape, generator=generator) for t in (Q, K, V))
    both = regard.attention(query, key, value, mask, is_causal=True)
    joined = regard.attention(query, key, value, masks.causal("upper_left") & mask)
    assert torch.equal(both, joined)
    tril = masks.as_mask(yes(12, 9).tril())
    torch.testing.assert_close(both, regard.attention(query, key, value, tril & mask, engine="reference"))


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.float16(0.5), Fraction(1, 2), np.int64(1), 1])
def test_real_numbers_of_any_kind_are_numbers(number: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, 4, generator=generator), torch.randn(2, 5, 4, generator=generator)
    as_it_came = regard.attention(query, key, key, scale=number, softcap=number)
    assert torch.equal(as_it_came, regard.attention(query, key, key, scale=float(number), softcap=float(number)))
    assert regard.attention(query, key, key, dropout_p=number).shape == query.shape


def test_errors_do_not_hide_their_cause() -> None:
    def broken(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return len(q_idx.shape) + "1"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        called(attn_mask=broken)()
    assert isinstance(caught.value.__cause__, TypeError)

    class OwnError(Exception):
        pass

    def raising(*_: Tensor) -> Tensor:
        raise OwnError("mine")

    for named in ({"attn_mask": raising}, {"score": raising}):
        with pytest.raises(OwnError, match="mine"):
            called(**named)()


def test_zero_sizes_are_no_error_for_functions_either() -> None:
    ids = torch.zeros(2, 0, dtype=torch.long)

    def same(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ids[b, q_idx] == kv_idx

    assert regard.attention(Q[:, :, :0], K, V, same).shape == (2, 8, 0, 16)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "None"),
        (np.float32(1), "np.float32(1.0)"),
        (torch.zeros(2, dtype=torch.int8), "an int8 tensor of shape (2,)"),
        (torch.float16, "torch.float16"),
        (always, "the function always"),
        (object(), "an object of type object"),
    ],
)
def test_described(value: object, told: str) -> None:
    assert described(value) == told


class Summed(scores.Score):
    """A score that forgets that it compares each query with each key."""

    def compare(self, query: Tensor, key: Tensor) -> Tensor:
        return (query @ key.mT).sum(-1)


class Halved(normalizers.Normalizer):
    """A normalizer that forgets half of the keys."""

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)[..., ::2]


class Silent(normalizers.Normalizer):
    """A normalizer that returns nothing."""

    def weights(self, scores: Tensor) -> Tensor:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize("engine", ["auto", "reference", "streaming"])
def test_a_score_of_the_users_own_returns_a_score_for_each_pair(engine: str) -> None:
    message = r"^attention: Summed.compare must return scores \(..., L, S\) of query .* and key .*, got shape \(.*\)\.$"
    with pytest.raises(ValueError, match=message):
        called(score=Summed(), engine=engine)()


@pytest.mark.parametrize(
    ("normalizer", "kind", "got"), [(Halved(), ValueError, "shape"), (Silent(), TypeError, "None")]
)
@pytest.mark.parametrize("mask", [None, masks.causal("lower_right")], ids=str)
def test_a_normalizer_of_the_users_own_returns_a_weight_for_each_score(
    normalizer: normalizers.Normalizer, kind: type[Exception], got: str, mask: masks.Mask | None
) -> None:
    name = type(normalizer).__name__
    message = rf"^attention: {name}.weights must return weights in the shape of scores, .*, got {got}.*\.$"
    with pytest.raises(kind, match=message):
        called(attn_mask=mask, normalizer=normalizer)()


def test_a_function_is_no_normalizer() -> None:
    message = "got the function always; derive a class from Normalizer, with it as weights."
    with pytest.raises(TypeError, match=message):
        called(normalizer=always)()


def test_a_function_without_a_module_is_a_mask_too() -> None:
    named: dict[str, Any] = {"regard": regard, "masks": masks}
    exec("mask = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx", named)  # as code in a notebook or a doctest
    assert called(attn_mask=named["mask"])().shape == (2, 8, 12, 16)  # type: ignore[attr-defined]

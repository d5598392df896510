"""A score_mod is a function of one pair, as FlexAttention calls it: against calls pair by pair."""

import functools
import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import regard
from regard import scores

B, H, L, S, E = 2, 3, 6, 7, 4
G = torch.Generator().manual_seed(0)
QUERY, KEY, VALUE = (torch.randn(B, H, n, E, generator=G, dtype=torch.float64) for n in (L, S, S))
TABLE = torch.randn(H, L + S, generator=G, dtype=torch.float64, requires_grad=True)
WEIGHTS = torch.randn(5, generator=G, dtype=torch.float64, requires_grad=True)
LEAVES = TABLE, WEIGHTS
GLOBAL = torch.tensor([1, 4])
FUNCTIONS = {
    "distance": lambda s, b, h, q, k: s - (q - k).abs() * (h + 1),
    "learned table": lambda s, b, h, q, k: s + TABLE[h, q - k + S - 1],
    "learned sum": lambda s, b, h, q, k: s * WEIGHTS.square().sum() + (WEIGHTS * k).sum(),
    "learned softmax": lambda s, b, h, q, k: s * WEIGHTS.softmax(0)[(q + k + b) % 5] + WEIGHTS.max(),
    "rows": lambda s, b, h, q, k: s + TABLE[h].norm() + TABLE[h, 1] * TABLE[:, k].sum(),
    "global tokens": lambda s, b, h, q, k: torch.where((q >= k) | (k == GLOBAL).any(), s + WEIGHTS[0], -torch.inf),
    "position alone": lambda s, b, h, q, k: WEIGHTS[(q - k) % 5],
    "number alone": lambda s, b, h, q, k: WEIGHTS[2],
    "score alone": lambda s, b, h, q, k: torch.tanh(s),
    "wide": lambda s, b, h, q, k: s.float() * WEIGHTS.mean(),
    "partial": functools.partial(lambda slope, s, b, h, q, k: s * slope * (q + 1), 0.25),
}
ENGINES = ["reference", "streaming", "auto"]


def by_pairs(score_mod, query, key, value):
    """Return attention whose scores are calls for one pair each."""
    dots = query @ key.mT / E**0.5
    places = itertools.product(range(B), range(H), range(L), range(S))
    moved = [score_mod(dots[place], *map(torch.tensor, place)).to(dots.dtype) for place in places]
    return torch.stack(moved).view(B, H, L, S).softmax(-1) @ value


def gradients(output, *inputs):
    direction = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).view_as(output)
    found = torch.autograd.grad(output, (*inputs, *LEAVES), direction, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip((*inputs, *LEAVES), found)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_score_mod_is_a_function_of_one_pair(name):
    """Outputs, and gradients to the rows and to tensors that the function closes over."""
    score_mod = FUNCTIONS[name]
    rows = [t.clone().requires_grad_() for t in (QUERY, KEY, VALUE)]
    wanted = by_pairs(score_mod, *rows)
    right = gradients(wanted, *rows)
    for engine in ENGINES:
        for score in (score_mod, scores.ScoreMod(score_mod)):
            output = regard.attention(*rows, score=score, engine=engine)
            torch.testing.assert_close(output, wanted, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(gradients(output, *rows), right, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_flex_attention_agrees():
    for score_mod in (FUNCTIONS["distance"], lambda s, b, h, q, k: s + (k == GLOBAL).any() * (b + 1)):
        rows = [t.float() for t in (QUERY, KEY, VALUE)]
        torch.testing.assert_close(
            regard.attention(*rows, score=score_mod), flex_attention(*rows, score_mod=score_mod), rtol=1e-5, atol=1e-5
        )


def compiles(name, engine, backend):
    query = QUERY.clone().requires_grad_()

    def call(query, key, value):
        return regard.attention(query, key, value, score=FUNCTIONS[name], engine=engine)

    torch._dynamo.reset()
    wanted = call(query, KEY, VALUE)
    right = gradients(wanted, query)
    output = torch.compile(call, fullgraph=True, backend=backend)(query, KEY, VALUE)
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(gradients(output, query), right)


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["learned table", "learned softmax", "global tokens"])
def test_a_score_mod_compiles(name, engine):
    compiles(name, engine, "aot_eager")


@pytest.mark.campaign(keep=1)
@pytest.mark.parametrize("name", ["learned table", "learned softmax", "global tokens"])
def test_a_score_mod_compiles_to_machine_code(name):
    compiles(name, "auto", "inductor")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["learned table", "learned softmax", "global tokens"])
def test_a_score_mod_under_transforms(name, engine):
    """First and second derivatives in both modes, and a batch of them."""

    def loss(query):
        return regard.attention(query, KEY, VALUE, score=FUNCTIONS[name], engine=engine).square().sum()

    query, step = QUERY.clone().requires_grad_(), torch.randn(QUERY.shape, generator=G, dtype=torch.float64)
    (slope,) = torch.autograd.grad(
        by_pairs(FUNCTIONS[name], query, KEY, VALUE).square().sum(), query, create_graph=True
    )
    (curve,) = torch.autograd.grad((slope * step).sum(), query)
    gradient = torch.func.grad(loss)
    torch.testing.assert_close(gradient(QUERY), slope.detach())
    torch.testing.assert_close(torch.func.jvp(loss, (QUERY,), (step,))[1], (slope * step).sum().detach())
    torch.testing.assert_close(torch.func.jvp(gradient, (QUERY,), (step,))[1], curve)
    torch.testing.assert_close(torch.func.vjp(gradient, QUERY)[1](step)[0], curve)
    torch.testing.assert_close(torch.func.vmap(gradient)(torch.stack((QUERY, step)))[0], slope.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs_keep_their_dtype(dtype):
    """What the function returns may be wider; it is not what softmax and values are computed in."""
    rows = [t.to(dtype) for t in (QUERY, KEY, VALUE)]
    for engine in ENGINES:
        output = regard.attention(*rows, score=FUNCTIONS["learned table"], engine=engine)
        assert output.dtype == dtype
        wanted = by_pairs(FUNCTIONS["learned table"], *(t.double() for t in rows))
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(output.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_score_mod_of_few_pairs(sizes, engine):
    B, H, L, S = sizes
    query, key = torch.randn(B, H, L, 4, requires_grad=True), torch.randn(B, H, S, 4)
    output = regard.attention(query, key, key, score=FUNCTIONS["global tokens"], engine=engine)
    torch.testing.assert_close(output, key.expand(B, H, 1, 4) if S == 1 else torch.zeros(B, H, L, 4))
    output.sum().backward()
    assert torch.equal(query.grad, torch.zeros(B, H, L, 4))


def test_a_part_of_the_sequences_keeps_its_positions():
    """As where several processes hold a sequence; one function may also change what another made."""
    outer = scores.ScoreMod(FUNCTIONS["learned table"], scores.ScoreMod(FUNCTIONS["global tokens"], scores.Dot()))
    whole = torch.randn(B, H, L, S, generator=G, dtype=torch.float64)
    index = [torch.arange(n).view(-1, *[1] * (3 - i)) for i, n in enumerate((B, H, L, S))]
    part = outer.at(2, 3).modify(whole[..., 2:, 3:], *index[:2], index[2][:-2], index[3][:-3])
    torch.testing.assert_close(part, outer.modify(whole, *index)[..., 2:, 3:])


REFUSED = {
    lambda s, b, h, q, k: q - k: "return a float tensor of shape (), as in FlexAttention, got the function <lambda>, "
    "which returned an int64 tensor of shape () for one pair.",
    lambda s, b, h, q, k: s + WEIGHTS: "return a float tensor of shape (), as in FlexAttention, got the function "
    "<lambda>, which returned a float64 tensor of shape (5,) for one pair.",
    lambda s, b, h, q, k: s if q > k else -s: "work under torch.vmap, as in FlexAttention, got the function <lambda>, "
    "which does not (vmap: It looks like you're attempting to use a Tensor in some data-dependent control flow).",
    lambda s, b, h, q, k: s + torch.rand(()): "work under torch.vmap, as in FlexAttention, got the function <lambda>, "
    "which does not (vmap: called random operation while in randomness error mode).",
}


@pytest.mark.parametrize("score_mod", REFUSED, ids=lambda f: REFUSED[f])
def test_what_is_no_score_mod_is_refused(score_mod):
    with pytest.raises(TypeError) as error:
        regard.attention(QUERY, KEY, VALUE, score=scores.ScoreMod(score_mod))
    assert str(error.value) == f"ScoreMod: score_mod must {REFUSED[score_mod]}"
    with pytest.raises(TypeError) as error:
        regard.attention(QUERY, KEY, VALUE, score=score_mod)
    must = "be a name, a Score or a score_mod(score, b, h, q_idx, kv_idx) that returns a float tensor"
    wanted = REFUSED[score_mod].replace("return a float tensor of shape (), as in FlexAttention", must)
    assert str(error.value) == f"attention: score must {wanted}"

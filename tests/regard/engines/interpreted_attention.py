"""Checks of engine ``triton`` in Triton's interpreter: ``python interpreted_attention.py NAME ...``.

``TRITON_INTERPRET=1`` must be set before Triton is imported, which is why these are no tests of pytest's process.
"""

import subprocess
import sys
import tempfile
from unittest.mock import Mock, patch

import interpreter
import torch

import regard
from regard import masks, scores
from regard.engines.triton import kernels
from regard.nn import paged_attention
from regard.normalizers import Entmax, SoftmaxSink
from regard.testing.campaign import Plan, entries

L, S, E, V = 19, 21, 8, 5


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rows(dtype=torch.float64, E=E, V=V, heads=2, groups=1):
    made = normal(1, heads, L, E), normal(1, groups, S, E, seed=1), normal(1, groups, S, V, seed=2)
    return [t.to(dtype).requires_grad_() for t in made]


def agrees(dtype=torch.float64, rtol=1e-12, E=E, V=V, **named):
    """Compare output and gradients with the plain formula in float64."""
    given = rows(dtype, E, V)
    exact = [t.detach().double().requires_grad_() for t in given]
    grad = normal(1, 2, L, V, seed=3)
    ours = regard.attention(*given, enable_gqa=True, engine="triton", **named)
    right = regard.attention(*exact, enable_gqa=True, engine="reference", **named)
    found = ours, *torch.autograd.grad(ours, given, grad.to(dtype))
    wanted = right, *torch.autograd.grad(right, exact, grad)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol * 10)


def families(step):
    causal = {"E": 3, "attn_mask": masks.causal("upper_left")}
    calls = [
        {"score": scores.Cosine(0.5), "softcap": 3.0}, {"score": scores.Dot(), "softcap": 3.0},
        {"score": scores.Additive(normal(E)), "softcap": 3.0}, {"score": scores.General(normal(E, E)), "softcap": 3.0},
        {"score": scores.Gaussian(2.0), "E": 3}, causal | {"score": scores.Boxcar(2.5)},
        causal | {"score": scores.Epanechnikov(4.0)}, causal | {"score": scores.Triangular(4.0)},
        {"score": scores.Laplacian(normal(3).abs() + 1), "E": 3},
        {"E": 20, "V": 33},  # wider than a slice of a row
    ]  # fmt: skip
    for call in calls[::step]:
        agrees(**call)


def masks_of_every_kind(step):
    packed = masks.document(torch.arange(L) // 9, torch.arange(S) // 10)
    given = (
        packed, masks.causal("upper_left"), masks.dilated(3, "upper_left"), masks.window(5, 0, "lower_right"),
        masks.causal("upper_left") & ~masks.sinks(2) | masks.prefix(4), masks.key_padding(normal(1, S) > 0),
        masks.dense(normal(1, 1, 1, S)), masks.dense(normal(2, L, S) > 0),
        masks.selected(torch.arange(L).unsqueeze(-1) % torch.tensor([3, 7, 19])), masks.alibi(2, align="upper_left"),
        masks.causal("upper_left") & masks.alibi(2, align="upper_left"), ~masks.everything(),
        masks.dense(normal(L, S) > -1) & (lambda b, h, q, k: (q + h) % 2 == k % 2),
    )  # fmt: skip
    for mask in given[::step]:
        agrees(attn_mask=mask)


def dtypes(step):
    for dtype, rtol in ((torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 5e-2))[::step]:
        agrees(dtype, rtol, attn_mask=masks.causal("upper_left"))


def normalizers():
    agrees(normalizer="sigmoid", attn_mask=masks.causal("upper_left"))
    agrees(normalizer=SoftmaxSink(normal(2)), attn_mask=masks.window(3, 3, "upper_left"))


def thresholds(step):
    """Sparsemax and entmax, in all families, with scores that are flat, steep, hidden or not numbers."""
    biased = {"attn_mask": masks.dense(normal(1, 1, 1, S)), "E": 3}
    calls = (
        {"normalizer": "sparsemax", "dtype": torch.float16, "rtol": 2e-2},
        {"normalizer": "sparsemax", "attn_mask": masks.dilated(2, "upper_left"), "scale": 2.0},
        {"normalizer": Entmax(1.3), "score": scores.Additive(normal(E)), "attn_mask": masks.causal("upper_left")},
        {"normalizer": "entmax15", "scale": 0.01},
        biased | {"normalizer": "entmax15", "score": scores.Epanechnikov(4.0)},
        {"normalizer": Entmax(3.0), "rtol": 1e-9, "scale": 3.0},
    )  # fmt: skip
    for call in calls[::step]:
        agrees(**call)
    query, key, value = (t.detach() for t in rows())
    key[0, 0, 3, 0] = torch.nan  # which the first three queries do not see
    given = {"attn_mask": masks.causal("upper_left"), "enable_gqa": True, "engine": "triton"}
    for name in ("sparsemax", "argmax"):
        output = regard.attention(query, key, value, normalizer=name, **given)
        assert output[:, :, 3:].isnan().all()
        assert output[:, :, :3].isfinite().all()
    empty = regard.attention(
        query, key, value, ~masks.everything(), normalizer="entmax15", engine="triton", enable_gqa=True
    )
    assert (empty == 0).all()


def tiles_without_weight():
    """Entmax reads no values of tiles without weight, unless one of them is not finite: 0 times NaN is NaN."""
    query, key, value = normal(1, 1, 16, E), normal(1, 1, 64, E, seed=1), normal(1, 1, 64, V, seed=2)
    query[..., 0], key[..., 0] = 1.0, torch.arange(64) * -1.0  # weights end with the first of four tiles
    leaves = [t.requires_grad_() for t in (query, key, value)]
    for name in ("sparsemax", "entmax15", Entmax(1.8)):
        outputs, counts = [], []
        for engine in ("triton", "reference"):
            reads = [Mock(wraps=getattr(kernels, each)) for each in ("read", "weight_gradients")]
            with patch.object(kernels, "read", reads[0]), patch.object(kernels, "weight_gradients", reads[1]):
                output = regard.attention(query, key, value, normalizer=name, scale=1.0, engine=engine)
                outputs.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
            counts.append([each.call_count for each in reads])
        torch.testing.assert_close(*outputs)
        assert counts[0] == [1, 4]  # of 4 and 16: δ, queries, and two parts for keys
        bad = value.detach().index_fill(2, torch.tensor([50]), torch.nan)
        for engine in ("triton", "reference"):
            output = regard.attention(query, key, bad, normalizer=name, scale=1.0, engine=engine)
            assert output.isnan().all()


def argmax():
    """The first of the largest scores, whatever the order of the tiles."""
    agrees(normalizer="argmax", attn_mask=masks.dilated(2, "upper_left"))
    query, key, value = (t.detach() for t in rows())
    ties = regard.attention(
        query * 0, key, value, masks.causal("lower_right"), normalizer="argmax", engine="triton", enable_gqa=True
    )
    assert torch.equal(ties, value[:, :, :1].expand(1, 2, L, V))


def auxiliary_outputs(step):
    query, key, value = rows()
    request = regard.AuxRequest(lse="grad", max=True, entropy=True, topk=3, received=True)
    for normalizer in (SoftmaxSink(normal(2)), "softmax", Entmax(1.3), "sigmoid", "argmax")[::step]:
        named = {"enable_gqa": True, "normalizer": normalizer, "attn_mask": masks.causal("upper_left")}
        ours, theirs = (
            regard.attention(query, key, value, engine=name, return_aux=request, **named)
            for name in ("triton", "reference")
        )
        assert torch.equal(ours[0], regard.attention(query, key, value, engine="triton", **named))
        for field in ("lse", "max", "entropy", "received", "topk"):
            found, wanted = (getattr(aux, field) for _, aux in (ours, theirs))
            if field == "topk":
                assert torch.equal(found.indices, wanted.indices)
                found, wanted = found.weights, wanted.weights
            torch.testing.assert_close(found, wanted)
        grads = [torch.autograd.grad(aux.lse.sum(), (query, key)) for _, aux in (ours, theirs)]
        torch.testing.assert_close(*grads)

    def entropy(query):
        request = regard.AuxRequest(entropy=True)
        return regard.attention(query, key, value, engine="triton", enable_gqa=True, return_aux=request)[1].entropy

    samples = torch.stack((query, query + 1)).detach()
    torch.testing.assert_close(torch.func.vmap(entropy)(samples), torch.stack([entropy(each) for each in samples]))
    many = regard.AuxRequest(topk=S + 2)
    ours, theirs = (
        regard.attention(query, key, value, engine=name, enable_gqa=True, return_aux=many)[1].topk
        for name in ("triton", "reference")
    )
    assert torch.equal(ours.indices, theirs.indices)


def learned_parts():
    """Gradients of what a score, a mask and a normalizer hold."""
    query, key, value = rows(E=3)
    for make in (
        lambda w: {"score": scores.Gaussian(w[0].abs() + 1)},
        lambda w: {"score": scores.Laplacian(w[:3].abs() + 1)},
        lambda w: {"score": scores.Additive(w[:3])},
        lambda w: {"attn_mask": masks.alibi(w[:2], align="upper_left")},
        lambda w: {"attn_mask": masks.dense(w[: L * S].view(L, S))},
        lambda w: {"normalizer": SoftmaxSink(w[:2])},
    ):
        found = []
        for engine in ("triton", "reference"):
            held = normal(L * S).requires_grad_()
            output = regard.attention(query, key, value, enable_gqa=True, engine=engine, **make(held))
            found.append(torch.autograd.grad(output.square().sum(), held)[0])
        torch.testing.assert_close(*found)


def dropout():
    query, key, value = rows()
    torch.manual_seed(0)
    output = regard.attention(query, key, value, dropout_p=0.3, enable_gqa=True, engine="triton")
    torch.manual_seed(0)
    ones = torch.eye(S, dtype=torch.float64).expand(1, 1, S, S)
    weights = regard.attention(query.detach(), key.detach(), ones, dropout_p=0.3, enable_gqa=True, engine="triton")
    by_head = value.repeat_interleave(2, 1)
    torch.testing.assert_close(output, weights @ by_head)
    assert 0.2 < float((weights == 0).double().mean()) < 0.4
    upstream = normal(1, 2, L, V, seed=3)  # the backward pass drops the same weights
    found = torch.autograd.grad(output, value, upstream)[0]
    torch.testing.assert_close(found, (weights.mT @ upstream).sum(1, keepdim=True))


def compiled():
    query, key, value = rows(torch.float32)

    def run(query, key, value):
        return regard.attention(query, key, value, is_causal=True, enable_gqa=True, engine="triton")

    made = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(made(query, key, value), run(query, key, value))
    torch.autograd.grad(made(query, key, value).sum(), (query, key, value))


def saved_programs():
    """A saved program names the operators, which ``import regard`` defines."""

    class Causal(torch.nn.Module):
        def forward(self, query):
            return regard.attention(query, query, query, is_causal=True, engine="triton")

    given = torch.ones(1, 1, 3, 4, dtype=torch.float64)
    load = "import sys, torch, regard; torch.export.load(sys.argv[1]).module()(torch.ones(1, 1, 3, 4).double())"
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/causal.pt2"
        torch.export.save(torch.export.export(Causal(), (given,)), path)
        subprocess.run([sys.executable, "-c", load, path], check=True)


def decoding(step):
    """Few queries, of several heads of a group, over keys that programs share."""
    for dtype, rtol, heads, groups, queries, keys, E, V in (
        (torch.float64, 1e-12, 4, 2, 3, 37, 8, 5), (torch.float64, 1e-12, 6, 1, 4, 17, 20, 40),
        (torch.float32, 1e-5, 2, 2, 1, 64, 8, 8), (torch.float16, 1e-2, 4, 2, 2, 37, 8, 5),
    ):  # fmt: skip
        given = normal(2, heads, queries, E), normal(2, groups, keys, E, seed=1), normal(2, groups, keys, V, seed=2)
        narrow, sink = [t.to(dtype) for t in given], SoftmaxSink(normal(heads))
        last = {"align": "lower_right"}
        calls = (
            {"attn_mask": masks.padding(torch.tensor([3, keys])), "normalizer": sink, "softcap": 2.0},
            {"attn_mask": masks.alibi(heads, **last) & masks.window(5, 0, **last)},
            {"attn_mask": masks.padding(torch.tensor([0, keys]))}, {"attn_mask": masks.dilated(3, **last)},
            {"attn_mask": masks.causal(**last), "normalizer": sink}, {"score": "cosine", "softcap": 1.0}, {},
        )  # fmt: skip
        for named in calls[::step] if queries == 3 else calls[: 3 - step]:
            request = regard.AuxRequest(lse=True)
            ours, theirs = (
                regard.attention(*each, enable_gqa=True, engine=engine, return_aux=request, **named)
                for each, engine in ((narrow, "triton"), ([t.double() for t in narrow], "reference"))
            )
            torch.testing.assert_close(ours[0].double(), theirs[0], rtol=rtol, atol=rtol)
            torch.testing.assert_close(ours[1].lse.double(), theirs[1].lse, rtol=1e-5, atol=1e-5)
    query, key, value = rows()
    masked = masks.padding(torch.tensor([5]))
    bad = value.detach().clone().index_fill_(2, torch.arange(5, S), torch.nan)
    for named in ({"attn_mask": masked}, {"attn_mask": masks.dense((torch.arange(S) < 5).expand(2, S))}):
        a, b = (
            regard.attention(query[:, :, :2], key, v, enable_gqa=True, engine="triton", **named) for v in (bad, value)
        )
        assert torch.equal(a, b)
    large = torch.full_like(value, torch.finfo(torch.float64).max).detach()
    assert regard.attention(query[:, :, :1], key, large, enable_gqa=True, engine="triton").isfinite().all()


def paged():
    """Pages are read where they are."""
    key, value = (normal(7, 3, 2, width).transpose(1, 2) for width in (E, V))
    table, lengths = torch.tensor([[3, 0, -1], [5, 1, 2], [4, 99, -7]]), torch.tensor([4, 9, 0])
    key[6], value[6] = torch.nan, torch.nan
    sink = SoftmaxSink(normal(6))
    for queries, mask, named in (
        (1, None, {}), (3, masks.causal(align="lower_right"), {"softcap": 2.0}), (1, None, {"normalizer": sink}),
        (3, masks.alibi(6, align="lower_right"), {}), (3, masks.window(2, 0, align="lower_right"), {}),
    ):  # fmt: skip
        given = normal(3, 6, queries, E), key, value, table, lengths, mask
        copied = paged_attention(*given, engine="streaming", return_lse=True, **named)
        with patch("regard.nn.paged.attention", None):  # which gets copies
            found = paged_attention(*given, engine="triton", return_lse=True, **named)
        torch.testing.assert_close(found, copied)
    narrow = [t.bfloat16() for t in (normal(3, 6, 1, E), key, value)]
    ours = paged_attention(*narrow, table, lengths, engine="triton")
    wide = paged_attention(*(t.double() for t in narrow), table, lengths, engine="streaming")
    torch.testing.assert_close(ours.double(), wide, rtol=2e-2, atol=2e-2)
    query = normal(3, 6, 1, E)
    run = torch.compile(paged_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        run(query, key, value, table, lengths, engine="triton"), paged_attention(query, key, value, table, lengths)
    )


def refusals():
    plain = normal(1, 1, 3, 4)
    for named, reason in (
        ({"normalizer": "relu"}, "no kernel for ReLU"),
        ({"score": lambda score, *_: score * 2}, "no kernel for ScoreMod"),
        ({"order": 1}, "order=0 only"),
    ):
        try:
            regard.attention(plain, plain, plain, engine="triton", **named)
        except ValueError as error:
            assert f"'triton': {reason}" in str(error), error
        else:
            raise AssertionError(named)
    wide = normal(1, 1, 3, 257)
    assert "256 features, not 257" in regard.explain(wide, wide, wide).others["triton"]


def laws(first, count):
    """A slice of the campaign: every law, on random cases."""
    plan = Plan(seed=7, engines=("triton",))
    broken = [each for each in entries(plan, range(first, first + count)) if each.is_broken]
    assert not broken, "\n".join(each.reason for each in broken)


if __name__ == "__main__":
    assert type(kernels.forward).__name__ == "InterpretedFunction"
    interpreter.hasten()
    for check in sys.argv[1:]:
        name, *numbers = check.split()
        globals()[name](*map(int, numbers))

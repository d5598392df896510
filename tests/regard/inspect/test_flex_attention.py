"""FlexAttention is recorded as any other attention is, compiled by somebody or not; of compiled models one is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hugging_face_models import DECODERS, made, tokens
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

import regard
from regard.inspect import ablate, capture

compiled = torch.compile(flex_attention, backend="eager")


class ByName(nn.Module):
    def forward(self, *args: Tensor, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = ByTorch()

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x) + x


class ByTorch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Compiled(nn.Module):
    def forward(self, *args: Tensor, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)


class OfTheClass(nn.Module):
    attend: Callable[..., Any] = staticmethod(compiled)

    def forward(self, *args: Tensor, **kwargs: Any) -> Any:
        return OfTheClass.attend(*args, **kwargs)


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = compiled

    def forward(self, *args: Tensor, **kwargs: Any) -> Any:
        return self.attend(*args, **kwargs)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sloped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (k - q) * 0.1 * (h + 1)


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k - q).abs() <= 9


def expected(query: Tensor, key: Tensor, score_mod: bool, hidden: bool, scale: float | None) -> Tensor:
    """The formula, in float64."""
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.double() @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    behind = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
    if score_mod:
        scores = scores + behind * 0.1 * torch.arange(1, query.shape[1] + 1)[:, None, None]
    return (scores.masked_fill(behind.abs() > 9, -torch.inf) if hidden else scores).softmax(-1)


@pytest.mark.campaign(keep=6)
@pytest.mark.parametrize("module", [ByName, Compiled, OfTheClass, Held])
@pytest.mark.parametrize("given", [{}, {"score_mod": sloped, "scale": 0.4}, {"score_mod": sloped, "hidden": True},
                                   {"hidden": True, "return_aux": AuxRequest(lse=True)}],
                         ids=lambda given: " ".join(given) or "plain")  # fmt: skip
@torch.no_grad()
def test_what_it_attends_to(module: type[nn.Module], given: dict[str, Any]) -> None:
    model, query, key = module(), drawn(2, 4, 40, 16), drawn(2, 2, 48, 16, seed=1)
    given = dict(given)
    hidden, right = given.pop("hidden", False), given.pop("return_aux", None)
    blocks: BlockMask | None = create_block_mask(window, None, None, 40, 48, device="cpu") if hidden else None
    arguments = {"block_mask": blocks, "enable_gqa": True, **given} | ({} if right is None else {"return_aux": right})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = model(query, key, key, **arguments)
        with capture(model) as record:
            together = model(query, key, key, **arguments)
    both = alone, together
    if right is not None:
        alone, together = alone[0], together[0]
        assert torch.equal(*(each[1].lse for each in both))
    assert torch.equal(alone, together) and record.layers == ("",) and record[0].heads_per_group == 2
    weights = expected(query, key, "score_mod" in given, hidden, given.get("scale"))
    torch.testing.assert_close(record[0].weights().double(), weights, rtol=1e-4, atol=1e-6)
    part = record[0].weights(head=3, rows=slice(9, 30, 4)).double()
    torch.testing.assert_close(part, weights[:, 3, 9:30:4], rtol=1e-4, atol=1e-6)
    assert vars(OfTheClass)["attend"].__func__ is compiled and (module is not Held or model.attend is compiled)


@torch.no_grad()
def test_a_function_of_scores_goes_by_places_in_any_part() -> None:
    query = drawn(1, 2, 9, 8)
    with capture() as record:
        regard.attention(query, query, query, score=sloped)
    whole = record[0].weights()
    torch.testing.assert_close(whole.double(), expected(query, query, True, False, None), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(record[0].weights(rows=slice(4, 7)), whole[:, :, 4:7], rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_hugging_face_on_it() -> None:
    model, given = made(DECODERS["llama, grouped"]()), tokens(1, 12)
    weights = model(given, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"), capture(model) as record:  # its compilation takes half a minute
        model(given, use_cache=False)
    for run, each in zip(record, weights, strict=True):
        torch.testing.assert_close(run.weights(), each, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_heads_of_it_can_be_taken_away() -> None:
    query = drawn(1, 2, 20, 8)
    model = ByName()
    with warnings.catch_warnings(), ablate(model, 0, head=1):
        warnings.simplefilter("ignore")
        out = model(query, query, query)
    assert not out[:, 1].any() and out[:, 0].all()


@torch.no_grad()
def test_a_compiled_model_is_warned_of() -> None:
    torch.manual_seed(0)
    layer, own, x = Plain(), Plain(), drawn(1, 2, 5, 16)
    own.compile(backend="aot_eager", fullgraph=True)
    for model in (torch.compile(layer, backend="aot_eager", fullgraph=True), own, nn.ModuleList([own])):
        run = own if isinstance(model, nn.ModuleList) else model
        alone = run(x)
        with pytest.warns(regard.RegardWarning, match="capture: .* Calls in code that torch.compile compiled are not"):
            watching = capture(model)
            with watching as record:
                assert torch.equal(run(x), alone)
        assert len(record) == 0
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"), capture(model) as record:
            warnings.simplefilter("error")
            run(x)
        assert record.layers == (("0.attend",) if isinstance(model, nn.ModuleList) else ("attend",))

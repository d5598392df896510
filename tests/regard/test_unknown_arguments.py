"""Unknown keyword arguments: the error names what was called and what to write instead."""

from __future__ import annotations

import inspect
from typing import Any, TypedDict, Unpack

import pytest
import torch

import regard
import regard.nn
from regard.nn import (
    DifferentialAttention,
    ForgettingAttention,
    LaserAttention,
    LogLinearGatedDeltaNet,
    PathAttention,
    SelfAttention,
    TensorProductAttention,
)

LAYERS = [each for each in (getattr(regard.nn, name) for name in regard.nn.__all__) if hasattr(each, "forward")]


@pytest.mark.parametrize("layer", [each for each in LAYERS if not inspect.isabstract(each)], ids=lambda it: it.__name__)
def test_the_layer_that_was_called_is_named(layer: Any) -> None:
    required = [each for each in inspect.signature(layer).parameters.values() if each.default is each.empty]
    expected = rf"^{layer.__name__}\(\) got an unexpected keyword argument 'no_such_option'"
    with pytest.raises(TypeError, match=expected):
        layer(*[16 for each in required if each.kind is each.POSITIONAL_OR_KEYWORD], no_such_option=1)


@pytest.mark.parametrize(
    ("layer", "option", "hint"),
    [
        (ForgettingAttention, "num_kv_head", "Did you mean 'num_kv_heads'?"),
        (DifferentialAttention, "paring", "Did you mean 'pairing'?"),
        (TensorProductAttention, "head_dims", "Did you mean 'head_dim'?"),
        (LaserAttention, "normaliser", "Did you mean 'normalizer'?"),
        (SelfAttention, "num_key_value_heads", "Did you mean 'num_kv_heads'?"),
        (SelfAttention, "attention_dropout", "Did you mean 'dropout'?"),
        (  # an option of its base, and none that is near
            LogLinearGatedDeltaNet,
            "num_steps",
            "Write one of embed_dim, num_heads, max_len, num_key_heads, key_dim, value_dim, conv_size, "
            "negative_eigenvalues, norm_eps, device, dtype.",
        ),
    ],
)
def test_the_nearest_option_is_suggested(layer: Any, option: str, hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        layer(16, 4, **{option: 2})
    assert str(caught.value) == f"{layer.__name__}() got an unexpected keyword argument {option!r}. {hint}"


@pytest.mark.parametrize(("layer", "option"), [(TensorProductAttention, "num_kv_heads"), (PathAttention, "rotary")])
def test_options_that_a_layer_lacks_are_not_those_of_its_base(layer: Any, option: str) -> None:
    with pytest.raises(TypeError, match=rf"^{layer.__name__}\(\) got an unexpected keyword argument '{option}'"):
        layer(16, 4, **{option: None})


def test_other_type_errors_are_unchanged() -> None:
    with pytest.raises(TypeError, match=r"^SelfAttention: num_kv_heads must be an int"):
        SelfAttention(16, 4, num_kv_heads="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'num_heads'"):
        SelfAttention(16)  # type: ignore[call-arg]


def test_subclasses_of_users_are_named_for_their_own_options() -> None:
    class Given(TypedDict, total=False):
        head_dim: int

    class Typed(SelfAttention):
        def __init__(self, **options: Unpack[Given]) -> None:
            super().__init__(16, 4, **options)

    class Open(SelfAttention):
        def __init__(self, extra: int, **options: Any) -> None:
            super().__init__(16, 4, **options)
            self.extra = extra

    class Wrong(SelfAttention):
        def __init__(self, extra: int) -> None:
            super().__init__(16, 4, headdim=extra)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match=r"^Open\(\) got .* 'extr'. Did you mean 'extra'"):
        Open(1, extr=1)
    with pytest.raises(TypeError, match=r"^Open\(\) got .* 'headdim'. Did you mean 'head_dim'"):
        Open(1, headdim=4)
    with pytest.raises(TypeError, match=r"^SelfAttention\(\) got .* 'headdim'. Did you mean 'head_dim'"):
        Wrong(4)
    with pytest.raises(TypeError, match=r"'headdim'. Did you mean 'head_dim'"):  # the name Given is not to be found
        Typed(headdim=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("attention_mask", "Write attn_mask=regard.masks.key_padding(mask), True where a key is visible."),
        ("attnmask", "Did you mean 'attn_mask'?"),
        ("bias", "Write attn_mask=bias, a float tensor that is added to the scores."),
        ("causal", "Write is_causal=True."),
        ("dropout", "Did you mean 'dropout_p'?"),
        ("key_padding_mask", "Write attn_mask=regard.masks.key_padding(~key_padding_mask)."),
        ("need_weights", "Write return_aux=regard.AuxRequest(weights=True)."),
        ("softmax_scale", "Did you mean 'scale'?"),
        ("window_size", "Write attn_mask=regard.masks.window(left, right)."),
    ],
)
def test_arguments_of_other_libraries_are_translated(argument: str, hint: str) -> None:
    x, functions = torch.zeros(1, 1, 2, 4), list[Any]((regard.attention, regard.explain))
    for function in functions:
        with pytest.raises(TypeError) as caught:
            function(x, x, x, **{argument: None})
        assert str(caught.value) == f"{function.__name__}() got an unexpected keyword argument {argument!r}. {hint}"


def test_arguments_are_listed_where_none_is_near() -> None:
    x: Any = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match=r"'zzz'\. Write one of query, key, value, attn_mask, dropout_p, is_causal, "):
        regard.attention(x, x, x, zzz=1)  # type: ignore[call-overload]

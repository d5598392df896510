"""Errors for unknown keyword arguments: what was called, the argument, and what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from difflib import get_close_matches
from types import FunctionType
from typing import Any, Unpack, get_args, get_origin, get_type_hints

_WEIGHTS = "return_aux=regard.AuxRequest(weights=True)"
_WINDOW = "attn_mask=regard.masks.window(left, right)"
_VISIBLE = "attn_mask=regard.masks.key_padding(mask), True where a key is visible"
_LENGTHS = "attn_mask=regard.masks.padding(lengths)"

#: Arguments of torch, transformers, flash-attn, JAX, Keras and x-transformers, and what does the same here: the name of
#: an argument, or an argument with its value. The first whose argument the called function has is suggested.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "alibi_slopes": ("attn_mask=regard.masks.alibi(slopes)",),
    "attention_dropout": ("dropout", "dropout_p"),
    "attention_mask": (_VISIBLE, "valid_lens"),
    "attn_bias": ("attn_mask=bias, a float tensor that is added to the scores",),
    "attn_dropout": ("dropout", "dropout_p"),
    "bandwidth": ("score=regard.scores.Gaussian(bandwidth)",),
    "bias": ("attn_mask=bias, a float tensor that is added to the scores",),
    "block_mask": ("attn_mask=block_mask",),
    "causal": ("is_causal=True",),
    "cu_seqlens": ("attn_mask=regard.masks.from_cu_seqlens(cu_seqlens)",),
    "cu_seqlens_q": ("attn_mask=regard.masks.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k)",),
    "d_model": ("embed_dim",),
    "dim": ("embed_dim",),
    "dim_head": ("head_dim",),
    "dropout": ("dropout_p",),
    "dropout_p": ("dropout",),
    "dropout_rate": ("dropout", "dropout_p"),
    "heads": ("num_heads",),
    "hidden_size": ("embed_dim",),
    "key_padding_mask": ("attn_mask=regard.masks.key_padding(~key_padding_mask)", "valid_lens"),
    "key_value_seq_lengths": (_LENGTHS,),
    "kv_heads": ("num_kv_heads",),
    "local_window_size": (_WINDOW,),
    "logits_soft_cap": ("softcap",),
    "mask": (_VISIBLE, "valid_lens"),
    "mask_mod": ("attn_mask=mask_mod",),
    "n_heads": ("num_heads",),
    "need_weights": (_WEIGHTS,),
    "nhead": ("num_heads",),
    "num_attention_heads": ("num_heads",),
    "num_key_value_heads": ("num_kv_heads",),
    "output_attentions": (_WEIGHTS,),
    "return_attention_scores": (_WEIGHTS,),
    "return_attn_probs": (_WEIGHTS,),
    "return_lse": ("return_aux=regard.AuxRequest(lse=True)",),
    "scaling": ("scale",),
    "score_mod": ("score=score_mod",),
    "sliding_window": ("attn_mask=regard.masks.window(left, 0)",),
    "sm_scale": ("scale",),
    "softmax_scale": ("scale",),
    "training": ("dropout_p=0.0 in evaluation",),
    "use_bias": ("bias",),
    "use_causal_mask": ("is_causal=True",),
    "valid_lens": (_LENGTHS,),
    "window_size": (_WINDOW,),
}


def unexpected(function: str, argument: str, known: Collection[str]) -> TypeError:
    """Return the error for a keyword argument that a function does not have; ``known`` are those that it has.

    Examples
    --------
    >>> unexpected("SelfAttention", "num_kv_head", ["num_heads", "num_kv_heads"])
    TypeError("SelfAttention() got an unexpected keyword argument 'num_kv_head'. Did you mean 'num_kv_heads'?")
    >>> print(unexpected("attention", "window_size", ["attn_mask", "is_causal"]))
    attention() got an unexpected keyword argument 'window_size'. Write attn_mask=regard.masks.window(left, right).
    """
    same = [each for each in _ELSEWHERE.get(argument, ()) if each.partition("=")[0] in known]
    near = same or get_close_matches(argument, known, 1, 0.75) or [f"one of {', '.join(known)}"]
    hint = f"Did you mean {near[0]!r}?" if near[0] in known else f"Write {near[0]}."
    return TypeError(f"{function}() got an unexpected keyword argument {argument!r}. {hint}")


def name_unexpected(cls: Any) -> None:
    """Have the constructor of a class refuse unknown options in the name of the class, with a suggestion.

    Python names the function that refuses an option, which may be that of a base class. It refuses none that the base
    class takes, though the class declares others (``**options: Unpack[...]``).
    """
    init = vars(cls).get("__init__")
    if not isinstance(init, FunctionType):
        return
    hands_on = init.__code__.co_flags & inspect.CO_VARKEYWORDS

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **options: Any) -> None:
        if hands_on and (declared := _declared(init)):
            refuse(self, [each for each in options if each not in declared])
        try:
            init(self, *args, **options)
        except TypeError as error:
            known = _options(cls)
            refuse(self, [each for each in options if known and each not in known and repr(each) in str(error)])
            raise

    def refuse(self: Any, unknown: list[str]) -> None:
        if unknown:
            caller = type(self) if type(self).__init__ is constructor else cls
            raise unexpected(caller.__name__, unknown[0], _options(cls)) from None

    cls.__init__ = constructor


def _named(init: Callable[..., None]) -> tuple[str, ...]:
    """Return the names of a constructor's arguments."""
    arguments = list(inspect.signature(init).parameters.values())[1:]
    return tuple(each.name for each in arguments if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))


@functools.cache
def _declared(init: Callable[..., None]) -> tuple[str, ...]:
    """Return the options of a constructor; empty if it takes more of them than it declares."""
    last = list(inspect.signature(init).parameters.values())[-1]
    if last.kind is not last.VAR_KEYWORD:
        return _named(init)
    try:
        further = get_type_hints(init).get(last.name)
    except NameError:  # a name of an enclosing function
        return ()
    return (*_named(init), *get_args(further)[0].__annotations__) if get_origin(further) is Unpack else ()


def _options(cls: type) -> list[str]:
    """Return the options of a class, and of the classes to whose constructors they go; empty if it takes any."""
    found: list[str] = []
    for init in (vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)):
        if declared := _declared(init):
            return [*found, *declared]
        found += _named(init)
    return []

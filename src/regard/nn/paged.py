"""Attention over a key–value cache that is stored in pages."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from regard import masks
from regard._utils.constraints import TensorOf, flag
from regard._utils.errors import rejected, shape
from regard._utils.tracing import values_unavailable
from regard.engines import TABLE, EngineLike
from regard.engines.aux import AuxRequest
from regard.engines.problem import Call, Problem
from regard.engines.triton.paged import attend_pages, reads_pages
from regard.functional import attention
from regard.masks import MaskLike
from regard.normalizers import NormalizerLike
from regard.scores import ScoreLike

_NAME = "paged_attention"
_PAGES = TensorOf(("pages", "G", "size", "E"))
_TABLE, _LENGTHS = TensorOf(("B", "N"), integer=True), TensorOf(("B",), integer=True)


@overload
def paged_attention(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lengths: Tensor, attn_mask: MaskLike | None = ..., *, scale: float | None = ..., score: ScoreLike | None = ..., normalizer: NormalizerLike = ..., softcap: float | None = ..., engine: EngineLike = ..., return_lse: Literal[False] = ...) -> Tensor: ...  # noqa: E501  # fmt: skip
@overload
def paged_attention(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lengths: Tensor, attn_mask: MaskLike | None = ..., *, scale: float | None = ..., score: ScoreLike | None = ..., normalizer: NormalizerLike = ..., softcap: float | None = ..., engine: EngineLike = ..., return_lse: Literal[True]) -> tuple[Tensor, Tensor]: ...  # noqa: E501  # fmt: skip
def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    lengths: Tensor,
    attn_mask: MaskLike | None = None,
    *,
    scale: float | None = None,
    score: ScoreLike | None = None,
    normalizer: NormalizerLike = "softmax",
    softcap: float | None = None,
    engine: EngineLike = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Return :func:`regard.attention` of queries to the cached keys of their sequence, which lie in pages.

    Key j of sequence b is ``key[table[b, j // size], :, j % size]`` for j < n_b = ``lengths[b]``, and
    ``o_b = Σ_{j < n_b} α(q_b, k_j) v_j``. Serving engines keep caches in this way (Kwon et al. 2023, arXiv 2309.06180).

    Parameters
    ----------
    query : Tensor (B, H, L, E)
        The newest L steps of each sequence.
    key, value : Tensor (pages, G, size, E) and (pages, G, size, V)
        The pages of all sequences, with any strides. H is a multiple of G. For pages that are stored as
        (pages, size, G, E), pass ``pages.transpose(1, 2)``.
    table : Tensor (B, N), integer
        The pages of each sequence, in order. Entries after its last page are not read.
    lengths : Tensor (B,), integer
        The number of keys of each sequence, the newest included.
    attn_mask : Mask, Tensor or callable, optional
        What else to hide or to add, as in :func:`regard.attention`, for L queries and N·size keys. Masks with
        ``align="lower_right"`` put the last query at the last key of its sequence: pass
        ``masks.causal(align="lower_right")`` for several steps at once.
    scale, score, normalizer, softcap, engine
        As in :func:`regard.attention`.
    return_lse : bool, default False
        Also return the logarithm of the sum of exponentials, with which results over several caches are merged.

    Returns
    -------
    output : Tensor (B, H, L, V)
        Zeros for a sequence of length 0.
    lse : Tensor (B, H, L)
        Only with ``return_lse``.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid. Whether entries of the table are pages, and lengths fit into them, is checked on the
        CPU alone: elsewhere that would wait for the device.

    Notes
    -----
    Engine ``triton`` reads pages where they are for softmax of dot products, up to 16 queries and no gradients;
    ``auto`` uses it on GPUs that were measured (docs/gpu.md). All other calls copy the pages into one tensor
    (B, G, N·size, E).

    Examples
    --------
    >>> import torch, regard
    >>> key, value = torch.randn(2, 9, 4, 16, 8).unbind(0)  # 9 pages of 16 steps, of 4 heads
    >>> table, lengths = torch.tensor([[3, 0], [5, 8]]), torch.tensor([20, 7])
    >>> query = torch.randn(2, 8, 1, 8)
    >>> output = regard.nn.paged_attention(query, key, value, table, lengths)
    >>> first = torch.cat([key[3], key[0]], 1)[None, :, :20], torch.cat([value[3], value[0]], 1)[None, :, :20]
    >>> torch.allclose(output[:1], regard.attention(query[:1], *first, enable_gqa=True), atol=1e-6)
    True
    """
    flag(_NAME, "return_lse", return_lse)
    _check(query, key, value, table, lengths)
    size = key.shape[2]
    mask = masks.padding(lengths)
    if attn_mask is not None:
        queries = torch.full_like(lengths, query.shape[2])
        mask = mask & masks.as_mask(attn_mask, _NAME, "attn_mask").for_lengths(queries, lengths)
    named: dict[str, Any] = {"scale": scale, "enable_gqa": True, "score": score}
    named |= {"normalizer": normalizer, "softcap": softcap}
    triton = TABLE["triton"]
    if engine in ("auto", "triton", triton) and key.shape[0] > 0:
        S = table.shape[1] * size
        first, second = (t[:1, :, :1].expand(len(table), -1, S, -1) for t in (key, value))  # of no memory
        problem = Problem.of(Call(query, first, second, mask, engine=engine, **named))
        supported = triton.why_not(problem) is None and (engine != "auto" or triton.not_automatic(problem) is None)
        if supported and reads_pages(problem):
            output, lse = attend_pages(problem, key, value, table)
            return (output, lse) if return_lse else output
    used = torch.arange(table.shape[1], device=table.device) * size < lengths.unsqueeze(-1)
    pages = torch.where(used, table, 0).to(torch.int64)
    key, value = (t[pages].transpose(1, 2).flatten(2, 3) for t in (key, value))
    if not return_lse:
        return attention(query, key, value, mask, engine=engine, **named)
    output, aux = attention(query, key, value, mask, engine=engine, **named, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return output, aux.lse


def _check(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lengths: Tensor) -> None:
    """Raise if tensors do not fit together; :func:`regard.attention` checks all else."""
    for name, pages in (("key", key), ("value", value)):
        _PAGES(_NAME, name, pages)
    if value.shape[:3] != key.shape[:3]:
        raise rejected(_NAME, "value", f"have key's pages, heads and size {tuple(key.shape[:3])}", shape(value))
    if not isinstance(query, Tensor) or query.dim() != 4:
        got = shape(query) if isinstance(query, Tensor) else type(query).__name__
        raise rejected(_NAME, "query", "be a tensor (B, H, L, E)", got)
    B = query.shape[0]
    for name, tensor, wanted in (("table", _TABLE(_NAME, "table", table), f"({B}, N)"),
                                 ("lengths", _LENGTHS(_NAME, "lengths", lengths), f"({B},)")):  # fmt: skip
        if tensor.shape[0] != B:
            raise rejected(_NAME, name, f"have one row for each sequence, {wanted}", shape(tensor))
        if tensor.device != query.device:
            raise rejected(_NAME, name, f"be on the device of query, {query.device}", str(tensor.device))
    room = table.shape[1] * key.shape[2]
    if lengths.is_cpu and B > 0 and not values_unavailable(lengths):
        least, most = (int(each) for each in lengths.aminmax())
        if least < 0 or most > room:
            wrong = least if least < 0 else most
            raise rejected(_NAME, "lengths", f"be from 0 to {room}, the keys of a row of table", wrong)
    if table.is_cpu and table.numel() > 0 and not values_unavailable(table):
        used = torch.arange(table.shape[1]) * key.shape[2] < lengths.unsqueeze(-1)
        bad = table[used & ((table < 0) | (table >= key.shape[0]))]
        if bad.numel():
            raise rejected(_NAME, "table", f"hold pages from 0 to {key.shape[0] - 1}", int(bad[0]))

"""Linear self-attention of language models, and its cache of sums."""

from __future__ import annotations

from typing import Any, NoReturn, Unpack

from torch import Tensor

from regard._utils.constraints import floats
from regard._utils.errors import described, rejected
from regard._utils.mechanism import mechanism
from regard.masks import MaskLike
from regard.masks.documents import Documents
from regard.nn.heads.self_attention import GroupedProjections, ProjectionOptions
from regard.nn.linear.attention import linear_attention
from regard.nn.linear.recurrence import FeatureMap, check_options

# The cache of linear attention and of recurrences: a state over all steps so far, of constant size -------------------
# Dimensions: B sequences, H heads, F features, V width of values.


class LinearCache:
    """The state of a layer of linear attention, or of another recurrence, after earlier steps.

    The state is a tuple of tensors that begin with the sequences: :class:`LinearState` or :class:`RecurrentState`.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, linear_attention
    >>> cache, (q, k, v) = LinearCache(), torch.randn(3, 1, 2, 5, 8).unbind(0)
    >>> _, state = linear_attention(q, k, v, is_causal=True, return_state=True)
    >>> cache.advance(state, 5)
    >>> len(cache), cache.state.matrix.shape
    (5, torch.Size([1, 2, 8, 8]))
    """

    def __init__(self) -> None:
        self._sums: tuple[Tensor, ...] | None = None  # one row for each sequence
        self._length = 0

    def __len__(self) -> int:
        """Return the number of steps."""
        return self._length

    def __repr__(self) -> str:
        return f"{type(self).__name__}(): {len(self)} steps"

    @property
    def state(self) -> Any:
        """The state of the sequences, as it was given to :meth:`advance`; None before the first step."""
        return self._sums

    def advance(self, state: tuple[Tensor | None, ...], steps: int) -> None:
        """Replace the state by the one after ``steps`` further steps."""
        self._sums, self._length = _whole(state), self._length + steps

    def sequence(self, row: int, first: int = 0, last: int | None = None) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return the state (1, ...) of one sequence, over all steps: a state does not separate them."""
        if self._sums is None:
            raise ValueError("LinearCache: the cache is empty; call advance before reading it.")
        return tuple(each[row : row + 1] for each in self._sums)

    def reorder(self, index: Tensor) -> None:
        """Replace sequence b by sequence ``index[b]``, for beam search."""
        if self._sums is not None:
            kind, made = type(self._sums), [each.index_select(0, index) for each in self._sums]
            self._sums = tuple(made) if kind is tuple else kind(*made)

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` steps: 0 or all, as a state does not separate them."""
        if length == len(self):
            return
        if length:
            raise rejected("LinearCache", "length", f"be 0 or {len(self)}, the number of steps", length)
        self._sums, self._length = None, 0


def cache_of(layer: object, cache: LinearCache, batch: int) -> int:
    """Return the number of steps in a layer's cache; raise if it is of another kind or of another batch size."""
    name = type(layer).__name__
    if not isinstance(cache, LinearCache):
        raise rejected(name, "cache", "be a LinearCache or None", described(cache), TypeError)
    state = cache.state
    if state is not None and state[0].shape[0] != batch:
        raise rejected(name, "cache", f"hold as many sequences as x, {batch}", state[0].shape[0])
    return len(cache)


def _whole(state: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    assert all(each is not None for each in state), "a cache holds tensors"
    return state  # type: ignore[return-value]


# Linear self-attention of language models, with constant cost per token -----------------------------------------------


#: Non-negative feature maps, for which weights can be normalized by their sum.
FEATURE_MAPS = ("elu", "relu")


@mechanism(
    formula="φ(Q)(φ(K)ᵀV) / φ(Q)(φ(K)ᵀ1) over earlier tokens · W_O",
    sources=("katharopoulos2020", "ainslie2023"),
    learned="W_QKV ((H + 2·G)·D, E), W_O (E, H·D), biases",
    cost="O(L·E² + L·E·D)",
    causal="yes",
    cache="H·F·(V + 1), not by token",
)
class LinearSelfAttention(GroupedProjections):
    """Causal :class:`SelfAttention` in which weights are products of features, ``φ(q)·φ(k) / Σ φ(q)·φ(k)``.

    Its cache has constant size: the sums of :func:`linear_attention` (Katharopoulos 2020, arXiv 2006.16236). Head h
    reads the keys and values of group ``h // (H/G)`` (Ainslie 2023, arXiv 2305.13245). Linear attention has no scores,
    so it supports no masks, biases or normalizers, except for document masks.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width E and number of heads H.
    feature_map : {"elu", "relu"} or callable, default "elu"
        φ, non-negative; see :func:`linear_attention`.
    num_kv_heads, head_dim, bias, out_bias, device, dtype : optional
        See :class:`SelfAttention`.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import LinearCache, LinearSelfAttention
    >>> layer, x, cache = LinearSelfAttention(16, 4, num_kv_heads=2).eval(), torch.randn(3, 5, 16), LinearCache()
    >>> with torch.no_grad():
    ...     steps = [layer(t, cache=cache) for t in x.split(1, 1)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: FeatureMap = "elu",
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[ProjectionOptions],
    ) -> None:
        check_options("LinearSelfAttention", feature_map, "auto", 64)
        super().__init__(embed_dim, num_heads, device=device, dtype=dtype, **options)
        self.feature_map = feature_map
        self.reset_parameters()

    def forward(
        self,
        x: Tensor,
        attn_mask: MaskLike | None = None,
        *,
        rotation: None = None,
        cache: LinearCache | None = None,
        return_aux: None = None,
    ) -> Tensor:
        """Return rows (B, L, E), each of which reads the rows before it and itself.

        Parameters
        ----------
        x : Tensor (B, L, E)
        attn_mask : Mask, optional
            ``masks.document(ids)`` only: rows see their own document, a contiguous run of equal ids.
        cache : LinearCache, optional
            The sums over earlier steps; those of ``x`` are added.
        rotation, return_aux : None
            Not supported: there are no scores.
        """
        x = floats(self, "x", x, "B", "L", self.embed_dim)
        for name, given in (("rotation", rotation), ("return_aux", return_aux), ("context", self.context)):
            if given is not None:
                self._refuse(name, "be None", given)
        if cache is not None:
            cache_of(self, cache, x.shape[0])
        q, k, v = self.projected(x)
        if (repeats := q.shape[1] // k.shape[1]) > 1:
            k, v = (each.repeat_interleave(repeats, 1) for each in (k, v))
        output, state = linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            is_causal=True,
            state=None if cache is None else cache.state,
            documents=self._documents(attn_mask),
            return_state=True,
        )
        if cache is not None:
            cache.advance(state, x.shape[1])
        rows: Tensor = self.out(output.transpose(1, 2).flatten(2))
        return rows

    def _documents(self, mask: MaskLike | None) -> Tensor | None:
        if mask is None:
            return None
        if not isinstance(mask, Documents) or mask.kv_ids is not None:
            self._refuse("attn_mask", "be None or masks.document(ids), as linear attention has no scores to mask", mask)
        return mask.ids

    def _refuse(self, name: str, expected: str, given: object) -> NoReturn:
        raise rejected("LinearSelfAttention", name, expected, described(given))

    def extra_repr(self) -> str:
        """Return the sizes and the feature map."""
        name = self.feature_map if isinstance(self.feature_map, str) else getattr(self.feature_map, "__name__", "φ")
        return f"{super().extra_repr()}, feature_map={name!r}"

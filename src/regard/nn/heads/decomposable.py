"""Decomposable attention: soft alignment, comparison and classification of two sentences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import lengths, probability, size
from regard._utils.errors import rejected, shape
from regard._utils.mechanism import mechanism
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.nn._base import Layer, sequences
from regard.nn.heads.scored import without_heads


def _feedforward(inputs: int, hidden: int, dropout: float, **where: Any) -> nn.Sequential:
    """Return two ReLU layers, each preceded by dropout."""
    first, second = nn.Linear(inputs, hidden, **where), nn.Linear(hidden, hidden, **where)
    return nn.Sequential(nn.Dropout(dropout), first, nn.ReLU(), nn.Dropout(dropout), second, nn.ReLU())


@mechanism(
    formula="H([Σ_i G([a_i; β_i]); Σ_j G([b_j; α_j])]), β = softmax(F(a) F(b)ᵀ) b, α = softmax(F(b) F(a)ᵀ) a",
    sources=("parikh2016",),
    learned="F, G and H: feedforward networks of C features",
    cost="O((M + N)·C·(E + C) + M·N·(C + E))",
    reads="dot",
)
class DecomposableAttention(Layer):
    """Parikh's decomposable attention model of sentence pairs: attend, compare, aggregate (2016, arXiv 1606.01933).

    For sentences a (M rows) and b (N rows)::

        attend     β_i = Σ_j softmax_j(F(a_i)ᵀ F(b_j)) b_j        α_j = Σ_i softmax_i(F(a_i)ᵀ F(b_j)) a_i
        compare    u_i = G([a_i; β_i])                            w_j = G([b_j; α_j])
        aggregate  logits = H([Σ_i u_i; Σ_j w_j])

    F and G have two ReLU layers, H two ReLU layers and a linear one. Word order has no effect. Apply the paper's
    projection of embeddings to width E before this layer.

    Parameters
    ----------
    embed_size : int
        Width E of the rows of both sentences.
    hidden_size : int
        Features C of F, G and H.
    classes : int
        Number of classes.
    dropout : float, default 0.0
        Dropout probability before each layer of F, G and H, in training (0.2 in the paper).
    engine : str, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Examples
    --------
    >>> import torch, regard
    >>> from regard.nn import DecomposableAttention
    >>> layer = DecomposableAttention(6, 8, classes=3)
    >>> a, b = torch.randn(2, 4, 6), torch.randn(2, 5, 6)
    >>> logits, (to_b, to_a) = layer(a, b, b_lens=torch.tensor([5, 2]), return_aux=regard.AuxRequest(weights=True))
    >>> logits.shape, to_b.weights.shape, to_a.weights.shape
    (torch.Size([2, 3]), torch.Size([2, 4, 5]), torch.Size([2, 5, 4]))
    """

    def __init__(
        self,
        embed_size: int,
        hidden_size: int,
        classes: int,
        dropout: float = 0.0,
        *,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.embed_size, C = size(self, "embed_size", embed_size), size(self, "hidden_size", hidden_size)
        dropout, self.engine, where = probability(self, "dropout", dropout), engine, {"device": device, "dtype": dtype}
        self.attend = _feedforward(self.embed_size, C, dropout, **where)
        self.compare = _feedforward(2 * self.embed_size, C, dropout, **where)
        self.aggregate = _feedforward(2 * C, C, dropout, **where)
        self.classify = nn.Linear(C, size(self, "classes", classes), **where)

    def reset_parameters(self) -> None:
        """Draw all parameters as ``nn.Linear`` does."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    def forward(
        self,
        a: Tensor,
        b: Tensor,
        a_lens: Tensor | None = None,
        b_lens: Tensor | None = None,
        *,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Aux, Aux]]:
        """Return the logits of each pair of sentences.

        Parameters
        ----------
        a : Tensor (B, M, E)
        b : Tensor (B, N, E)
        a_lens, b_lens : Tensor (B,) of int, optional
            Number of valid rows per sentence; later rows are ignored. A sentence may be empty.
        return_aux : AuxRequest, optional
            Auxiliary outputs of the two alignments to return.

        Returns
        -------
        logits : Tensor (B, classes)
        (Aux, Aux)
            Only if requested: for a attending to b, with weights (B, M, N), and for b attending to a, with weights
            (B, N, M). Padded rows count as zeros.
        """
        a, b = (sequences(self, name, t, self.embed_size) for name, t in (("a", a), ("b", b)))
        if a.shape[0] != b.shape[0]:
            raise rejected("DecomposableAttention", "b", f"have a's batch size {len(a)}", f"{len(b)} (b {shape(b)})")
        a_real, b_real = self._real("a_lens", a, a_lens), self._real("b_lens", b, b_lens)
        a, b = _cleared(a, a_real), _cleared(b, b_real)
        f_a, f_b = self.attend(a), self.attend(b)  # (B, M, C), (B, N, C)
        beta, to_b = self._aligned(f_a, f_b, b, b_lens, return_aux)  # (B, M, E)
        alpha, to_a = self._aligned(f_b, f_a, a, a_lens, return_aux)  # (B, N, E)
        found_a = _cleared(self.compare(torch.cat([a, beta], -1)), a_real).sum(1)  # (B, C)
        found_b = _cleared(self.compare(torch.cat([b, alpha], -1)), b_real).sum(1)  # (B, C)
        logits: Tensor = self.classify(self.aggregate(torch.cat([found_a, found_b], -1)))
        return logits if to_a is None or to_b is None else (logits, (to_b, to_a))

    def _aligned(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None, request: AuxRequest | None
    ) -> tuple[Tensor, Aux | None]:
        """Return the soft alignment of each query, and the requested auxiliary outputs."""
        answer = attention(
            query.unsqueeze(1),
            key.unsqueeze(1),
            value.unsqueeze(1),
            None if lengths is None else masks.padding(lengths),
            score="dot",
            engine=self.engine,
            return_aux=request,
        )
        if isinstance(answer, Tensor):
            return answer.squeeze(1), None
        return answer[0].squeeze(1), without_heads(answer[1])

    def _real(self, argument: str, sentence: Tensor, valid_lens: Any) -> Tensor | None:
        """Check the lengths and return which rows (B, N) are valid."""
        if valid_lens is None:
            return None
        length = lengths(self, argument, valid_lens, *sentence.shape[:2])
        return torch.arange(sentence.shape[1], device=sentence.device) < length.unsqueeze(1)

    def extra_repr(self) -> str:
        """Return the settings, without the networks'."""
        return f"embed_size={self.embed_size}"


def _cleared(sentence: Tensor, real: Tensor | None) -> Tensor:
    """Zero the padding, even if it holds NaN."""
    return sentence if real is None else torch.where(real.unsqueeze(-1), sentence, 0.0)

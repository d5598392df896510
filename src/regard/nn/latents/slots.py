"""Slot attention: a few slots compete for the elements of an input.

Dimensions: B sequences, K slots, N inputs, E width of inputs, D width of slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard._utils.constraints import Number, floats, lengths, size
from regard._utils.mechanism import mechanism
from regard._utils.tracing import autocast_suspended
from regard.engines import EngineLike
from regard.engines.aux import Aux, AuxRequest
from regard.functional import attention
from regard.masks import Mask
from regard.nn._base import Layer, parameter, reset_children, sequences, zero_padding
from regard.nn.transformer import FeedForward


@mechanism(
    formula="S ← GRU(u, S) + MLP(LN(·)), u_i = Σ_j (a_ij + ε) v_j / Σ_j (a_ij + ε), a_ij = softmax_i(q_i·k_j / √D)",
    sources=("locatello2020",),
    learned="μ, σ (D), W_q (D, D), W_k, W_v (E, D), GRU, MLP, layer norms",
    cost="O(rounds·(K·N·D + K·D²) + N·E·D)",
    reads="scaled_dot",
)
class SlotAttention(Layer):
    """Slot attention: K slots compete for N inputs, which divide their attention among the slots (Locatello 2020).

    In each of a few rounds, ``a_ij = exp(q_i·k_j / √D) / Σ_i' exp(q_i'·k_j / √D)``: the softmax is over slots (arXiv
    2006.15055). A slot takes the mean of values with these weights, ``u_i = Σ_j (a_ij + ε) v_j / Σ_j (a_ij + ε)``, and
    becomes ``GRU(u_i, S_i)``, to which ``MLP(LN(S_i))`` is added. Queries come from ``LN(S)``, keys and values from
    ``LN(X)``. Slots start as ``μ + σ ⊙ noise``, with new noise at every call. Permuting the inputs changes nothing;
    permuting the initial slots permutes the slots.

    Each round is two calls of :func:`regard.attention`: ``a_ij`` divided by its sum over inputs is the softmax over
    inputs of ``q_i·k_j / √D − z_j``, where ``z_j`` is the log-sum-exp over slots. No K × N matrix is needed.

    Parameters
    ----------
    slot_dim : int
        Width D of the slots.
    num_slots : int
        Number of slots K that are drawn if none are given.
    input_dim : int, optional
        Width E of the inputs; defaults to D.
    hidden_dim : int, optional
        Hidden width of the MLP; defaults to 2·D.
    rounds : int, default 3
        Number of rounds.
    eps : float, default 1e-8
        ε.
    engine : str or Engine, default "auto"
        See :func:`regard.attention`.
    device, dtype : optional
        Device and dtype of the parameters.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid.

    Examples
    --------
    >>> import torch
    >>> from regard.nn import SlotAttention
    >>> layer = SlotAttention(8, num_slots=4, input_dim=3)
    >>> layer(torch.randn(2, 100, 3), torch.tensor([100, 20])).shape
    torch.Size([2, 4, 8])
    """

    def __init__(
        self,
        slot_dim: int,
        num_slots: int,
        *,
        input_dim: int | None = None,
        hidden_dim: int | None = None,
        rounds: int = 3,
        eps: float = 1e-8,
        engine: EngineLike = "auto",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        D, where = size(self, "slot_dim", slot_dim), {"device": device, "dtype": dtype}
        self.slot_dim, self.num_slots = D, size(self, "num_slots", num_slots)
        self.input_dim = D if input_dim is None else size(self, "input_dim", input_dim)
        self.rounds, self.eps = size(self, "rounds", rounds), Number(ge=0)(self, "eps", eps)
        self.engine = engine
        self.mean = parameter(D, **where)
        self.log_std = parameter(D, **where)
        self.input_norm = nn.LayerNorm(self.input_dim, **where)
        self.slot_norm = nn.LayerNorm(D, **where)
        self.q_proj = nn.Linear(D, D, False, **where)
        self.k_proj = nn.Linear(self.input_dim, D, False, **where)
        self.v_proj = nn.Linear(self.input_dim, D, False, **where)
        self.gru = nn.GRUCell(D, D, **where)
        self.mlp_norm = nn.LayerNorm(D, **where)
        hidden = 2 * D if hidden_dim is None else size(self, "hidden_dim", hidden_dim)
        self.mlp = FeedForward(D, hidden, "relu", **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialize maps and norms as torch does, and μ and log σ by Glorot's rule."""
        reset_children(self)
        for row in (self.mean, self.log_std):
            nn.init.xavier_uniform_(row.view(1, -1))

    def forward(
        self,
        inputs: Tensor,
        valid_lens: Tensor | None = None,
        *,
        slots: Tensor | None = None,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Return the slots after the last round.

        Parameters
        ----------
        inputs : Tensor (B, N, E)
        valid_lens : Tensor (B,) of int, optional
            Number of valid inputs per sequence; later ones are ignored.
        slots : Tensor (B, K, D), optional
            The initial slots, in any number. By default they are drawn, in float32, from ``torch``'s generator.
        return_aux : AuxRequest, optional
            Auxiliary outputs to return, of the last round's read: weights (B, 1, K, N) sum to 1 over inputs.

        Returns
        -------
        output : Tensor (B, K, D)
        aux : Aux
            Only if requested.
        """
        inputs = sequences(self, "inputs", inputs, self.input_dim)
        B, N = inputs.shape[:2]
        mask, count = None, torch.full((B,), N, device=inputs.device)
        if valid_lens is not None:
            mask, count = masks.padding(lengths(self, "valid_lens", valid_lens, B)), valid_lens.to(inputs.device)
            inputs = zero_padding(inputs, valid_lens)
        slots = self._drawn(B) if slots is None else floats(self, "slots", slots, B, "K", self.slot_dim)
        rows = self.input_norm(inputs)
        k, v = (each(rows).unsqueeze(1) for each in (self.k_proj, self.v_proj))
        real = torch.arange(N, device=inputs.device) < count.unsqueeze(1)
        total = torch.where(real[:, None, :, None], v, 0.0).sum(2, keepdim=True)  # (B, 1, 1, D)
        aux = None
        for turn in range(self.rounds):
            last = turn + 1 == self.rounds
            update, aux = self._round(slots, k, v, mask, total, count, return_aux if last else None)
            slots = self._updated(update, slots)
        return slots if aux is None else (slots, aux)

    def _round(
        self,
        slots: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        total: Tensor,
        count: Tensor,
        return_aux: AuxRequest | None,
    ) -> tuple[Tensor, Aux | None]:
        """Return the means (B, K, D) of values that slots take, and the requested fields."""
        q = self.q_proj(self.slot_norm(slots)).unsqueeze(1)
        wanted = AuxRequest(lse="grad")
        _, over_slots = attention(k, q, q, engine=self.engine, return_aux=wanted)
        assert over_slots.lse is not None
        shares = masks.dense(-over_slots.lse.unsqueeze(2))  # (B, 1, 1, N), added to the score of each slot
        both = shares if mask is None else mask & shares
        read, over_inputs = attention(q, k, v, both, engine=self.engine, return_aux=wanted)
        assert over_inputs.lse is not None
        if self.eps:  # Σ_j a_ij = exp(lse_i), so that the mean with ε needs no weights either
            mass = over_inputs.lse.exp().unsqueeze(3)
            whole = mass + self.eps * count.to(mass.dtype).view(-1, 1, 1, 1)
            mixed = mass * read + self.eps * total
            read = torch.where(whole == 0, 0.0, mixed / torch.where(whole == 0, 1.0, whole))
        aux = None
        if return_aux is not None:
            _, aux = attention(q, k, v, both, engine=self.engine, return_aux=return_aux)
        return read.squeeze(1), aux

    def _updated(self, update: Tensor, slots: Tensor) -> Tensor:
        """Return the slots after the GRU and the MLP, in the slots' dtype."""
        with autocast_suspended(slots.device.type):  # its GRU would mix dtypes
            wide = self.gru.weight_ih.dtype
            slots = self.gru(update.to(wide).flatten(0, 1), slots.to(wide).flatten(0, 1)).view_as(slots)
        fed: Tensor = slots + self.mlp(self.mlp_norm(slots))
        return fed

    def _drawn(self, batch: int) -> Tensor:
        noise = torch.randn(batch, self.num_slots, self.slot_dim, device=self.mean.device, dtype=torch.float32)
        return self.mean + self.log_std.exp() * noise.to(self.mean.dtype)

    def extra_repr(self) -> str:
        """Return the settings that the projections do not show."""
        return f"num_slots={self.num_slots}, rounds={self.rounds}"

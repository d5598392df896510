"""Recurrent layers as torch has them, and what is drawn and picked of them."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn

from regard._utils.torch_private import has_bfloat16_cells
from regard._utils.tracing import autocast_is_active, autocast_suspended


class LSTM(nn.LSTM):
    """torch's, which oneDNN refuses to run in bfloat16 on a CPU that has no instructions for it: there in float32."""

    def forward(self, rows: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        native = rows.device.type != "cpu" or not autocast_is_active("cpu") or has_bfloat16_cells()
        with nullcontext() if native else autocast_suspended("cpu"):
            if not native:
                rows, state = rows.float(), None if state is None else (state[0].float(), state[1].float())
            made: tuple[Tensor, tuple[Tensor, Tensor]] = super().forward(rows, state)
        return made


CELLS = {"lstm": LSTM, "gru": nn.GRU}


def reset_cells(cells: nn.Module, kind: str) -> None:
    """Draw a recurrent layer's parameters: orthogonal recurrences, and open forget gates."""
    gates = 4 if kind == "lstm" else 3
    for name, parameter in cells.named_parameters():
        if "weight_hh" in name:
            for gate in parameter.data.chunk(gates):
                nn.init.orthogonal_(gate)
        elif "weight_ih" in name:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
            if gates == 4 and "bias_ih" in name:
                nn.init.ones_(parameter.data.chunk(4)[1])


def pick_rows(sequences: Tensor, steps: Tensor) -> Tensor:
    """Return the rows (B, L, C) of sequences (B, S, C) at these steps (B, L)."""
    return sequences.gather(1, steps[..., None].expand(-1, -1, sequences.shape[-1]))

"""What a model answers without a head.

Dimensions: B batch, L positions, N possible answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.errors import described, rejected
from regard.inspect._capture.interception import ablate

#: How many answers are kept.
_KEPT = 5


@dataclass(frozen=True)
class HeadEffect:
    """What a model answers with and without a head.

    Attributes
    ----------
    layer : int or str
    head : int
    before, after : tuple of (str, float)
        The five most probable answers with the head and without it; empty if the answers have no names.
    change : float
        The total variation distance ½ Σ |p − p′| between all probabilities, in [0, 1]; without names, the size of the
        output's change divided by that of the output.
    text : str
        One sentence.
    """

    layer: int | str
    head: int
    before: tuple[tuple[str, float], ...]
    after: tuple[tuple[str, float], ...]
    change: float
    text: str

    def __str__(self) -> str:
        return self.text

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return asdict(self)


def head_effect(
    model: nn.Module, run: Callable[[], object], layer: int | str, head: int, *,
    names: Callable[[int], str] | None = None, batch: int = 0,
) -> HeadEffect:  # fmt: skip
    """Run a model with and without a head, and return how its answer differs.

    Parameters
    ----------
    model : Module
    run : callable
        Runs the model on its inputs and returns its output: a tensor, or what has ``logits`` or ``last_hidden_state``.
        Both runs are without gradients; a model that draws random numbers gives other answers each time.
    layer, head
        As in :func:`ablate`.
    names : callable, optional
        The name of answer n: a label, or a token. The output then is logits (B, N), or (B, L, N), of which the last
        position counts. Without it, outputs are compared as they are.
    batch : int
        Which sequence.

    Raises
    ------
    TypeError, ValueError
        As in :func:`ablate`; or the output is no tensor, or no logits although there are names.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import head_effect
    >>> model = torch.nn.MultiheadAttention(2, 1, batch_first=True)
    >>> model.load_state_dict({"in_proj_weight": torch.eye(2).repeat(3, 1), "in_proj_bias": torch.zeros(6),
    ...                        "out_proj.weight": torch.eye(2), "out_proj.bias": torch.tensor([0.5, 0.0])})
    <All keys matched successfully>
    >>> x = torch.tensor([[[0.0, 1.0]]])
    >>> print(head_effect(model.eval(), lambda: model(x, x, x), 0, 0, names=["cat", "dog"].__getitem__))
    without this head the answer is "cat" (0.62), not "dog" (0.62)
    """
    with torch.no_grad():
        whole = _output(run(), batch)
        with ablate(model, layer, head):
            part = _output(run(), batch)
    if whole.shape != part.shape:
        raise rejected(
            "head_effect", "run", "return outputs of one shape", f"{tuple(whole.shape)}, {tuple(part.shape)}"
        )
    if names is None:
        size = float(whole.norm())
        change = float((whole - part).norm()) / size if size else 0.0
        return HeadEffect(layer, head, (), (), change, f"without this head the output changes by {100 * change:.1f} %")
    if whole.dim() not in (1, 2) or not whole.numel():
        expected = "return logits (B, N) or (B, L, N), for answers with names"
        raise rejected("head_effect", "run", expected, f"shape {(1, *whole.shape)}")
    one, other = (each.reshape(-1, each.shape[-1])[-1].softmax(-1) for each in (whole, part))
    before, after = (_best(each, names) for each in (one, other))
    change = 0.5 * float((one - other).abs().sum())
    (answer, share), (instead, less) = before[0], after[0]
    if answer == instead:
        text = f'without this head the answer is still "{answer}" ({less:.2f}, not {share:.2f})'
    else:
        text = f'without this head the answer is "{instead}" ({less:.2f}), not "{answer}" ({share:.2f})'
    return HeadEffect(layer, head, before, after, change, text)


def _output(answer: Any, batch: int) -> Tensor:
    """Return the output of one sequence in float64."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(answer, name, None), Tensor):
            answer = found
    if isinstance(answer, tuple | list) and answer:
        answer = answer[0]
    if not isinstance(answer, Tensor):
        raise rejected("head_effect", "run", "return a tensor or what has logits", described(answer), TypeError)
    if not answer.dim() or not -len(answer) <= batch < len(answer):
        raise rejected("head_effect", "batch", f"be below {len(answer) if answer.dim() else 0}, the batch size", batch)
    return answer[batch].detach().double().cpu()


def _best(probabilities: Tensor, names: Callable[[int], str]) -> tuple[tuple[str, float], ...]:
    top = probabilities.topk(min(_KEPT, len(probabilities)))
    return tuple((names(number), share) for share, number in zip(top.values.tolist(), top.indices.tolist()))

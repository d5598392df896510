"""Change what a layer attends to while a model runs: remove heads, or give them other weights.

Dimensions: B batch, H query heads, L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard._errors import described, rejected, shape, unknown_name
from regard.inspect.calls import Attended, Change
from regard.inspect.interception import intervening
from regard.inspect.layer_record import LayerRecord
from regard.inspect.layer_tracker import Caller, LayerTracker, chosen
from regard.inspect.record import Record


class Intervention:
    """What becomes of one layer's heads.

    Attributes
    ----------
    function : str
        Who asked for it, for errors.
    names : mapping of int to str
        The model's modules, by their identities.
    latest : Change
        That of the last call.
    """

    def __init__(
        self,
        function: str,
        model: nn.Module,
        layer: int | str,
        head: int | Sequence[int] | None,
        runs: Sequence[Tensor | LayerRecord] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise rejected(function, "model", "be a torch.nn.Module", described(model), TypeError)
        self.function = function
        self.names: Mapping[int, str] = {id(module): name for name, module in model.named_modules()}
        self.latest = Change(())
        self._layer, self._head, self._runs = layer, head, runs
        self._tracker = LayerTracker()
        self._calls = 0

    def concerns(self, caller: Caller, attended: Attended) -> bool:
        """Whether a call is of the layer."""
        if attended.query.is_nested:
            run, _ = self._tracker.run_of(caller, None, None)
        else:
            call = attended.flat()
            run, _ = self._tracker.run_of(caller, call.query, call.marks)
        return chosen(run.layer, self._tracker.layers, self._layer)

    def change(self, attended: Attended) -> Change:
        """Return the weights of a call."""
        if attended.query.is_nested:
            raise rejected(self.function, "layer", "attend in tensors that are not nested", repr(self._layer))
        *lead, H, L, _ = (1, 1, *attended.query.shape)
        B, S = torch.Size(torch.broadcast_shapes(lead, attended.key.shape[:-3])).numel(), attended.key.shape[-2]
        heads = self._heads(H)
        weights = None
        if self._runs:
            given = self._runs[self._calls % len(self._runs)]
            weights = given.weights() if isinstance(given, LayerRecord) else given
            if weights.dim() > 4 or weights.shape[-2:] != (L, S) or not _fits(weights.shape[:-2], (B, H)):
                expected = f"be of shape {(B, H, L, S)}, or without the first dimensions"
                raise rejected(self.function, "weights", expected, shape(weights))
            weights = weights.expand(B, H, L, S)[:, list(heads)]
        self._calls += 1
        self.latest = Change(heads, weights)
        return self.latest

    def _heads(self, H: int) -> tuple[int, ...]:
        if self._head is None:
            return tuple(range(H))
        heads = (self._head,) if isinstance(self._head, int) else tuple(self._head)
        for each in heads:
            if isinstance(each, bool) or not isinstance(each, int) or not -H <= each < H:
                raise rejected(self.function, "head", f"be one or more numbers below {H}", repr(self._head))
        return tuple(each % H for each in heads)

    def require_calls(self) -> None:
        """Raise where the layer was not among those that ran."""
        self._tracker.forget()
        if self._calls:
            return
        if not self._tracker.layers:
            raise rejected(self.function, "layer", "run in the block", "no call of attention that is seen")
        if isinstance(self._layer, str):
            raise unknown_name(self.function, "layer", self._layer, self._tracker.layers)
        raise rejected(
            self.function, "layer", f"be below {len(self._tracker.layers)}, as many as ran", repr(self._layer)
        )


@contextmanager
def ablate(model: nn.Module, layer: int | str, head: int | Sequence[int] | None = None) -> Iterator[None]:
    """Remove heads of a layer while a ``with`` block runs: their output is zero (Michel 2019, arXiv 1905.10650).

    Seen are the models and functions that :func:`regard.inspect.capture` sees; torch's modules leave their fast paths
    in this thread. The model itself is not changed.

    Parameters
    ----------
    model : Module
    layer : int or str
        A layer as a :class:`Record` has it: its name, or its number in the order in which layers run in the block. A
        module that is several layers, as ALBERT's is, means all of them, and "module#3" the third.
    head : int or sequence of int, optional
        All by default.

    Raises
    ------
    TypeError, ValueError
        If the model is none, a head is not there, or the block ends without a call of the layer: a model compiled
        before, for example, does not call what is replaced here.

    Notes
    -----
    Blocks nest: in one layer the inner one comes last. A capture of the same block records the weights as zero, and
    the log-sum-exp of the scores as it was. A backward pass that computes checkpointed layers again belongs in the
    block.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import ablate
    >>> model = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 16)
    >>> with ablate(model, 0):  # all heads: what is left is the bias
    ...     out, _ = model(x, x, x)
    >>> torch.equal(out, model.out_proj.bias.expand(1, 5, 16))
    True
    """
    intervention = Intervention("ablate", model, layer, head)
    with intervening(intervention, model):
        yield
    intervention.require_calls()


@contextmanager
def patch(
    model: nn.Module,
    layer: int | str,
    weights: Tensor | LayerRecord | Record,
    head: int | Sequence[int] | None = None,
) -> Iterator[None]:
    """Let a layer use other weights while a ``with`` block runs: those of another run, or any matrix.

    The output of a head is ``Σ_j weights[i, j] · v_j``, with the values of the run; gradients flow to them. Weights
    need not sum to one. Dropout does not apply to them.

    Parameters
    ----------
    model, layer, head
        As :func:`ablate` takes them.
    weights : Tensor (B, H, L, S), (H, L, S) or (L, S), LayerRecord or Record
        Of a record, those of the layer of this name or number: its first call in the block takes its first run, the
        next one the next, and after the last comes the first again.

    Raises
    ------
    TypeError, ValueError
        As :func:`ablate` does, and if the weights are not of the shape of a call.

    Examples
    --------
    >>> import torch
    >>> from regard.inspect import capture, patch
    >>> model = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    >>> x, other = torch.randn(2, 1, 5, 16)
    >>> with capture(model) as record:
    ...     out, _ = model(other, other, other)
    >>> with patch(model, 0, record, head=[1, 2]):
    ...     out, weights = model(x, x, x, average_attn_weights=False)
    >>> torch.equal(weights[:, 1:3], record[0].weights(head=slice(1, 3)))
    True
    """
    if isinstance(weights, Record):
        runs: Sequence[Tensor | LayerRecord] = weights.runs(layer)
    elif isinstance(weights, LayerRecord | Tensor):
        runs = [weights]
    else:
        raise rejected("patch", "weights", "be a Tensor or a record", described(weights), TypeError)
    intervention = Intervention("patch", model, layer, head, runs)
    with intervening(intervention, model):
        yield
    intervention.require_calls()


def _fits(lead: tuple[int, ...], whole: tuple[int, int]) -> bool:
    return all(each in (1, size) for each, size in zip(reversed(lead), reversed(whole)))

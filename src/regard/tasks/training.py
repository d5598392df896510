"""Training an encoder–decoder within a budget of time or steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._errors import rejected
from regard.models import RecurrentEncoderDecoder
from regard.tasks.batches import Batch
from regard.tasks.vocabulary import END, PAD


@dataclass(frozen=True)
class Recipe:
    """How to train. The defaults are what worked best for pronunciation within three minutes on two cores.

    Attributes
    ----------
    learning_rate : float
        Of AdamW at its peak. It rises from 0 over the first ``warmup`` of the budget, then falls to 0 at its end.
    warmup : float
        Share of the budget.
    weight_decay, clip : float
        Of AdamW; the largest norm of the gradient.
    bfloat16 : bool or None
        Whether matrix products run in bfloat16. None: where the processor has instructions for it.
    """

    learning_rate: float = 5e-3
    warmup: float = 0.03
    weight_decay: float = 0.01
    clip: float = 1.0
    bfloat16: bool | None = None

    def rate(self, progress: float) -> float:
        """Return the learning rate at this share of the budget, in [0, 1]."""
        return self.learning_rate * min(progress / self.warmup if self.warmup else 1.0, 1.0) * (1.0 - progress)


@dataclass(frozen=True)
class Progress:
    """Where training stands after a step.

    Attributes
    ----------
    steps, sequences : int
        Done so far.
    seconds : float
        Since training began.
    fraction : float
        Share of the budget that is used up, in [0, 1].
    loss : float
        Mean cross-entropy of a symbol in nats, averaged over about the last fifty steps.
    interrupted : bool
        Whether a keyboard interrupt ended training before its budget did.
    """

    steps: int = 0
    sequences: int = 0
    seconds: float = 0.0
    fraction: float = 0.0
    loss: float = float("nan")
    interrupted: bool = False

    @property
    def rate(self) -> float:
        """Sequences per second so far."""
        return self.sequences / self.seconds if self.seconds else 0.0


def train(
    model: RecurrentEncoderDecoder,
    batches: Iterable[Batch],
    *,
    seconds: float | None = None,
    steps: int | None = None,
    recipe: Recipe | None = None,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Train a model in place until its budget of seconds or of steps is used up.

    A keyboard interrupt ends training early; what was learned stays in the model. With ``steps`` and a seed the
    result is the same on every run; with ``seconds`` it depends on how far the machine gets.

    Parameters
    ----------
    model : RecurrentEncoderDecoder
        Left in evaluation mode.
    batches : iterable of Batch
        Endless, or training ends with it.
    seconds : float, optional
    steps : int, optional
        Exactly one of the two.
    recipe : Recipe, optional
    report : callable, optional
        Called with a :class:`Progress` after every step.

    Returns
    -------
    Progress
        At the end.

    Raises
    ------
    ValueError
        If not exactly one budget is given, or it is not positive.
    """
    budget = seconds if steps is None else steps
    if budget is None or (seconds is not None and steps is not None):
        raise rejected("train", "seconds or steps", "be given, and not both", f"{seconds} and {steps}")
    if not budget > 0:
        raise rejected("train", "seconds" if steps is None else "steps", "be positive", budget)
    recipe = recipe or Recipe()
    update = _Updater(model, recipe)
    progress, begin = Progress(), time.monotonic()
    model.train()
    try:
        for batch in batches:
            if progress.fraction >= 1.0:
                break
            loss = update(batch, recipe.rate(progress.fraction))
            used = time.monotonic() - begin
            progress = Progress(
                steps=progress.steps + 1,
                sequences=progress.sequences + len(batch.source),
                seconds=used,
                fraction=min(1.0, (used if steps is None else progress.steps + 1) / budget),
                loss=loss if not progress.steps else progress.loss + 0.02 * (loss - progress.loss),
            )
            if report is not None:
                report(progress)
    except KeyboardInterrupt:
        progress = replace(progress, interrupted=True)
    finally:
        model.eval()
    return progress


class _Updater:
    """One step of gradient descent."""

    def __init__(self, model: RecurrentEncoderDecoder, recipe: Recipe) -> None:
        self.model = model
        self.clip = recipe.clip
        self.bfloat16 = has_fast_bfloat16() if recipe.bfloat16 is None else recipe.bfloat16
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True
        )

    def __call__(self, batch: Batch, rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item()

    def _loss(self, batch: Batch) -> Tensor:
        start = torch.full_like(batch.target[:, :1], END)
        shifted = torch.cat([start, batch.target[:, :-1]], dim=1)  # (B, T)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
            logits = self.model(batch.source, batch.lengths, shifted)  # (B, T, N)
        return F.cross_entropy(logits.float().flatten(0, 1), batch.target.flatten(), ignore_index=PAD)


def has_fast_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 matrices in hardware; elsewhere it is slower than float32."""
    able: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))

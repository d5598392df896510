"""A tiny model of a family on its own attention ("eager") and on ours, compared in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from benchmarks.families import stand_ins
from benchmarks.families.inputs import B, Draw, L, candidates, text_and_images
from benchmarks.families.tiny_configs import tiny
from regard.integrations.transformers.attention_function import attention_function

#: How far numbers may be apart, relative to the largest of them where that is above 1.
NEAR = 1e-5
#: How much of the second sequence of a batch is padding.
PADDED = 4
#: Classes that are compiled, too.
COMPILED = frozenset((
    "LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel", "Qwen3ForCausalLM", "BertModel",
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "ViTModel", "GptOssForCausalLM", "Llama4ForCausalLM",
))  # fmt: skip
OURS, THEIRS = "regard", "eager"

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """What was found of one check of one class.

    Attributes
    ----------
    check : str
    verdict : {"equal", "different", "refused", "no attention", "not built", "not run", "recorded", "reported"}
    detail : str
    """

    check: str
    verdict: str
    detail: str = ""


def build(cls: type[PreTrainedModel]) -> PreTrainedModel:
    """Return a tiny model whose attention matters: its weights are larger than those of a new model."""
    torch.manual_seed(0)
    stand_ins.register()
    config = tiny(cls.config_class)
    model = cls._from_config(config, attn_implementation=THEIRS) if hasattr(cls, "_from_config") else cls(config)
    if sum(p.numel() for p in model.parameters()) > 3e7:
        raise ValueError("too large")
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.numel() and parameter.is_floating_point():
                fan = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * (1.5 / fan**0.5))
            elif parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model.eval()


def fresh(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return copies of inputs: some models change theirs."""
    return deepcopy(inputs)


def cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs with real numbers of a dtype."""
    return {name: _each(lambda t: t.to(dtype) if t.is_floating_point() else t, value) for name, value in inputs.items()}


def _each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a value with a function applied to each tensor in it."""
    if isinstance(value, (list, tuple)):
        return type(value)(_each(function, inner) for inner in value)
    return function(value) if isinstance(value, Tensor) else value


def numbers(output: Any) -> dict[str, Tensor]:
    """Return the real tensors of a model's output by name, without caches."""
    found: dict[str, Tensor] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, Cache):
            return
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found[name] = value
        elif isinstance(value, (ModelOutput, dict)):
            for key, inner in value.items():
                collect(f"{name}.{key}" if name else key, inner)
        elif isinstance(value, (tuple, list)):
            for i, inner in enumerate(value):
                collect(f"{name}.{i}", inner)

    collect("", output)
    return found


def apart(theirs: dict[str, Tensor], ours: dict[str, Tensor], keep: Tensor | None = None) -> tuple[float, str]:
    """Return how far outputs are apart at most, and where; padding does not count."""
    worst, where = 0.0, ""
    if theirs.keys() != ours.keys():
        return float("inf"), f"{sorted(theirs.keys() ^ ours.keys())[:3]}"
    for name, right in theirs.items():
        found = ours[name]
        if found.shape != right.shape:
            return float("inf"), f"{name}: shapes {tuple(right.shape)}, {tuple(found.shape)}"
        if keep is not None and right.dim() > 1 and right.shape[:2] == keep.shape:
            right, found = right[keep], found[keep]
        elif keep is not None and right.dim() and len(right) == len(keep):  # models may pool padding
            right, found = right[keep.all(1)], found[keep.all(1)]
        if not right.numel():
            continue
        both = right.isfinite() & found.isfinite()
        same = (right == found) | (right.isnan() & found.isnan()) | both
        if not bool(same.all()):
            return float("inf"), f"{name}: not finite"
        difference = float((right - found)[both].abs().max()) if bool(both.any()) else 0.0
        difference /= max(1.0, float(right[both].abs().max()) if bool(both.any()) else 1.0)
        if difference > worst:
            worst, where = difference, name
    return worst, where


def reason(error: BaseException) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:240]


def attempted(run: Callable[[], T], otherwise: T) -> tuple[T, str]:
    """Return the result of a run and "", or another value and the error: models of transformers raise any."""
    try:
        return run(), ""
    except Exception as error:
        return otherwise, f"; {reason(error)}"


class Family:
    """One class of models, its inputs, and the checks."""

    def __init__(self, cls: type[PreTrainedModel]) -> None:
        self.model = build(cls)
        self.inputs = self._inputs()

    def _inputs(self) -> dict[str, Any]:
        found, error = self._first_that_runs(candidates(self.model))
        if found is None:
            raise error or ValueError("no inputs are known for this class")
        return found

    def _first_that_runs(self, many: Iterator[dict[str, Any]]) -> tuple[dict[str, Any] | None, BaseException | None]:
        """Return the first inputs that the model takes on its own attention, or why it does not take the first."""
        first: BaseException | None = None
        for inputs in many:
            try:
                self.run(THEIRS, inputs)
            except Exception as error:
                first = first or error
            else:
                return inputs, None
        return None, first

    def run(self, implementation: str, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Return a model's outputs."""
        with torch.no_grad():
            self.use(implementation)
            torch.manual_seed(3)
            return numbers(self.model(**fresh(inputs)))

    def use(self, implementation: str) -> None:
        """Let the model run on an implementation."""
        if self.model.config._attn_implementation != implementation or implementation == OURS:
            self.model.set_attn_implementation(implementation)

    def compared(self, check: str, call: Callable[[str], dict[str, Tensor]], keep: Tensor | None = None) -> Found:
        """Return how ours differs from theirs in what a call gives: in float32, where that is too far in float64."""
        try:
            theirs = call(THEIRS)
        except Exception as error:
            return Found(check, "not run", reason(error))
        try:
            worst, where = apart(theirs, call(OURS), keep)
        except Exception as error:
            return Found(check, "refused", reason(error))
        if worst <= NEAR:
            return Found(check, "equal", f"{worst:.1g}")
        errors = ""
        if self.model._supports_sdpa:
            near, errors = attempted(lambda: apart(call("sdpa"), call(OURS), keep)[0], math.inf)
            if near <= NEAR:
                return Found(check, "equal", f"to sdpa, from which eager is {worst:.1g} apart")
        inputs = self.inputs
        self.model.double()
        self.inputs = cast(inputs, torch.float64)
        exact, error = attempted(lambda: call(THEIRS), None)
        exactly, rounding = math.inf, 0.0
        if exact is not None:
            rounding = apart(theirs, exact, keep)[0]
            exactly, error = attempted(lambda: apart(exact, call(OURS), keep)[0], math.inf)
        self.model.float()
        self.inputs = inputs
        # Ours may be twice as far from the exact value as eager is, and eager is on the other side.
        if exactly <= rounding and worst <= 3 * rounding:
            return Found(check, "equal", f"{worst:.2g}, where eager in float32 is {rounding:.1g} from float64")
        errors += error
        if exactly > NEAR:
            noise, error = attempted(lambda: apart(self.run(THEIRS, inputs), self.run("sdpa", inputs))[0], 0.0)
            if worst <= noise:
                return Found(check, "equal", f"{worst:.2g}, where eager and sdpa are {noise:.1g} apart")
            errors += error
        verdict = "equal" if exactly <= NEAR else "different"
        return Found(check, verdict, f"{worst:.2g} in {where}, in float64 {exactly:.2g}{errors}")

    def checks(self) -> Iterator[Found]:
        """Yield the result of each check that fits the class."""
        names, model = inspect.signature(self.model.forward).parameters, self.model
        forward = self.compared("forward", lambda how: self.run(how, self.inputs))
        if forward.verdict == "equal" and not self.calls():
            yield Found("forward", "no attention", "no layer that runs asks transformers for its attention")
            yield from self._images()
            return
        yield forward
        with_tokens = "input_ids" in self.inputs
        main = next(iter(self.inputs.values()))
        if "attention_mask" in names and isinstance(main, Tensor) and main.shape[:2] == (B, L):
            for side in ("left", "right"):
                keep = torch.ones(B, L, dtype=torch.long)
                keep[1, slice(PADDED) if side == "left" else slice(L - PADDED, L)] = 0
                yield self.compared(
                    f"padding {side}",
                    lambda how, keep=keep: self.run(how, self.inputs | {"attention_mask": keep}),
                    keep.bool(),
                )
        yield from self._images()
        yield self.compared("gradients", self.gradients)
        if type(model).__name__ in COMPILED:
            yield self.compared("compiled", self.compiled)
        if with_tokens and model.can_generate():
            for cache in ("dynamic", "static"):
                yield self.compared(f"generate, {cache}", lambda how, cache=cache: self.generate(how, cache))
        if with_tokens and "position_ids" in names and "decoder_input_ids" not in self.inputs:
            half = L // 2 - 1
            positions = torch.tensor([[*range(half), *range(L - half)]])
            yield self.compared("packed", lambda how: self.packed(how, positions.expand(B, -1), half))

    def _images(self) -> Iterator[Found]:
        """Yield the result of a text with images in it, where the class takes both and was not given them."""
        names = inspect.signature(self.model.forward).parameters
        if "input_ids" in self.inputs and "pixel_values" in names and "pixel_values" not in self.inputs:
            found, _ = self._first_that_runs(text_and_images(self.model, Draw()))
            if found is not None:
                yield self.compared("images", lambda how: self.run(how, found))

    def calls(self) -> int:
        """Return how often the model calls our attention."""
        calls: list[nn.Module] = []

        def counted(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            calls.append(module)
            return attention_function(module, *args, **keywords)

        AttentionInterface.register(OURS, counted)
        try:
            self.run(OURS, self.inputs)
        finally:
            AttentionInterface.register(OURS, attention_function)
        return len(calls)

    def compiled(self, implementation: str) -> dict[str, Tensor]:
        """Return the outputs of a compiled model; by theirs, of one that is not."""
        if implementation != OURS:
            return self.run(implementation, self.inputs)
        self.use(OURS)
        torch.compiler.reset()
        with torch.no_grad():
            return numbers(torch.compile(self.model, backend="aot_eager")(**fresh(self.inputs)))

    def packed(self, implementation: str, positions: Tensor, half: int) -> dict[str, Tensor]:
        """Return the outputs (B, L, ...) of two sequences packed into one row; by theirs, of each alone."""
        given = self.inputs | {"position_ids": positions}
        if implementation == OURS:
            return {name: t for name, t in self.run(OURS, given).items() if t.shape[:2] == (B, L)}
        whole = self.run(THEIRS, given)
        try:
            mine = self.run(OURS, given)
        except ValueError:  # a refusal, which is found again when ours is called
            return whole
        for other in (whole, self._without_cache(given)):
            if apart(other, mine)[0] <= 30 * NEAR:
                return {name: t for name, t in other.items() if t.shape[:2] == (B, L)}
        parts = []
        for place in (slice(half), slice(half, L)):
            cut = {
                n: t[:, place] if isinstance(t, Tensor) and t.shape[:2] == (B, L) else t for n, t in self.inputs.items()
            }
            parts.append(self.run(THEIRS, cut | {"position_ids": given["position_ids"][:, place]}))
        return {n: torch.cat([p[n] for p in parts], 1) for n, t in whole.items() if t.shape[:2] == (B, L)}

    def _without_cache(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """Return what theirs gives without a cache, where transformers keeps packed sequences apart."""
        names = inspect.signature(self.model.forward).parameters
        if "use_cache" not in names and "kwargs" not in names:
            return {}
        return self.run(THEIRS, given | {"use_cache": False})

    def gradients(self, implementation: str) -> dict[str, Tensor]:
        """Return the gradients to all parameters of a random sum of the outputs."""
        self.use(implementation)
        self.model.zero_grad()
        torch.manual_seed(3)
        with torch.enable_grad():
            outputs = numbers(self.model(**fresh(self.inputs)))
            draw = torch.Generator().manual_seed(4)
            wanted = [t for t in outputs.values() if t.requires_grad]
            total = sum(
                (t * torch.randn(t.shape, generator=draw).to(t.dtype)).sum() / max(t.numel(), 1) ** 0.5 for t in wanted
            )
            if not isinstance(total, Tensor):
                raise ValueError("no output has a gradient")
            total.backward()
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        largest = max((float(g.abs().max()) for g in found.values() if g.numel()), default=1.0) or 1.0
        return {name: gradient / largest for name, gradient in found.items()}

    def generate(self, implementation: str, cache: str) -> dict[str, Tensor]:
        """Return the tokens and scores of greedy generation from a batch that is padded on the left."""
        self.use(implementation)
        keep = torch.ones(B, L, dtype=torch.long)
        keep[1, :PADDED] = 0
        paired = "decoder_input_ids" in self.inputs
        given = {n: t for n, t in self.inputs.items() if n != "decoder_input_ids"} | (
            {} if paired else {"attention_mask": keep}
        )
        with torch.no_grad():
            torch.manual_seed(3)
            found = self.model.generate(
                **given, do_sample=False, num_beams=1, max_new_tokens=5, min_new_tokens=5, output_logits=True,
                return_dict_in_generate=True, pad_token_id=0, cache_implementation=cache, disable_compile=True,
            )  # fmt: skip
        return {"sequences": found.sequences.double(), **{f"logits {i}": t for i, t in enumerate(found.logits)}}

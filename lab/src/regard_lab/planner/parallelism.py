"""Layouts over many devices, and a schedule of a whole run: days, energy, money."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from regard_lab.planner.counts import GB, Layout, Memory, Recipe, executed_flops, training_flops, training_memory
from regard_lab.planner.shapes import Shape

# How many devices share a training step: what fits in their memory, what they send each other, and how long it takes
# Volumes are bytes that one device sends in a step; rings of n devices send (n − 1)/n of an array to gather or to
# reduce it, and twice that for both (Rajbhandari 2019, arXiv 1910.02054, section 7). Matrices are cut as in Megatron-
# LM (Shoeybi 2019, arXiv 1909.08053), layers as in Narayanan 2021 (arXiv 2104.04473), sequences as in ring attention
# (Liu 2023, arXiv 2310.01889).


#: Micro-batch sizes to try, in sequences; maximum number of pieces of a sequence.
_MICRO_BATCHES, _MOST_PIECES = (1, 2, 4, 8, 16, 32), 64
#: Share of a step's arithmetic that runs backward.
_BACKWARD = 2 / 3


@dataclass(frozen=True)
class Cluster:
    """Devices, and what connects them.

    Attributes
    ----------
    devices : int
    memory : float
        GB (10⁹ bytes) of one.
    peak : float
        TFLOP/s (10¹²) of one.
    share : float
        Share of the peak that its arithmetic reaches while it computes.
    bandwidth, network : float
        GB/s that one sends to those of its node, and to those of others.
    node : int
        Devices of a node.
    """

    devices: int
    memory: float
    peak: float
    share: float
    bandwidth: float
    network: float
    node: int

    def speed(self, members: int, stride: int = 1) -> float:
        """Return the bytes per second that a device of a ring sends.

        Parameters
        ----------
        members : int
            Devices of the ring.
        stride : int
            One of how many neighbouring devices belongs to it. A ring over several nodes leaves each of them by the
            network of all its members there.
        """
        if members * stride <= self.node:
            return self.bandwidth * GB
        return min(self.bandwidth, self.network * max(self.node // stride, 1)) * GB


@dataclass(frozen=True)
class Step:
    """A training step of a layout, for the device with the most to do.

    Attributes
    ----------
    layout : Layout
    memory : Memory
    sent : dict of str to float
        Bytes for each kind of parallelism.
    seconds : dict of str to float
        Seconds of computation, of communication that does not overlap with it, and of the pipeline bubble.
    utilization : float
        Model FLOPs utilization (MFU): the model's FLOPs as a share of the peak.
    """

    layout: Layout
    memory: Memory
    sent: dict[str, float]
    seconds: dict[str, float]
    utilization: float

    @property
    def total(self) -> float:
        """Seconds of all kinds."""
        return sum(self.seconds.values())

    @property
    def order(self) -> tuple[float, float]:
        """Return what to choose by: the time, and of equal times what is sent."""
        return round(self.total, 9), sum(self.sent.values())


def training_step(shape: Shape, recipe: Recipe, cluster: Cluster, layout: Layout, sequences: int) -> Step:
    """Estimate a step of so many sequences, which the layout's devices share evenly.

    Gradients are sent while layers still run backward, shards of weights while others compute, keys and values around
    the ring while attention computes; what takes longer than that counts. What tensor parallelism and a pipeline send
    is waited for, and for every m micro-batches a stage of p waits as long as p − 1 take (Narayanan 2021, section 2.2).
    """
    micro_batches = sequences / (layout.data * layout.micro_batch)
    executed = executed_flops(shape, recipe.length, recompute=layout.recompute, keeps_scores=recipe.keeps_scores)
    tokens = sequences * recipe.length
    rate = cluster.peak * 1e12 * cluster.share * layout.devices
    arithmetic, attention = tokens * executed.total / rate, tokens * executed.attention / rate
    memory = training_memory(shape, recipe, layout)
    sent = _sent(shape, recipe, layout, micro_batches)
    speeds = {
        "tensor": cluster.speed(layout.tensor),
        "context": cluster.speed(layout.context, layout.tensor),
        "data": cluster.speed(layout.replicas, layout.tensor),
        "pipeline": cluster.bandwidth * GB if layout.devices <= cluster.node else cluster.network * GB,
    }
    takes = {name: volume / speeds[name] for name, volume in sent.items()}
    hidden = arithmetic if layout.sharding == "all" else arithmetic * _BACKWARD / micro_batches
    seconds = {
        "arithmetic": arithmetic,
        "tensor": takes["tensor"],
        "pipeline": takes["pipeline"],
        "context": max(takes["context"] - attention, 0.0),
        "data": max(takes["data"] - hidden, 0.0),
    }
    running = seconds["arithmetic"] + seconds["tensor"] + seconds["pipeline"] + seconds["context"]
    seconds["bubble"] = running * (layout.pipeline - 1) / micro_batches
    asked = tokens * training_flops(shape, recipe.length).total
    utilization = asked / (sum(seconds.values()) * cluster.peak * 1e12 * layout.devices)
    return Step(layout, memory, sent, seconds, utilization)


def _sent(shape: Shape, recipe: Recipe, layout: Layout, micro_batches: float) -> dict[str, float]:
    """Return the bytes that a device sends in a step, by kind of parallelism."""
    element, n = recipe.bytes.activations, layout.replicas
    rows = layout.micro_batch * recipe.length / layout.context
    reductions = keys = 0.0
    for stack in shape.stacks:
        blocks = len(stack.layer.attentions) + 1
        # Each block sums over devices after its forward pass, its backward pass, and its recomputation.
        reductions += stack.depth * blocks * (3 if layout.recompute else 2)
        numbers = sum(2 * each.kv_heads * each.head_width for each in stack.layer.attentions)
        keys += stack.depth * numbers / layout.tensor
    row = shape.width * element
    tensor = 2 * _ring(layout.tensor) * rows * row * reductions / layout.pipeline
    # Forward and backward, divided among the devices that share the matrices.
    pipeline = 2 * rows * row / layout.tensor if layout.pipeline > 1 else 0.0
    # Keys and values travel once forward, and backward with their gradients.
    context = 3 * (layout.context - 1) * rows * keys * element / layout.pipeline
    own = _own_parameters(shape, layout)
    weights, gradients = own * recipe.bytes.weights, own * recipe.bytes.gradients
    data = {
        "none": 2 * gradients,
        "optimizer": gradients + weights,
        "all": micro_batches * (2 * weights + gradients),
    }[layout.sharding] * _ring(n)
    return {
        "data": data,
        "tensor": tensor * micro_batches,
        "pipeline": pipeline * micro_batches,
        "context": context * micro_batches,
    }


def _ring(members: int) -> float:
    return (members - 1) / members


def _own_parameters(shape: Shape, layout: Layout) -> float:
    inside = sum(stack.parameters for stack in shape.stacks)
    return inside / (layout.tensor * layout.pipeline) + (shape.parameters - inside) / layout.tensor


def refusal(shape: Shape, recipe: Recipe, cluster: Cluster, layout: Layout, sequences: int) -> str:
    """Return why a layout cannot be, in a few words; "" where it can, whether it fits in memory or not."""
    if layout.devices != cluster.devices:
        return f"{layout.devices:,} devices are not {cluster.devices:,}"
    if layout.tensor > cluster.node:
        return f"a node has {cluster.node} devices"
    attentions = [each for stack in shape.stacks for each in stack.layer.attentions]
    if layout.tensor > 1 and not all(each.cut_heads for each in attentions):
        return "this kind of attention is not cut by heads"
    if layout.context > 1 and not all(each.cut_tokens for each in attentions):
        return "this kind of attention needs all tokens of a sequence on one device"
    heads = [each.kv_heads for each in attentions]
    if any(each % layout.tensor for each in heads):
        return f"{heads[0]} heads cannot be cut in {layout.tensor}"
    if layout.pipeline > 1 and len(shape.stacks) > 1:
        return "an encoder and a decoder are no row of layers"
    if any(stack.depth % layout.pipeline for stack in shape.stacks):
        return f"{shape.depth} layers cannot be cut in {layout.pipeline}"
    if recipe.length % (2 * layout.context) and layout.context > 1:
        return f"{recipe.length:,} tokens cannot be cut in {layout.context}"
    if sequences % layout.data:
        return f"{sequences:,} sequences of a batch are no multiple of {layout.data:,} devices"
    if sequences % (layout.data * layout.micro_batch):
        return f"{sequences // layout.data:,} sequences are no multiple of {layout.micro_batch}"
    if sequences // (layout.data * layout.micro_batch) < layout.pipeline:
        return "there are fewer micro-batches than stages"
    return ""


@dataclass(frozen=True)
class Choice:
    """The best layout of one kind.

    Attributes
    ----------
    kind : str
        One of :data:`KINDS`.
    step : Step, optional
        The fastest one that fits; if none does, that with the least memory; None where there is no such layout.
    reason : str
        Why it does not fit, or "".
    """

    kind: str
    step: Step | None
    reason: str

    @property
    def fits(self) -> bool:
        """Whether it can be run."""
        return not self.reason


#: Layouts to compare: which of tensor (TP), pipeline (PP) and context parallelism (CP) they use, and what devices with
#: the same weights divide among them.
KINDS: dict[str, tuple[frozenset[str], str]] = {
    "DDP": (frozenset(), "none"),
    "ZeRO-1": (frozenset(), "optimizer"),
    "FSDP": (frozenset(), "all"),
    "TP + DDP": (frozenset({"tensor"}), "none"),
    "PP + DDP": (frozenset({"pipeline"}), "none"),
    "CP + FSDP": (frozenset({"context"}), "all"),
    "TP + FSDP": (frozenset({"tensor"}), "all"),
    "TP + PP + DDP": (frozenset({"tensor", "pipeline"}), "none"),
    "TP + PP + ZeRO-1": (frozenset({"tensor", "pipeline"}), "optimizer"),
    "TP + PP + CP + ZeRO-1": (frozenset({"tensor", "pipeline", "context"}), "optimizer"),
}


def choices(shape: Shape, recipe: Recipe, cluster: Cluster, sequences: int) -> list[Choice]:
    """Return the best layout of every kind, those of one device for a single one.

    Parameters
    ----------
    shape : Shape
    recipe : Recipe
    cluster : Cluster
    sequences : int
        Of a step, over all devices.

    Examples
    --------
    >>> from regard_lab.models.decoder_lm import DecoderLMConfig
    >>> from regard_lab.planner import shape_of
    >>> shape, recipe = shape_of(DecoderLMConfig.preset("gpt2")), Recipe(length=1024)
    >>> cluster = Cluster(8, memory=16, peak=100, share=0.5, bandwidth=300, network=25, node=8)
    >>> [each.kind for each in choices(shape, recipe, cluster, 512) if each.fits][:3]
    ['DDP', 'ZeRO-1', 'FSDP']
    """
    if cluster.devices == 1:
        return [_choice("one device", list(_layouts(frozenset(), "none", 1)), shape, recipe, cluster, sequences)]
    return [
        _choice(kind, list(_layouts(used, sharding, cluster.devices)), shape, recipe, cluster, sequences)
        for kind, (used, sharding) in KINDS.items()
    ]


def best(found: list[Choice]) -> Choice | None:
    """Return the choice that takes the least time of those that fit, or None."""
    fitting = [each for each in found if each.fits and each.step is not None]
    return min(fitting, key=lambda each: each.step.order if each.step else (0.0, 0.0), default=None)


def _choice(kind: str, layouts: list[Layout], shape: Shape, recipe: Recipe, cluster: Cluster, sequences: int) -> Choice:
    refused, steps = "", []
    for layout in layouts:
        reason = refusal(shape, recipe, cluster, layout, sequences)
        if reason:
            refused = refused or reason
        else:
            steps.append(training_step(shape, recipe, cluster, layout, sequences))
    if not steps:
        return Choice(kind, None, refused or f"{cluster.devices:,} devices cannot be shared so")
    fitting = [step for step in steps if step.memory.total <= cluster.memory * GB]
    if fitting:
        return Choice(kind, min(fitting, key=lambda step: step.order), "")
    least = min(steps, key=lambda step: step.memory.total)
    return Choice(kind, least, f"needs {least.memory.total / GB:,.1f} GB of {cluster.memory:g}")


def _layouts(used: frozenset[str], sharding: str, devices: int) -> Iterator[Layout]:
    """Yield the layouts of a kind; those that are used are above 1."""
    for tensor in _degrees("tensor" in used, devices, devices):
        for pipeline in _degrees("pipeline" in used, devices // tensor, devices):
            for context in _degrees("context" in used, devices // (tensor * pipeline), _MOST_PIECES):
                data = devices // (tensor * pipeline * context)
                for micro_batch in _MICRO_BATCHES:
                    for recompute in (False, True):
                        yield Layout(data, tensor, pipeline, context, sharding, micro_batch, recompute)


def _degrees(used: bool, devices: int, most: int) -> list[int]:
    if not used:
        return [1]
    return [each for each in range(2, min(devices, most) + 1) if devices % each == 0]


# How long a training run takes, and what it costs: tokens, days, energy, money ----------------------------------------


#: Tokens per parameter that minimize the loss for a given number of operations: about 20 at every size (Hoffmann 2022,
#: arXiv 2203.15556, table 3).
CHINCHILLA = 20


def chinchilla_tokens(shape: Shape) -> int:
    """Return how many tokens a model of this size should see: 20 for each parameter (Hoffmann 2022)."""
    return CHINCHILLA * shape.parameters


@dataclass(frozen=True)
class Schedule:
    """A run of so many steps.

    Attributes
    ----------
    tokens : float
        That are read.
    steps : int
    seconds : float
        Of all steps.
    devices : int
    """

    tokens: float
    steps: int
    seconds: float
    devices: int

    @property
    def days(self) -> float:
        """Days of all steps."""
        return self.seconds / 86400

    @property
    def device_hours(self) -> float:
        """Hours of all devices together."""
        return self.seconds / 3600 * self.devices

    def energy(self, watts: float, overhead: float = 1.0) -> float:
        """Return kWh: of devices of so many watts, times what the building takes for each watt of theirs (PUE)."""
        return self.device_hours * watts * overhead / 1000

    def money(self, price: float) -> float:
        """Return the cost at a price of an hour of one device."""
        return self.device_hours * price


def schedule(tokens: float, batch: int, step_seconds: float, devices: int) -> Schedule:
    """Return the run that reads so many tokens in steps of ``batch`` tokens.

    Examples
    --------
    >>> run = schedule(tokens=1e9, batch=500_000, step_seconds=2.0, devices=8)
    >>> run.steps, round(run.device_hours, 1), round(run.energy(watts=400, overhead=1.2), 1)
    (2000, 8.9, 4.3)
    """
    steps = math.ceil(tokens / batch)
    return Schedule(tokens, steps, steps * step_seconds, devices)

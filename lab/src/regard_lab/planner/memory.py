"""Memory of training and of a cache, by what takes it. Everything is in bytes; a GB is 10⁹ of them.

Dimensions: B sequences of a micro-batch, L tokens of each, E width, H heads, G key-value heads, D width of a head, F
hidden width, N vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from regard_lab.planner.shapes import AttentionShape, Layer, Shape

GB = 1e9
#: Logits that exist at once in :func:`regard_lab.training.losses.cross_entropy` on anything but a CPU.
CHUNK = 1 << 26


@dataclass(frozen=True)
class Precision:
    """Bytes of each number: of weights, of gradients, of a float32 copy of the weights, and of activations."""

    weights: int
    gradients: int
    copy: int
    activations: int


#: With AdamW the first takes 16 bytes for each parameter (Rajbhandari 2019, arXiv 1910.02054, section 3.1), the second,
#: which sums gradients in float32, 18 (Narayanan 2021, arXiv 2104.04473). Autocast keeps a cast copy of the weights.
PRECISIONS = {
    "mixed": Precision(weights=2, gradients=2, copy=4, activations=2),
    "mixed-float32-gradients": Precision(weights=2, gradients=4, copy=4, activations=2),
    "autocast": Precision(weights=4, gradients=4, copy=2, activations=2),
    "float32": Precision(weights=4, gradients=4, copy=0, activations=4),
}
#: float32 numbers that an optimizer keeps for each parameter.
OPTIMIZERS = {"adamw": 2, "momentum": 1, "sgd": 0}


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, as far as memory and time depend on it.

    Attributes
    ----------
    length : int
        Tokens L of a sequence.
    precision, optimizer : str
        Of :data:`PRECISIONS` and :data:`OPTIMIZERS`.
    keeps_scores : bool
        Whether attention keeps its L×S weights, as it does where it is written with matrix products; the engines here
        keep none.
    chunk : int, optional
        Logits that exist at once; None is all of them.
    """

    length: int
    precision: str = "mixed"
    optimizer: str = "adamw"
    keeps_scores: bool = False
    chunk: int | None = CHUNK

    @property
    def bytes(self) -> Precision:
        """Bytes of each number."""
        return PRECISIONS[self.precision]

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer for each parameter, a float32 copy of it included."""
        return self.bytes.copy + 4 * OPTIMIZERS[self.optimizer]


@dataclass(frozen=True)
class Layout:
    """How devices share a model and a batch.

    Attributes
    ----------
    data, tensor, pipeline, context : int
        Devices over which sequences, the matrices of each layer, the layers, and the tokens of a sequence are cut.
    sharding : {"none", "optimizer", "all"}
        What devices with the same weights divide among them: nothing (DDP), the optimizer's numbers (stage 1 of
        ZeRO), or weights, gradients and optimizer (stage 3, FSDP).
    micro_batch : int
        Sequences that a device takes at once.
    recompute : bool
        Whether layers keep their input alone and run forward again before they run backward.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sharding: str = "none"
    micro_batch: int = 1
    recompute: bool = False

    @property
    def devices(self) -> int:
        """How many there are."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def replicas(self) -> int:
        """Devices that would have the same weights if nothing were sharded."""
        return self.data * self.context


@dataclass(frozen=True)
class Memory:
    """Bytes that one device holds at most, by what takes them; ``gathered`` are weights of other shards in use."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, float]:
        """Return the bytes by name."""
        return {each.name: float(getattr(self, each.name)) for each in fields(self)}


def layer_activations(layer: Layer, recipe: Recipe, attended: int | None = None) -> float:
    """Return the bytes that a layer keeps of each token for its backward pass.

    With rows of 2 bytes, dropout and attention that keeps its weights these are 34·E + 5·H·S (Korthikanti 2022, arXiv
    2205.05198, equation 1), and a few float32 statistics of norms. Attention that streams keeps no L×S but a float32
    number for each head::

        norms and inputs of products    4·E             queries, keys, values    (H + 2·G)·D, turned ones (H + G)·D
        what the heads read             H·D             hidden layer             2·F, of ReLU F, with a gate 2·F more

    Parameters
    ----------
    layer : Layer
    recipe : Recipe
    attended : int, optional
        Keys S of the whole sequence, L by default.

    Examples
    --------
    >>> from regard_lab.models.decoder_lm import DecoderLMConfig
    >>> from regard_lab.planner import shape_of
    >>> layer = shape_of(DecoderLMConfig(9, width=64, heads=4, dropout=0.1, attention_dropout=0.1)).stacks[0].layer
    >>> kept = layer_activations(layer, Recipe(length=32, keeps_scores=True))
    >>> statistics = 2 * 2 * 4
    >>> kept - statistics == 34 * 64 + 5 * 4 * 32
    True
    """
    E, element = layer.width, recipe.bytes.activations
    S = recipe.length if attended is None else attended
    blocks = len(layer.attentions) + 1
    rows = 2 * E * blocks + layer.kept_hidden * layer.hidden + sum(map(_attention_rows, layer.attentions))
    found = float(element * rows + 4 * layer.statistics * blocks + (E * blocks if layer.dropout else 0))
    for attention in layer.attentions:
        H = attention.heads
        weight = 2 * element + 1 if layer.attention_dropout else element
        if attention.linear:
            found += 4 * H * _linear_numbers(attention.head_width)
        else:
            found += H * S * weight if recipe.keeps_scores else 4 * H
    return found


def _attention_rows(attention: AttentionShape) -> int:
    """Return how many numbers an attention keeps of each token."""
    H, G, D = attention.heads, attention.kv_heads, attention.head_width
    return (2 * H + 2 * G) * D + ((H + G) * D if attention.rotary else 0)


def _linear_numbers(width: int) -> float:
    """Return about how many numbers of float32 a head of linear attention keeps of each token.

    Features, masked ones, outputs before and after they are divided; a row of a chunk's products; and two matrices of
    sums for each chunk of 64 tokens. Which of these torch keeps was counted.
    """
    return 8 * width + 64 + 2 * width**2 / 64


def activation_memory(shape: Shape, recipe: Recipe, layout: Layout | None = None) -> float:
    """Return the bytes that a device keeps of its micro-batches between forward and backward.

    Where layers are cut, what lies between their matrices is cut, too (sequence parallelism, Korthikanti 2022, arXiv
    2205.05198). The first stage of a pipeline keeps the rows of its layers for as many micro-batches as there are
    stages: as much as one micro-batch leaves in all layers (Narayanan 2021, arXiv 2104.04473).
    """
    layout = layout or Layout()
    tokens = layout.micro_batch * recipe.length / layout.context / layout.tensor
    element = recipe.bytes.activations
    kept = working = 0.0
    for stack in shape.stacks:
        each = layer_activations(stack.layer, recipe)
        kept += stack.depth * (stack.layer.width * element if layout.recompute else each)
        working = max(working, each if layout.recompute else 0.0)
    # Behind the layers a norm keeps its input, and what makes logits the norm's output; before them are the numbers.
    outside = 2 * shape.width * element + 4 * shape.stacks[-1].layer.statistics + 8
    return tokens * (kept + working + outside)


def logit_memory(shape: Shape, recipe: Recipe, layout: Layout | None = None) -> float:
    """Return the bytes that the loss takes at its peak.

    All at once, logits are there as they are computed, and in float32 as log-probabilities and two gradients. In
    chunks, some of each, and the gradients of the rows.
    """
    layout = layout or Layout()
    tokens, element = layout.micro_batch * recipe.length / layout.context, recipe.bytes.activations
    logits = tokens * shape.vocabulary / layout.tensor
    if recipe.chunk is None:
        return logits * (element + 12)
    return min(logits, recipe.chunk) * (8 + 2 * element) + tokens * shape.width * element


def training_memory(shape: Shape, recipe: Recipe, layout: Layout | None = None) -> Memory:
    """Return what the device with the most to hold does hold: that of a pipeline's first stage.

    Everything is added up, as if all of it were there at once; what an allocator does not reuse comes on top.

    Parameters
    ----------
    shape : Shape
    recipe : Recipe
    layout : Layout, optional
        One device and one sequence by default.

    Examples
    --------
    >>> from regard_lab.models.decoder_lm import DecoderLMConfig
    >>> from regard_lab.planner import shape_of
    >>> shape = shape_of(DecoderLMConfig.preset("gpt2"))
    >>> memory = training_memory(shape, Recipe(length=1024))
    >>> (memory.weights + memory.gradients + memory.optimizer) / shape.parameters
    16.0
    """
    layout = layout or Layout()
    inside = sum(stack.parameters for stack in shape.stacks)
    outside = shape.parameters - inside
    own = inside / (layout.tensor * layout.pipeline) + outside / layout.tensor
    shards = {"none": (1, 1), "optimizer": (1, layout.replicas), "all": (layout.replicas, layout.replicas)}
    of_weights, of_optimizer = shards[layout.sharding]
    gathered = 0.0
    if of_weights > 1:
        # The weights of a layer, those of the next, the gradients of one, and the embeddings throughout.
        largest = max(sum(each.parameters for each in stack.layer.weights) for stack in shape.stacks) / layout.tensor
        per_layer = 2 * recipe.bytes.weights + recipe.bytes.gradients
        gathered = largest * per_layer + outside / layout.tensor * recipe.bytes.weights
    return Memory(
        weights=own * recipe.bytes.weights / of_weights,
        gradients=own * recipe.bytes.gradients / of_weights,
        optimizer=own * recipe.optimizer_bytes / of_optimizer,
        gathered=gathered,
        activations=activation_memory(shape, recipe, layout),
        logits=logit_memory(shape, recipe, layout),
    )


def cache_memory(shape: Shape, tokens: int, element: int = 2) -> float:
    """Return the bytes of the keys and values of so many tokens, in all layers that write one token after the other.

    Of linear attention, they are those of one sequence's sums in float32, however many tokens it has.

    Parameters
    ----------
    shape : Shape
    tokens : int
        Of all sequences together.
    element : int, default 2
        Bytes of a number.

    Examples
    --------
    >>> from regard_lab.models.decoder_lm import DecoderLMConfig
    >>> from regard_lab.planner import shape_of
    >>> cache_memory(shape_of(DecoderLMConfig.preset("gpt3")), 1) == 2 * 96 * 12288 * 2
    True
    """
    found = 0
    for stack in shape.stacks:
        if stack.layer.attentions[0].causal:
            for each in stack.layer.attentions:
                D = each.head_width
                kept = each.heads * D * (D + 1) * 4 if each.linear else 2 * each.kv_heads * D * tokens * element
                found += stack.depth * kept
    return float(found)

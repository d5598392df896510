"""What a model takes: parameters, operations and memory, by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from regard._utils.errors import rejected
from regard_lab.planner.shapes import PARTS, AttentionShape, Layer, Shape

# Parameters by what they belong to ------------------------------------------------------------------------------------


def parameters_by_part(shape: Shape) -> dict[str, int]:
    """Count the parameters of embeddings, attention, feed-forward networks, norms, and what makes logits.

    Their sum is that of the built model: ``sum(p.numel() for p in model.parameters())``. A matrix that is used twice
    counts once, as an embedding.

    Examples
    --------
    >>> from regard_lab.models.decoder_lm import DecoderLMConfig
    >>> from regard_lab.planner import shape_of
    >>> parameters_by_part(shape_of(DecoderLMConfig(50, width=16, layers=2, heads=4, max_length=8)))
    {'embeddings': 928, 'attention': 2176, 'feed-forward': 4256, 'norms': 160, 'head': 0}
    """
    found = dict.fromkeys(PARTS, 0)
    for weight in shape.rest:
        found[weight.part] += weight.parameters
    for stack in shape.stacks:
        for weight in stack.layer.weights:
            found[weight.part] += weight.parameters * (1 if stack.shared else stack.depth)
    return found


def parameters_without_embeddings(shape: Shape) -> int:
    """Count the non-embedding parameters: N of Kaplan 2020 (arXiv 2001.08361)."""
    return shape.parameters - parameters_by_part(shape)["embeddings"]


# Operations of a token: products with weights, and of queries with keys and weights with values, counted by the mask
# A multiplication and an addition are two operations. What is linear in width (norms, activations, softmax) is not
# counted, as in Kaplan 2020 (arXiv 2001.08361) and in torch's own counter.


@dataclass(frozen=True)
class Flops:
    """Operations of one token, on average over a sequence.

    Where one sequence is read and another written, they are those of one token of each.

    Attributes
    ----------
    layers : float
        Of products with the weights of layers.
    head : float
        Of products with what is outside them, most of all of logits.
    scores, values : float
        Of queries with keys, and of weights with values.
    """

    layers: float
    head: float
    scores: float
    values: float

    @property
    def attention(self) -> float:
        """Operations of all pairs of tokens."""
        return self.scores + self.values

    @property
    def total(self) -> float:
        """Operations of all kinds."""
        return self.layers + self.head + self.scores + self.values


def visible_pairs(length: int, attention: AttentionShape, documents: Sequence[int] | None = None) -> int:
    """Count the pairs of a query and a key that it sees, in a sequence of so many tokens.

    Parameters
    ----------
    length : int
        Tokens L of the sequence, and of another that is read.
    attention : AttentionShape
    documents : sequence of int, optional
        Tokens of each of the documents that the sequence is packed with; a query sees its own alone. They sum to L.

    Raises
    ------
    ValueError
        If the documents do not fill the sequence.

    Examples
    --------
    >>> visible_pairs(4, AttentionShape(1, 1, 8, causal=True)), visible_pairs(4, AttentionShape(1, 1, 8))
    (10, 16)
    """
    documents = [length] if documents is None else documents
    if sum(documents) != length:
        raise rejected("visible_pairs", "documents", f"have {length:,} tokens together", f"{sum(documents):,}")
    pairs, start = 0, 0
    for size in documents:
        pairs += _document_pairs(size, attention, max(attention.sinks - start, 0))
        start += size
    return pairs


def _document_pairs(size: int, attention: AttentionShape, sinks: int) -> int:
    """Return the visible pairs of one document, whose first ``sinks`` keys every later query sees."""
    if not attention.causal:
        return size * size
    if attention.means is not None:
        ended, rest = divmod(size, attention.means)
        return attention.means * _triangle(ended - 1) + ended * (rest + 1)
    if attention.block is not None:
        C, others = attention.block, attention.chosen - 1
        blocks, rest = divmod(size, C)
        own = blocks * _triangle(C) + _triangle(rest)
        return own + C * (C * _ramp(max(blocks - 1, 0), others) + rest * min(others, blocks))
    window = size if attention.window is None else min(attention.window, size)
    beyond = size - window  # queries from which some earlier key is hidden by the window
    return _triangle(window) + beyond * window + _ramp(beyond, sinks)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


def _ramp(count: int, most: int) -> int:
    """Return 1 + 2 + … of so many terms, none of them above ``most``."""
    most = min(count, most)
    return _triangle(most) + (count - most) * most


def forward_flops(shape: Shape, length: int | None = None, documents: Sequence[int] | None = None) -> Flops:
    """Count the FLOPs per token of a forward pass.

    A head's scores take 2·D FLOPs for every visible pair, and its weighted values the same; a weight matrix of n
    entries takes 2·n per token (Kaplan 2020, arXiv 2001.08361, table 1). In linear attention, each token updates a
    head's state matrix with 2·D·V FLOPs, counted as scores, and reads it with the same number, counted as values; both
    once for each key that it writes. What else an attention takes counts as scores: comparing with keys that are not
    chosen, products of factors, systems of equations.

    Parameters
    ----------
    shape : Shape
    length : int, optional
        Tokens L of a sequence; the longest by default.
    documents : sequence of int, optional
        Tokens of each document that the sequence is packed with.

    Examples
    --------
    >>> from regard_lab.models.decoder_lm import DecoderLMConfig
    >>> from regard_lab.planner import shape_of
    >>> flops = forward_flops(shape_of(DecoderLMConfig(100, width=8, layers=2, heads=2)), 3)
    >>> flops.layers == 2 * 2 * 12 * 8**2, flops.head == 2 * 100 * 8, flops.scores == 2 * 2 * 8 * (1 + 2 + 3) / 3
    (True, True, True)
    """
    L = shape.max_length if length is None else length
    layers = scores = values = 0.0
    for stack in shape.stacks:
        layers += stack.depth * sum(each.flops for each in stack.layer.weights)
        for attention in stack.layer.attentions:
            for each in (attention, *attention.also):
                of_scores, of_values = _attention_flops(each, L, documents)
                scores += stack.depth * of_scores
                values += stack.depth * of_values
    head = sum(each.flops / (L if each.multiplies == "sequences" else 1) for each in shape.rest)
    return Flops(layers, head, scores, values)


def _attention_flops(attention: AttentionShape, length: int, documents: Sequence[int] | None) -> tuple[float, float]:
    """Return the operations of a token that make scores, and those that read values."""
    H, D, V = attention.heads, attention.head_width, attention.values
    if attention.linear:
        each = 2.0 * H * D * V * attention.steps
        return each + attention.token, each
    pairs = visible_pairs(length, attention, documents) / length
    return H * pairs * (2 * D + attention.pair) + attention.token, 2 * H * pairs * V


def training_flops(shape: Shape, length: int | None = None, documents: Sequence[int] | None = None) -> Flops:
    """Count the operations of a token in a training step: one pass forward, and two products for each one backward.

    These are the operations that the model asks for, whose share of what a device could do is known as MFU; what is
    computed again is not among them.

    Parameters are those of :func:`forward_flops`.
    """
    once = forward_flops(shape, length, documents)
    return Flops(3 * once.layers, 3 * once.head, 3 * once.scores, 3 * once.values)


def executed_flops(
    shape: Shape,
    length: int | None = None,
    documents: Sequence[int] | None = None,
    *,
    recompute: bool = False,
    keeps_scores: bool = False,
) -> Flops:
    """Count the operations of a token in a training step as they are executed.

    Parameters
    ----------
    shape, length, documents
        As :func:`forward_flops` has them.
    recompute : bool, default False
        Whether layers keep their input alone and run forward again before they run backward.
    keeps_scores : bool, default False
        Whether attention keeps its L×S weights. Otherwise its backward pass computes the scores again: five products
        rather than four.
    """
    once = forward_flops(shape, length, documents)
    passes = 4 if recompute else 3
    again = 0 if keeps_scores else 1
    return Flops(passes * once.layers, 3 * once.head, (passes + again) * once.scores, passes * once.values)


# Memory of training and of a cache, by what takes it. Everything is in bytes; a GB is 10⁹ of them ---------------------
# Dimensions: B sequences of a micro-batch, L tokens of each, E width, H heads, G key-value heads, D width of a head, F
# hidden width, N vocabulary.


GB = 1e9
#: Number of logits in memory at once in :func:`regard_lab.training.objectives.cross_entropy`, except on a CPU.
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
            found += 4 * H * _linear_numbers(attention.head_width) if attention.kept is None else 0.0
        else:
            found += H * S * weight if recipe.keeps_scores else 4 * H
    return found


def _attention_rows(attention: AttentionShape) -> int:
    """Return how many numbers an attention keeps of each token."""
    H, G, D = attention.heads, 0 if attention.shares else attention.kv_heads, attention.head_width
    kept = (2 * H + 2 * G) * D if attention.kept is None else attention.kept
    return kept + ((H + G) * D if attention.rotary else 0)


def _linear_numbers(width: int) -> float:
    """Return about how many numbers of float32 a head of linear attention keeps of each token.

    Features, masked ones, outputs before and after they are divided, and a matrix of sums now and then: fitted to what
    torch keeps with the compiled kernels.
    """
    return 6 * width + 4 + 1.5 * width**2 / 128


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
    # After the layers, the norm keeps its input, and the output projection the norm's output; before them are the ids.
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

    Of layers with a state, they are those of one sequence's state in float32, however many tokens it has. Layers that
    read the keys and values of another one have none.

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
                kept = each.state * 4 if each.linear else each.numbers * tokens * element
                found += 0 if each.shares else stack.depth * kept
    return float(found)

"""What the kernels and their callers share: the names of arguments, sizes, and the shape of each array.

``csrc/arguments.h`` states names and sizes for the kernels; the loader compares them.
"""

from __future__ import annotations

from types import SimpleNamespace

#: Keys that a tile has at most.
TILE = 512
#: Values or features that a chunk has: the distance of the rows of an array whose lanes are these.
CHUNK = 64
#: Queries that a block has at most, blocks that meet a packed tile of keys at most, and queries calculated together.
BLOCK, BLOCKS, GROUP = 64, 4, 4
#: Queries whose weights the backward pass holds before it sums them up for the keys.
BAND = 16
#: Every row of lanes is a multiple of this long.
PAD = 16
#: Steps of a recurrence that are handled at once.
SPAN = 16
#: The distance of the rows of an array whose lanes are keys: no power of two, or rows would share a cache's few sets.
ROW = TILE + PAD

#: Scores of a distance by the number that ``kind`` holds; from ``COMPACT`` on, weights are 0 beyond a distance.
RADIAL = ("gaussian", "laplacian", "boxcar", "triangular", "epanechnikov")
GAUSSIAN, LAPLACIAN, BOXCAR, TRIANGULAR, EPANECHNIKOV = range(len(RADIAL))
COMPACT = BOXCAR
#: How scores become weights, by the number that ``normalizer`` holds.
SOFTMAX, SIGMOID, ENTMAX = range(3)
#: The additive score: features up to here lose precision to exponentials.
SMALL_FEATURE = 0.5

_NAMES = (
    # What the rows are compared by, up to three forms of it, and the class of each row: see the families.
    "query query_small query_raw query_class",
    "key key_small key_raw key_class",
    "weight weight_rest weight_head mixed kind direct boxes",
    "factor",
    "value value_lanes read_all",
    # Distances of sequences, heads and rows that are read where they are.
    "key_b key_g key_s value_b value_g value_s",
    # How scores become weights, and the bits of a double, entmax's α.
    "normalizer alpha",
    # Results.
    "output flawed peak total top entropy received best best_key",
    # The logit of each row's sink, and the dropout of weights: those whose 32 random bits are below the threshold.
    "sink seed threshold",
    # Of the backward pass.
    "grad d_query d_key d_value d_weight d_added",
    "d_bias d_bias_b d_bias_h d_bias_r d_bias_c d_bias_by_row",
    "order kv_b kv_h head_b head_h",
    # The mask: an interval of keys for each row, or segments of one block with what is added to their scores; the key
    # that is hidden from each row.
    "own start stop interval_b interval_h interval_r",
    "segments segment_count added added_at added_b added_h added_r",
    # A bias given as a tensor, with its strides, and which of its matrices a sequence has.
    "bias planes bias_b bias_h bias_r bias_c",
    # The rows of queries and keys that a sequence has, −1 for none, and how many there are of each head.
    "query_rows key_rows all_queries all_keys",
    # Sizes; a work item is a block of rows of one head.
    "H G L S C V K tile first last block head_first kv_first held held_row",
    # Where the parts of the scratch memory begin.
    "scratch at_query at_key at_value at_score at_weight at_state at_output",
    "at_rows at_d_key at_d_score at_d_query at_delta at_held at_found at_place at_line at_gathered",
)

FIELDS = tuple(" ".join(_NAMES).split())
#: The place of each argument: ``args[F.query]``.
F = SimpleNamespace(**{name: place for place, name in enumerate(FIELDS)})

#: The real numbers of a call: the factor of scores, softcap, and the factor of weights that dropout keeps.
REALS = 3

_ROWS = {
    "query": "B H L C",
    "query_small": "B H L C",
    "query_raw": "B H L C",
    "query_class": "B H L",
    "key": "B G S C",
    "key_small": "B G S C",
    "key_raw": "B G S C",
    "key_class": "B G S",
    "weight": "H C",
    "weight_rest": "H C",
    "boxes": "B G tiles two C",
    "factor": "B H L",
    "value": "B G S V",
    "output": "B H L V",
    "peak": "B H L",
    "total": "B H L",
    "own": "B H L",
    "start": "intervals",
    "stop": "intervals",
    "segments": "segment_count three",
    "added": "added_numbers",
    "bias": "bias_numbers",
    "planes": "sequences",
    "query_rows": "sequences rows",
    "key_rows": "sequences keys",
    "order": "items",
}
_FORWARD = {
    "sink": "B H L",
    "top": "B H L",
    "entropy": "B H L",
    "best": "B H L K",
    "best_key": "B H L K",
    "received": "share_heads S",
}
_BACKWARD = {
    "grad": "B H L V",
    "d_query": "B H L C",
    "d_key": "share_kv_heads S C",
    "d_value": "share_kv_heads S V",
    "d_weight": "share_heads two C",
    "d_added": "added_numbers",
    "d_bias": "d_bias_numbers",
}
_PREPARE = {"query": "B S C", "weight": "H V", "query_class": "B S", "output": "B S V"}

#: How many numbers every array of a kernel holds, as a product of sizes; in which order they stand is the kernel's own.
#: Scratch memory is no array: it has ``scratch_numbers`` of the compute dtype.
SHAPES = {
    kernel: {name: tuple(shape.split()) for name, shape in shapes.items()}
    for kernel, shapes in (("forward", _ROWS | _FORWARD), ("backward", _ROWS | _BACKWARD), ("prepare", _PREPARE))
}


def _names(*groups: tuple[str, str]) -> tuple[str, ...]:
    """Return all names, each with the suffixes of its group: a name with suffixes ``" _b"`` is two numbers."""
    return tuple([name + end for names, ends in groups for name in names.split() for end in ends.split(" ")])


_STRIDES = " _b _h _l"
#: The numbers of the records that kernels take, in their order: ``csrc/records.h`` states them too, and what they are.
RECORDS = {
    "recurrence": _names(
        ("H G L K V query_heads delta kind parts saved_every together", ""),
        ("query key reader value decay rate output", _STRIDES),
        ("start end residual saved wrong", ""),
        ("grad d_query d_key d_reader d_value d_decay d_rate", _STRIDES),
        ("query_part key_part d_end d_start", ""),
    ),
    "lines": _names(
        ("query place key centred origin value bias start stop output slopes centers means factors state", ""),
        ("B H G L S C V gaussian interval_b interval_h interval_r bias_b bias_h bias_r bias_c", ""),
    ),
    "selection": _names(("B H G L S C V K list_b list_h rows words", "")),
    "layer": _names(
        ("norm_own norm_other norm_forward", " _bias"),
        ("query_key_value own_output other_query other_output up down", " _scales _bias"),
        ("key value other_key other_value", ""),
    ),
    "stack": _names(
        ("layers count norm_first E H F kv_row other_kv_row place", ""),
        ("own other", "_which _rows _row _counts _all"),
        ("last_norm", " _bias"),
    ),
}

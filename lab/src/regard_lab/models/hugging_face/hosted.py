"""Models that run in transformers, with regard's attention where the model supports it.

The classes of :mod:`regard_lab.models` need no other library. All other model families of transformers run through the
adapters in this file, which take the same inputs as regard's models. They never download files, load pickles, or run
code from a folder.

Dimensions: B batch, L tokens, E hidden size, N vocabulary size, C labels.
"""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard._utils.errors import RegardWarning, is_memory_error, rejected
from regard_lab.models.folders import CONFIG, ModelFileError, brief, file_error, read_json
from regard_lab.models.heads import Head
from regard_lab.models.hugging_face.reading import labels_of, problem_of

#: The command that installs transformers.
INSTALL = "pip install 'regard[hf]'"
#: Names of caches in the arguments and outputs of transformers' models.
_CACHES = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True)
class HostedConfig:
    """The properties of a model that the commands need.

    Attributes
    ----------
    vocabulary : int
        Number of embeddings.
    max_length : int
        Maximum number of positions.
    positions : {"learned", "other"}
        Learned positions are a hard limit.
    segments : int
        Number of segment types; 0 without segment embeddings.
    """

    vocabulary: int
    max_length: int
    positions: str
    segments: int


class Hosted(nn.Module):
    """A model that runs in transformers.

    Parameters
    ----------
    module : transformers.PreTrainedModel

    Attributes
    ----------
    attention : str
        Its attention implementation: ``"regard"``, or one of transformers' own if the model does not support that.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self._reads = frozenset(inspect.signature(module.forward).parameters)
        text = module.config.get_text_config()
        embedding = module.get_input_embeddings()
        learned = _learned_positions(module)
        max_length = getattr(text, "max_position_embeddings", None) or learned or 1 << 20
        segments = getattr(text, "type_vocab_size", 0) if "token_type_ids" in self._reads else 0
        self.config = HostedConfig(
            int(embedding.weight.shape[0]), int(max_length), "learned" if learned else "other", int(segments or 0)
        )

    @property
    def attention(self) -> str:
        return str(self.module.config._attn_implementation)

    def run(self, tokens: Tensor, attention_mask: Tensor | None = None, segments: Tensor | None = None) -> Any:
        """Return the module's output for tokens (B, L); ``attention_mask`` (B, L) is True for real tokens."""
        return self._run(self.module, tokens, attention_mask, segments)

    def rows(self, tokens: Tensor, attention_mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Return the last hidden states (B, L, E); for an encoder–decoder, those of the encoder.

        Parameters
        ----------
        tokens : Tensor (B, L) of int
        attention_mask : Tensor (B, L) of bool, optional
            True for real tokens; all by default.
        segments : Tensor (B, L) of int, optional
            The segment of each token; the first by default.

        Raises
        ------
        ValueError
            If the module returns no hidden states.
        """
        trunk = self.module.get_encoder() if self.module.config.is_encoder_decoder else self.module.base_model
        found = getattr(self._run(trunk, tokens, attention_mask, segments), "last_hidden_state", None)
        if not isinstance(found, Tensor):
            name = type(self.module).__name__
            raise rejected("rows", "model", "return last_hidden_state", f"a {name}, which does not")
        return found

    def _run(self, module: Any, tokens: Tensor, attention_mask: Tensor | None, segments: Tensor | None) -> Any:
        given: dict[str, Any] = {} if attention_mask is None else {"attention_mask": attention_mask.long()}
        if attention_mask is not None and (pad := self.pad) is not None:
            tokens = torch.where(attention_mask, tokens, pad)  # some models detect padding by its id
        if segments is not None and self.config.segments > 1:
            given["token_type_ids"] = segments
        return module(input_ids=tokens, **given)

    @property
    def pad(self) -> int | None:
        """The padding token's id in the config, or None."""
        return getattr(self.module.config.get_text_config(), "pad_token_id", None)

    def extra_repr(self) -> str:
        """Return the attention implementation."""
        return f"attention={self.attention!r}"


class HostedEncoder(Hosted):
    """A model without a head, which returns hidden states; for an encoder–decoder, those of the encoder.

    Examples
    --------
    >>> from transformers import DistilBertConfig, DistilBertModel
    >>> sizes = {"vocab_size": 50, "dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2}
    >>> model = HostedEncoder(DistilBertModel(DistilBertConfig(**sizes))).eval()  # as load() returns it of a folder
    >>> model.pool(model(torch.tensor([[3, 1, 4]]))).shape
    torch.Size([1, 16])
    """

    def forward(
        self, tokens: Tensor, *, attention_mask: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states (B, L, E)."""
        return self.rows(tokens, attention_mask, segments)

    def pool(self, rows: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the mean (B, E) of the hidden states of each sequence's real tokens."""
        from regard_lab.models.pooling import pooled

        return pooled("mean", rows, attention_mask)


class HostedMaskedLM(Hosted):
    """A masked language model."""

    def forward(
        self, tokens: Tensor, *, attention_mask: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Return the logits (B, L, N) of the token at each position."""
        return self.run(tokens, attention_mask, segments).logits


class HostedClassifier(Hosted):
    """A sequence classifier.

    Attributes
    ----------
    labels : tuple of C str
    problem : {"single_label", "multi_label", "regression"}
        What the logits mean; see :meth:`~regard_lab.models.heads.Head.predictions`.
    """

    def __init__(self, module: Any, labels: Sequence[str], problem: str) -> None:
        super().__init__(module)
        self.labels, self.problem = tuple(labels), problem

    @property
    def model(self) -> Hosted:
        """The model below the head: the classifier itself."""
        return self

    predictions = Head.predictions

    def forward(
        self, tokens: Tensor, *, attention_mask: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Return the logits (B, C); without a padding token, sequences run one at a time."""
        if self.pad is not None or len(tokens) < 2:
            return self.run(tokens, attention_mask, segments).logits
        rows = []
        for row in range(len(tokens)):
            real = slice(None) if attention_mask is None else attention_mask[row]
            kinds = None if segments is None else segments[row][real][None]
            rows.append(self.run(tokens[row][real][None], None, kinds).logits)
        return torch.cat(rows)


class HostedTokenClassifier(Hosted):
    """A token classifier with one label per token, regardless of the config's ``problem_type``.

    Attributes
    ----------
    labels : tuple of C str
    """

    def __init__(self, module: Any, labels: Sequence[str]) -> None:
        super().__init__(module)
        self.labels = tuple(labels)

    def forward(
        self, tokens: Tensor, *, attention_mask: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Return the logits (B, L, C)."""
        return self.run(tokens, attention_mask, segments).logits


class HostedImageClassifier(nn.Module):
    """An image classifier that runs in transformers.

    Parameters
    ----------
    module : transformers.PreTrainedModel
    labels : sequence of K str
    problem : {"single_label", "multi_label", "regression"}
        What the logits mean; see :meth:`~regard_lab.models.heads.Head.predictions`.

    Examples
    --------
    >>> from transformers import SwinConfig, SwinForImageClassification
    >>> sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4}
    >>> module = SwinForImageClassification(SwinConfig(**sizes, num_labels=3))
    >>> model = HostedImageClassifier(module, ["cat", "dog", "fox"], "single_label").eval()
    >>> model(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 3])
    """

    def __init__(self, module: Any, labels: Sequence[str], problem: str) -> None:
        super().__init__()
        self.module, self.labels, self.problem = module, tuple(labels), problem

    predictions = Head.predictions

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, K) of images (B, C, H, W)."""
        return self.module(pixel_values=images).logits


class HostedWriter(Hosted):
    """A text generator: a decoder, which continues the prompt, or an encoder–decoder, which answers it."""

    @property
    def is_pair(self) -> bool:
        """Whether it is an encoder–decoder."""
        return bool(self.module.config.is_encoder_decoder)

    @property
    def ends(self) -> list[int]:
        """The end-of-text tokens in its generation_config."""
        found = self.module.generation_config.eos_token_id
        return [] if found is None else [int(each) for each in (found if isinstance(found, list) else [found])]

    def forward(self, tokens: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
        """Return a decoder's next-token logits (B, L, N)."""
        if self.is_pair:
            raise rejected("load", "model", "be a decoder-only model", "an encoder–decoder")
        return self.run(tokens, attention_mask).logits

    def begin(self, prompt: Sequence[int]) -> Writing:
        """Start generation for a prompt."""
        return Writing(self, prompt)


class Writing:
    """The generation of one text by a :class:`HostedWriter`, token by token.

    Parameters
    ----------
    model : HostedWriter
    prompt : sequence of int

    Attributes
    ----------
    tokens : list of int
        The decoder's input tokens, initially the prompt of a decoder or the start token of an encoder–decoder.
    """

    def __init__(self, model: HostedWriter, prompt: Sequence[int]) -> None:
        self.model, self.tokens = model, list(prompt)
        self._read, self._cache, self._given = 0, None, {}
        self._device = next(model.parameters()).device
        if model.is_pair:
            source = torch.tensor([list(prompt)], device=self._device)
            self._given = {"encoder_outputs": model.module.get_encoder()(input_ids=source)}
            self.tokens = self._beginning()

    def _beginning(self) -> list[int]:
        """Return the start tokens of an encoder–decoder's decoder."""
        how, config = self.model.module.generation_config, self.model.module.config
        begin = how.decoder_start_token_id
        begin = getattr(config, "decoder_start_token_id", None) if begin is None else begin
        begin = how.bos_token_id if begin is None else begin
        if begin is None:
            got = "none in config.json and generation_config.json"
            raise rejected("generate", "model", "have a decoder_start_token_id", got, ModelFileError)
        forced = how.forced_bos_token_id
        return [int(begin)] if forced is None else [int(begin), int(forced)]

    def logits(self, *, weights: bool = False) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return the next-token logits (N,) and, if requested, the last token's attention (H, S) in each layer."""
        model, new = self.model, self.tokens[self._read :]
        name = next((each for each in _CACHES if each in model._reads), None)
        given: dict[str, Any] = {**self._given, "use_cache": True}
        if weights:
            given["output_attentions"] = True
        if self._cache is None:
            new = self.tokens
        else:
            given[str(name)] = self._cache
        ids = torch.tensor([new], device=self._device)
        out = model.module(**{"decoder_input_ids" if model.is_pair else "input_ids": ids}, **given)
        self._cache = None if name is None else getattr(out, name, None)
        self._read = len(self.tokens)
        return out.logits[0, -1], _last_rows(model, out) if weights else None

    def together(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the next-token logits (K, N) of several equally long decoder inputs (K, L)."""
        ids, given = torch.tensor([list(each) for each in texts], device=self._device), dict(self._given)
        if self.model.is_pair:
            read = given["encoder_outputs"]
            given["encoder_outputs"] = type(read)(last_hidden_state=read[0].expand(len(ids), -1, -1))
        out = self.model.module(**{"decoder_input_ids" if self.model.is_pair else "input_ids": ids}, **given)
        return out.logits[:, -1]


def _last_rows(model: HostedWriter, out: Any) -> tuple[Tensor, ...]:
    """Return the attention weights (H, S) of the decoder's last token in each layer."""
    found = out.decoder_attentions if model.is_pair else out.attentions
    rows = tuple(each[0, :, -1] for each in found or () if isinstance(each, Tensor))
    if not rows:
        name = type(model.module).__name__
        raise rejected("generate", "model", "return attention weights to draw them", f"a {name}, which does not")
    return rows


def host(folder: Path, dtype: torch.dtype | None = None) -> Hosted | HostedImageClassifier:
    """Load a model from a folder with transformers, in evaluation mode.

    Parameters
    ----------
    folder : Path
    dtype : torch.dtype, optional
        Dtype of the parameters; as stored by default.

    Raises
    ------
    ModelFileError
        If transformers has no such class or cannot load it, or if it is neither a text model nor an image classifier.
    """
    described = read_json(folder / CONFIG)
    module = load_module(folder, dtype=dtype)
    name, path = type(module).__name__, folder / CONFIG
    kinds = _names()
    if name in kinds["token classification"]:
        return HostedTokenClassifier(module, labels_of(path, described)).eval()
    labelling: tuple[tuple[str, type[HostedClassifier | HostedImageClassifier]], ...]
    labelling = (("sequence classification", HostedClassifier), ("image classification", HostedImageClassifier))
    for kind, classifier in labelling:
        if name in kinds[kind]:
            labels = labels_of(path, described)
            return classifier(module, labels, problem_of(path, described, len(labels))).eval()
    for kind, made in (("pair", HostedWriter), ("causal", HostedWriter), ("masked", HostedMaskedLM)):
        if name in kinds[kind]:
            return made(module).eval()
    if module.main_input_name != "input_ids" or not name.endswith(("Model", "Encoder")):
        expected = (
            "be of a text generator, a masked language model, a classifier of texts, tokens or images, or a model "
            "without a head"
        )
        raise file_error(path, expected, name)
    return HostedEncoder(module).eval()


def load_module(folder: Path, auto: str | None = None, dtype: torch.dtype | None = None) -> Any:
    """Load a transformers model from a folder, in evaluation mode, with regard's attention if it supports that.

    Parameters
    ----------
    folder : Path
    auto : str, optional
        The ``Auto`` class of transformers to use; by default, the architecture in the folder's config.
    dtype : torch.dtype, optional
        Dtype of the parameters; as stored by default.

    Raises
    ------
    ModelFileError
        If transformers is missing, has no such class, or cannot load the folder.

    Warns
    -----
    RegardWarning
        If the model runs with transformers' own attention.
    """
    path = folder / CONFIG
    if find_spec("transformers") is None:
        kind = brief((read_json(path) or {}).get("model_type"))
        raise file_error(path, f"be of a family that runs without transformers (for others: {INSTALL})", kind)
    import transformers

    from regard.integrations.transformers import attention_layers, register

    register()
    transformers.utils.logging.disable_progress_bar()
    made = getattr(transformers, auto or _architecture(path, transformers))
    stored: Any = "auto" if dtype is None else dtype
    options = {"local_files_only": True, "use_safetensors": True, "dtype": stored, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # checked below, with a shorter error
    options["trust_remote_code"] = False  # never prompt on standard input
    refused: list[str] = []
    for attention in ("regard", "sdpa", "eager"):
        try:
            module, found = made.from_pretrained(folder, attn_implementation=attention, **options)
        except Exception as error:
            if not _refuses_folder(error):
                raise
            kind = "KeyError: " if isinstance(error, KeyError) else ""  # its message is only the key
            refused.append(kind + " ".join(str(error).split())[:200])
            continue
        if attention == "regard" and not attention_layers(module):
            refused.append("its layers implement their own attention")
            continue
        if missing := sorted(found["missing_keys"]):
            raise file_error(folder, f"hold the tensors of {type(module).__name__}", f"no {brief(missing[0])}")
        if wrong := sorted(found["mismatched_keys"]):
            tensor, stored_shape, shape = wrong[0]
            raise file_error(folder, f"hold {tensor} of shape {tuple(shape)}", tuple(stored_shape))
        if refused:
            name = type(module).__name__
            warnings.warn(
                f"load: {name} runs with its own {attention} attention: {refused[0]}", RegardWarning, stacklevel=3
            )
        return module.eval()
    raise file_error(folder, "be a model that transformers loads", refused[-1])


@contextmanager
def reading_folder(path: Path, expected: str) -> Iterator[None]:
    """Raise a ModelFileError for what transformers refuses about a folder; other errors pass."""
    try:
        yield
    except Exception as error:  # filtered: an inconsistent folder can cause any type
        if not _refuses_folder(error, callers=2):
            raise
        raise file_error(path, expected, " ".join(str(error).split())[:200]) from None


def _refuses_folder(error: Exception, callers: int = 1) -> bool:
    """Return whether an error of transformers is about the folder or the requested attention.

    transformers raises such errors for missing or damaged files, unknown models, missing packages, and attention that
    a class does not support. An inconsistent config can cause any exception type, raised where transformers builds the
    model. Errors in regard's functions, invalid calls and full memory do not count. The first ``callers`` frames are
    those that call transformers.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    if is_memory_error(error):
        return False
    called = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)][callers:]
    raising = [name for name in called if name.startswith(("regard.", "regard_lab.", "transformers."))][-1:]
    if any(name.startswith(("regard.", "regard_lab.")) for name in raising):
        return isinstance(error, ValueError)  # raised for layers that do not support regard's attention
    if isinstance(error, OSError | ValueError | ImportError | RuntimeError | SafetensorError | StrictDataclassError):
        return True
    return any(name.startswith("transformers.models.") and ".auto." not in name for name in called)


def _architecture(path: Path, transformers: Any) -> str:
    """Return the architecture class in a config.json."""
    described = read_json(path)
    given = described.get("architectures") if isinstance(described, Mapping) else None
    name = given[0] if isinstance(given, list) and given else None
    if name is None:
        return "AutoModel"
    if not isinstance(name, str) or not isinstance(getattr(transformers, name, None), type):
        expected = f"name an architecture of transformers {transformers.__version__}"
        raise file_error(path, expected, brief(name))
    return name


def _names() -> dict[str, set[str]]:
    """Return transformers' model classes by task."""
    from transformers.models.auto import modeling_auto as auto

    tables: dict[str, Mapping[str, Any]] = {
        "pair": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "sequence classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "image classification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    found: dict[str, set[str]] = {}
    for kind, table in tables.items():
        listed = [each if isinstance(each, tuple) else (each,) for each in table.values()]
        found[kind] = {name for each in listed for name in each}
    return found


def _learned_positions(module: nn.Module) -> int | None:
    """Return the number of learned positions; None without a table of positions."""
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(part, nn.Embedding) and last in _TABLES:
            offset = int(getattr(part, "offset", 0) or getattr(part, "padding_idx", None) or 0)
            return part.num_embeddings - offset
    return None


#: Names of learned position tables in transformers' models.
_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe", "position_embed", "pos_embed")

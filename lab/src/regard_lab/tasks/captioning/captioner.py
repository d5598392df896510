"""A trained captioner with its encoder and vocabulary: saved, loaded, and put to images.

Dimensions: A attention maps, T target tokens, S places of the grid, X pixels of a side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard._utils.errors import fitting, rejected
from regard_lab.data.images import resize_image
from regard_lab.generation.beam_search import Hypothesis, search
from regard_lab.generation.predictions import Prediction, PredictionOptions, merge_duplicates, with_alternatives
from regard_lab.models.base import END, EncoderDecoder
from regard_lab.models.captioner import CAPTIONERS
from regard_lab.models.efficientnet import channels_last
from regard_lab.models.folders import (
    CONFIG,
    build_model,
    file_error,
    load_config,
    load_json,
    load_weights,
    read_json,
    save_model,
)
from regard_lab.tasks.captioning.encoders import TOGETHER, ImageEncoder, build_encoder
from regard_lab.text.ragged import pad
from regard_lab.text.vocabulary import Vocabulary

#: The input weights of a recurrent decoder's first layer.
_ENTERING = "decoder.weight_ih_l0"
FORMAT, VERSION, TARGET = "regard.captioner", 1, "target.json"
#: Default maximum caption length in tokens.
LONGEST = 50


class Captioner:
    """An image captioner: a caption decoder with its image encoder and vocabulary.

    Parameters
    ----------
    model : EncoderDecoder
        One of :data:`CAPTIONERS`; put into evaluation mode.
    encoder : ImageEncoder
    vocabulary : Vocabulary
        Decodes token ids to text.
    about : mapping, optional
        JSON-serializable metadata, saved with the model.
    """

    def __init__(
        self, model: EncoderDecoder, encoder: ImageEncoder, vocabulary: Vocabulary, about: Mapping[str, Any] = {}
    ) -> None:
        places = encoder.rows * encoder.cols
        for name, wanted, got in (
            ("vocabulary", model.config.targets, len(vocabulary)),
            ("encoder", (model.config.sources, model.config.places), (encoder.width, places)),
        ):
            if wanted != got:
                raise rejected("Captioner", name, f"have the size in the model's config, {wanted}", got)
        self.model, self.encoder, self.vocabulary = model.eval(), encoder.eval(), vocabulary
        self.about = dict(about)

    @property
    def kind(self) -> str:
        """The model's name in :data:`CAPTIONERS`."""
        return next(name for name, (_, kind) in CAPTIONERS.items() if type(self.model) is kind)

    def save(self, folder: str | Path) -> Path:
        """Save the captioner, including its encoder, to a folder; see :meth:`load`.

        Raises
        ------
        OSError
            If it cannot be written.
        ValueError
            If a parameter is not finite.
        """
        config = {"format": FORMAT, "version": VERSION, "kind": self.kind, "model": asdict(self.model.config)}
        config |= {"encoder": self.encoder.config, "about": self.about}
        return save_model(folder, self._whole(), config, others={TARGET: self.vocabulary.to_json()})

    @classmethod
    def load(cls, folder: str | Path) -> Captioner:
        """Read a captioner from the folder that :meth:`save` wrote.

        Raises
        ------
        ModelFileError
            If a file is missing, unreadable, truncated, modified, of another format or version, or inconsistent with
            the others.
        """
        path = Path(folder) / CONFIG
        config = load_config(folder, kind=FORMAT, version=VERSION)
        if config.get("kind") not in CAPTIONERS:
            raise file_error(path, f"have a 'kind' among {', '.join(CAPTIONERS)}", repr(config.get("kind"))[:60])
        if not isinstance(config.get("about"), dict):
            raise file_error(path, "have an object 'about'", repr(config.get("about"))[:60])
        vocabulary = Vocabulary.from_json(load_json(folder, TARGET, config), str(Path(folder) / TARGET))
        model = build_model(path, *CAPTIONERS[config["kind"]], config.get("model"))
        encoder = build_encoder(config.get("encoder"), path)
        try:
            made = cls(model, encoder, vocabulary, config["about"])
        except ValueError as error:
            raise file_error(path, "describe a model, an encoder and a vocabulary that fit", str(error)) from None
        load_weights(folder, made._whole(), config)
        channels_last(encoder)
        return made

    def _whole(self) -> nn.Module:
        return nn.ModuleDict({"encoder": self.encoder, "model": self.model})

    def read(self, pixels: np.ndarray) -> np.ndarray:
        """Resize an image (H, W, 3) to the encoder's input size (X, X, 3)."""
        return resize_image(pixels, self.encoder.side)

    @torch.no_grad()
    def features(self, images: Sequence[np.ndarray]) -> Tensor:
        """Return the features (B, S, F) of images (X, X, 3), rounded to float16 like precomputed features."""
        pixels, learning = torch.from_numpy(np.stack(images)), self.encoder.training
        self.encoder.eval()
        made = torch.cat([self.encoder(each).half() for each in pixels.split(TOGETHER)]).float()
        self.encoder.train(learning)
        return made

    def caption(self, grids: Tensor, names: Sequence[str], options: PredictionOptions) -> list[Prediction]:
        """Return captions of images.

        Parameters
        ----------
        grids : Tensor (B, S, F)
            Image features, from :meth:`features` or a file of features.
        names : sequence of str
            Names of the images.
        options : PredictionOptions
            Only ``search``, ``alignment``, ``batch`` and ``precision`` are used.

        Returns
        -------
        list of Prediction
            ``source`` is the image name, and ``alignment`` (A, T, S) refers to grid positions in row-major order.
        """
        max_length = options.search.max_length or LONGEST
        searching = replace(options.search, max_length=max_length, unknown=False)
        narrow, made = options.precision == "bfloat16", []
        with self._evaluating(options):
            for first in range(0, len(grids), options.batch):
                some = grids[first : first + options.batch].float()
                lengths = torch.full((len(some),), some.shape[1])
                with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
                    found = search(self.model, some, lengths, searching, pool=searching.n_best)
                for name, grid, hypotheses in zip(names[first:], some, found):
                    made.append(self._prediction(name, grid, hypotheses or [_NOTHING], options))
        return made

    @torch.no_grad()
    def attention(self, grid: Tensor, captions: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the attention weights (A, T, S) of captions on a grid (S, F)."""
        before, lengths = pad([[END, *numbers[:-1]] for numbers in captions])
        weights = self.model.align(grid[None], torch.tensor([len(grid)]), before)
        return [each[:, : int(length)] for each, length in zip(weights, lengths)]

    def _prediction(
        self, name: str, grid: Tensor, hypotheses: Sequence[Hypothesis], options: PredictionOptions
    ) -> Prediction:
        predictions = []
        for each in hypotheses:
            numbers = list(each.numbers)
            made = Prediction(
                name,
                self.vocabulary.decode(numbers),
                (),
                tuple(self.vocabulary.tokens(numbers)),
                each.score,
                each.normalized,
                words=tuple(self.vocabulary.words(numbers)),
            )
            if options.alignment and numbers and self.model.maps:
                (weights,) = self.attention(grid, [numbers])
                made = replace(made, maps=self.model.maps, alignment=weights, aligning=self.aligning)
            predictions.append(made)
        if options.search.sample:
            return with_alternatives(predictions)
        return merge_duplicates(predictions, options.search.n_best)

    @property
    def aligning(self) -> str | None:
        """The attention map that shows where words attend; None for the mean of all maps."""
        return self.model.maps[0] if len(self.model.maps) == 1 else None

    @contextmanager
    def _evaluating(self, options: PredictionOptions) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        lower = f"lower batch (now {options.batch}) or beams (now {options.search.beams})"
        try:
            with fitting(f"caption: out of memory: {lower}."):
                yield
        finally:
            self.model.train(training)


def copy_captioner(captioner: Captioner, start: Captioner) -> None:
    """Copy the parameters of a start captioner; hard attention can start from soft attention.

    If the new model adds a glimpse of the whole image, its weights are initially 0, so that outputs do not change.

    Raises
    ------
    ValueError
        If the encoders differ, or the parameters have other names or shapes.
    """
    ours, theirs = (each.encoder.config for each in (captioner, start))
    if ours != theirs:
        raise rejected("train", "start", f"have the encoder {ours}", theirs)
    captioner.encoder.load_state_dict(start.encoder.state_dict())
    known = {_plain(name): tensor for name, tensor in start.model.state_dict().items()}
    taken = captioner.model.state_dict()
    for name, tensor in captioner.model.named_parameters():
        other = known.get(_plain(name))
        if name == _ENTERING and other is not None and _begins_to_glimpse(captioner, start):
            wider = F.pad(other, (0, captioner.model.config.states))  # the glimpse is the last input
            other = wider if wider.shape == tensor.shape else other
        if other is None or other.shape != tensor.shape:
            got = "none" if other is None else f"of shape {tuple(other.shape)}"
            expected = f"have the parameter {name} of shape {tuple(tensor.shape)}, as in the options"
            raise rejected("train", "start", expected, got)
        taken[name] = other
    left = known.keys() - {_plain(name) for name in taken}
    if left:
        expected = "have no parameters other than those in the options"
        raise rejected("train", "start", expected, ", ".join(sorted(left)[:3]))
    captioner.model.load_state_dict(taken)


def _begins_to_glimpse(captioner: Captioner, start: Captioner) -> bool:
    ours, theirs = (getattr(each.model.config, "glimpse", False) for each in (captioner, start))
    return bool(ours and not theirs)


def _plain(name: str) -> str:
    """Return a parameter's name without the hard attention layer around its score."""
    return name.replace("attending.layer.scorer.", "attending.layer.")


def is_captioner(folder: str | Path) -> bool:
    """Return whether a folder holds a captioner."""
    path = Path(folder) / CONFIG
    config = read_json(path) if path.is_file() else None
    return isinstance(config, dict) and config.get("format") == FORMAT


_NOTHING = Hypothesis((), -torch.inf, -torch.inf)

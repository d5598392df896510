"""Small models of both kinds with vocabularies of a few sentences, untrained but decided."""

from __future__ import annotations

import torch

from regard_lab.generation.sequence_model import SequenceModel
from regard_lab.models import RecurrentConfig, RecurrentEncoderDecoder, TransformerConfig, TransformerEncoderDecoder
from regard_lab.text.vocabulary import SubwordVocabulary

ENGLISH = ["the zone of international control", "I love you", "a cat and a dog", "the dog loves the cat", "you and I"]
FRENCH = [
    "la zone de contrôle international",
    "je t'aime",
    "un chat et un chien",
    "le chien aime le chat",
    "toi et moi",
]
SOURCE = SubwordVocabulary.train(ENGLISH)
TARGET = SubwordVocabulary.train(FRENCH, "unigram")
LINES = ["the cat", "", "I love the international dog and you", "zone", "   ", "a dog and a cat", "you", "love"]


def recurrent(**changes: object) -> SequenceModel:
    torch.manual_seed(1)
    config = RecurrentConfig(len(SOURCE), len(TARGET), embedding=8, encoder=6, decoder=8, features=6, **changes)
    return _livened(SequenceModel(RecurrentEncoderDecoder(config), SOURCE, TARGET, {"from": "en", "to": "fr"}))


def transformer(**changes: object) -> SequenceModel:
    torch.manual_seed(2)
    sizes = {"width": 8, "heads": 2, "feedforward": 16, "encoder_layers": 1, "decoder_layers": 2, **changes}
    config = TransformerConfig(len(SOURCE), len(TARGET), **sizes)
    return _livened(SequenceModel(TransformerEncoderDecoder(config), SOURCE, TARGET))


def _livened(model: SequenceModel) -> SequenceModel:
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter *= 1.8
    return model


MAKERS = {"recurrent": recurrent, "transformer": transformer}

"""Texts as numbers and back: vocabularies, subwords, words and sentences."""

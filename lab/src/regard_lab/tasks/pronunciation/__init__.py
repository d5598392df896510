"""Pronouncing words: letters in, phonemes out."""

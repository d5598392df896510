"""Alignment of words with those of their translations: links, aligners, guided attention, and links from attention."""

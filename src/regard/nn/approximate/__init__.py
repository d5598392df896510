"""Layers that approximate softmax attention, each with a method that computes what it approximates."""

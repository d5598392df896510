"""Sums over training points, by the method that suits them."""

"""One short file for each family of mechanisms; ``python -m examples`` draws all of them into docs/gallery."""

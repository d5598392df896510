"""Every model family of the installed transformers, tiny: on its own attention and on ours."""

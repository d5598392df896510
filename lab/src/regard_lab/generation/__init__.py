"""Output of a trained model: generation, beam search, sampling, forced scores, and predictions for lines of text."""

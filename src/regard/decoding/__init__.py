"""Output of a trained model: beam search, sampling, forced scores, and predictions for lines of text."""

"""Language models: pretrained on text, fine-tuned on labels, evaluated."""

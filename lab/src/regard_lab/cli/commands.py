"""The commands of this package with their one-line help for ``regard --help``."""

COMMANDS = (
    "regard_lab.cli.app:app",
    {
        "align": "Align the words of sentences and their translations, in Pharaoh format: 0-0 1-2.",
        "caption": "Caption images and show where each word attended.",
        "classify": "Classify texts, images or the tokens of a text; print each label with its probability.",
        "compare": "Train attention mechanisms on the same data, steps and seed, and compare them.",
        "demo": "Translate English to French and show which words each word attended to.",
        "embed": "Compute an embedding of each text from a model's last layer.",
        "evaluate": "Evaluate a model on test data.",
        "fill-mask": "Predict the most likely tokens for each mask in a text, with probabilities.",
        "generate": "Continue a text with a language model.",
        "look": "Show what a model attends to in a text or an image.",
        "plan": "Estimate what training a model takes: parameters, FLOPs, memory, parallel layouts, time.",
        "pronounce": "Pronounce words with a trained model.",
        "train": "Train a model on your own data.",
        "translate": "Translate sentences and show which words the model attended to.",
    },
)

"""Where the commands of this package are defined, and what ``regard --help`` says of each."""

COMMANDS = (
    "regard_lab.cli.app:app",
    {
        "align": "Link the words of sentences with those of their translations, in Pharaoh's format: 0-0 1-2.",
        "caption": "Write a sentence about each image, and show where each word looked.",
        "classify": "Name the label of each text or image, with its probability.",
        "compare": "Train several mechanisms on the same data, steps and seed, and compare them.",
        "demo": "Translate English to French, and show which words each word looked at.",
        "embed": "Make a vector of each text, from the rows that leave a model's last layer.",
        "evaluate": "Score a translator, a captioner, a language model or a classifier.",
        "fill-mask": "Name the likeliest tokens for each mask in a text, with their probabilities.",
        "generate": "Let a language model go on with a text, token by token.",
        "look": "Show what a model attends to in a text or an image.",
        "plan": "Tell what training a model takes: parameters, operations, memory, layouts, time.",
        "pronounce": "Pronounce words with a saved model, without training.",
        "train": "Train a model on data of your own.",
        "translate": "Translate lines with a model, and show which words it looked at.",
    },
)

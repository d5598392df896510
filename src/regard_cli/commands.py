"""Where the commands of the library are defined, and what ``regard --help`` says of each."""

COMMANDS = (
    "regard_cli.library:app",
    {
        "catalogue": "List every mechanism: formula, source, learned parts, engines, cost.",
        "regress": "Predict a column of a table from the others by kernel regression, and say how well that works.",
        "view": "Show what a model attends to on a page, on this machine alone.",
        "warmup": "Compile the CPU kernels now, so that no first call has to wait for them.",
    },
)

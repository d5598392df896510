"""The module that defines the library's commands, and their help lines."""

COMMANDS = (
    "regard_cli.library:app",
    {
        "catalogue": "List every mechanism with formula, source, learned parts, engines, cost and cache.",
        "regress": "Predict a table column from the others by kernel regression, and report the accuracy.",
        "view": "Show recorded attention on a local web page.",
    },
)

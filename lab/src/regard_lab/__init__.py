"""What is built with regard: models, training, generation, and the tasks of the command line.

The names in ``__all__`` are public: in ``regard_lab.models``, ``text``, ``data``, ``training``, ``training.sharded``,
``generation``, ``planner`` and ``pretrained``, and in ``translation``, ``translation.alignment``, ``language``,
``classification``, ``captioning``, ``pronunciation`` and ``embedding`` of ``regard_lab.tasks``. All other modules and
names are private, with an underscore or without: they may change in any version.
"""

from importlib.metadata import version as _version

__version__ = "0.2.0"

__all__ = ["__version__"]

#: Versions of regard with these two numbers in front fit this package.
_FITS = __version__.rpartition(".")[0]

if _version("regard").rpartition(".")[0] != _FITS:
    raise ImportError(
        f"regard_lab {__version__} needs regard {_FITS}, and {_version('regard')} is installed: "
        f"pip install 'regard=={_FITS}.*'"
    )

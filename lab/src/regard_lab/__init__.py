"""What is built with regard: models, training, generation, and the tasks of the command line."""

from importlib.metadata import version as _version

__version__ = "0.1.0"

#: Versions of regard with these two numbers in front fit this package.
_FITS = __version__.rpartition(".")[0]

if _version("regard").rpartition(".")[0] != _FITS:
    raise ImportError(
        f"regard_lab {__version__} needs regard {_FITS}, and {_version('regard')} is installed: "
        f"pip install 'regard=={_FITS}.*'"
    )

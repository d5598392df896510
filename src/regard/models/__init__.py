"""Models, one file each, that read from top to bottom; every one of them attends through :func:`regard.attention`."""

from regard.models.recurrent import Memory, RecurrentConfig, RecurrentEncoderDecoder, State

__all__ = ["Memory", "RecurrentConfig", "RecurrentEncoderDecoder", "State"]

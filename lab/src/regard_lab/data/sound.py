"""Recordings: reading sound files.

Dimensions: N samples, C channels.
"""

from __future__ import annotations

import io
import wave
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from regard._utils.errors import rejected
from regard._utils.files import display_name, read_bytes

#: The most bytes of a file: an hour of stereo at 48 kHz and 24 bits.
LARGEST = 1 << 30
#: Bytes of a sample in WAV files, and the value of the largest sample.
_PEAKS = {1: 1 << 7, 2: 1 << 15, 3: 1 << 23, 4: 1 << 31}
_INSTALL = "pip install soundfile"


def read_sound(path: str | Path, rate: int, *, function: str = "read_sound") -> np.ndarray:
    """Return the samples of a sound file, as one channel at a rate.

    Parameters
    ----------
    path : str or Path
        A WAV file of integers, or whatever the package soundfile reads, if it is installed: WAV of floats, FLAC, Ogg,
        MP3.
    rate : int
        Samples per second to return. Other rates are resampled without the frequencies above half of either rate.
    function : str
        What error messages begin with.

    Returns
    -------
    ndarray (N,) of float32
        The mean of the channels, in [-1, 1].

    Raises
    ------
    ValueError
        If the file cannot be read, holds no sound, or is of a kind that needs soundfile.

    Examples
    --------
    >>> import tempfile, wave
    >>> from regard_lab.data.sound import read_sound
    >>> path = Path(tempfile.mkdtemp()) / "a.wav"
    >>> with wave.open(str(path), "wb") as file:
    ...     file.setnchannels(1), file.setsampwidth(2), file.setframerate(8000)
    ...     file.writeframes(np.array([0, 16384, -32768], "<i2").tobytes())
    (None, None, None)
    >>> read_sound(path, 8000)
    array([ 0. ,  0.5, -1. ], dtype=float32)
    """
    name, data = display_name(path), read_bytes(path, function, LARGEST)
    try:
        samples, own = _wave(data)
    except (wave.Error, EOFError, ValueError) as error:
        samples, own = _others(data, name, function, error)
    if not samples.size:
        raise rejected(function, name, "hold sound", "no samples")
    if not np.isfinite(samples).all():
        raise rejected(function, name, "hold finite samples", "NaN or infinity")
    return _resampled(samples.mean(1), own, rate).astype(np.float32)


def _wave(data: bytes) -> tuple[np.ndarray, int]:
    """Return the samples (N, C) of a WAV file of integers, and their rate."""
    with wave.open(io.BytesIO(data)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        if width not in _PEAKS or rate < 1:
            raise wave.Error(f"{8 * width} bits at {rate} Hz")
        raw = file.readframes(file.getnframes())
    raw = raw[: len(raw) // (width * channels) * width * channels]
    if width == 1:  # unsigned, unlike all others
        samples = np.frombuffer(raw, np.uint8).astype(np.float64) - _PEAKS[1]
    else:
        whole = np.zeros((len(raw) // width, 4), np.uint8)
        whole[:, 4 - width :] = np.frombuffer(raw, np.uint8).reshape(-1, width)  # the upper bytes of 32 bits
        samples = whole.view("<i4")[:, 0] / float(1 << 8 * (4 - width))
    return (samples / _PEAKS[width]).reshape(-1, channels), rate


def _others(data: bytes, name: str, function: str, error: Exception) -> tuple[np.ndarray, int]:
    """Return the samples (N, C) of a file that only soundfile reads, and their rate."""
    if find_spec("soundfile") is None:
        expected = f"be a WAV file of integers (others: {_INSTALL})"
        raise rejected(function, name, expected, str(error) or "a file that ends early") from None
    import soundfile

    try:
        samples, rate = soundfile.read(io.BytesIO(data), always_2d=True)
    except (soundfile.SoundFileError, ValueError) as other:
        raise rejected(function, name, "be a sound file", str(other).rstrip(".")) from None
    return samples, int(rate)


def _resampled(samples: np.ndarray, own: int, rate: int) -> np.ndarray:
    """Return samples (N,) at another rate, by their Fourier coefficients up to half of the lower rate."""
    if own == rate:
        return samples
    count = max(round(len(samples) * rate / own), 1)
    found = np.fft.rfft(samples)[: count // 2 + 1]
    return np.fft.irfft(found, count) * (count / len(samples))

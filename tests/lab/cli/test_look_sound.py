"""``regard look --audio``: what speech models attend to in a recording."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pages import Page

from regard.inspect import Record
from regard_lab.data.sound import read_sound
from regard_lab.text.tokenizer import Tokenizer

RATE = 16000
PAIR = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
#: The strides of these families are those of the published ones; so 20 ms, and 40 ms of SEW and Speech2Text.
HEARD = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 12,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def model_of(kind: str, size: int) -> tuple[Any, Any, float]:
    """Return a small speech model, its feature extractor and the seconds of a token."""
    torch.manual_seed(0)
    if kind == "whisper":
        config = transformers.WhisperConfig(
            **PAIR, vocab_size=size, num_mel_bins=8, max_source_positions=100, max_target_positions=12
        )
        extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
        return transformers.WhisperForConditionalGeneration(config), extractor, 0.02
    if kind == "speech_to_text":
        config = transformers.Speech2TextConfig(
            **PAIR, vocab_size=size, max_source_positions=100, max_target_positions=12, input_feat_per_channel=8,
            conv_channels=16,
        )  # fmt: skip
        extractor = transformers.Speech2TextFeatureExtractor(feature_size=8, num_mel_bins=8)
        return transformers.Speech2TextForConditionalGeneration(config), extractor, 0.04
    wave_extractor = transformers.Wav2Vec2FeatureExtractor()
    if kind == "moonshine":
        config = transformers.MoonshineConfig(
            vocab_size=size, hidden_size=16, intermediate_size=16, encoder_num_hidden_layers=2,
            decoder_num_hidden_layers=2, encoder_num_attention_heads=2, decoder_num_attention_heads=2,
            bos_token_id=0, eos_token_id=0, pad_token_id=0, decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.MoonshineForConditionalGeneration(config), wave_extractor, 0.024
    if kind == "wav2vec2-bert":
        config = transformers.Wav2Vec2BertConfig(**HEARD, feature_projection_input_dim=16)
        extractor = transformers.SeamlessM4TFeatureExtractor(feature_size=8, num_mel_bins=8, stride=2)
        return transformers.Wav2Vec2BertModel(config), extractor, 0.02
    name = {"wav2vec2": "Wav2Vec2", "hubert": "Hubert", "wavlm": "WavLM", "sew": "SEW", "unispeech": "UniSpeech"}[kind]
    few = {} if kind == "sew" else {"conv_dim": (8,) * 7}
    config = getattr(transformers, f"{name}Config")(**HEARD, **few)
    return getattr(transformers, f"{name}Model")(config), wave_extractor, 0.04 if kind == "sew" else 0.02


def recording(path: Path, seconds: float = 1.5, rate: int = RATE, channels: int = 1) -> Path:
    samples = np.random.default_rng(0).integers(-9999, 9999, (round(seconds * rate), channels))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return path


def folder_of(kind: str, folder: Path) -> float:
    tokenizer = Tokenizer.learn(["the cat sat"], kind="bytes", specials=("end", "pad"))
    model, extractor, step = model_of(kind, len(tokenizer))
    model.save_pretrained(folder)
    extractor.save_pretrained(folder)
    tokenizer.save(folder)
    return step


@pytest.mark.parametrize(
    "kind",
    ["whisper", "speech_to_text", "moonshine", "wav2vec2", "hubert", "wavlm", "sew", "unispeech", "wav2vec2-bert"],
)
def test_tokens_have_their_seconds(regard, tmp_path, kind: str) -> None:
    step, pair = folder_of(kind, tmp_path), kind in ("whisper", "speech_to_text", "moonshine")
    sound = recording(tmp_path / "a.wav")
    out = ("--out", tmp_path / "a.regard", "--html", tmp_path / "a.html")
    result = regard("look", tmp_path, "--audio", sound, *out, *(("--target", "the cat") if pair else ()))
    assert result.code == 0, result.err
    record = Record.load(tmp_path / "a.regard")
    heard = record.texts[0]
    assert heard.seconds[0] == (0.0, step)
    assert heard.seconds[-1][1] == pytest.approx(2 if kind == "whisper" else 1.5, abs=0.09)
    assert len(record.texts) == 1 + pair and record.title == "a.wav"
    if pair:
        crossed = record["cross 1"]
        assert crossed.shape[3] == len(heard.tokens) and "".join(record.texts[1].tokens).endswith("the cat")
        free = regard("look", tmp_path, "--audio", sound, "--layer", "cross 0", "--head", "1")
        assert free.code == 0 and "cross-attention, layer 0" in free.out, free.err
    seen = Page((tmp_path / "a.html").read_text(encoding="utf-8")).described["texts"]
    assert seen[0]["seconds"][1] == pytest.approx([step, 2 * step])


def test_padding_is_special_and_what_is_too_long_is_said(regard, tmp_path) -> None:
    folder_of("whisper", tmp_path)
    given = ("look", tmp_path, "--target", "a", "--out", tmp_path / "a.regard", "--audio")
    assert regard(*given, recording(tmp_path / "a.wav")).code == 0
    special = Record.load(tmp_path / "a.regard").texts[0].special
    assert special == tuple(range(80, 100))
    assert "the model reads the first 2 of 4 seconds" in regard(*given, recording(tmp_path / "b.wav", seconds=4)).err


def test_what_cannot_be_heard_is_said(regard, tmp_path) -> None:
    for kind in ("whisper", "wav2vec2"):
        (tmp_path / kind).mkdir()
        folder_of(kind, tmp_path / kind)
    whisper, encoder, sound = tmp_path / "whisper", tmp_path / "wav2vec2", recording(tmp_path / "a.wav")
    (tmp_path / "torn.wav").write_bytes(sound.read_bytes()[:30])
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "no.wav").write_bytes(b"ID3 not a sound")
    silent = recording(tmp_path / "silent.wav", seconds=0)
    short = recording(tmp_path / "short.wav", seconds=0.001)
    text = tmp_path / "gpt2"
    few = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
    transformers.GPT2Model(transformers.GPT2Config(**few)).save_pretrained(text)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((whisper,), "look: a speech model requires --audio"),
        ((whisper, "--audio", sound, "--text", "a"), "--text must be left out for a speech model"),
        ((whisper, "--audio", sound, "--image", sound), "--image must be left out for a speech model"),
        ((whisper, "--audio", sound, "--video", sound.parent), "--video must be left out for a speech model"),
        ((encoder, "--audio", sound, "--target", "a"), "--target must be left out for a model without a decoder"),
        ((text, "--audio", sound), "--audio must be left out unless the model reads recordings alone"),
        ((whisper, "--audio", tmp_path / "torn.wav"), "torn.wav must be a WAV file of integers (others: pip install"),
        ((whisper, "--audio", tmp_path / "empty.wav"), "empty.wav must be a WAV file"),
        ((whisper, "--audio", tmp_path / "no.wav"), "no.wav must be a WAV file"),
        ((whisper, "--audio", silent), "silent.wav must hold sound, got no samples"),
        ((whisper, "--audio", tmp_path / "nowhere.wav"), "nowhere.wav must exist, got no such file"),
        ((encoder, "--audio", short), "--audio must be a recording that the model reads"),
    ]
    for given, message in cases:
        result = regard("look", *given)
        assert result.code == 2 and message in " ".join(result.err.split()), (given, result.err)
    (encoder / "preprocessor_config.json").unlink()
    result = regard("look", encoder, "--audio", sound)
    assert result.code == 2 and "hold a feature extractor that transformers loads" in " ".join(result.err.split())


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files_of_any_width(tmp_path, width: int) -> None:
    wanted = np.array([[0.0, 0.5], [-1.0, -0.5], [0.25, 0.25]])
    whole = np.round(wanted * 2 ** (8 * width - 1)).astype(np.int64) + (128 if width == 1 else 0)
    raw = whole.astype("<i8").view(np.uint8).reshape(3, 2, 8)[..., :width].tobytes()
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((2, width, 8000, 0, "NONE", ""))
        file.writeframes(raw)
    assert read_sound(tmp_path / "a.wav", 8000) == pytest.approx(wanted.mean(1), abs=1e-6)


@pytest.mark.parametrize("rate", [8000, 44100])
def test_a_tone_keeps_its_pitch_at_another_rate(tmp_path, rate: int) -> None:
    at = np.arange(rate) / rate
    tone = np.round(20000 * np.sin(2 * np.pi * 440 * at)).astype("<i2")
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(tone.tobytes())
    found = read_sound(tmp_path / "a.wav", RATE)
    expected = 20000 / 32768 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert len(found) == RATE and np.abs(found - expected).max() < 1e-4

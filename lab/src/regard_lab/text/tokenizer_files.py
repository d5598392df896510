"""Tokenizers of model folders as Hugging Face libraries write them: ``tokenizer.json`` and what stands beside it.

Nothing here can run code that a folder carries: these files hold data, which is read up to a limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from regard_lab.models.folders import file_error

TOKENIZER, CONFIG, MAP, VOCABULARY = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"
#: What Hugging Face calls special tokens.
ROLES = {
    "end": "eos_token",
    "pad": "pad_token",
    "begin": "bos_token",
    "mask": "mask_token",
    "cls": "cls_token",
    "sep": "sep_token",
    "unknown": "unk_token",
}
#: What special tokens are called in the families whose folders do not say which is which, the likeliest first.
_USUAL = {
    "end": ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "begin": ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
    "cls": ("[CLS]", "<cls>", "<|cls|>"),
    "sep": ("[SEP]", "<sep>", "<|sep|>"),
    "unknown": ("<unk>", "[UNK]"),
}
#: Bytes of a tokenizer.json (those of 256,000 tokens have 34 million), of the files beside it, and tokens.
_LARGEST, _LARGEST_CONFIG, _MOST = 1 << 27, 1 << 22, 1 << 24
#: Fields of tokenizer_config.json that name code, or paths on the machine of whoever wrote it.
_LEFT_OUT = ("auto_map", "name_or_path", "tokenizer_file", "special_tokens_map_file")


def read_folder(folder: str | Path) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, Any]]:
    """Return the tokenizer of a folder, the text of each special token, and the rest of its configuration.

    Raises
    ------
    ModelFileError
        If there is none that can be read; the message says which file and why.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise file_error(folder, f"be a folder with {TOKENIZER}", "a file" if folder.exists() else "no such folder")
    config, named = (_read_object(folder / name) for name in (CONFIG, MAP))
    path = folder / TOKENIZER
    if path.exists():
        engine = _engine(path)
    elif (folder / VOCABULARY).exists():
        path = folder / VOCABULARY
        engine = _word_piece(path, config)
    else:
        raise _none(folder)
    if max(engine.get_vocab().values(), default=_MOST) >= _MOST:
        raise file_error(path, f"number tokens, from 0 to at most {_MOST:,}", "none, or a higher number")
    return engine, _specials(engine, config, named), {k: v for k, v in config.items() if k not in _LEFT_OUT}


def to_config(names: Mapping[str, str], rest: Mapping[str, Any]) -> bytes:
    """Return a tokenizer_config.json that says which special token is which; null where there is none."""
    roles = {field: names.get(role) for role, field in ROLES.items()}
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **rest, **roles}
    return (json.dumps(whole, indent=2, ensure_ascii=False) + "\n").encode()


def _engine(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(_read(path, _LARGEST).decode())
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except UnicodeDecodeError:
        raise file_error(path, "be a tokenizer in JSON", "something else, not in UTF-8") from None
    except BaseException as error:  # the library panics on some, which is no Exception
        if isinstance(error, ValueError):  # of reading
            raise
        raise file_error(path, "be a tokenizer in JSON", f"something else ({_brief(error)})") from None


def _word_piece(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of BERT, whose vocabulary alone is there."""
    try:
        pieces = _read(path, _LARGEST).decode().splitlines()
    except UnicodeDecodeError:
        raise file_error(path, "be text in UTF-8", "something else") from None
    numbers = {piece.strip(): number for number, piece in enumerate(pieces)}
    missing = [piece for piece in ("[UNK]", "[CLS]", "[SEP]") if piece not in numbers]
    if missing or not any(piece.startswith("##") for piece in numbers):
        got = f"no {missing[0]}" if missing else "no piece that begins with ##"
        raise file_error(path, f"be a WordPiece vocabulary, where there is no {TOKENIZER}", got)
    engine = tokenizers.Tokenizer(models.WordPiece(vocab=numbers, unk_token="[UNK]", max_input_chars_per_word=100))
    accents, chinese = config.get("strip_accents"), config.get("tokenize_chinese_chars", True)
    engine.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(chinese),
        strip_accents=accents if isinstance(accents, bool) else None,
        lowercase=bool(config.get("do_lower_case", True)),
    )
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece(prefix="##")
    engine.post_processor = processors.BertProcessing(("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"]))
    known = [piece for piece in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if piece in numbers]
    engine.add_special_tokens(known)
    return engine


def _specials(engine: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token: as the files say, else by what is usual."""
    added = {token.content for token in engine.get_added_tokens_decoder().values()}
    around = _around(engine)
    found: dict[str, str] = {}
    for role, field in ROLES.items():
        said = next((each[field] for each in (config, named) if field in each), ...)
        if said is ...:
            usual = next((name for name in _USUAL[role] if name in added), None)
            if role == "unknown":
                usual = getattr(engine.model, "unk_token", None) or usual
            text = around.get(role, usual)
        else:
            text = said.get("content") if isinstance(said, dict) else said
        if isinstance(text, str) and engine.token_to_id(text) is not None:
            found[role] = text
    return found


def _around(engine: tokenizers.Tokenizer) -> dict[str, str]:
    """Return what stands before and behind a text where the processor of BERT or RoBERTa puts it there."""
    if engine.post_processor is None:
        return {}
    state = json.loads(engine.post_processor.__getstate__())
    if state.get("type") not in ("BertProcessing", "RobertaProcessing"):
        return {}
    return {role: state[role][0] for role in ("cls", "sep")}


def _none(folder: Path) -> Exception:
    sentence_piece = sorted(path.name for path in folder.glob("*.model"))
    if sentence_piece:
        got = (
            f"only a SentencePiece model, {sentence_piece[0]}, which is not read (transformers makes {TOKENIZER} "
            "of it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder))"
        )
    else:
        got = "neither"
    return file_error(folder, f"have a {TOKENIZER}, or the {VOCABULARY} of BERT", got)


def _read_object(path: Path) -> dict[str, Any]:
    """Return what a JSON file beside the tokenizer says; nothing where there is none."""
    if not path.exists():
        return {}
    try:
        said = json.loads(_read(path, _LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        if getattr(error, "rejection", None) is not None:
            raise
        raise file_error(path, "be JSON", f"something else ({_brief(error)})") from None
    if not isinstance(said, dict):
        raise file_error(path, "hold a JSON object", _brief(said))
    return said


def _read(path: Path, most: int) -> bytes:
    try:
        if not path.is_file():
            raise file_error(path, "be a file", "a folder or device")
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise file_error(path, "be readable", error.strerror or type(error).__name__) from None
    if len(data) > most:
        raise file_error(path, f"have at most {most:,} bytes", "more")
    return data


def _brief(value: object) -> str:
    text = str(value) if isinstance(value, BaseException) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def metaspaces(parts: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether decoders, as JSON describes them, read ``▁`` as a space."""
    return any(part.get("type") == "Metaspace" or part.get("pattern") == {"String": "▁"} for part in parts)

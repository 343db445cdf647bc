"""A small WordPiece or BPE vocabulary from the selection and the task's training text.

The path of a text: control and bidirectional marks are dropped, then NFC, then (if asked) lower case, accents kept; it is cut at white
space into words, into runs of at most two equal punctuation marks or symbols (so that the entity marker `<<` can become one token), and
into single characters where a script is written without spaces (Han, Kana, Thai, Lao, Khmer, Myanmar). A word of more than 100 characters
is one [UNK].

Training is deterministic: the trainer of `tokenizers` numbers continuing characters (`##a`) in the order of a randomly seeded hash table,
which also decides ties between merges, so all of them are handed to it in sorted order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, assert_never

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from cramlm.artifacts import environment_faults
from cramlm.config import TokenizerConfig
from cramlm.errors import DataError
from cramlm.model.tokenization import CONTINUES, SPECIAL_TOKENS, TOKENIZER_FILE, Tokenizer, not_text

LONGEST_WORD: Final = 100  # characters; a longer word is one [UNK], as in BERT

_MARK: Final = r"\p{P}\p{S}"
_ISOLATED: Final = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD: Final = rf"[^\s{_MARK}{_ISOLATED}]"
_PIECES: Final = rf"{_WORD}+|[{_ISOLATED}]|([{_MARK}])\1?"
# Controls that are not white space, soft hyphen, bidirectional marks, invisible operators, byte order mark. The joiners U+200C/D stay.
_DROPPED: Final = r"[\p{Cc}&&[^\t\n\x0B\f\r\x{85}]]|[\x{00AD}\x{061C}\x{200E}\x{200F}\x{202A}-\x{202E}\x{2060}-\x{2069}\x{FEFF}]"
_UNKNOWN_WORD: Final = "\x00"  # what stands for an over-long word inside a BPE tokenizer: no text can hold it, it is dropped above
_RAREST: Final = 1e-6  # a character rarer than this gets no token of its own


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig, folder: Path) -> None:
    """Train on at most `config.sample_bytes` of `texts`, evenly spread over them, and write `folder/tokenizer.json`.

    Same texts in the same order, same file: byte for byte, for any number of threads. The vocabulary is smaller than asked for if the
    texts do not hold as many pieces; never larger.

    Raises:
        DataError: if a text holds a lone surrogate, or there is no text at all.
    """
    backend = _untrained(config)
    normalizer = backend.normalizer
    sample = [normalizer.normalize_str(text).replace(_UNKNOWN_WORD, " ") for text in _thinned(texts, config.sample_bytes)]
    alphabet, rare = _alphabet(sample, backend.pre_tokenizer, config.vocab_size)
    if not alphabet:
        raise DataError("tokenizer: there is no text to train on; the selection and the training texts are empty")
    backend.normalizer = None  # the sample is normalised already
    forced = [CONTINUES + character for character in alphabet if _continues(character, backend.pre_tokenizer)]
    trainer = _trainer(config, [*SPECIAL_TOKENS, *forced], alphabet)
    backend.train_from_iterator(sample if rare is None else (rare.sub(" ", text) for text in sample), trainer, len(sample))
    backend.normalizer = normalizer
    content: dict[str, Any] = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL_TOKENS)]
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    Tokenizer(text)
    with environment_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKENIZER_FILE).write_text(text, "utf-8")


def _untrained(config: TokenizerConfig) -> tokenizers.Tokenizer:
    steps: list[Any] = [normalizers.Replace(tokenizers.Regex(_DROPPED), ""), normalizers.NFC()]
    if config.lowercase:
        steps.append(normalizers.Lowercase())
    match config.kind:
        case "wordpiece":
            model: Any = models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD, continuing_subword_prefix=CONTINUES)
        case "bpe":
            # BPE knows no longest word: a longer one is replaced by a character that is in no vocabulary, before it can cost time.
            steps.append(normalizers.Replace(tokenizers.Regex(rf"{_WORD}{{{LONGEST_WORD + 1},}}"), _UNKNOWN_WORD))
            model = models.BPE(unk_token="[UNK]", continuing_subword_prefix=CONTINUES, fuse_unk=True)
        case _:
            assert_never(config.kind)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_PIECES), "removed", invert=True)
    backend.decoder = decoders.WordPiece(prefix=CONTINUES, cleanup=False)
    # Both halves of a pair have type 0: the models learn no second type (see encoder.py).
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:0 [SEP]:0",
        special_tokens=[(name, SPECIAL_TOKENS.index(name)) for name in ("[CLS]", "[SEP]")],
    )
    return backend


def _trainer(config: TokenizerConfig, special: list[str], alphabet: list[str]) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "min_frequency": 2,
        "show_progress": False,
        "special_tokens": special,
        "initial_alphabet": alphabet,
        "continuing_subword_prefix": CONTINUES,
    }
    match config.kind:
        case "wordpiece":
            return trainers.WordPieceTrainer(**settings)
        case "bpe":
            return trainers.BpeTrainer(**settings)
        case _:
            assert_never(config.kind)


def _thinned(texts: Iterable[str], limit: int) -> list[str]:
    """Every 2^k-th text, with the smallest k for which they fit into `limit` bytes; holds at most twice that while reading."""
    kept: list[tuple[str, int]] = []
    stride, total = 1, 0
    for place, text in enumerate(texts):
        if place % stride:
            continue
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise not_text([text], place) from error
        kept.append((text, size))
        total += size
        while total > limit and len(kept) > 1:
            kept = kept[::2]
            stride *= 2
            total = sum(size for _, size in kept)
    return [text for text, _ in kept]


def _alphabet(sample: Sequence[str], pre_tokenizer: Any, vocab_size: int) -> tuple[list[str], re.Pattern[str] | None]:
    """The characters that get a token of their own, in code point order, and a pattern of those that occur but do not (None if all do).

    Rarer than one in a million: none. Beyond that the most frequent, as long as a quarter of the vocabulary is left for longer pieces.
    """
    counts = np.zeros(0x110000, np.int64)
    for text in sample:
        np.add.at(counts, np.frombuffer(text.encode("utf-32-le"), np.uint32), 1)
    present = np.flatnonzero(counts)
    present = present[np.array([bool(pre_tokenizer.pre_tokenize_str(chr(code))) for code in present], np.bool_)]
    order = present[np.lexsort((present, -counts[present]))]
    least = counts[present].sum() * _RAREST
    room = (vocab_size - len(SPECIAL_TOKENS)) * 3 // 4
    kept: list[str] = []
    for code in order:
        room -= 2 if _continues(chr(code), pre_tokenizer) else 1
        if room < 0 or counts[code] < least:
            break
        kept.append(chr(code))
    rare = [chr(code) for code in order[len(kept) :]]
    return sorted(kept), re.compile(f"[{re.escape(''.join(rare))}]") if rare else None


def _continues(character: str, pre_tokenizer: Any) -> bool:
    """Whether a character can follow another inside a piece: all but those of scripts written without spaces."""
    return len(pre_tokenizer.pre_tokenize_str(character * 2)) == 1

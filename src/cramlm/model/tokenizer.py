"""The tokenizer: text to token sequences, with a vocabulary trained here or a pretrained model's.

Everything about a tokenizer is in its `tokenizer.json`, so that transformers' AutoTokenizer gives the same ids. Special tokens such as
`[MASK]` inside a text are ordinary text (`encode_special_tokens` here, `split_special_tokens` in an exported folder). Encoding runs at
7 MB/s per core.

`train_tokenizer` trains a small WordPiece or BPE vocabulary on the selection and the task's training text. Normalisation drops control and
bidirectional marks, then applies NFC and, optionally, lower case; accents are kept. Text is split at white space into words, into runs of
at most two equal punctuation marks or symbols (so that the entity marker `<<` can become one token), and into single characters in scripts
without spaces (Han, Kana, Thai, Lao, Khmer, Myanmar). A word of more than 100 characters is one [UNK].

Training is deterministic. The trainer of `tokenizers` numbers continuing characters (`##a`) in the order of a randomly seeded hash table,
which also breaks ties between merges; hence it gets all of them in sorted order.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from cramlm.config.run import TokenizerConfig
from cramlm.errors import ArtifactError, DataError
from cramlm.records import Diacritics, IntArray, count
from cramlm.storage.arrays import offsets_of, spread
from cramlm.storage.locks import environment_faults
from cramlm.text.characters import DIACRITICS

TOKENIZER_FILE: Final = "tokenizer.json"
SPECIAL_ROLES: Final = ("pad", "unk", "cls", "sep", "mask")
SPECIAL_TOKENS: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0..4 in a tokenizer trained here
_SPECIAL_FAMILIES: Final = (SPECIAL_TOKENS, ("<pad>", "<unk>", "<s>", "</s>", "<mask>"))

IdArray: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
SpanArray: TypeAlias = npt.NDArray[np.uint32]

_MOST_TOKENS: Final = 1_000_000  # four times the largest vocabularies of published encoders

CONTINUES: Final = "##"  # prefix of a piece that continues a word
_CHUNK: Final = 1024  # texts encoded at a time
_SHORTEST: Final = 8  # tokens of a sequence
_BLOB: Final = re.compile("[A-Za-z0-9]{256,}")
_LONG_TEXT: Final = 65_536


UNCUT: Final = 1 << 30  # a max_length that no text exceeds


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of many texts, end to end: text i is ids[offsets[i]:offsets[i+1]].

    ids: uint16, or uint32 if the vocabulary has over 65,536 tokens. offsets: int64, (n+1,). source: int64, (n,), the index of each in the
    input (0..n-1 unless long texts were split).
    """

    ids: IdArray
    offsets: IntArray
    source: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> IdArray:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> IntArray:
        """Tokens of each text, int64, (n,)."""
        return np.diff(self.offsets)


class Tokenizer:
    """A trained tokenizer, from `train_tokenizer` or of a BERT-like or RoBERTa-like model.

    special_tokens: the names of pad, unk, cls, sep and mask. separators: number of sep tokens between the halves of a pair.
    """

    def __init__(self, content: str, *, origin: str = TOKENIZER_FILE) -> None:
        """content: the text of a `tokenizer.json`.

        Raises:
            ArtifactError: if it is damaged, lacks special tokens, adds them elsewhere than around a text and between the halves of a pair,
            or has gaps in its ids.
        """
        self.content = content
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()
        self._backend, self.special_tokens, prefix = _check(content, origin)
        self._backend.no_truncation()
        self._backend.no_padding()
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (_id(self._backend, name) for name in self.special_tokens)
        self.separators = _separators(self._backend, cls_id=self.cls_id, sep_id=self.sep_id, origin=origin)
        self._backend.encode_special_tokens = True
        self._long_words_are_unknown = prefix == CONTINUES
        self.vocab_size: int = self._backend.get_vocab_size()
        self._dtype: type[np.unsignedinteger[Any]] = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        self._cached: dict[str, int] = {}
        self._cached_ids: Tokens | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._backend.encode_special_tokens = True  # which a pickle of the backend does not hold

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `folder/tokenizer.json`.

        Raises:
            ArtifactError: if it is missing or not a supported tokenizer.
        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ArtifactError(f"{path}: missing; pass a folder that holds a trained tokenizer")
        try:
            with environment_faults(path):
                content = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{path}: damaged, not UTF-8; train or export the tokenizer again") from error
        return cls(content, origin=str(path))

    def encode(self, texts: Sequence[str]) -> Tokens:
        """Ids of each text without special tokens.

        Raises:
            DataError: if a text holds a lone surrogate, which no UTF-8 file can.
        """
        indices = [self._cached.get(text, -1) for text in texts]
        missing = [text for text, index in zip(texts, indices, strict=True) if index < 0]
        new = self._encode_chunks(missing, self._backend.encode_batch_fast)
        if self._cached_ids is None or len(missing) == len(texts):
            return new
        cached, numbers = self._cached_ids, iter(range(len(missing)))
        parts = [cached[index] if index >= 0 else new[next(numbers)] for index in indices]
        return _join(parts, per_text=1)

    def sequences(
        self,
        texts: Sequence[str],
        pairs: Sequence[str | None] | None = None,
        *,
        max_length: int,
        cut: Literal["truncate", "split"],
    ) -> Tokens:
        """Sequences of at most `max_length` tokens: [CLS] text [SEP], or [CLS] text [SEP] pair [SEP] (RoBERTa: [SEP] twice between).

        cut: "truncate": one sequence per text; of a pair the longer half is cut first, as in transformers. "split": a long text becomes
        several sequences of nearly equal length; pairs are truncated.

        Raises:
            DataError: if a text holds a lone surrogate.
        """
        first = self.encode(texts)
        if pairs is not None and any(pair is not None for pair in pairs):
            assert max_length >= _SHORTEST, "shorter sequences cannot hold a pair and its special tokens"
            return self._paired(first, pairs, max_tokens=max_length - 2 - self.separators)
        return self.cut(first, max_length=max_length, cut=cut)

    def cut(self, first: Tokens, *, max_length: int, cut: Literal["truncate", "split"]) -> Tokens:
        """`sequences` of texts that are encoded already, by `encode`."""
        assert max_length >= _SHORTEST, "shorter sequences cannot hold a pair and its special tokens"
        match cut:
            case "truncate":
                starts, stops, source = first.offsets[:-1], np.minimum(first.offsets[1:], first.offsets[:-1] + max_length - 2), first.source
            case "split":
                starts, stops, source = split_evenly(first.offsets, max_length - 2)
            case _:
                assert_never(cut)
        return self._wrapped(first.ids, starts, stops, source)

    def pieces(self, texts: Sequence[str], *, max_length: int) -> tuple[Tokens, list[str]]:
        """Return the sequences of `sequences(..., cut="split")`, and the part of the text that each covers.

        Raises:
            DataError: if a text holds a lone surrogate.
        """
        return self.cut_with_texts(texts, *self.encode_with_spans(texts), max_length=max_length)

    def cut_with_texts(self, texts: Sequence[str], first: Tokens, spans: SpanArray, *, max_length: int) -> tuple[Tokens, list[str]]:
        """`pieces` of texts that are encoded already, by `encode_with_spans`."""
        texts = self._without_long_words(texts)
        starts, stops, source = split_evenly(first.offsets, max_length - 2)
        parts = []
        for start, stop, of in zip(starts.tolist(), stops.tolist(), source.tolist(), strict=True):
            whole = start == first.offsets[of] and stop == first.offsets[of + 1]
            parts.append(texts[of] if whole else texts[of][spans[start, 0] : spans[stop - 1, 1]])
        return self._wrapped(first.ids, starts, stops, source), parts

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids with special tokens, for reports and messages; not an exact inverse of `encode`."""
        return str(self._backend.decode(list(map(int, ids)), skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        """Return the vocabulary entry of an id."""
        return str(self._backend.id_to_token(int(token_id)))

    @property
    def vocabulary(self) -> list[str]:
        """All entries in order of their ids."""
        return [self.token(number) for number in range(self.vocab_size)]

    def _without_long_words(self, texts: Sequence[str]) -> list[str]:
        if not self._long_words_are_unknown:
            return list(texts)
        return [text if len(text) < _LONG_TEXT else _BLOB.sub(_shortened, text) for text in texts]

    def with_cache(self, texts: Sequence[str], ids: Tokens) -> Tokenizer:
        """Return a copy of this tokenizer that looks up the ids of these texts instead of encoding them again."""
        assert len(texts) == len(ids)
        tokenizer = copy.copy(self)
        tokenizer._cached, tokenizer._cached_ids = {text: index for index, text in enumerate(texts)}, ids
        return tokenizer

    def encode_with_spans(self, texts: Sequence[str]) -> tuple[Tokens, SpanArray]:
        """Return the ids of `encode`, and the span of characters (end exclusive) of every token, uint32 (tokens, 2).

        Raises:
            DataError: if a text holds a lone surrogate.
        """
        spans: list[SpanArray] = []

        def encode(chunk: list[str], **options: Any) -> Any:
            encodings = self._backend.encode_batch(chunk, **options)
            spans.extend(np.array(encoding.offsets, dtype=np.uint32).reshape(-1, 2) for encoding in encodings)
            return encodings

        tokens = self._encode_chunks(self._without_long_words(texts), encode)
        return tokens, np.concatenate(spans) if spans else np.zeros((0, 2), dtype=np.uint32)

    def _encode_chunks(self, texts: Sequence[str], encode: Callable[..., Any]) -> Tokens:
        ids: list[IdArray] = []
        lengths = np.zeros(len(texts) + 1, np.int64)
        for start in range(0, len(texts), _CHUNK):
            chunk = self._without_long_words(texts[start : start + _CHUNK])
            count("tokenized", chunk)
            try:
                encodings = encode(chunk, add_special_tokens=False)
            except (TypeError, UnicodeEncodeError) as error:
                raise not_text(chunk, start) from error
            for number, encoding in enumerate(encodings, start + 1):
                piece = np.asarray(encoding.ids, self._dtype)
                ids.append(piece)
                lengths[number] = len(piece)
        return Tokens(np.concatenate(ids) if ids else np.zeros(0, self._dtype), np.cumsum(lengths), np.arange(len(texts), dtype=np.int64))

    def _wrapped(self, ids: IdArray, starts: IntArray, stops: IntArray, source: IntArray) -> Tokens:
        """[CLS] ids[start:stop] [SEP] for each piece, vectorised."""
        lengths = stops - starts
        offsets = offsets_of(lengths + 2)
        result = np.empty(int(offsets[-1]), self._dtype)
        result[offsets[:-1]] = self.cls_id
        result[offsets[1:] - 1] = self.sep_id
        inside = np.ones(len(result), np.bool_)
        inside[offsets[:-1]] = inside[offsets[1:] - 1] = False
        result[inside] = ids[spread(starts, lengths)]
        return Tokens(result, offsets, source)

    def _paired(self, first: Tokens, pairs: Sequence[str | None], *, max_tokens: int) -> Tokens:
        assert len(pairs) == len(first), "texts and pairs come in equal numbers"
        second = self.encode(["" if pair is None else pair for pair in pairs])
        cls, sep, between = (np.array(ids, self._dtype) for ids in ([self.cls_id], [self.sep_id], [self.sep_id] * self.separators))
        parts = []
        for index, pair in enumerate(pairs):
            one, two = first[index], second[index]
            if pair is None:
                parts += [cls, one[: max_tokens + self.separators], sep, two, two]  # `two` is empty: five parts for every text
            else:
                keep_one, keep_two = longest_first(len(one), len(two), max_tokens)
                parts += [cls, one[:keep_one], between, two[:keep_two], sep]
        return _join(parts, per_text=5)


def longest_first(one: int, two: int, max_tokens: int) -> tuple[int, int]:
    """Return how many tokens of each half of a pair to keep, at most `max_tokens` in all: longest_first truncation, as in `tokenizers`."""
    if one + two <= max_tokens:
        return one, two
    short, long = min(one, two), max(one, two)
    long = short if short > max_tokens else max(short, max_tokens - short)
    if short + long > max_tokens:
        short = max_tokens // 2
        long = short + max_tokens % 2
    return (long, short) if one > two else (short, long)


def _check(content: str, origin: str) -> tuple[tokenizers.Tokenizer, tuple[str, ...], str | None]:
    """Return the tokenizer, its special tokens in the order of `SPECIAL_ROLES`, and the prefix of a piece that continues a word."""
    try:
        parts = json.loads(content)
        added, prefix = parts["added_tokens"], parts["model"].get("continuing_subword_prefix")
        names = [(token["id"], token["content"]) for token in added if token["special"]]
        backend = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # tokenizers raises bare Exception for a malformed file
        raise ArtifactError(
            f"{origin}: damaged, not a tokenizer ({' '.join(str(error).split())[:80]}); train or export it again"
        ) from error
    family = next((family for family in _SPECIAL_FAMILIES if set(family) <= {name for _, name in names}), None)
    if family is None:
        families = " or ".join(" ".join(family) for family in _SPECIAL_FAMILIES)
        raise ArtifactError(f"{origin}: special tokens are {str(names)[:160]}, expected {families}; use a tokenizer trained by cramlm")
    ids = sorted(backend.get_vocab().values())
    if len(ids) > _MOST_TOKENS or ids != list(range(len(ids))):
        raise ArtifactError(f"{origin}: {len(ids)} token ids up to {ids[-1]}, expected 0, 1, 2, ... below {_MOST_TOKENS:,}; train it again")
    return backend, family, prefix


def _id(backend: tokenizers.Tokenizer, name: str) -> int:
    number = backend.token_to_id(name)
    assert number is not None, f"{name} is among the special tokens"
    return number


def _separators(backend: tokenizers.Tokenizer, *, cls_id: int, sep_id: int, origin: str) -> int:
    """Return the number of [SEP] tokens between the halves of a pair, after a check that no other tokens are added."""
    single, pair = backend.encode("").ids, backend.encode("", "").ids
    between = len(pair) - 2
    if single != [cls_id, sep_id] or between not in (1, 2) or pair != [cls_id, *[sep_id] * (between + 1)]:
        raise ArtifactError(
            f"{origin}: puts {single} around a text and {pair} around a pair of texts, expected {[cls_id, sep_id]} and "
            f"{[cls_id, sep_id, sep_id]} or {[cls_id, sep_id, sep_id, sep_id]}; use the tokenizer of a BERT, RoBERTa or ModernBERT"
        )
    return between


def split_evenly(offsets: IntArray, max_tokens: int) -> tuple[IntArray, IntArray, IntArray]:
    """Cut each text into the fewest pieces of at most `max_tokens` tokens, as equal as possible; an empty text is one empty piece."""
    lengths = np.diff(offsets)
    pieces = np.maximum(1, -(-lengths // max_tokens))
    source = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)
    number = np.arange(len(source), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = offsets[source] + number * lengths[source] // pieces[source]
    stops = offsets[source] + (number + 1) * lengths[source] // pieces[source]
    return starts, stops, source


def _join(parts: Sequence[IdArray], *, per_text: int) -> Tokens:
    lengths = np.array([len(part) for part in parts], np.int64).reshape(-1, per_text).sum(1)
    return Tokens(np.concatenate(parts) if parts else np.zeros(0, np.uint16), offsets_of(lengths), np.arange(len(lengths), dtype=np.int64))


def _shortened(match: re.Match[str]) -> str:
    """Cut a very long word to a length that is still over the limit: the same [UNK], without the memory for 20 MB of one word."""
    return match[0][:256]


def not_text(texts: Sequence[str], start: int) -> DataError:
    """Return the error for the first of these texts that UTF-8 cannot encode; they are numbered from `start` + 1."""
    for number, text in enumerate(texts, start + 1):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return DataError(f"text {number}: character {error.start + 1} is the lone surrogate {text[error.start]!r}; remove it")
    return DataError("a text is not a string; pass strings")


LONGEST_WORD: Final = 100  # characters; a longer word is one [UNK], as in BERT

_MARK: Final = r"\p{P}\p{S}"
_ISOLATED: Final = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD: Final = rf"[^\s{_MARK}{_ISOLATED}]"
_PIECES: Final = rf"{_WORD}+|[{_ISOLATED}]|([{_MARK}])\1?"
# Controls that are not white space, soft hyphen, bidirectional marks, invisible operators, byte order mark. The joiners U+200C/D stay.
_DROPPED: Final = r"[\p{Cc}&&[^\t\n\x0B\f\r\x{85}]]|[\x{00AD}\x{061C}\x{200E}\x{200F}\x{202A}-\x{202E}\x{2060}-\x{2069}\x{FEFF}]"
_UNKNOWN_WORD: Final = "\x00"  # replaces an over-long word inside a BPE tokenizer; in no text, because it is dropped above
_OVER_LONG: Final = normalizers.Replace(tokenizers.Regex(rf"{_WORD}{{{LONGEST_WORD + 1},}}"), _UNKNOWN_WORD)
_RUN: Final = re.compile(rf"\S{{{LONGEST_WORD + 1}}}")
_RAREST: Final = 1e-6  # a character rarer than this gets no token of its own


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig, folder: Path, *, diacritics: Diacritics = "keep") -> None:
    """Train on at most `config.sample_bytes` of `texts`, evenly spread over them, and write `folder/tokenizer.json`.

    diacritics: "remove" = the tokenizer removes them from every text (text/characters.py).

    The same texts in the same order give the same bytes, for any number of threads. The vocabulary is smaller than configured if the texts
    have fewer pieces; never larger.

    Raises:
        DataError: if a text holds a lone surrogate, or there is no text at all.
    """
    backend = _untrained(config, diacritics)
    normalizer = backend.normalizer
    normalised = (normalizer.normalize_str(text) for text in _thinned(texts, config.sample_bytes))
    # An over-long word, whose training takes a time quadratic in its length, is no known word of the trained tokenizer either.
    sample = [(_OVER_LONG.normalize_str(text) if _RUN.search(text) else text).replace(_UNKNOWN_WORD, " ") for text in normalised]
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


def _untrained(config: TokenizerConfig, diacritics: Diacritics) -> tokenizers.Tokenizer:
    steps: list[Any] = [normalizers.Replace(tokenizers.Regex(_DROPPED), "")]
    if diacritics == "remove":
        steps += [normalizers.NFD(), normalizers.Replace(tokenizers.Regex(DIACRITICS), "")]
    steps.append(normalizers.NFC())
    if config.lowercase:
        steps.append(normalizers.Lowercase())
    match config.kind:
        case "wordpiece":
            model: Any = models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD, continuing_subword_prefix=CONTINUES)
        case "bpe":
            # BPE has no longest word: a longer one is replaced by a character that is in no vocabulary, before it takes time.
            steps.append(_OVER_LONG)
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
    """Every 2^k-th text, with the smallest k for which they fit into `limit` bytes; needs at most twice that memory."""
    kept: list[tuple[str, int]] = []
    stride, total = 1, 0
    for number, text in enumerate(texts):
        if number % stride:
            continue
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise not_text([text], number) from error
        kept.append((text, size))
        total += size
        while total > limit and len(kept) > 1:
            kept = kept[::2]
            stride *= 2
            total = sum(size for _, size in kept)
    return [text for text, _ in kept]


def _alphabet(sample: Sequence[str], pre_tokenizer: Any, vocab_size: int) -> tuple[list[str], re.Pattern[str] | None]:
    """Return the characters that get a token, in code point order, and a pattern of those that occur but get none (None if all do).

    Characters rarer than one in a million get none. Of the others the most frequent, up to three quarters of the vocabulary.
    """
    counts = np.zeros(0x110000, np.int64)
    for text in sample:
        np.add.at(counts, np.frombuffer(text.encode("utf-32-le"), np.uint32), 1)
    present = np.flatnonzero(counts)
    present = present[np.array([bool(pre_tokenizer.pre_tokenize_str(chr(code))) for code in present], np.bool_)]
    order = present[np.lexsort((present, -counts[present]))]
    least = counts[present].sum() * _RAREST
    left = (vocab_size - len(SPECIAL_TOKENS)) * 3 // 4
    kept: list[str] = []
    for code in order:
        left -= 2 if _continues(chr(code), pre_tokenizer) else 1
        if left < 0 or counts[code] < least:
            break
        kept.append(chr(code))
    rare = [chr(code) for code in order[len(kept) :]]
    return sorted(kept), re.compile(f"[{re.escape(''.join(rare))}]") if rare else None


def _continues(character: str, pre_tokenizer: Any) -> bool:
    """Return True if a character can follow another inside a piece: all but those of scripts without spaces."""
    return len(pre_tokenizer.pre_tokenize_str(character * 2)) == 1

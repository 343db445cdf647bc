"""Sizes of an encoder that is trained from scratch, by name."""

from __future__ import annotations

from collections.abc import Mapping

from cramlm.config.run import EncoderConfig, RunConfig, parse_budget
from cramlm.errors import UsageError

DEFAULT_BUDGET = "20m"

# Sizes by wall-clock time on two CPU cores: at a small, fixed amount of compute the loss depends little on the shape (Geiping and
# Goldstein 2022), so a size is chosen that still sees each retrieved passage several times.
TINY = EncoderConfig(layers=2, hidden=192, heads=3, intermediate=384, embedding_init="cooccurrence")
MINI = EncoderConfig(layers=4, hidden=256, heads=4, intermediate=512, embedding_init="cooccurrence")
SMALL = EncoderConfig(layers=6, hidden=384, heads=6, intermediate=768, embedding_init="cooccurrence")
BASE = EncoderConfig(layers=12, hidden=768, heads=12, intermediate=1536, embedding_init="cooccurrence")
# The paper's: BERT-base at its small and medium scale, BERT-large at its large one.
BERT_BASE = EncoderConfig(shape="bert", layers=12, hidden=768, heads=12, intermediate=3072, norm_eps=1e-12)
BERT_LARGE = EncoderConfig(shape="bert", layers=24, hidden=1024, heads=16, intermediate=4096, norm_eps=1e-12)

PRESETS: Mapping[str, EncoderConfig] = {
    "tiny": TINY,
    "mini": MINI,
    "small": SMALL,
    "base": BASE,
    "bert-base": BERT_BASE,
    "bert-large": BERT_LARGE,
}
"""Sizes by the name that `--preset` takes."""


def encoder_for_budget(seconds: float) -> EncoderConfig:
    """tiny up to 5 minutes, mini up to an hour, small beyond.

    At 1e13 operations (a minute of two cores, as budgets count) tiny is 4 to 23 points of dev macro-F1 above mini; at 6e13, five minutes
    of two cores and ten of one, they are even (docs/log.md).
    """
    return TINY if seconds <= 300 else MINI if seconds <= 3600 else SMALL


def encoder_for(budget: str | None) -> EncoderConfig:
    """The encoder for a budget as a user writes it; None = for the default one."""
    return encoder_for_budget(parse_budget(budget or DEFAULT_BUDGET).nominal_seconds)


def with_preset(config: RunConfig, name: str) -> RunConfig:
    """The same run with an encoder of `PRESETS`; one of BERT's shape pools [CLS]. Token embeddings that are drawn stay drawn.

    Raises:
        UsageError: if there is no such preset, or the run starts from weights that have a size.
    """
    if name not in PRESETS:
        raise UsageError(f"--preset {name!r} is not one of {', '.join(PRESETS)}")
    if config.init is not None:
        raise UsageError(f"--preset {name} and --init exclude each other: the weights in {config.init} have a size; drop one")
    encoder = PRESETS[name]
    if config.encoder.embedding_init == "random":
        encoder = encoder.model_copy(update={"embedding_init": "random"})
    head = config.head.model_copy(update={"pooling": "cls"}) if encoder.shape == "bert" else config.head
    return config.model_copy(update={"encoder": encoder, "head": head})

"""Settings of the retrievers, one class each; a `RunConfig` has one of them.

bm25    the best documents for each training text      dense   the same by the cosine of sentence embeddings
dsir    importance resampling to the task's n-grams    random  random documents (control)
union   several of these, interleaved                  elasticsearch  documents of a search server, by its own BM25
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, TypeAdapter, model_validator

from cramlm.config.base import Count, FrozenModel, classes_by_kind

Pooling: TypeAlias = Literal["mean", "cls"]
QueriesOf: TypeAlias = Literal["text", "phrases"]

MOST_K1: Final = 1000
"""Largest k1 of BM25: far beyond any that is used, and scores are still far from rounding to 0."""

DEPTHS: Final = (50, 200, 800, 3200)
"""Documents per query to try in turn until the selection is large enough, if `top_k` is unset."""


class _Retriever(FrozenModel):
    """Settings of every retriever: how much of its ranking is kept."""

    kind: str
    max_documents: Count | None = Field(None, ge=1, description="keep at most this many of the best-ranked documents, like 500 or 20k")
    max_tokens: Count | None = Field(
        None, ge=1, description="keep the best-ranked up to so many tokens, like 50M; estimated from characters (retrieval/ranking.py)"
    )

    rank_decay: float = Field(
        0.0, ge=0, le=4, description="alpha: training samples a document in proportion to 1 / (rank + 1)^alpha; 0 = uniformly"
    )
    near_duplicates: float | None = Field(
        None,
        gt=0,
        le=1,
        description="drop passages whose word 5-grams have at least this Jaccard similarity to those of a better-ranked one; "
        "None = keep them",
    )

    @property
    def bounded(self) -> bool:
        """True if the size of the selection is limited."""
        return self.max_documents is not None or self.max_tokens is not None


class _Queried(_Retriever):
    """Retrievers for which every training text is a query."""

    top_k: int | None = Field(
        None,
        ge=1,
        description="documents per query. None = 50; with max_documents or max_tokens also 200, 800, then 3,200, until that limit is "
        "reached. The paper: 50 for high-resource tasks, 500-5000 for low-resource",
    )
    per_query: int | None = Field(None, ge=1, description="at most this many documents of the selection are attributed to one query")
    queries: QueriesOf = Field("text", description="text: the whole text; phrases: its key phrases, for long texts")
    query_words: int | None = Field(None, ge=1, description="maximum words of a query")

    @property
    def depths(self) -> tuple[int, ...]:
        """Documents per query: the next number is tried if the previous one does not fill the selection."""
        if self.top_k is not None:
            return (self.top_k,)
        return DEPTHS if self.bounded else DEPTHS[:1]


class Bm25Config(_Queried):
    """BM25 as Lucene scores it; every training text is a query (Yao et al. 2022, section 3.1)."""

    kind: Literal["bm25"] = "bm25"
    k1: float = Field(1.2, ge=0, le=MOST_K1)
    b: float = Field(0.75, ge=0, le=1)
    norm: Literal["exact", "lucene"] = Field("exact", description="document lengths; lucene: as Lucene stores them, in one byte")


class RandomConfig(_Retriever):
    """Control: a random sample of documents. Without a limit: as much text as the budget allows BM25, or 10,000 documents."""

    kind: Literal["random"] = "random"


class DsirConfig(_Retriever):
    """Importance resampling to the n-grams of the training texts (Xie et al. 2023). Without a limit: as for random."""

    kind: Literal["dsir"] = "dsir"
    buckets: int = Field(10_000, ge=16, le=65_536, description="hashed words and pairs of words; the released code: 10,000")
    normalise: Literal["none", "length"] = Field(
        "none", description="none: the sum over a passage, as released; length: as if every passage had the average length"
    )


class DenseConfig(_Queried):
    """Passages by the cosine of sentence embeddings, from an encoder of the user."""

    kind: Literal["dense"] = "dense"
    encoder: str = Field(description="folder with config.json, tokenizer.json and model.safetensors, as transformers saves them")
    pooling: Pooling = Field("mean", description="of the last hidden states: mean over the tokens, or [CLS]")
    max_length: int = Field(256, ge=8, description="tokens of a text that are encoded; the rest is cut off")
    query_prefix: str = Field("", description="prefix that the encoder expects before a query, like 'query: '")
    passage_prefix: str = Field("", description="prefix before a passage, like 'passage: '")


class ElasticsearchConfig(_Queried):
    """Documents of an Elasticsearch or OpenSearch index, by its own BM25; every training text is a query.

    Settings are written to the run's folder, so secrets are read from environment variables.
    """

    kind: Literal["elasticsearch"] = "elasticsearch"
    top_k: int = Field(DEPTHS[0], ge=1, description="documents per query, 10,000 at most")
    url: str = Field(description="scheme, host and port: https://host:9200", pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$")
    index: str = Field(min_length=1, description="one index, or an alias of one")
    text_field: str = Field("text", min_length=1, description="of type text, with _source")
    id_field: str | None = Field(None, description="None = _id")
    source_field: str | None = Field(None, description="field with the source of a document; None = the index's name")
    queries: Literal["text"] = Field("text", description="the whole text; key phrases need a local corpus to count stop words in")
    max_clauses: int = Field(1024, ge=1, description="maximum terms of a query; the server's own limit is 1,024 by default")
    batch: int = Field(50, ge=1, le=1000, description="queries per request")
    timeout: float = Field(120.0, gt=0, description="seconds per request")
    retries: int = Field(6, ge=0, le=20, description="after the first attempt; pauses double from 0.5 s")
    api_key_env: str | None = Field(None, description="environment variable with an API key")
    login_env: str | None = Field(None, description="environment variable with user:password, for servers without API keys")
    ca_certs: str | None = Field(None, description="file with the certificates to trust, for self-signed servers")

    @model_validator(mode="after")
    def _fits_the_server(self) -> ElasticsearchConfig:
        if self.top_k > 10_000:
            raise ValueError(f"top_k {self.top_k} is over 10,000, the window of an index (index.max_result_window)")
        if self.api_key_env is not None and self.login_env is not None:
            raise ValueError("api_key_env and login_env exclude each other; set one")
        return self


MemberConfig: TypeAlias = Annotated[Bm25Config | RandomConfig | DsirConfig | DenseConfig, Field(discriminator="kind")]


class UnionConfig(_Retriever):
    """Several retrievers, interleaved.

    Each ranks its documents, up to its own `max_documents` or `max_tokens`; the rankings are interleaved in proportion to `shares`, up to
    the union's own limit. A document is attributed to the retriever that lists it first. Documents that are dropped later (held-out
    text, near-duplicates) are not replaced within a member's own limit.
    """

    kind: Literal["union"] = "union"
    retrievers: tuple[MemberConfig, ...] = Field(min_length=2)
    shares: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(None, description="share of each in the interleaving; None = equal")

    @model_validator(mode="after")
    def _members_agree(self) -> UnionConfig:
        if self.shares is not None and len(self.shares) != len(self.retrievers):
            raise ValueError(f"{len(self.shares)} shares for {len(self.retrievers)} retrievers; give one each or none")
        if any(member.near_duplicates is not None or member.rank_decay for member in self.retrievers):
            raise ValueError("near_duplicates and rank_decay apply to the whole selection: set them on the union, not on a member")
        return self


_AnyConfig: TypeAlias = Bm25Config | RandomConfig | DsirConfig | DenseConfig | UnionConfig | ElasticsearchConfig
RetrieverConfig: TypeAlias = Annotated[_AnyConfig, Field(discriminator="kind")]
RETRIEVER: TypeAdapter[_AnyConfig] = TypeAdapter(RetrieverConfig)
"""Validates plain data as a retriever's settings; raises pydantic's ValidationError."""
_CONFIGS: Final = classes_by_kind(_AnyConfig)


def members_of(config: RetrieverConfig) -> tuple[MemberConfig | ElasticsearchConfig, ...]:
    """Return the members of a union, else the retriever itself."""
    return config.retrievers if isinstance(config, UnionConfig) else (config,)


def uses_bm25(config: RetrieverConfig | None) -> bool:
    """Return True if the retriever, or a member of a union, searches a BM25 index."""
    return config is not None and any(isinstance(member, Bm25Config) for member in members_of(config))


def unbounded(config: RetrieverConfig) -> tuple[str, ...]:
    """Return the kinds that would select the whole corpus: those that rank all of it, if neither they nor their union have a limit."""
    members = members_of(config)
    return () if config.bounded else tuple(member.kind for member in members if without_queries(member.kind) and not member.bounded)


def without_queries(kind: object) -> bool:
    """Return True if retrievers of this kind have no queries of their own, and so no `top_k`; False if there is no such kind."""
    return isinstance(kind, str) and kind in _CONFIGS and not issubclass(_CONFIGS[kind], _Queried)


def with_kind(table: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return a retriever's plain data with another kind; settings that the new kind lacks are removed."""
    fields = _CONFIGS[kind].model_fields if isinstance(kind, str) and kind in _CONFIGS else table
    return {name: value for name, value in table.items() if name in fields} | {"kind": kind}

"""The settings of what is retrieved, one model per retriever; `config.RunConfig` holds one of them.

bm25    every training text asks, the best documents of each      dense   the same by the inner product of sentence embeddings
dsir    importance resampling towards the task's n-grams          random  the control
union   several of them in turn                                   elasticsearch  documents of a search server, by its own BM25
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field, TypeAdapter, model_validator

from cramlm.config.base import Count, FrozenModel

Pooling: TypeAlias = Literal["mean", "cls"]
QueriesOf: TypeAlias = Literal["text", "phrases"]

DEPTHS: Final = (50, 200, 800, 3200)  # documents per query, one after the other, where `top_k` is open


class _Retriever(FrozenModel):
    """What every retriever obeys: how much of its ranking is kept."""

    kind: str
    max_documents: Count | None = Field(None, ge=1, description="keep only the best-ranked so many; like 500 or 20k")
    max_tokens: Count | None = Field(
        None, ge=1, description="keep the best-ranked up to so many tokens, like 50M; estimated from characters (retrieval/ranking.py)"
    )

    rank_decay: float = Field(
        0.0, ge=0, le=4, description="alpha: training draws a document in proportion to 1 / (rank + 1)^alpha; 0 = all alike"
    )
    near_duplicates: float | None = Field(
        None,
        gt=0,
        le=1,
        description="drop passages whose word 5-grams have this Jaccard similarity to those of a better one; cramlm[dedup]",
    )

    @property
    def bounded(self) -> bool:
        """Whether the size of the slice is set."""
        return self.max_documents is not None or self.max_tokens is not None


class _Queried(_Retriever):
    """Retrievers that ask with every training text."""

    top_k: int | None = Field(
        None,
        ge=1,
        description="documents per query; open: 50, and where these are fewer than the slice may hold 200, 800, then 3,200; "
        "the paper: 50 for high-resource tasks, 500-5000 for low-resource",
    )
    per_query: int | None = Field(None, ge=1, description="at most so many documents of the union are credited to one query")
    queries: QueriesOf = Field("text", description="text: the whole text; phrases: its key phrases (retrieval/phrases.py), for long texts")
    query_words: int | None = Field(None, ge=1, description="most words of a query")

    @property
    def depths(self) -> tuple[int, ...]:
        """Documents to ask each query for: the next number where those before do not fill the slice."""
        if self.top_k is not None:
            return (self.top_k,)
        return DEPTHS if self.bounded else DEPTHS[:1]


class Bm25Config(_Queried):
    """BM25 as Lucene scores it; every training text is a query (Yao et al. 2022, section 3.1)."""

    kind: Literal["bm25"] = "bm25"
    k1: float = Field(1.2, ge=0)
    b: float = Field(0.75, ge=0, le=1)
    norm: Literal["exact", "lucene"] = Field("exact", description="document lengths; lucene: as Lucene stores them, in one byte")


class RandomConfig(_Retriever):
    """The control: documents drawn without looking at the task. Unbounded: as much text as the budget allows BM25, 10,000 documents
    without a budget.
    """

    kind: Literal["random"] = "random"


class DsirConfig(_Retriever):
    """Importance resampling towards the n-grams of the training texts (Xie et al. 2023). Unbounded: as for random."""

    kind: Literal["dsir"] = "dsir"
    buckets: int = Field(10_000, ge=16, le=65_536, description="hashed words and pairs of words; the released code: 10,000")
    normalise: Literal["none", "length"] = Field(
        "none", description="none: the sum over a passage, as released; length: as if every passage had the average length"
    )


class DenseConfig(_Queried):
    """Passages by the cosine of sentence embeddings, with an encoder that the user has."""

    kind: Literal["dense"] = "dense"
    encoder: str = Field(description="folder with config.json, tokenizer.json and model.safetensors, as transformers saves them")
    pooling: Pooling = Field("mean", description="of the last hidden states: mean over the tokens, or [CLS]")
    max_length: int = Field(256, ge=8, description="tokens of a text that are read")
    query_prefix: str = Field("", description="what the encoder wants before a query, like 'query: '")
    passage_prefix: str = Field("", description="what it wants before a passage, like 'passage: '")


class ElasticsearchConfig(_Queried):
    """Documents of an Elasticsearch or OpenSearch index, by its own BM25; every training text is a query. No secret stands here: settings
    end in a run's folder.
    """

    kind: Literal["elasticsearch"] = "elasticsearch"
    top_k: int = Field(DEPTHS[0], ge=1, description="documents per query, 10,000 at most")
    url: str = Field(description="scheme, host and port: https://host:9200", pattern=r"^https?://[^/@\s]+(/[^@\s]*)?$")
    index: str = Field(min_length=1, description="one index, or an alias of one")
    text_field: str = Field("text", min_length=1, description="of type text, with _source")
    id_field: str | None = Field(None, description="None = _id")
    source_field: str | None = Field(None, description="says where a document came from; None = the index's name")
    queries: Literal["text"] = Field("text", description="the whole text; key phrases need a corpus at hand to count stop words in")
    max_clauses: int = Field(1024, ge=1, description="terms of a query; the server's own bound is 1,024 by default")
    batch: int = Field(50, ge=1, le=1000, description="queries per request")
    timeout: float = Field(120.0, gt=0, description="seconds for a request")
    retries: int = Field(6, ge=0, le=20, description="after the first attempt; pauses double from 0.5 s")
    api_key_env: str | None = Field(None, description="environment variable with an API key")
    login_env: str | None = Field(None, description="environment variable with user:password, where there are no API keys")
    ca_certs: str | None = Field(None, description="file with the certificates to trust, for servers that sign their own")

    @model_validator(mode="after")
    def _fits_the_server(self) -> ElasticsearchConfig:
        if self.top_k > 10_000:
            raise ValueError(f"top_k {self.top_k} is over 10,000, the window of an index (index.max_result_window)")
        if self.api_key_env is not None and self.login_env is not None:
            raise ValueError("api_key_env and login_env are two ways to sign in; give one")
        return self


MemberConfig: TypeAlias = Annotated[Bm25Config | RandomConfig | DsirConfig | DenseConfig, Field(discriminator="kind")]


class UnionConfig(_Retriever):
    """Several retrievers in turn. Each lists its documents best first, at most its own `max_documents` or `max_tokens`; then they take
    turns, in proportion to `shares`, until the union's own bound is reached. A document belongs to the retriever whose turn names it
    first. What is dropped later (held-out text, near-duplicates) is not replaced within a member's own bound.
    """

    kind: Literal["union"] = "union"
    retrievers: tuple[MemberConfig, ...] = Field(min_length=2)
    shares: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(None, description="turns of each, in proportion; None = alike")

    @model_validator(mode="after")
    def _members_agree(self) -> UnionConfig:
        if self.shares is not None and len(self.shares) != len(self.retrievers):
            raise ValueError(f"{len(self.shares)} shares for {len(self.retrievers)} retrievers; give one each or none")
        if any(member.near_duplicates is not None or member.rank_decay for member in self.retrievers):
            raise ValueError("near_duplicates and rank_decay concern the whole selection: set them on the union, not on a member")
        return self


_AnyConfig: TypeAlias = Bm25Config | RandomConfig | DsirConfig | DenseConfig | UnionConfig | ElasticsearchConfig
RetrieverConfig: TypeAlias = Annotated[_AnyConfig, Field(discriminator="kind")]
RETRIEVER: TypeAdapter[_AnyConfig] = TypeAdapter(RetrieverConfig)
"""Plain data -> the retriever's config; raises pydantic's ValidationError."""


def members_of(config: RetrieverConfig) -> tuple[MemberConfig | ElasticsearchConfig, ...]:
    """The retrievers that do the work: a union's, else the one itself."""
    return config.retrievers if isinstance(config, UnionConfig) else (config,)


def unbounded(config: RetrieverConfig) -> tuple[str, ...]:
    """The kinds that would give the whole corpus: those that list all of it, where neither they nor their union are bounded."""
    listing = [member for member in members_of(config) if not isinstance(member, _Queried)]
    return () if config.bounded else tuple(member.kind for member in listing if not member.bounded)


def with_kind(table: dict[str, Any], kind: Any) -> dict[str, Any]:
    """A retriever's plain data changed to another kind: the settings that the new kind has too stay, the others go."""
    kinds = (Bm25Config, RandomConfig, DsirConfig, DenseConfig, UnionConfig, ElasticsearchConfig)
    models = {model.model_fields["kind"].default: model for model in kinds}
    known = models[kind].model_fields if kind in models else table
    return {name: value for name, value in table.items() if name in known} | {"kind": kind}

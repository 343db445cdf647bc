from __future__ import annotations

import tomllib
from typing import Any

import pytest

from cramlm.config.retriever import RETRIEVER, Bm25Config, UnionConfig, unbounded
from cramlm.config.run import apply_overrides, load_config, to_toml
from cramlm.errors import UsageError

UNION = {"kind": "union", "retrievers": [{"kind": "bm25", "top_k": 7}, {"kind": "random", "max_tokens": "1M"}], "shares": [3, 1]}


def run_data(retriever: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": {"train": "train.jsonl"},
        "corpus": {"files": ["a"]},
        "retriever": retriever,
        "phases": [{"name": "finetune", "steps": 10, "terms": [{"kind": "classify", "on": "task"}]}],
    }


@pytest.mark.parametrize("retriever", [{"kind": "bm25", "per_query": 3}, {"kind": "random", "max_documents": 9}, {"kind": "dsir"}, UNION])
def test_every_retriever_written_as_toml_reads_back_equal(retriever: dict[str, Any]) -> None:
    config = load_config(run_data(retriever))
    assert load_config(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(("text", "count"), [("50M", 50_000_000), ("1.5k", 1500), ("2_000", 2000), ("7", 7), (7, 7), ("1G", 10**9)])
def test_a_bound_is_a_number_or_a_count_with_a_letter(text: str | int, count: int) -> None:
    assert Bm25Config(max_tokens=text).max_tokens == count
    assert load_config(apply_overrides(run_data({"kind": "bm25"}), [f"retriever.max_tokens={text}"])).retriever == Bm25Config(
        max_tokens=count
    )


@pytest.mark.parametrize("text", ["many", "50MB", "-5", "0", "", "1.5"])
def test_a_bound_that_is_no_count_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"retriever\.bm25\.max_tokens"):
        load_config(run_data({"kind": "bm25", "max_tokens": text}))


def test_another_kind_keeps_the_settings_that_it_has_too() -> None:
    data = run_data({"kind": "bm25", "top_k": 7, "k1": 0.9, "max_tokens": 5000, "max_documents": None})
    changed = apply_overrides(data, ["retriever.kind=random"])["retriever"]
    assert changed == {"kind": "random", "max_tokens": 5000, "max_documents": None}
    union = apply_overrides(data, ["retriever.kind=union", 'retriever.retrievers=[{kind="bm25"},{kind="random",max_documents=3}]'])
    assert load_config(union).retriever == UnionConfig(
        max_tokens=5000, retrievers=({"kind": "bm25"}, {"kind": "random", "max_documents": 3})
    )


@pytest.mark.parametrize(
    ("retriever", "expected"),
    [
        ({"kind": "magic"}, "magic"),
        ({"kind": "random", "top_k": 5}, "top_k"),
        (UNION | {"shares": [1]}, "1 shares for 2 retrievers"),
        (UNION | {"shares": [1, 0]}, "shares"),
        (UNION | {"retrievers": [{"kind": "bm25"}]}, "retrievers"),
        (UNION | {"retrievers": [UNION, UNION]}, "retrievers"),
        (UNION | {"retrievers": [{"kind": "bm25", "near_duplicates": 0.8}, {"kind": "random"}]}, "on the union"),
        (UNION | {"retrievers": [{"kind": "bm25", "rank_decay": 1}, {"kind": "random"}]}, "on the union"),
        ({"kind": "bm25", "near_duplicates": 1.2}, "near_duplicates"),
    ],
)
def test_a_bad_retriever_is_one_line_that_names_the_setting(retriever: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(run_data(retriever))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_what_lists_the_whole_corpus_is_unbounded() -> None:
    def kinds(**data: Any) -> tuple[str, ...]:
        return unbounded(RETRIEVER.validate_python(data))

    assert kinds(kind="bm25") == ()
    assert kinds(kind="random") == ("random",)
    assert kinds(kind="random", max_tokens=5) == ()
    assert kinds(**UNION) == ()
    assert kinds(kind="union", retrievers=[{"kind": "bm25"}, {"kind": "random"}]) == ("random",)
    assert kinds(kind="union", retrievers=[{"kind": "bm25"}, {"kind": "random"}], max_documents=5) == ()

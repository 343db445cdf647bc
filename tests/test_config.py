"""Settings: reading and writing TOML, overrides, amounts, and one-line errors."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from cramlm.config.base import Budget, parse_budget
from cramlm.config.retriever import RETRIEVER, Bm25Config, RetrieverConfig, UnionConfig, unbounded, without_queries
from cramlm.config.run import RunConfig, apply_overrides, load_config, read_toml, to_toml
from cramlm.errors import UsageError

# Any text that a file can hold; TOML refuses lone surrogates, as UTF-8 does.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
shares = st.floats(0.001, 0.999)


UNION = {"kind": "union", "retrievers": [{"kind": "bm25", "top_k": 7}, {"kind": "random", "max_tokens": "1M"}], "shares": [3, 1]}
CLASSIFY = [{"kind": "classify"}]
PHASE = {"name": "a", "terms": CLASSIFY}
TAUGHT = {"phases": [{"name": "a", "terms": [*CLASSIFY, {"kind": "distil", "on": "task"}]}]}


def minimal(**changes: Any) -> dict[str, Any]:
    return {"task": {"train": "train.jsonl"}, "phases": [PHASE | {"name": "finetune", "steps": 10}], **changes}


def with_corpus(**retriever: Any) -> dict[str, Any]:
    return minimal(corpus={"files": ["a"]}, retriever=retriever)


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Configs of every shape: with and without raw text, any number of phases, either encoder, odd strings and floats."""
    raw_text = draw(st.booleans())
    names = draw(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True), min_size=1, max_size=3, unique=True))
    phases = [
        {
            "name": name,
            "steps": draw(st.none() | st.integers(1, 10**9)),
            "passes": draw(st.none() | st.floats(0.01, 1e6)),
            "external": draw(st.integers(1, 999)) if raw_text else 0,
            "terms": [
                *([{"kind": draw(st.sampled_from(["mlm", "distil"])), "weight": draw(st.floats(1e-3, 1000))}] if raw_text else []),
                {"kind": "classify", "label_smoothing": draw(st.floats(0, 0.5))},
            ],
            "loss_scale": draw(st.sampled_from(["sum", "mean"])),
            "masking": {"rate": draw(shares), "mask_share": draw(st.floats(0, 0.5)), "random_share": draw(st.floats(0, 0.5))},
            "optimizer": {"kind": draw(st.sampled_from(["adamw", "muon"])), "eps": draw(st.floats(1e-12, 1e-3))},
            "evaluate_every": draw(st.none() | st.integers(1, 1000)),
        }
        for name in names
    ]
    data: dict[str, Any] = {
        "name": draw(texts),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "task": {"train": draw(texts), "dev": draw(st.none() | texts), "text_column": draw(texts)},
        "phases": phases,
    }
    if raw_text:
        data["corpus"] = {"files": draw(st.lists(texts, min_size=1, max_size=3))}
        bm25 = {"kind": "bm25", "k1": draw(st.floats(0, 3)), "max_documents": draw(st.none() | st.integers(1))}
        data["retriever"] = draw(st.sampled_from([bm25, {"kind": "random"}, {"kind": "dsir"}, UNION]))
    if draw(st.booleans()):
        data |= {"encoder": {"shape": "bert"}, "head": {"pooling": "cls"}}
    return load_config(data)


@given(configs())
def test_a_config_written_as_toml_reads_back_equal_and_is_written_equally_again(config: RunConfig) -> None:
    again = load_config(tomllib.loads(to_toml(config)))
    assert again == config
    assert to_toml(again) == to_toml(config)


def test_unset_settings_are_comments_in_toml_and_a_config_is_immutable() -> None:
    config = load_config(minimal())
    assert "# budget is unset" in to_toml(config)
    assert "# dev is unset" in to_toml(config)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("phases[0].steps=500", ("phases", 0, "steps"), 500),
        ("phases[0].steps = 500", ("phases", 0, "steps"), 500),
        ("phases[0].masking.rate=0.3", ("phases", 0, "masking", "rate"), 0.3),
        ("task.dev=dev.jsonl", ("task", "dev"), "dev.jsonl"),
        ('task.dev="a = b.jsonl"', ("task", "dev"), "a = b.jsonl"),
        ("task.dev=a=b.jsonl", ("task", "dev"), "a=b.jsonl"),
        ("task.dev=none", ("task", "dev"), None),
        ("budget=20m", ("budget",), "20m"),
        ("baseline.enabled=false", ("baseline", "enabled"), False),
        ("baseline.c=[1.0, 2.0]", ("baseline", "c"), [1.0, 2.0]),
        ("retriever.top_k=7", ("retriever", "top_k"), 7),
    ],
)
def test_an_override_sets_one_value(override: str, path: tuple[str | int, ...], value: Any) -> None:
    data = minimal()
    node: Any = apply_overrides(data, [override])
    for key in path:
        node = node[key]
    assert node == value
    assert data == minimal()
    later = apply_overrides(data, ["encoder.layers=2", "encoder.layers=3", "logit_adjustment=none"])
    assert (load_config(later).encoder.layers, load_config(later).logit_adjustment) == (3, "none")


@pytest.mark.parametrize(
    "override",
    ["steps", "=5", "phases[7].steps=1", "phases[x].steps=1", "phases.steps=1", "task[0]=1", "task.train.more=1", "a b=1", "task.=1"],
)
def test_an_override_without_a_target_is_a_usage_error_with_its_text(override: str) -> None:
    with pytest.raises(UsageError, match="--set") as caught:
        apply_overrides(minimal(), [override])
    assert repr(override) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sead": 1}, "sead"),
        ({"seed": -1}, "seed"),
        ({"seed": "many"}, "seed"),
        ({"task": {}}, "task.train"),
        ({"task": {"train": "a", "dev_fraction": 0.9}}, "task.dev_fraction"),
        ({"task": {"train": "a", "label_separator": ";"}}, "task: label_separator ';' is for several labels of a text; set kind = "),
        ({"phases": []}, "phases"),
        ({"phases": [{"name": "Joint Phase", "terms": CLASSIFY}]}, "phases[0].name"),
        ({"phases": [PHASE, PHASE]}, "phase names must differ"),
        ({"phases": [PHASE | {"external": 0, "task": 0}]}, "no text to sample"),
        ({"phases": [PHASE | {"steps": 0}]}, "phases[0].steps: Input should be greater than or equal to 1"),
        ({"phases": [{"name": "a"}]}, "phases[0].terms"),
        ({"phases": [{"name": "a", "terms": []}]}, "phases[0].terms"),
        ({"phases": [PHASE | {"external": 1, "terms": [*CLASSIFY, {"kind": "mlm"}]}]}, "there is no corpus"),
        ({"phases": [PHASE | {"max_length": 9999}]}, "max_length 9999"),
        ({"phases": [PHASE | {"masking": {"mask_share": 0.9, "random_share": 0.9}}]}, "must not exceed 1"),
        ({"phases": [{"name": "a", "terms": [{"kind": "classify", "weight": float("nan")}]}]}, "phases[0].terms[0].weight"),
        ({"phases": [{"name": "a", "terms": [{"kind": "classify", "weight": 0}]}]}, "nothing to learn"),
        ({"phases": [{"name": "a", "terms": [{"kind": "classify", "weight": -1}]}]}, "phases[0].terms[0].weight"),
        ({"phases": [{"name": "a", "terms": [{"kind": "magic"}]}]}, "phases[0].terms[0]"),
        ({"corpus": {"files": ["a"]}}, "corpus and retriever must be set together"),
        (TAUGHT | {"teacher": {"models": ["static"]}}, "no corpus, which static would learn from"),
        (TAUGHT | {"teacher": {"models": ["bayes", "static"]}}, "no corpus, which bayes and static would learn from"),
        (with_corpus(kind="magic"), "retriever"),
        (with_corpus(kind="random", top_k=5), "top_k"),
        (with_corpus(kind="bm25", near_duplicates=1.2), "near_duplicates"),
        (with_corpus(**UNION | {"shares": [1]}), "1 shares for 2 retrievers"),
        (with_corpus(**UNION | {"shares": [1, 0]}), "shares"),
        (with_corpus(**UNION | {"retrievers": [{"kind": "bm25"}]}), "retrievers"),
        (with_corpus(**UNION | {"retrievers": [UNION, UNION]}), "retrievers"),
        (with_corpus(**UNION | {"retrievers": [{"kind": "bm25", "near_duplicates": 0.8}, {"kind": "random"}]}), "on the union"),
        (with_corpus(**UNION | {"retrievers": [{"kind": "bm25", "rank_decay": 1}, {"kind": "random"}]}), "on the union"),
        ({"name": "combined"}, "'combined' is reserved"),
        ({"name": ""}, "name: "),
        ({"seed": 2**32}, "seed: Input should be less than 4294967296"),
        ({"threads": 100_000}, "threads: Input should be less than or equal to 1024"),
        ({"baseline": {"c": [1.0, 0.0]}}, "baseline.c[1]: Input should be greater than 0"),
        (with_corpus(kind="dense"), "run.toml: retriever.encoder has no default and is not set (--set retriever.encoder=VALUE)"),
        (
            with_corpus(**UNION | {"retrievers": [{"kind": "bm25"}, {"kind": "dense"}]}),
            "run.toml: retriever.retrievers[1].encoder has no default",
        ),
        ({"encoder": {"hidden": 100, "heads": 3}}, "multiple of heads"),
        ({"encoder": {"shape": "bert"}}, "head.pooling"),
    ],
)
def test_an_invalid_config_is_a_one_line_error_with_the_setting(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(minimal(**changes), origin="run.toml")
    message = str(caught.value)
    assert expected in message
    assert message.startswith("run.toml: ")
    assert "\n" not in message
    assert "cramlm config" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("label_prior=trained", "label_prior was renamed logit_adjustment (dev|none); "),
        ("choose_by=accuracy", "choose_by was renamed dev_metric; "),
        ("encoder.embedding_init=drawn", "encoder.embedding_init = drawn was renamed encoder.embedding_init = random; "),
        ("head.places=true", "head.places was renamed head.token_classifier; "),
        ("head.prompt.chosen=2", "head.prompt.chosen was renamed head.prompt.words_per_label; "),
        ("phases[0].most_passes=3", "phases[0].most_passes was renamed phases[].max_passes; "),
        (
            "phases[0].marks.rule=gradient",
            "phases[0].marks was replaced by the term 'important_tokens' in phases[].terms (docs/guides/objectives.md)",
        ),
        *(
            (f"phases[0].{name}=none", f"phases[0].{name} was replaced by ")
            for name in ("objective", "mlm_weight", "task_weight", "teacher_weight", "teacher_from", "label_smoothing", "causal_share")
        ),
        ("phases[0].rtd_weight=2", "the detection_weight of the term 'replaced_tokens' in phases[].terms (docs/guides/objectives.md)"),
    ],
)
def test_a_setting_of_an_earlier_version_is_refused_with_its_new_name(override: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(apply_overrides(minimal(), [override]))
    assert str(caught.value).startswith("config: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hits_of_a_server_are_a_corpus_for_the_teacher() -> None:
    server = {"kind": "elasticsearch", "url": "http://localhost:9200", "index": "passages"}
    assert load_config(minimal(**TAUGHT, teacher={"models": ["static"]}, retriever=server)).teaching == ("static",)


def test_the_first_of_several_errors_is_shown_and_the_others_are_counted() -> None:
    with pytest.raises(UsageError, match="and 2 more"):
        load_config(minimal(a=1, b=2, c=3))
    with pytest.raises(UsageError, match=r"run\.toml: label_prior was renamed logit_adjustment \(dev\|none\), and 1 more; "):
        load_config(minimal(label_prior="dev", choose_by="accuracy"), origin="run.toml")


def test_a_missing_or_invalid_toml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml"):
        read_toml(tmp_path / "absent.toml")
    (tmp_path / "marked.toml").write_text("seed = 1", "utf-8-sig")
    assert read_toml(tmp_path / "marked.toml") == {"seed": 1}
    (tmp_path / "broken.toml").write_text("seed = 1\nname = oops\n")
    with pytest.raises(UsageError, match=r"broken\.toml.*line 2"):
        read_toml(tmp_path / "broken.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"\n')
    with pytest.raises(UsageError, match=r"latin\.toml"):
        read_toml(tmp_path / "latin.toml")


def test_a_term_with_weight_0_is_dropped() -> None:
    terms = [{"kind": "mlm", "on": "task", "weight": 0}, {"kind": "classify"}]
    (phase,) = load_config(minimal(phases=[PHASE | {"terms": terms}])).phases
    assert [term.kind for term in phase.terms] == ["classify"]


COUNTS = [("50M", 50_000_000), ("1.5k", 1500), ("4.1M", 4_100_000), ("2.3G", 2_300_000_000), ("1.001k", 1001), ("2.0", 2)]
COUNTS += [("2_000", 2000), ("7", 7), (7, 7), ("1G", 10**9)]


@pytest.mark.parametrize(("text", "count"), COUNTS)
def test_a_limit_is_a_number_or_a_count_with_a_suffix(text: str | int, count: int) -> None:
    assert Bm25Config(max_tokens=text).max_tokens == count
    overridden = apply_overrides(with_corpus(kind="bm25"), [f"retriever.max_tokens={text}"])
    assert load_config(overridden).retriever == Bm25Config(max_tokens=count)


@pytest.mark.parametrize("text", ["many", "50MB", "-5", "0", "", "1.5", "1.0001k", "9" * 5000])
def test_a_limit_that_is_not_a_count_is_a_usage_error(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"^config: retriever\.max_tokens: (must be a count like 500000, 500k or 50M|Input should be greater)"
    ):
        load_config(with_corpus(kind="bm25", max_tokens=text))


@given(st.integers(1, 10**9), st.sampled_from([("k", 3), ("M", 6), ("G", 9)]))
def test_every_count_with_a_suffix_is_read_exactly(count: int, suffix: tuple[str, int]) -> None:
    letter, digits = suffix
    assert Bm25Config(max_tokens=f"{count // 10**digits}.{count % 10**digits:0{digits}}{letter}").max_tokens == count


def test_another_retriever_keeps_the_settings_that_it_also_has() -> None:
    data = with_corpus(kind="bm25", top_k=7, k1=0.9, max_tokens=5000, max_documents=None)
    changed = apply_overrides(data, ["retriever.kind=random"])["retriever"]
    assert changed == {"kind": "random", "max_tokens": 5000, "max_documents": None}
    union = apply_overrides(data, ["retriever.kind=union", 'retriever.retrievers=[{kind="bm25"},{kind="random",max_documents=3}]'])
    assert load_config(union).retriever == UnionConfig(
        max_tokens=5000, retrievers=({"kind": "bm25"}, {"kind": "random", "max_documents": 3})
    )


def test_a_setting_of_the_retriever_of_a_run_without_one_names_what_is_missing() -> None:
    rule = r"^config: retriever\.top_k: this run retrieves nothing; take a recipe that does, like tlm, or set retriever.kind, like"
    with pytest.raises(UsageError, match=rule):
        load_config(apply_overrides(minimal(), ["retriever.top_k=5"]))


@pytest.mark.parametrize("kind", ["[1]", "{}", "7", "'bm52'"])
def test_a_kind_of_retriever_that_does_not_exist_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=r"^config: retriever(\.kind)?: "):
        load_config(apply_overrides(with_corpus(kind="bm25"), [f"retriever.kind={kind}"]))


@pytest.mark.parametrize("config", get_args(get_args(RetrieverConfig)[0]))
def test_retrievers_with_queries_are_those_with_a_number_of_documents_per_query(config: type[BaseModel]) -> None:
    assert without_queries(config.model_fields["kind"].default) == ("top_k" not in config.model_fields)


def test_retrievers_that_rank_the_whole_corpus_are_unbounded_without_a_limit() -> None:
    def kinds(**data: Any) -> tuple[str, ...]:
        return unbounded(RETRIEVER.validate_python(data))

    assert kinds(kind="bm25") == ()
    assert kinds(kind="random") == ("random",)
    assert kinds(kind="random", max_tokens=5) == ()
    assert kinds(**UNION) == ()
    assert kinds(kind="union", retrievers=[{"kind": "bm25"}, {"kind": "random"}]) == ("random",)
    assert kinds(kind="union", retrievers=[{"kind": "bm25"}, {"kind": "random"}], max_documents=5) == ()


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("90s", Budget(seconds=90)),
        ("20m", Budget(seconds=1200)),
        ("1.5h", Budget(seconds=5400)),
        ("45", Budget(seconds=45)),
        (" 1m ", Budget(seconds=60)),
        ("3e15flops", Budget(flops=3e15)),
        ("2.5E12 FLOPs", Budget(flops=2.5e12)),
        ("1000000flop", Budget(flops=1e6)),
    ],
)
def test_a_budget_is_a_duration_or_a_number_of_operations(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


NOT_BUDGETS = ("", "soon", "0", "0m", "-5m", "5 m", "5d", "1e3s", "nan", "0flops", "-3e15flops", "3e15", "flops", "1e999flops", "nanflops")


BEYOND = ["1e40flops", "1e27flops", "9" * 400 + "flops", "99999999999999999999h", "31536000001s", "9" * 400]


@pytest.mark.parametrize("text", [*NOT_BUDGETS, *BEYOND])
def test_any_other_budget_is_a_usage_error_with_an_example_and_the_limit_if_it_is_beyond_any_run(text: str) -> None:
    limit = r"^budget '.*' is over (1e26 operations|1,000 years); pass a smaller one, like (3e15flops|20m)$"
    with pytest.raises(UsageError, match=limit if text in BEYOND else "3e15flops"):
        parse_budget(text)


def test_a_name_that_is_no_setting_is_refused_with_where_the_settings_are() -> None:
    with pytest.raises(UsageError, match=r"^config: phases\[0\]\.stpes is no setting; `cramlm config` prints every setting$"):
        load_config(minimal(phases=[PHASE | {"name": "finetune", "steps": 10, "stpes": 3}]))

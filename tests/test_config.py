"""Config: TOML out and in, overrides, and one line for every mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cramlm.config.run import RunConfig, apply_overrides, load_config, parse_duration, read_toml, to_toml
from cramlm.errors import UsageError

# Any text that a file can hold; TOML refuses lone surrogates, as UTF-8 does.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
shares = st.floats(0.001, 0.999)


CLASSIFY = [{"kind": "classify"}]
PHASE = {"name": "a", "terms": CLASSIFY}


def minimal(**changes: Any) -> dict[str, Any]:
    return {"task": {"train": "train.jsonl"}, "phases": [PHASE | {"name": "finetune", "steps": 10}], **changes}


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    """Configs of every shape: with and without raw text, any number of phases, either encoder, odd strings and floats."""
    raw_text = draw(st.booleans())
    names = draw(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True), min_size=1, max_size=3, unique=True))
    phases = [
        {
            "name": name,
            "steps": draw(st.none() | st.integers(0, 10**9)),
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
        "seed": draw(st.integers(0, 2**63)),
        "task": {"train": draw(texts), "dev": draw(st.none() | texts), "text_column": draw(texts)},
        "phases": phases,
    }
    if raw_text:
        data["corpus"] = {"files": draw(st.lists(texts, min_size=1, max_size=3))}
        kinds = [{"kind": "bm25", "k1": draw(st.floats(0, 3)), "max_documents": draw(st.none() | st.integers(1))}, {"kind": "random"}]
        data["retriever"] = draw(st.sampled_from(kinds))
    if draw(st.booleans()):
        data |= {"encoder": {"shape": "bert"}, "head": {"pooling": "cls"}}
    return load_config(data)


@given(configs())
def test_a_config_written_as_toml_reads_back_equal(config: RunConfig) -> None:
    assert load_config(tomllib.loads(to_toml(config))) == config


@given(configs())
@settings(max_examples=15)
def test_the_toml_does_not_change_when_written_again(config: RunConfig) -> None:
    assert to_toml(load_config(tomllib.loads(to_toml(config)))) == to_toml(config)


def test_every_unset_setting_shows_as_a_comment() -> None:
    text = to_toml(load_config(minimal()))
    assert "# budget is unset" in text
    assert "# dev is unset" in text


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
def test_an_override_sets_one_place(override: str, path: tuple[str | int, ...], value: Any) -> None:
    data = minimal()
    place: Any = apply_overrides(data, [override])
    for key in path:
        place = place[key]
    assert place == value
    assert data == minimal()


def test_later_overrides_win_and_make_tables_that_are_not_there() -> None:
    data = apply_overrides(minimal(), ["encoder.layers=2", "encoder.layers=3"])
    assert load_config(data).encoder.layers == 3


@pytest.mark.parametrize(
    "override", ["steps", "=5", "phases[7].steps=1", "phases[x].steps=1", "phases.steps=1", "task[0]=1", "task.train.more=1", "a b=1"]
)
def test_an_override_that_leads_nowhere_is_a_usage_error_naming_it(override: str) -> None:
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
        ({"phases": []}, "phases"),
        ({"phases": [{"name": "Joint Phase", "terms": CLASSIFY}]}, "phases[0].name"),
        ({"phases": [PHASE, PHASE]}, "phase names must differ"),
        ({"phases": [PHASE | {"external": 0, "task": 0}]}, "no text to sample"),
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
        ({"corpus": {"files": ["a"]}, "retriever": {"kind": "magic"}}, "retriever"),
        ({"encoder": {"hidden": 100, "heads": 3}}, "multiple of heads"),
        ({"encoder": {"shape": "bert"}}, "head.pooling"),
    ],
)
def test_a_bad_config_is_one_line_that_names_the_setting(changes: dict[str, Any], expected: str) -> None:
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
            "phases[0].marks was replaced by the term 'important_tokens' in phases[].terms (docs/objectives.md)",
        ),
        *(
            (f"phases[0].{name}=none", f"phases[0].{name} was replaced by ")
            for name in ("objective", "mlm_weight", "task_weight", "teacher_weight", "teacher_from", "label_smoothing", "causal_share")
        ),
        ("phases[0].rtd_weight=2", "the detection_weight of the term 'replaced_tokens' in phases[].terms (docs/objectives.md)"),
    ],
)
def test_a_setting_of_an_earlier_version_is_refused_with_its_new_name(override: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(apply_overrides(minimal(), [override]))
    assert str(caught.value).startswith("config: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_settings_of_an_earlier_version_are_counted() -> None:
    with pytest.raises(UsageError, match=r"run\.toml: label_prior was renamed logit_adjustment \(dev\|none\), and 1 more; "):
        load_config(minimal(label_prior="dev", choose_by="accuracy"), origin="run.toml")


def test_none_is_a_value_where_a_setting_has_it() -> None:
    assert load_config(apply_overrides(minimal(), ["logit_adjustment=none"])).logit_adjustment == "none"


def test_several_mistakes_show_the_first_and_count_the_others() -> None:
    with pytest.raises(UsageError, match="and 2 more"):
        load_config(minimal(a=1, b=2, c=3))


def test_a_config_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(minimal()).seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("45", 45), (" 1m ", 60)])
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "-5m", "5 m", "5d", "soon", "1e3s", "nan"])
def test_a_duration_that_is_not_positive_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="not a positive time"):
        parse_duration(text)


def test_a_toml_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml"):
        read_toml(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("seed = 1\nname = oops\n")
    with pytest.raises(UsageError, match=r"broken\.toml.*line 2"):
        read_toml(tmp_path / "broken.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "caf\xe9"\n')
    with pytest.raises(UsageError, match=r"latin\.toml"):
        read_toml(tmp_path / "latin.toml")


def test_a_term_with_weight_0_is_left_out() -> None:
    terms = [{"kind": "mlm", "on": "task", "weight": 0}, {"kind": "classify"}]
    (phase,) = load_config(minimal(phases=[PHASE | {"terms": terms}])).phases
    assert [term.kind for term in phase.terms] == ["classify"]

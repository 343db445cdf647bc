"""The HTML report: its content, missing data, and that text from data cannot act in it.

The last tests open it in Chromium and are skipped without it (pip install playwright, and Debian's chromium).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from cramlm import recipes
from cramlm.config.run import load_config
from cramlm.errors import ArtifactError
from cramlm.linear.files import read_setting
from cramlm.pipeline.run import run
from cramlm.records import Event
from cramlm.reporting.charts import Estimate, Line, interval_chart, line_chart, ticks
from cramlm.reporting.comparison import compare_runs, names_of, sign_test
from cramlm.reporting.page import environment, refresh_report, report_page, write_report
from cramlm.reporting.record import read_run
from damaging import edit_json
from jsonl import read_json, read_jsonl, write_jsonl
from tiny_task import quick, tiny_config, write_task

HOSTILE = (
    "wave ship </script><script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\"> \u202e\u2066reef\x00 "
    "\x1b[31m <style>*{display:none}</style> &lt;script&gt; ]]> --> \" ' harbour"
)
LONG = "summit " + "x" * 25_000 + " ridge" * 4000
VOID = {"meta", "br", "img", "input", "hr", "link"}


class Page(HTMLParser):
    """Parses a page, checks that its tags are balanced, and collects tags and text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.inside: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text.append(data)
            self.inside.append((" ".join(self.open), data))

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def lacks(self, *phrases: str) -> list[str]:
        """Return those of the phrases that the page does not show."""
        return [phrase for phrase in phrases if phrase not in self.words]


def passage(text: str, **settings: Any) -> str:
    """Render a text from data with the macro of the templates."""
    macros: Any = environment().get_template("macros.html.jinja").module
    return str(macros.passage(text, **settings))


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on data with hostile texts and labels."""
    folder = tmp_path_factory.mktemp("reported")
    paths = write_task(folder / "data")
    label = "<b onclick=alert(1)>hill</b>"
    for split in ("train", "dev", "test"):
        path = Path(paths[split])
        rows = read_jsonl(path)
        rows = [{**row, "label": label if row["label"] == "hill" else row["label"]} for row in rows]
        rows += [{"text": f"{HOSTILE} {split} tide anchor sailor", "label": "sea" if split == "train" else label}]
        rows += [{"text": LONG + split, "label": "sea"}]
        if split == "test":
            rows.append({"text": f"{HOSTILE} train tide anchor sailor", "label": "sea"})  # stands in train
        write_jsonl(path, rows)
    with Path(paths["corpus"]).open("a", encoding="utf-8") as file:
        for number in range(20):
            text = (
                f"<script>document.title='broken {number}'</script> \u202eonerror ]]> document title broken {number} sailor anchor tide "
                * 2
            )
            file.write(json.dumps({"id": f"<i>{number}", "text": text, "source": f"</td><script>{number}"}) + "\n")
    run(load_config(tiny_config(paths, baseline={"c": [1.0, 3.0, 10.0]})), out=folder / "run", store=folder / "store")
    return folder / "run"


@pytest.fixture(scope="module")
def text(reported: Path) -> str:
    """The page that fit wrote."""
    return (reported / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


@pytest.fixture
def copied(reported: Path, tmp_path: Path) -> Path:
    shutil.copytree(reported, tmp_path / "run")
    return tmp_path / "run"


def test_fit_writes_a_well_formed_page_without_external_references(text: str, page: Page) -> None:
    counts = {name: sum(tag == name for tag, _ in page.tags) for name in ("script", "style", "link", "img", "iframe", "object", "base")}
    assert counts == {"script": 1, "style": 1, "link": 0, "img": 0, "iframe": 0, "object": 0, "base": 0}
    references = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("href", "src", "action", "srcset")]
    named = {attributes["id"]: tag for tag, attributes in page.tags if "id" in attributes}
    assert len(named) == sum("id" in attributes for _, attributes in page.tags)
    assert references
    assert all(value.startswith("#") and value[1:] in named for value in references)
    style = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)[0]
    assert "url(" not in style
    assert "@import" not in style
    charts = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(charts) >= 8
    for chart in charts:
        assert chart["role"] == "img"
        assert [named[identity] for identity in chart["aria-labelledby"].split()] == ["title", "desc"]


def test_text_from_data_is_shown_isolated_and_shortened_and_never_becomes_markup(text: str, page: Page) -> None:
    assert not {name for _, attributes in page.tags for name in attributes if name.startswith("on")}
    shown = "".join(page.text)
    assert "</script><script>document.title" in shown
    assert "<b onclick=alert(1)>hill</b>" in shown
    assert "reef␀ ␛[31m <style>*{display:none}</style> &lt;script&gt; ]]> -->" in shown
    overridden = [tags for tags, data in page.inside if "\u202e" in data]
    assert overridden
    assert all("bdi" in tags.split() or tags.endswith("svg title") for tags in overridden)
    for forbidden in ("\x00", "\x1b", "x" * 7000):
        assert forbidden not in text
    assert len(text) < 400_000


def test_scores_are_shown_with_intervals_baselines_and_without_leaked_rows(reported: Path, page: Page) -> None:
    scores = read_json(reported / "evaluation/scores.json")
    for name, entry in scores["models"].items():
        low, high = entry["test"]["intervals"]["macro_f1"]
        assert not page.lacks(name, f"{100 * entry['test']['macro_f1']:.1f} {100 * low:.1f}–{100 * high:.1f}")
    leak_free = f"rows the macro-F1 of combined is {100 * scores['models']['combined']['test_leak_free']['macro_f1']:.1f} instead of"
    assert not page.lacks("1 of 19 test rows are also in train", "test was scored once.", leak_free)
    assert "test was scored once." in (reported / "export/README.md").read_text("utf-8")


def test_the_page_shows_the_verdict_its_scores_and_the_settings_of_the_linear_models(reported: Path, page: Page) -> None:
    scores = read_json(reported / "evaluation/scores.json")
    assert scores["verdict"] in page.words
    assert set(scores["comparison"]["cross_fitted"]) == {"tlm", "combined", "static", "bayes", "tfidf"}
    for name, score in scores["comparison"]["cross_fitted"].items():
        dev = scores["models"][name]["dev"]
        low, high = dev["intervals"]["macro_f1"]
        own = f"{name} (predicts)" if name == "combined" else name
        assert f"{own} {100 * dev['macro_f1']:.1f} {100 * low:.1f}–{100 * high:.1f} {100 * score:.1f}" in page.words
    for name, stage in (("static", "static"), ("bayes", "bayes"), ("tfidf", "baseline")):
        fit = read_json(reported / stage / "fit.json")
        uses = fit["variant"].replace("union", "tokens and characters") + (" and word vectors" if name == "static" else "")
        assert f"{name} {uses} {read_setting(fit)} {fit['tau']:g} {fit['features']:,}" in page.words
        chosen_on = f"dev and {texts} training texts out of fold" if (texts := fit.get("held_out_texts")) else "dev"
        caption = f"{name}: the best {min(20, len(fit['tried']))} of {len(fit['tried'])} settings tried, by macro-F1 on {chosen_on}"
        assert page.text.count(caption) == 2, "of the folded table, and above it"


def test_the_errors_are_those_of_the_model_that_predicts(reported: Path, page: Page) -> None:
    run = read_run(reported)
    assert run.predictor == "combined"
    assert list(run.predictions["test"]) == read_jsonl(reported / "evaluation/predictions-test-combined.jsonl")
    assert not page.lacks("Errors on test Of combined", "F1 of tlm F1 of static F1 of bayes F1 of tfidf")
    for label, scores in run.models["combined"]["test"]["per_class"].items():
        own = " ".join(f"{100 * scores[name]:.1f} %" for name in ("f1", "precision", "recall"))
        assert f"{label} {own} {scores['support']}" in page.words
    rare = sum(scores["support"] < 10 for scores in run.models["combined"]["test"]["per_class"].values())
    assert rare == 1
    assert "1 label has fewer than 10 texts here: such scores are unreliable." in page.words
    mistakes = sum(line["label"] != line["predicted"] for line in run.predictions["test"])
    assert f"of {mistakes} mistakes" in page.words or mistakes == 0


@pytest.mark.parametrize("name", ["static", "tfidf"])
def test_the_page_of_a_linear_recipe_has_no_phases(linear_runs: Path, name: str) -> None:
    page = Page((linear_runs / name / "report.html").read_text("utf-8"))
    scores = read_json(linear_runs / name / "evaluation/scores.json")
    parameters = f"{read_json(linear_runs / name / 'export/provenance.json')['parameters']:,} parameters"
    phrases = "no training text occurs with different labels", "How the linear models were fitted", "linear: n-grams"
    assert not page.lacks(parameters, scores["verdict"], f"{name} (predicts)", *phrases)
    assert "phase" not in page.words.lower().replace("phases (blank)", "").partition("all settings")[0]
    assert "not finished" not in page.words
    assert {"#scores", "#errors"} <= {attributes["href"] for tag, attributes in page.tags if tag == "a"}


def test_a_comparison_of_runs_shows_each_model_once(tiny_run: Path, linear_runs: Path, tmp_path: Path) -> None:
    encoder, linear = tiny_run / "run", [linear_runs / "static", linear_runs / "tfidf"]
    page = Page(write_report([encoder, linear[0]], tmp_path / "two.html").read_text("utf-8"))
    absent = ["static (fitted in", "not comparable"]
    assert page.lacks("tfidf (fitted in run)", "tlm (fitted in run)", *absent) == absent
    page = Page(write_report([encoder, *linear], tmp_path / "three.html").read_text("utf-8"))
    absent = ["tfidf (fitted in", "static (fitted in"]
    assert page.lacks("3 runs side by side", *absent) == absent
    parameters = [read_json(run / "export/provenance.json")["parameters"] for run in (encoder, *linear)]
    assert min(parameters) < 50_000, "0.0 million"
    assert not page.lacks(*(f"{number:,}" for number in parameters))


def test_a_comparison_of_runs_is_of_the_models_that_predict(tiny_run: Path, linear_runs: Path, tmp_path: Path) -> None:
    runs = tiny_run / "run", linear_runs / "static"
    compared = compare_runs(runs)
    models = [read_run(run).models[name] for run, name in zip(runs, ("combined", "static"), strict=True)]
    assert [row["name"] for row in compared["scores"]["rows"]] == ["run: combined", "static: static"]
    assert [row["own"] for row in compared["scores"]["rows"]] == models
    assert list(compared["labels"]["runs"].values()) == [model["test"]["per_class"] for model in models]
    files = runs[0] / "evaluation/predictions-test-combined.jsonl", runs[1] / "evaluation/predictions-test.jsonl"
    first, second = ([line["label"] == line["predicted"] for line in read_jsonl(file)] for file in files)
    against = compared["scores"]["rows"][1]["against"]
    assert against["only_first"] - against["only_this"] == sum(first) - sum(second)
    html = write_report(runs, tmp_path / "runs.html").read_text("utf-8")
    assert '<th scope="col" class="text">recommended</th>' in html, "which the script sorts as text"
    assert not Page(html).lacks("run: combined", "Each run is compared by the model that predicts")
    assert "1 run side by side" in Page(write_report([runs[0]] * 2, tmp_path / "one.HTM").read_text("utf-8")).words


@pytest.mark.parametrize("split", ["train", "test"])
def test_runs_on_other_training_texts_are_comparable_and_runs_scored_on_other_texts_are_not(split: str, tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=0)
    for name in ("before", "after"):
        run(quick(recipes.tfidf(**{each: paths[each] for each in ("train", "dev", "test")})), out=tmp_path / name)
        write_jsonl(Path(paths[split]), [*read_jsonl(Path(paths[split])), {"text": "wave ship harbour", "label": "sea"}])
    runs = [tmp_path / "before", tmp_path / "after"]
    words = Page(write_report(runs, tmp_path / "runs.html").read_text("utf-8")).words
    assert ("trained on different texts" in words, "not comparable" in words) == (split == "train", split == "test")
    assert (compare_runs(runs)["scores"]["rows"][1]["against"] is None) == (split == "test")


def test_a_dev_split_that_is_too_small_for_thresholds_is_named(reported: Path, page: Page, tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=0)
    write_jsonl(Path(paths["dev"]), read_jsonl(Path(paths["dev"]))[:6])
    small = run(quick(recipes.tfidf(**{each: paths[each] for each in ("train", "dev", "test")})), out=tmp_path / "run").path
    assert not Page(report_page(small)).lacks("Dev has 6 texts, too few to choose a threshold on (at least 10).")
    assert page.lacks("too few to choose a threshold")


def test_the_page_of_an_unchanged_run_is_identical_and_not_written_again(copied: Path) -> None:
    one = report_page(copied)
    assert report_page(copied) == one
    target = copied / "report.html"
    refresh_report(copied, emit=lambda event: None)
    before = target.stat().st_mtime_ns
    events: list[Event] = []
    refresh_report(copied, emit=events.append)
    assert (target.stat().st_mtime_ns, events) == (before, [])


def test_a_run_of_compare_whose_folder_is_its_seed_is_titled_by_recipe_and_seed(copied: Path) -> None:
    assert read_json(copied / "export/provenance.json")["config"]["seed"] == 3
    for name, title in (("3", "tlm seed 3"), ("13", "tlm 13")):
        copied = copied.rename(copied.parent / name)
        assert not Page(report_page(copied)).lacks(title, title.replace("tlm ", "tlm: ")), "the latter is that of the window"


def test_an_error_of_the_page_is_a_warning_after_a_finished_fit(copied: Path) -> None:
    (copied / "report.html").unlink()
    (copied / "report.html").mkdir()
    events: list[Event] = []
    refresh_report(copied, emit=events.append)
    assert [event.kind for event in events] == ["warning"]
    assert "cramlm report" in events[0].message


def test_a_labels_only_run_without_test_file_says_what_is_missing_and_exports_no_language_model(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data")
    data = tiny_config(paths, corpus=None, retriever=None, baseline={"enabled": False}, tokens_per_second=None)  # which is measured then
    data["task"].pop("test")
    data["phases"] = [{**data["phases"][1], "steps": 4}]
    export = run(load_config(data), out=tmp_path / "run", store=tmp_path / "store").export
    assert (export / "model.safetensors").is_file()
    assert not (export / "mlm").exists()
    page, absent = Page((tmp_path / "run/report.html").read_text("utf-8")), ["test was scored", "nearest retrieved passages"]
    shown = "nothing was retrieved", "There is no test file", "No linear model was fitted", "Errors on dev"
    assert page.lacks(*shown, *absent) == absent
    assert "test was scored" not in (export / "README.md").read_text("utf-8")


def test_an_unfinished_run_lists_its_finished_stages(copied: Path) -> None:
    for stage in ("phase-2-finetune", "logit-adjustment", "evaluation", "export"):
        shutil.rmtree(copied / stage)
    page = Page(report_page(copied))
    published = "task, baseline, plan, selection, tokenizer, tokens, embedding, bayes, static, teacher, schedule, phase-1-joint"
    unfinished = f"This run is not finished. Finished stages: {published}. Run the same cramlm fit again to continue."
    assert not page.lacks(unfinished, "The model is not evaluated yet.", "There are no predictions yet.")
    assert ("html body header p code", "cramlm fit") in page.inside


def test_a_run_without_a_copy_of_its_task_is_shown_without_texts(copied: Path) -> None:
    shutil.rmtree(copied / "task")
    page = Page(report_page(copied))
    assert not page.lacks("has no copy of the task")
    assert len(page.lacks("The texts are not shown", "There are no mistakes")) < 2


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        (lambda folder: (folder / "run.toml").unlink(), "not a run"),
        (lambda folder: (folder / "run.toml").write_text("colour = 'red'\n"), "another version of cramlm"),
        (lambda folder: (folder / "evaluation/scores.json").write_text("{}"), "damaged"),
        (lambda folder: (folder / "selection/report.json").unlink(), "missing"),
    ],
    ids=["no run", "an older config", "a damaged file", "a missing file"],
)
def test_a_folder_that_is_not_a_complete_run_is_refused_in_one_line(copied: Path, change: Any, needle: str) -> None:
    change(copied)
    with pytest.raises(ArtifactError, match=needle) as caught:
        write_report([copied])
    assert "\n" not in str(caught.value)


def test_steps_after_a_resume_replace_earlier_ones(copied: Path) -> None:
    log = copied / "events.jsonl"
    again = {"time": 0, "kind": "step", "stage": "phase-1-joint", "data": {"step": 3, "loss": 9.0}}
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(again) + "\n" + '{"time": 1, "kind": "st')
    found = read_run(copied).events_of("phase-1-joint", "step")
    assert [data["step"] for data in found] == [1, 2, 3]
    assert found[-1]["loss"] == 9.0


def test_the_time_of_a_stage_counts_from_its_first_start_to_its_end(copied: Path) -> None:
    """A selection that searches deeper starts twice; `static` starts again after its end, to train itself."""
    kinds = {"task": "start"}, {"selection": "start"}, {"selection": "start"}, {"selection": "done"}, {"plan": "note"}, {"static": "start"}
    again = *kinds, {"static": "done"}, {"plan": "note"}, {"static": "start"}, {"static": "done"}
    stages = [(stage, kind) for each in again for stage, kind in each.items()]
    write_jsonl(
        copied / "events.jsonl",
        [{"time": float(time), "kind": kind, "stage": stage, "data": {}} for time, (stage, kind) in enumerate(stages)],
    )
    assert read_run(copied).seconds == {"selection": 2.0, "static": 2.0}


def test_the_cpu_time_of_every_stage_is_in_the_report(copied: Path) -> None:
    run = read_run(copied)
    assert run.cpu_seconds.keys() == run.seconds.keys()
    assert all(seconds >= 0 for seconds in run.cpu_seconds.values())
    training = sum(run.cpu_seconds[name] for name in run.phases)
    assert run.share_outside_training == pytest.approx(1 - training / sum(run.cpu_seconds.values()))
    page = write_report([copied]).read_text("utf-8")
    assert "CPU seconds" in page
    assert "of the CPU time was outside of training" in page


def test_a_passage_is_shown_with_the_unlabelled_text_that_retrieved_it(tmp_path: Path) -> None:
    paths = write_task(tmp_path / "data", documents=60)
    write_jsonl(tmp_path / "more.jsonl", [{"text": f"the lighthouse of the island {number}"} for number in range(40)])
    config = recipes.bayes(corpus=[paths.pop("corpus")], unlabelled=[str(tmp_path / "more.jsonl")], **paths)
    page = Page(report_page(run(quick(config, "retriever.top_k=1"), out=tmp_path / "run", store=tmp_path / "store").path))
    read = "40 unlabelled texts of the task retrieved passages, too, and were read as passages are."
    assert not page.lacks("the lighthouse of the island", read, "more.jsonl unlabelled: texts 40 ")


def test_a_long_passage_shows_the_part_with_the_shared_words() -> None:
    text = "nothing here " * 60 + "the kinase inhibits a receptor " + "or there " * 60
    page = Page(passage(text, terms=("kinase", "receptor"), limit=120))
    shown = page.inside[[tags for tags, _ in page.inside].index("bdi mark")]
    assert shown == ("bdi mark", "kinase")
    assert sum(tag == "mark" for tag, _ in page.tags) == 2
    assert sum(tag == "details" for tag, _ in page.tags) == 2


def test_a_comparison_of_runs_shows_the_settings_that_differ(reported: Path, copied: Path, tmp_path: Path) -> None:
    toml = (copied / "run.toml").read_bytes().replace(b"top_k = 20", b"top_k = 30")
    (copied / "run.toml").write_bytes(toml)
    edit_json(copied / "stages.json", config=hashlib.sha256(toml).hexdigest())  # as if the run were of these settings
    page = Page(write_report([reported, copied], tmp_path / "runs.html").read_text("utf-8"))
    absent = ["phases[joint].steps", "not comparable"]
    assert page.lacks("2 runs side by side", "retriever.top_k 20 30", *absent) == absent


def test_long_names_that_differ_at_their_ends_differ_in_a_plot() -> None:
    names = [f"experiments/hobbies/learning-rate-and-other-settings/seed={seed}: combined" for seed in (1, 2)]
    drawn = interval_chart("Macro-F1", "", [Estimate(name, 0.5, 0.4, 0.6) for name in names])
    shown = [name for name in re.findall(r"<text[^>]*>([^<]*)</text>", drawn) if "…" in name]
    assert [len(name) for name in shown] == [44, 44]
    assert [name[-18:] for name in shown] == [name[-18:] for name in names]
    assert all(name.startswith("experiments/hobbies/") for name in shown)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["x/one", "y/two"], ["one", "two"]),
        (["x/run", "x/run"], ["run", "run"]),
        (["a/runs/all/k=5/1", "a/runs/all/k=50/1"], ["k=5", "k=50"]),
        (["a/k=5/1", "a/k=5/2", "a/k=50/1"], ["k=5/1", "k=5/2", "k=50/1"]),
        (["a/run", "b/run", "b/other"], ["a/run", "b/run", "b/other"]),
        (["a/run", "a/b/run"], ["run", "b/run"]),
        (["run", "run/run"], ["run", "run/run"]),
    ],
)
def test_runs_whose_folders_have_equal_names_are_named_by_the_parts_of_their_paths_that_differ(paths: list[str], names: list[str]) -> None:
    assert names_of([Path(path) for path in paths]) == names


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), min_size=1, max_size=4))
def test_different_runs_have_different_names(folders: list[list[str]]) -> None:
    paths = [Path(*folder) for folder in folders]
    named = dict(zip(paths, names_of(paths), strict=True))
    assert all(named.values())
    assert len(set(named.values())) == len(named)


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_sign_test_equals_the_sum_of_both_tails(one: int, other: int) -> None:
    tail = sum(math.comb(one + other, count) for count in range(min(one, other) + 1))
    assert sign_test(one, other) == pytest.approx(min(1.0, 2 * tail / 2 ** (one + other)))
    assert 0 <= sign_test(1000 * one, 1000 * other) <= 1, "for as many rows as a test file has"


def test_a_percentage_is_not_broken_into_two_lines(text: str) -> None:
    cells = re.findall(r'<td class="figure"[^>]*>(?:<i[^>]*></i><span>)?([\d.]+[^\d<]%)', text)
    assert len(cells) > 20
    assert all("\u00a0%" in cell for cell in cells)


def test_templates_clean_and_escape_values_and_raise_for_missing_names() -> None:
    template = environment().from_string('<p title="{{ label }}">{{ label }}</p>')
    assert template.render(label='<b>\x00\ud83d"') == '<p title="&lt;b&gt;␀\ufffd&#34;">&lt;b&gt;␀\ufffd&#34;</p>'
    with pytest.raises(UndefinedError, match="label"):
        template.render()


def test_messages_show_what_is_between_backticks_as_code_and_escape_it() -> None:
    macros: Any = environment().get_template("macros.html.jinja").module
    message, shown = "a `b <i>\x00` and ` c", "a <code>b &lt;i&gt;␀</code> and ` c"
    assert macros.note(message).strip() == f'<p class="note">{shown}</p>'
    assert macros.missing(message).strip() == f'<p class="missing">{shown}</p>'
    assert macros.passage(message, code=True) == f"<bdi>{shown}</bdi>"
    assert macros.passage(message) == "<bdi>a `b &lt;i&gt;␀` and ` c</bdi>", "of a text from data"


@given(st.text(max_size=900), st.sets(st.text(max_size=4), max_size=3))
def test_a_passage_contains_all_of_its_text_once(text: str, terms: set[str]) -> None:
    page = Page(passage(text, terms=terms, limit=60))
    shown = "".join(data for tags, data in page.inside if "bdi" in tags.split())
    clean = passage(text, limit=2000)
    assert shown == "".join(Page(clean).text)
    assert {tag for tag, _ in page.tags} <= {"bdi", "mark", "details", "summary"}


@pytest.mark.parametrize(("value", "expected"), [(1.0, ("50", "100")), (0.0, ("0", "50"))])
def test_an_axis_in_percent_ends_at_100(value: float, expected: tuple[str, ...]) -> None:
    chart = interval_chart("Macro-F1", "", [Estimate("tfidf", value, value, value)])
    assert re.findall(r">(-?\d+)</text>", chart) == list(expected)
    line = line_chart(
        "Macro-F1", "", [Line("dev", [(0.0, 100.0), (5.0, 100.0)])], x_name="step", y_format=lambda y: f"{y:g} %", largest=100
    )
    assert re.findall(r">(\d+) %<", line) == ["50", "100"]


def test_axes_of_whole_numbers_have_whole_ticks_and_bars(linear_runs: Path) -> None:
    line = line_chart("Loss", "", [Line("loss", [(0.0, 3.0), (2.0, 1.0)])], x_name="step", y_format=lambda y: f"y{y:g}")
    assert re.findall(r">(\d+)</text>", line) == ["0", "1", "2"]
    report = (linear_runs / "static/report.html").read_text("utf-8")
    (lengths,) = (svg for svg in re.findall(r"(?s)<svg.*?</svg>", report) if ">Length of the training texts<" in svg)
    labels = re.findall(r'class="tick"[^>]*>([^<]+)<', lengths)
    assert labels
    assert all(label.isdigit() for label in labels)
    bars = [re.fullmatch(r"(\d+)(?: to (\d+))?: (\d+)", tip) for tip in re.findall(r"<rect[^>]*><title>([^<]*)<", lengths)]
    counted = read_jsonl(linear_runs / "data/train.jsonl")
    assert sum(int(bar[3]) for bar in bars if bar) == len(counted)
    for bar in bars:
        assert int(bar[1]) < int(bar[2] or 10**9)


@given(st.integers(-(10**6), 10**6), st.just(0.0) | st.floats(1e-3, 1e6), st.integers(2, 6))
def test_ticks_are_few_and_cover_the_range(low: int, span: float, count: int) -> None:
    found = ticks(low, low + span, count)
    assert found[0] <= low + 1e-6 * (abs(low) + span)
    assert found[-1] >= low + span - 1e-6 * (abs(low) + span)
    assert 2 <= len(found) <= 2 * count + 2


def open_page(browser: Any, page: Path, **context: Any) -> tuple[Any, list[str]]:
    """Open the page; return it and the list of its console messages, errors and requests."""
    shown = browser.new_context(**context).new_page()
    problems: list[str] = []
    shown.on("console", lambda message: problems.append(message.text))
    shown.on("pageerror", lambda error: problems.append(str(error)))
    shown.on("request", lambda request: None if request.url.startswith("file:") else problems.append(request.url))
    shown.goto(page.as_uri())
    return shown, problems


def test_in_a_browser_the_page_has_no_errors_or_requests_and_tables_sort_unfold_and_filter(browser: Any, reported: Path) -> None:
    shown, problems = open_page(browser, reported / "report.html")
    assert (shown.title(), shown.locator("section").count()) == ("tlm: run", 8)
    style = "label => [getComputedStyle(label).paintOrder, getComputedStyle(label).stroke]"
    label = shown.locator("#learning svg .label").first.evaluate(style)
    ground = shown.locator("#learning").evaluate("section => getComputedStyle(section).backgroundColor")
    assert label == ["stroke", ground], "a border in the color of the page, below the label and above the lines"
    table = shown.locator("table", has_text="Sources of the passages")
    assert table.locator("tbody tr:visible").count() == 10
    rows = table.locator("tbody tr").count()
    header = table.locator("thead th").nth(1)
    for order, is_descending in (("descending", True), ("ascending", False)):
        header.locator("button").click()
        figures = [float(text.replace(",", "")) for text in table.locator("tbody tr td:nth-child(2)").all_text_contents()]
        assert (header.get_attribute("aria-sort"), figures) == (order, sorted(figures, reverse=is_descending))
    table.locator("input").fill("<script>1")
    assert 0 < table.locator("tbody tr:visible").count() < rows
    table.locator("input").fill("")
    shown.locator("section#retrieved button.unfold").first.click()
    assert table.locator("tbody tr:visible").count() == rows
    assert problems == []


def test_the_page_does_not_scroll_horizontally_and_has_a_dark_color_scheme(browser: Any, reported: Path) -> None:
    shown, _ = open_page(browser, reported / "report.html")
    shown.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true })")
    for width in (320, 400, 1300):
        shown.set_viewport_size({"width": width, "height": 800})
        assert shown.evaluate("document.documentElement.scrollWidth") <= width

    def colours(scheme: str) -> list[int]:
        shown.emulate_media(color_scheme=scheme)
        style = "getComputedStyle(document.querySelector('section'))"
        return [sum(map(int, re.findall(r"\d+", shown.evaluate(f"{style}.{name}"))[:3])) for name in ("backgroundColor", "color")]

    light, dark = colours("light"), colours("dark")
    assert light[0] > 700 > 200 > light[1]
    assert dark[0] < 150 < 600 < dark[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_figures_of_the_confusion_matrix_are_legible(browser: Any, reported: Path, scheme: str) -> None:
    shown, _ = open_page(browser, reported / "report.html", color_scheme=scheme)

    def luminance(color: str) -> float:
        """As WCAG 2 defines it, of rgb(r, g, b) from 0 to 255 or color(srgb r g b) from 0 to 1."""
        parts = [float(part) / (255 if color.startswith("rgb") else 1) for part in re.findall(r"[\d.]+", color)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for kind in ("hit", "miss"):
        cell = shown.locator(f".confusion td.{kind}").first
        cell.evaluate("cell => cell.style.setProperty('--share', 1)")
        ink, ground = (luminance(cell.evaluate(f"cell => getComputedStyle(cell).{name}")) for name in ("color", "backgroundColor"))
        assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5, kind


def test_the_print_style_is_light_complete_and_without_controls(browser: Any, reported: Path) -> None:
    shown, problems = open_page(browser, reported / "report.html", color_scheme="dark", viewport={"width": 720, "height": 1000})
    shown.emulate_media(media="print", color_scheme="dark")
    for name in ("nav", ".unfold", ".filter"):
        assert shown.locator(name).count() > 0
        assert shown.locator(f"{name}:visible").count() == 0, name
    arrows = shown.locator("th button").evaluate_all("buttons => buttons.map(button => getComputedStyle(button, '::after').content)")
    assert set(arrows) == {"none"}
    for element in ("body", "section"):
        style = f"getComputedStyle(document.querySelector('{element}'))"
        background, ink = (re.findall(r"[\d.]+", shown.evaluate(f"{style}.{name}")) for name in ("backgroundColor", "color"))
        assert background[:3] == ["255", "255", "255"] or background[3:] == ["0"], "white, or nothing painted"
        assert sum(map(int, ink[:3])) < 200
    table = shown.locator("table", has_text="Sources of the passages")
    assert table.locator("tbody tr:visible").count() == table.locator("tbody tr").count() > 10
    assert shown.evaluate("document.documentElement.scrollWidth") <= 720
    paper = shown.pdf(format="A4")
    assert paper.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type /Page\b", paper)) > 1
    assert problems == []


def test_a_confusion_matrix_of_thirty_long_labels_fits_the_page_and_the_paper(browser: Any, tmp_path: Path) -> None:
    labels = [f"label number {number} with many words" for number in range(30)]
    rows = [{"text": f"word{number} other{number} {place}", "label": label} for number, label in enumerate(labels) for place in "abc"]
    paths = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "dev", "test")}
    for split, path in paths.items():
        write_jsonl(Path(path), [{**row, "text": f"{row['text']} {split}"} for row in rows])
    report = write_report([run(quick(recipes.tfidf(**paths)), out=tmp_path / "run").path])
    shown, _ = open_page(browser, report, viewport={"width": 1100, "height": 900})
    matrix = shown.locator("table.confusion")
    assert matrix.locator("tbody tr").count() == 30
    inside = "table => table.getBoundingClientRect().right <= table.closest('.scroll').getBoundingClientRect().right + 1"
    assert matrix.evaluate(inside)
    shown.set_viewport_size({"width": 718, "height": 1000})
    shown.emulate_media(media="print")
    assert matrix.evaluate(inside)
    assert shown.evaluate("document.documentElement.scrollWidth") <= 718


def test_the_page_is_complete_without_javascript(browser: Any, reported: Path) -> None:
    shown, _ = open_page(browser, reported / "report.html", java_script_enabled=False)
    table = shown.locator("table", has_text="Sources of the passages")
    assert table.locator("tbody tr:visible").count() == table.locator("tbody tr").count() > 10

"""Recipes: what each holds, and that each runs from the command's own parsing to a model that transformers loads."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import cramlm
from commands import printed
from cramlm import recipes
from cramlm.cli.options import resolve_run
from cramlm.config.phase import PhaseConfig
from cramlm.config.retriever import RandomConfig
from cramlm.config.run import EncoderConfig, RunConfig, TeacherConfig, load_config
from cramlm.config.terms import Classify, Distil, Mlm
from cramlm.errors import ArtifactError, UsageError
from cramlm.experiments.grid import Grid, arms_of, cells_of
from cramlm.io.machine import has_bf16_instructions
from cramlm.recipes import RECIPES
from cramlm.recipes.describe import describe_run, stages_of
from cramlm.recipes.recipe import from_checkpoint
from cramlm.records import Event
from cramlm.storage.artifacts import hash_file
from jsonl import read_json, write_jsonl, write_labelled
from pretrained_folders import write_pretrained
from tiny_task import COMMON, QUICK, TOPICS, write_task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # raised inside transformers while it loads

DATA = {"train": "", "corpus": "corpus.jsonl"}
LABELS = 7
CONTROLS = ("random-retrieval", "external-only", "task-text-only", "no-stage-2", "labels-only")
FROM_CHECKPOINT = {"plm", "dapt", "tapt", "dapt+tapt", "knn-tapt"}
WITHOUT_CORPUS = {"labels-only", "task-text-only", "plm", "tapt", "tfidf"}
SMALL = (
    *("encoder.layers=1", "encoder.hidden=32", "encoder.heads=2", "encoder.intermediate=32", "encoder.embedding_init=random"),
    *("tokenizer.vocab_size=200",),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths: the files of a tiny task, a checkpoint, a store for all runs."""
    root = tmp_path_factory.mktemp("recipes")
    texts = [" ".join((*words, *COMMON)) for words in TOPICS.values()]
    checkpoint = write_pretrained(root / "checkpoint", "bert", texts * 4)
    return {**write_task(root / "data", train=24, held_out=8, documents=60), "init": str(checkpoint), "store": str(root / "store")}


def quick_run(place: dict[str, str], recipe: str, *settings: str, init: str | None = None) -> RunConfig:
    """The run that the command would do, with steps that take no time."""
    task = {name: place[name] for name in ("train", "dev", "test")}
    common: dict[str, Any] = {"task": task, "corpus": [place["corpus"]], "budget": None, "seed": 3, "init": init}
    phases = len(resolve_run(recipe, None, [], **common).phases)
    steps = [f"phases[{number}].{setting}" for number in range(phases) for setting in ("steps=2", "max_length=16", "batch_size=64")]
    return resolve_run(recipe, None, [*QUICK, *([] if init else SMALL), *steps, *settings], **common)


def fit(config: RunConfig, place: dict[str, str], out: Path) -> tuple[cramlm.Run, list[Event]]:
    events: list[Event] = []
    return cramlm.fit(config, out=out, store=place["store"], emit=events.append), events


def check_export(run: cramlm.Run) -> None:
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(run.export)
    assert sorted(model.config.id2label.values()) == ["hill", "sea"]
    assert read_json(run.path / "evaluation/scores.json")["models"][run.config.name]["test"]["accuracy"] >= 0


def some_slow(names: list[str], *, quick: set[str]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


METHODS = [
    name for name, recipe in RECIPES.items() if isinstance(recipe, recipes.EncoderRecipe) and recipe.head == "classifier"
]  # the others: test_prompting.py


@pytest.mark.parametrize("name", some_slow(METHODS, quick={"no-stage-2", "dapt+tapt"}))
def test_every_recipe_runs_to_a_model_that_transformers_loads(name: str, place: dict[str, str], tmp_path: Path) -> None:
    config = quick_run(place, name, init=place["init"] if name in FROM_CHECKPOINT else None)
    run, _ = fit(config, place, tmp_path / "run")
    check_export(run)
    assert (run.export / "mlm").exists() == any(phase.text_terms for phase in config.phases)
    assert (config.corpus is None) == (name in WITHOUT_CORPUS)
    assert config.encoder.hidden == 32


@pytest.mark.parametrize(
    ("budget", "device", "layers", "tokens"),
    [
        ("5m", "cpu", 2, 4096),
        ("6e13flops", "cuda", 2, 4096),
        ("1h", "cpu", 4, 4096),
        ("20s", "cuda:0", 4, 4096),
        ("1e15flops", "cpu", 6, 16384),
        ("10m", "cpu", 4 if has_bf16_instructions() else 2, 4096),
        ("6h", "cpu", 6, 16384),
        ("1m", "cuda", 6, 16384),
    ],
)
def test_more_operations_or_a_gpu_have_a_larger_encoder_and_larger_batches_of_text(
    budget: str, device: str, layers: int, tokens: int
) -> None:
    config = recipes.tlm(train="", corpus="corpus.jsonl", budget=budget, device=device)
    joint, finetune = config.phases
    assert (config.device, config.encoder.layers, joint.batch_size, joint.batch_unit) == (device, layers, tokens, "tokens")
    assert (finetune.batch_size, finetune.batch_unit) == (32, "sequences")


@pytest.mark.parametrize(
    ("budget", "device", "overrides", "layers"),
    [
        ("2m", "cuda", [], 6),
        ("2m", None, ["device=cuda"], 6),
        ("2m", "cpu", [], 2),
        (None, "cpu", ["budget=2m"], 2),
        ("2m", "cpu", ["budget = 6h"], 6),
        ("2m", "cpu", ["budget=none"], 4),
    ],
)
def test_budget_and_device_decide_on_the_size_as_options_and_as_settings(
    budget: str | None, device: str | None, overrides: list[str], layers: int, place: dict[str, str]
) -> None:
    task, corpus = {"train": place["train"]}, [place["corpus"]]
    config = resolve_run("tlm", None, overrides, task=task, corpus=corpus, budget=budget, seed=3, device=device)
    assert (config.device == "cuda", config.encoder.layers) == ("cpu" not in str(device), layers)


@pytest.mark.parametrize("name", some_slow(["tlm-small", "tlm-medium", "tlm-large"], quick={"tlm-small"}))
def test_the_twins_of_the_papers_recipes_run_every_part_of_them(name: str, place: dict[str, str], tmp_path: Path) -> None:
    task = {split: place[split] for split in ("train", "dev", "test")}
    config = resolve_run(f"{name}:scierc:0.0001", None, [*QUICK, *SMALL], task=task, corpus=[place["corpus"]], budget=None, seed=3)
    joint, finetune = config.phases
    assert (joint.steps, joint.mixing, joint.loss_scale) == (20 if name == "tlm-small" else 30, "interleaved", "mean")
    assert joint.steps // (joint.external + joint.task) >= 5
    assert finetune.reset_task_head
    run, _ = fit(config, place, tmp_path / "run")
    check_export(run)
    assert (run.path / "phase-1-joint").is_dir()
    assert (run.path / "phase-2-finetune").is_dir()


def test_a_run_from_a_checkpoint_keeps_its_tokenizer_names_it_and_notices_when_it_changes(place: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(place["init"], folder)
    config = quick_run(place, "tlm", init=str(folder))
    run, events = fit(config, place, tmp_path / "run")
    check_export(run)
    assert (run.export / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    start = read_json(run.export / "provenance.json")["init"]
    assert start["name"] == str(folder)
    assert start["sha256"]["model.safetensors"] == hash_file(folder / "model.safetensors")
    assert "It started from the weights of weights (sha256" in (run.export / "README.md").read_text("utf-8")
    assert any(event.stage == "init" and "with its vocabulary head" in event.message for event in events)

    _, events = fit(config, place, tmp_path / "run")
    assert not [event for event in events if event.kind == "stale"]

    tensors = load_file(folder / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.bias"] += 0.01
    save_file(tensors, folder / "model.safetensors")
    _, events = fit(config, place, tmp_path / "run")
    assert {"phase-1-joint", "phase-2-finetune", "export"} <= {event.stage for event in events if event.kind == "stale"}
    assert "tokenizer" not in {event.stage for event in events if event.kind == "stale"}

    continued = quick_run(place, "plm", init=str(run.export / "mlm"))  # what cramlm wrote is a starting point too
    assert continued.encoder == config.encoder
    assert continued.tokenizer.vocab_size == config.tokenizer.vocab_size


# Task, K, rho_1, rho_2, steps, batch at small, medium, large; length of task and external text. Written out from the tables of Yao et al.
# 2022 (section 4.1 and the appendix), not from the code.
PAPER = """
agnews         50/50/100        1/3/3          100/100/100    100000/300000/500000  256/256/256  128/128/128  128/128/128
hyperpartisan  5000/5000/10000  99/99/499      20/100/20      50000/100000/300000   256/256/512  128/128/128  128/128/128
helpfulness    50/50/100        1/1/7          100/1000/100   150000/300000/500000  256/256/512  128/128/128  128/128/128
imdb           500/500/1000     19/99/99       100/100/1000   150000/300000/500000  256/256/512  512/512/512  128/512/512
acl-arc        5000/5000/10000  999/999/1999   100/20/20      150000/300000/500000  256/256/512  128/128/128  128/128/128
scierc         5000/5000/10000  999/999/1999   20/20/20       150000/300000/300000  256/256/512  128/128/128  128/128/128
chemprot       5000/5000/10000  999/999/1999   20/100/20      150000/300000/500000  256/256/256  128/128/128  128/128/128
rct            50/50/100        3/3/7          20/100/100     100000/300000/500000  256/256/256  128/128/128  128/128/128
"""


@pytest.mark.parametrize(
    ("kind", "override", "metric"),
    [
        ("classification", [], "macro_f1"),
        ("multi-label", [], "macro_f1"),
        ("regression", [], "pearson"),
        ("regression", ["dev_metric=r2"], "r2"),
    ],
)
@pytest.mark.parametrize("recipe", ["tlm-small", "tlm-large:rct:0.001"])
def test_the_papers_recipes_take_every_kind_of_task(recipe: str, kind: str, override: list[str], metric: str, tmp_path: Path) -> None:
    label = {"classification": "c", "multi-label": ["c"], "regression": 1.5}[kind]
    rows = [{"text": f"a b {number}", "label": label} for number in range(20)]
    task = {"train": str(write_jsonl(tmp_path / "train.jsonl", rows)), "kind": kind}
    config = resolve_run(recipe, None, override, task=task, corpus=["corpus.jsonl"], budget=None, seed=None)
    assert config.metric == ("micro_f1" if "rct" in recipe and kind != "regression" else metric)


@pytest.mark.parametrize("line", PAPER.split("\n")[1:-1], ids=lambda line: line.split()[0])
def test_the_papers_recipes_hold_the_papers_numbers(line: str) -> None:
    task, *columns = line.split()
    for place, (scale, layers, width) in enumerate((("small", 12, 768), ("medium", 12, 768), ("large", 24, 1024))):
        top_k, rho_1, rho_2, steps, batch, length, external = (int(column.split("/")[place]) for column in columns)
        config = RECIPES[f"tlm-{scale}"](**DATA, like=task)
        joint, finetune = config.phases
        assert config.retriever.model_dump()["top_k"] == top_k
        assert (joint.external, joint.task, joint.mixing) == (rho_1, 1, "interleaved")
        assert joint.terms == (Mlm(on="external"), Mlm(on="task", weight=rho_2), Classify())
        assert (joint.steps, joint.batch_size, joint.batch_unit, joint.max_length) == (steps, batch, "sequences", length)
        assert joint.external_length == external
        assert joint.optimizer.kind == "adamw"
        assert (joint.optimizer.learning_rate, joint.optimizer.weight_decay, joint.schedule.kind) == (1e-4, 0.01, "linear")
        assert round(joint.schedule.warmup_fraction * steps) == 10_000
        assert (joint.masking.rate, joint.masking.mask_share, joint.masking.random_share) == (0.15, 0.8, 0.1)
        assert joint.loss_scale == "mean"
        assert [(phase.dropout, phase.attention_dropout) for phase in config.phases] == [(0.1, 0.1)] * 2
        assert (finetune.external, finetune.terms, finetune.steps, finetune.batch_size) == (0, (Classify(),), 30_000, 32)
        assert (finetune.optimizer.learning_rate, finetune.optimizer.weight_decay) == (2e-5, 0)
        assert round(finetune.schedule.warmup_fraction * 30_000) == 3_000
        assert (finetune.reset_task_head, finetune.evaluate_every, finetune.keep, finetune.max_length) == (True, 1000, "best", length)
        assert (config.encoder.shape, config.encoder.layers, config.encoder.hidden) == ("bert", layers, width)
        assert config.tokenizer.vocab_size == 30_522
        assert config.dev_metric == ("micro_f1" if task in ("chemprot", "rct") else "macro_f1")


@pytest.mark.parametrize(
    ("labelled", "top_k", "rho_1"), [(999, 5000, 99), (1000, 5000, 999), (4999, 5000, 999), (5000, 500, 19), (50_000, 50, 1)]
)
def test_another_task_gets_the_papers_settings_by_its_number_of_labels(labelled: int, top_k: int, rho_1: int, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a b", "label": "c"}\n' * labelled, "utf-8")
    config = recipes.tlm_small(train=str(file), corpus="corpus.jsonl")
    assert (config.retriever.model_dump()["top_k"], config.phases[0].external) == (top_k, rho_1)
    assert config.phases[0].max_length == 128


@pytest.mark.parametrize(("width", "rate"), [(32, 1e-4), (768, 2e-5)])
def test_a_checkpoint_is_tuned_at_the_rates_of_the_literature_and_a_narrow_one_at_more(width: int, rate: float) -> None:
    encoder = EncoderConfig(shape="bert", hidden=width)
    tuned, near = (from_checkpoint(phase, encoder) for phase in recipes.tlm.phases[::-1])
    assert (tuned.optimizer.kind, tuned.optimizer.learning_rate, tuned.batch_size, tuned.batch_unit) == ("adamw", rate, 16, "sequences")
    assert [(phase.dropout, phase.attention_dropout) for phase in (tuned, near)] == [(0.1, 0.1)] * 2
    assert (tuned.max_passes, tuned.terms, tuned.schedule.warmup_fraction) == (10, (Classify(),), 0.06)
    assert (near.optimizer.kind, near.optimizer.learning_rate, near.masking.rate, near.masking.mask_share) == ("adamw", 1e-4, 0.15, 0.8)


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("plm", {}, "the recipe plm starts from pretrained weights; pass init= (--base-model FOLDER"),
        *(
            (recipe, options, f"{recipe} retrieves from raw text; pass corpus= (--corpus FILES), or take the recipe {instead}")
            for recipe, options, instead in (
                ("tlm", {"corpus": None}, "labels-only"),
                ("dapt", {"corpus": None, "init": "folder"}, "tapt"),
                ("static", {"corpus": None}, "tfidf"),
                ("bayes", {"corpus": None}, "tfidf"),
            )
        ),
        ("tlm-small", {"init": "folder"}, "trains from scratch; drop init= (--base-model FOLDER), or take the recipe tlm"),
        ("tlm-small:mnli", {}, "'mnli' is not a task of the paper; write tlm-small:TASK with one of agnews, hyperpartisan"),
        ("tlm-small:rct:2", {}, "a twin's scale is 2.0, expected a number between 0 and 1"),
        ("tlm-small:rct:half", {}, "the scale 'half' is not a number"),
        ("tlm:rct", {}, "only tlm-small, -medium and -large take :TASK"),
        ("labels-only", {"init": "folder", "preset": "tiny"}, "--preset tiny and --base-model exclude each other"),
        ("tml", {}, "(did you mean 'tlm'?)"),
        ("mine.toml", {}, "--recipe mine.toml: is a config file; pass it with --config"),
        ("magic", {}, "'magic' is not one of tlm, tlm-plain, tlm-small, tlm-medium, tlm-large, random-retrieval, external-only"),
    ],
)
def test_wrong_arguments_of_a_recipe_are_one_line(recipe: str, options: dict[str, Any], message: str, place: dict[str, str]) -> None:
    options = {"corpus": [place["corpus"]], **options}
    if options.get("init") == "folder":
        options["init"] = place["init"]
    with pytest.raises(UsageError) as caught:
        resolve_run(recipe, None, [], task={"train": place["train"]}, budget=None, seed=None, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("encoder.layers=5", r"encoder\.layers is 5, the weights in .* have 2; drop that setting or --base-model"),
        ("tokenizer.lowercase=false", r"tokenizer\.lowercase is False, the tokenizer in .* is used as it is, with .* tokens; drop that"),
    ],
)
def test_an_encoder_or_a_tokenizer_set_by_hand_must_be_that_of_the_weights(
    setting: str, message: str, place: dict[str, str], tmp_path: Path
) -> None:
    config = quick_run(place, "plm", setting, init=place["init"])
    with pytest.raises(UsageError, match=message):
        fit(config, place, tmp_path / "run")
    with pytest.raises(ArtifactError, match=r"config\.json: missing; --base-model takes a folder"):
        quick_run(place, "plm", init=str(tmp_path))


def write_labels(path: Path, rows: list[Any]) -> str:
    """A training file of different texts with these labels."""
    return write_labelled(path, ((f"text number {number}", label) for number, label in enumerate(rows)))


def even(count: int) -> list[str]:
    """Labels of so many texts, of each nearly as many."""
    return [f"label {number % LABELS}" for number in range(count)]


def soft(phase: PhaseConfig) -> tuple[float, float]:
    """The weight of a teacher and the label smoothing."""
    return sum(term.weight for term in phase.terms_of(Distil)), sum(term.label_smoothing for term in phase.terms_of(Classify))


def softness(config: RunConfig) -> tuple[Any, ...]:
    """Phases as (name, teacher weight, label smoothing), and whether the distribution of the teacher's labels is aligned."""
    return (*((phase.name, *soft(phase)) for phase in config.phases), config.teacher.align_distribution)


# Of recipes from scratch, on 500 and on 100 texts of 7 labels.
SOFTNESS = {
    "tlm": ((("joint", 1, 0), ("finetune", 1, 0), False), (("joint", 1, 0), ("finetune", 0, 0.2), True)),
    "prompt": ((("joint", 1, 0), ("finetune", 1, 0), False), (("joint", 1, 0), ("finetune", 0, 0.2), True)),
    "labels-only": ((("finetune", 1, 0), False), (("finetune", 0, 0.2), False)),
    "selective-masking": (
        (("genept", 0, 0), ("tune", 1, 0), ("scorer", 0, 0), ("taskpt", 0, 0), ("finetune", 1, 0), False),
        (("genept", 0, 0), ("tune", 0, 0.2), ("scorer", 0, 0), ("taskpt", 0, 0), ("finetune", 0, 0.2), False),
    ),
    "pet": ((("joint", 0, 0), ("finetune", 0, 0), ("distil", 1, 0), False),) * 2,
    "soft-prompt": ((("joint", 0, 0), ("tune", 0, 0), False),) * 2,
}  # of the controls of tlm: test_a_control_is_tlm_with_one_change


@pytest.mark.parametrize("name", SOFTNESS)
def test_a_recipe_writes_the_weight_of_the_teacher_and_the_smoothing_that_suit_the_number_of_texts(name: str, tmp_path: Path) -> None:
    assert softness(RECIPES[name](train="", corpus="corpus.jsonl")) == SOFTNESS[name][0], "typical sizes are assumed without a file"
    for count, expected in zip((500, 100), SOFTNESS[name], strict=True):
        train = write_labels(tmp_path / f"{count}.jsonl", even(count))
        assert softness(RECIPES[name](train=train, dev="dev.jsonl", corpus="corpus.jsonl")) == expected


def test_few_labels_without_a_dev_file_are_learned_slowly_after_a_phase_that_has_read_them(tmp_path: Path) -> None:
    few, many = (write_labels(tmp_path / f"{count}.jsonl", even(count)) for count in (300, 400))
    for name, slow in (("tlm", True), ("task-text-only", True), ("external-only", False), ("labels-only", False), ("tlm-plain", False)):
        for train, dev, factor in ((many, None, 1), (few, "dev.jsonl", 1), (few, None, 0.1 if slow else 1)):
            phases = RECIPES[name](train=train, dev=dev, corpus="corpus.jsonl").phases
            rates = (phases[-1].optimizer.learning_rate, phases[-1].optimizer.muon_learning_rate)
            assert rates == pytest.approx((factor * 1e-3, factor * 2e-3))
            assert len(phases) == 1 or phases[0].optimizer.muon_learning_rate == 4e-3


def test_texts_that_are_split_off_for_dev_do_not_count(tmp_path: Path) -> None:
    train = write_labels(tmp_path / "train.jsonl", ["a", "b"] * 32)  # 32 texts a label, 29 after the split
    assert softness(recipes.labels_only(train=train, dev="dev.jsonl")) == (("finetune", 1, 0), False)
    assert softness(recipes.labels_only(train=train)) == (("finetune", 0, 0.2), False)


@pytest.mark.parametrize("kind", ["multi-label", "regression"])
def test_texts_without_one_label_each_have_a_linear_teacher_without_alignment_and_no_smoothing(kind: str, tmp_path: Path) -> None:
    labels: list[Any] = [["a"], ["a", "b"]] if kind == "multi-label" else [1.5, 2.5]
    for count in (20, 500):
        train = write_labels(tmp_path / "train.jsonl", labels * (count // 2))
        config = recipes.tlm(train=train, corpus="corpus.jsonl", kind=kind)
        assert softness(config) == (("joint", 1, 0), ("finetune", int(kind == "multi-label"), 0), False)
        assert config.teaching == ("tfidf", "static"), "naive Bayes is for one label per text"


@pytest.mark.parametrize("name", ["tlm", "plm", "prompt", "selective-masking"])
def test_from_a_checkpoint_there_is_no_linear_teacher_however_many_texts_there_are(
    name: str, place: dict[str, str], tmp_path: Path
) -> None:
    for count in (100, 500):
        train = write_labels(tmp_path / f"{count}.jsonl", even(count))
        config = RECIPES[name](train=train, corpus="corpus.jsonl", init=place["init"])
        assert {soft(phase) for phase in config.phases} == {(0, 0)}
        assert not config.teacher.align_distribution


def test_every_subsample_of_labels_gets_its_own_numbers(tmp_path: Path) -> None:
    train = write_labels(tmp_path / "train.jsonl", [f"label {number % 2}" for number in range(200)])
    grid = Grid(arms_of(["labels-only"]), (1,), ("20", "all"), {"train": train, "dev": train})
    few, every = cells_of(grid, tmp_path / "out")
    assert softness(few.config) == (("finetune", 0, 0.2), False)
    assert softness(every.config) == (("finetune", 1, 0), False)


@pytest.mark.parametrize("texts", [100, 500])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.2])
def test_label_smoothing_set_by_hand_changes_nothing_else(texts: int, smoothing: float, tmp_path: Path) -> None:
    train = write_labels(tmp_path / "train.jsonl", even(texts))
    plain, changed = (
        resolve_run("tlm", None, settings, task={"train": train}, corpus=["corpus.jsonl"], budget=None, seed=None)
        for settings in ([], [f"phases[1].terms[0].label_smoothing={smoothing}"])
    )
    first, *others = plain.phases[1].terms
    smoothed = first.model_copy(update={"label_smoothing": smoothing})
    finetune = plain.phases[1].model_copy(update={"terms": (smoothed, *others)})
    assert changed == plain.model_copy(update={"phases": (plain.phases[0], finetune)})


def test_tlm_plain_is_tlm_without_what_the_paper_does_not_have(tmp_path: Path) -> None:
    for count in (100, 500):
        train = write_labels(tmp_path / f"{count}.jsonl", even(count))
        full, plain = (RECIPES[name](train=train, corpus="corpus.jsonl") for name in ("tlm", "tlm-plain"))
        assert softness(plain) == (("joint", 0, 0), ("finetune", 0, 0), False)
        assert (plain.encoder.embedding_init, plain.logit_adjustment) == ("random", "none")
        assert (full.encoder.embedding_init, full.logit_adjustment) == ("words", "dev")
        differing = changes(plain, full)
        few = {"finetune.optimizer"} if count == 100 else set()
        assert set(differing) - {"teacher"} == {"encoder", "logit_adjustment", "joint.terms", "finetune.terms"} | few
        assert differing["encoder"] == plain.encoder.model_dump() | {"embedding_init": "words", "layer_init": "context"}


@pytest.mark.parametrize(
    ("name", "layers", "passages"),
    [
        ("tlm", "markers", True),
        ("random-retrieval", "markers", True),
        ("labels-only", "markers", False),
        ("tlm-plain", "random", False),
        ("prompt", "context", False),
    ],
)
def test_a_task_with_markers_has_layers_that_start_at_them_and_passages_that_get_them(
    name: str, layers: str, passages: bool, tmp_path: Path
) -> None:
    labels = even(40)
    marked = write_labelled(tmp_path / "marked.jsonl", ((f"a [[ ship ]] of {number}", label) for number, label in enumerate(labels)))
    plain, config = (RECIPES[name](train=file, corpus="corpus.jsonl") for file in (write_labels(tmp_path / "plain.jsonl", labels), marked))
    assert (config.encoder.layer_init, config.teacher.mark_passages) == (layers, passages)
    assert set(changes(plain, config)) == {"task", *(["encoder"] * (layers == "markers")), *(["teacher"] * passages)}
    assert "and the nearest markers" in describe_run(config) or layers != "markers"
    assert recipes.with_preset(config, "mini").encoder.layer_init == layers
    assert not plain.teacher.mark_passages


@pytest.mark.parametrize(
    ("name", "layers", "passages"), [("tlm", "markers", True), ("labels-only", "markers", False), ("tlm-plain", "random", False)]
)
def test_a_task_of_pairs_has_layers_that_start_at_their_boundary_and_passages_that_become_pairs(
    name: str, layers: str, passages: bool, tmp_path: Path
) -> None:
    rows = [{"text": f"text {number}", "second": f"other {number}", "label": label} for number, label in enumerate(even(40))]
    train = str(write_jsonl(tmp_path / "pairs.jsonl", rows))
    config = RECIPES[name](train=train, corpus="corpus.jsonl", text_pair_column="second")
    assert (config.encoder.layer_init, config.teacher.pair_passages, config.teacher.mark_passages) == (layers, passages, False)


@pytest.mark.parametrize("name", ["prompt", "pet", "soft-prompt"])
def test_a_recipe_with_a_prompt_reads_both_texts_of_pairs(name: str) -> None:
    config = RECIPES[name](train="", corpus="corpus.jsonl", text_pair_column="second")
    assert config.head.prompt.patterns == ("{text_a} {mask}, {text_b}",)
    assert RECIPES[name](train="", corpus="corpus.jsonl").head.prompt.patterns == ("{mask}: {text}",)


def changes(config: RunConfig, control: RunConfig) -> dict[str, Any]:
    """Settings of the control that differ from those of the config, by name; a phase that it lacks is None."""
    before, after = config.model_dump(), control.model_dump()
    own = {phase["name"]: phase for phase in after.pop("phases")}
    differing = {name: after[name] for name in after if name != "name" and after[name] != before[name]}
    for phase in before["phases"]:
        here = own.pop(phase["name"], None)
        if here is None:
            differing[phase["name"]] = None
        else:
            differing |= {f"{phase['name']}.{setting}": here[setting] for setting in phase if here[setting] != phase[setting]}
    assert not own, "a phase that the other config lacks"
    return differing


WITHOUT_RAW_TEXT = {"corpus": None, "retriever": None}


@pytest.mark.parametrize("texts", [100, 500])
@pytest.mark.parametrize("kind", ["classification", "multi-label"])
def test_a_control_is_tlm_with_one_change(kind: str, texts: int, tmp_path: Path) -> None:
    names = even(texts)
    train = write_labels(tmp_path / "train.jsonl", [[name] for name in names] if kind == "multi-label" else names)
    built = {name: RECIPES[name](train=train, corpus="corpus.jsonl", kind=kind) for name in ("tlm", *CONTROLS)}
    aligned = {"teacher": TeacherConfig().model_dump()} if built["tlm"].teacher.align_distribution else {}  # of passages
    slow = kind == "classification" and texts == 100  # learning of labels that the joint phase has read
    fast = {"finetune.optimizer": built["labels-only"].phases[0].optimizer.model_dump()} if slow else {}
    retriever = changes(built["tlm"], built["random-retrieval"]).pop("retriever")
    assert retriever == RandomConfig().model_dump()
    joint = built["tlm"].phases[0]
    on_task = [term.model_dump() for term in joint.terms if term.on == "task"]
    distilled = [term.model_dump() | {"on": "task"} for term in joint.terms_of(Distil)]  # in the place of external text
    on_external = [term.model_dump() for term in joint.terms if term.on == "external"]
    expected = {
        "random-retrieval": {"retriever": retriever},
        "external-only": {"joint.task": 0, "joint.terms": tuple(on_external), **fast},
        "task-text-only": {"joint.external": 0, "joint.terms": (*on_task, *distilled), **WITHOUT_RAW_TEXT, **aligned},
        "no-stage-2": {"finetune": None},
        "labels-only": {"joint": None, **WITHOUT_RAW_TEXT, **aligned, **fast},
    }
    assert {name: changes(built["tlm"], built[name]) for name in CONTROLS} == expected


def test_the_page_of_the_recipes_lists_every_control() -> None:
    page = Path(__file__).parents[1] / "docs" / "concepts" / "recipes.md"
    listed = re.findall(r"^\| `([\w-]+)` \| `", page.read_text("utf-8").partition("**The controls**")[2], flags=re.MULTILINE)
    assert listed == list(CONTROLS)


def test_a_preset_changes_the_size_and_not_how_token_embeddings_start() -> None:
    for name, start in (("tlm", "words"), ("tlm-plain", "random")):
        config = recipes.with_preset(RECIPES[name](train="", corpus="corpus.jsonl"), "small")
        assert (config.encoder.layers, config.encoder.embedding_init) == (6, start)


def test_every_recipe_is_listed_with_a_line_and_what_it_needs() -> None:
    lines = printed("recipes").splitlines()
    assert [line.split()[0] for line in lines] == list(RECIPES)
    assert all(("--base-model" in line) == (line.split()[0] in FROM_CHECKPOINT) for line in lines)
    assert all(("--corpus" in line) == (line.split()[0] not in WITHOUT_CORPUS) for line in lines)
    for name in RECIPES.keys() - FROM_CHECKPOINT:
        assert printed("recipes", "show", name).startswith(f"{name}: {RECIPES[name].summary}")


def test_a_dry_run_lists_the_stages_that_the_retriever_needs() -> None:
    by_words = recipes.tlm(train="", corpus=["raw"])
    assert {"corpus", "index", "selection"} <= set(stages_of(by_words))
    at_random = stages_of(recipes.random_retrieval(train="", corpus=["raw"]))
    assert ("index" in at_random, "selection" in at_random) == (False, True)
    server = {"kind": "elasticsearch", "url": "http://localhost:9200", "index": "passages"}
    on_a_server = load_config(by_words.model_dump(mode="json") | {"corpus": None, "retriever": server})
    local, remote = stages_of(by_words), stages_of(on_a_server)
    first = local.index("corpus")
    assert remote == [*local[:first], "server", "corpus", *local[first + 2 :]], "a corpus of the server's hits, without an index of words"
    assert "http://localhost:9200/passages: elasticsearch" in describe_run(on_a_server)
    assert "token embeddings start from word vectors of the corpus" in describe_run(on_a_server)


def test_recipes_show_describes_the_data_and_the_terms_that_run_on_a_task(tmp_path: Path) -> None:
    train = write_labels(tmp_path / "train.jsonl", even(100))
    options = ["--train", train, "--dev", "dev.csv", "--test", "test.csv", "--corpus", "text/", "--budget", "2e13flops"]
    shown = printed("recipes", "show", "tlm", *options, "--set", "phases[0].terms[1].weight=0.5")
    title, data, _, joint, finetune = shown.split("\n\n")
    assert title.startswith("tlm: retrieve with every training text")
    assert "100 training texts, 7 labels (classification); dev: dev.csv; test: test.csv" in data
    assert "text/: BM25, each training text is a query, as much as the budget reads" in data
    assert "2e13flops" in data
    assert [line.split()[:3] for line in joint.splitlines()[2:6]] == [
        ["mlm", "external", "1"],
        ["mlm", "task", "0.5"],
        ["classify", "task", "0.25"],
        ["distil", "external", "1"],
    ]
    assert "masks 20% of the tokens (random): 100% [MASK]" in joint
    assert "label_smoothing = 0.2" in finetune
    assert "distil" not in finetune  # fewer than 30 texts a label


def test_recipes_show_describes_a_config_file_as_the_recipe_that_it_is_of(tmp_path: Path) -> None:
    train = write_labels(tmp_path / "train.jsonl", even(100))
    options = ["--train", train, "--corpus", "text/"]
    config = tmp_path / "mine.toml"
    config.write_text(printed("config", *options), "utf-8")
    described = printed("recipes", "show", "tlm", *options)
    assert printed("recipes", "show", config) == described.replace(f"tlm: {RECIPES['tlm'].summary}", "tlm", 1)
    assert "task      0.5 " in printed("recipes", "show", config, "--set", "phases[0].terms[1].weight=0.5")


def test_files_may_be_paths_and_a_bad_value_is_one_line(tmp_path: Path) -> None:
    paths = {name: Path(path) for name, path in write_task(tmp_path, documents=5).items()}
    files = {name: paths[name] for name in ("train", "dev", "corpus")}
    config = recipes.static(**files, unlabelled=[paths["test"]])
    assert config == recipes.static(**{name: str(path) for name, path in files.items()}, unlabelled=[str(paths["test"])])
    assert config == recipes.static(**files, unlabelled=paths["test"])
    assert recipes.static(**files | {"corpus": [paths["corpus"]]}).corpus == config.corpus
    with pytest.raises(UsageError, match=r"^dev_fraction: Input should be less than 0.5 \(got 2\)"):
        recipes.static(**files, dev_fraction=2)
    for wrong in ({"budget": 300}, {"seed": "x"}, {"seed": None}):
        with pytest.raises(UsageError, match=rf"^{next(iter(wrong))}: Input should be a valid .* \(got .*\); `cramlm config`"):
            recipes.tlm(**files, **wrong)
    for top_k in (0, -5, "x", 2.5):
        for recipe in (recipes.static, recipes.tlm, recipes.tlm_small):
            with pytest.raises(UsageError, match=r"^(retriever\.)?top_k: .* \(got .*\); `cramlm config` prints every setting$"):
                recipe(**files, top_k=top_k)
    with pytest.raises(
        UsageError, match=r"^threads is a setting of the run .*; set it in the result: config.model_copy\(update={'threads': "
    ):
        recipes.static(**files, threads=1)

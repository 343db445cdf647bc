"""The planner: what it leaves alone, what it sets, and what it refuses; the forecast cost of a run, beside the resources of the machine."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cramlm.config.base import MAX_FLOPS, MAX_SECONDS, Budget
from cramlm.config.phase import PhaseConfig
from cramlm.config.retriever import Bm25Config, RandomConfig, RetrieverConfig, UnionConfig
from cramlm.config.run import EncoderConfig, RunConfig, TokenizerConfig, load_config
from cramlm.config.terms import Classify, Distil
from cramlm.errors import EnvironmentFault, UsageError
from cramlm.pipeline.run import run
from cramlm.planning.budget import (
    DROPOUT,
    EVALUATION_SPEEDUP,
    MAX_DRIFT,
    MIN_STEPS,
    MIN_TOKENS,
    PASSES_OVER_SELECTION,
    UNPLANNED_DOCUMENTS,
    Planner,
    Sizes,
    Speed,
    drift,
    finetune_passes,
    passes_over_selection,
    plan_selection,
    row_length,
)
from cramlm.planning.cost import CostForecast, Machine, TextSizes, beyond_budget, check_resources, forecast_cost
from cramlm.planning.plan import forecast_runs, late_message, measure_machine
from cramlm.planning.speed import Measurement
from cramlm.recipes import PRESETS, RECIPES, finetune_phase, joint_phase, tlm
from cramlm.recipes.recipe import LONG_BATCH, with_preset
from cramlm.records import silent
from jsonl import read_jsonl
from tiny_task import tiny_config, write_task

SIZES = Sizes(train_examples=4000, labels=8, train_tokens=200_000, dev_tokens=50_000, test_tokens=100_000, external_tokens=500_000)
SPEED = Speed(joint=10_000, finetune=12_000)


@given(st.floats(60, 7200), st.floats(1_000, 100_000))
def test_planned_phases_fill_the_time_and_never_exceed_it(seconds: float, rate: float) -> None:
    speed = Speed(joint=rate, finetune=1.2 * rate)
    try:
        joint, finetune = Planner(SIZES, speed).plan([joint_phase(), finetune_phase()], amount=seconds, rows=128)
    except UsageError:
        assert seconds * rate < 22 * 4096 / 0.7 + 8 * SIZES.dev_tokens  # only a budget that buys fewer than 20 steps is refused
        return
    evaluations = 1 + -(-finetune.steps // finetune.evaluate_every)  # the joint phase's end, and during the next
    training = joint.steps * 4096 / speed.joint + finetune.steps * 32 * 50 / speed.finetune
    spent = training + evaluations * SIZES.dev_tokens / (speed.finetune * EVALUATION_SPEEDUP)
    assert spent <= seconds * 1.001
    assert spent >= seconds - 2 * 4096 / speed.joint - 3 * 1600 / speed.finetune - 2 * SIZES.dev_tokens / speed.finetune


@pytest.mark.parametrize("speed", [SPEED, Speed(joint=1e12, finetune=1e12), Speed(joint=1e-3, finetune=1e-3)])
def test_the_largest_budgets_can_be_planned(speed: Speed) -> None:
    small = [phase.model_copy(update={"batch_size": 1}) for phase in (joint_phase(), finetune_phase())]
    for amount in (MAX_SECONDS, MAX_FLOPS):
        assert all(phase.steps for phase in Planner(SIZES, speed).plan(small, amount=amount, rows=128))


def test_explicit_numbers_and_terms_are_kept_and_passes_become_steps() -> None:
    by_hand = {"steps": 7, "max_length": 64, "dropout": 0.3, "evaluate_every": 3}
    fixed = joint_phase().model_copy(update=by_hand)
    planned, _ = Planner(SIZES, SPEED).plan([fixed, finetune_phase()], amount=300, rows=128)
    assert planned == fixed
    for terms in ((Classify(),), (Classify(label_smoothing=0.2),), (Classify(), Distil(on="task", weight=0.3))):
        phase = finetune_phase().model_copy(update={"passes": 2.0, "batch_size": 50, "terms": terms})
        (planned,) = Planner(SIZES, SPEED).plan([phase], amount=None, rows=128)
        assert (planned.steps, planned.terms) == (160, terms)


@pytest.mark.parametrize(
    ("phases", "amount", "message"),
    [([joint_phase()], None, "--budget"), ([joint_phase(), finetune_phase()], 4.0, r"phase '(joint|finetune)'.* at least 20 are needed")],
    ids=["no budget", "too small"],
)
def test_phases_that_cannot_be_planned_are_refused(phases: list[PhaseConfig], amount: float | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Planner(SIZES, SPEED).plan(phases, amount=amount, rows=128)


def test_fewer_labels_get_more_passes_within_bounds_and_dropout_if_they_are_many() -> None:
    assert [finetune_passes(examples) for examples in (1, 100, 2000, 4000, 10**6)] == [60, 60, 20, 10, 10]
    few = Sizes(train_examples=100, labels=2, train_tokens=5_000, dev_tokens=5_000, test_tokens=0, external_tokens=500_000)
    (often,) = Planner(few, SPEED).plan([finetune_phase()], amount=300, rows=128)
    joint, seldom = Planner(SIZES, SPEED).plan([joint_phase(), finetune_phase()], amount=60, rows=128)
    assert (often.dropout, joint.dropout, seldom.dropout) == (DROPOUT, 0.0, 0.0)
    ninety, _ = Planner(few, SPEED).plan([joint_phase(), finetune_phase()], amount=300, rows=128)
    assert few.passes_of(ninety)["task"] > 90
    assert ninety.dropout == 0.0, "also with few labels: it gained nothing (docs/log.md)"


@pytest.mark.parametrize("examples", [2, 6, 10])
def test_very_few_labels_get_the_least_number_of_steps(examples: int) -> None:
    few = Sizes(examples, labels=2, train_tokens=10 * examples, dev_tokens=20, test_tokens=0, external_tokens=0)
    for amount in (None, 600.0):
        (planned,) = Planner(few, SPEED).plan([finetune_phase()], amount=amount, rows=128)
        assert planned.steps == MIN_STEPS


def test_max_passes_limits_the_steps_with_and_without_a_budget() -> None:
    bounded = [phase.model_copy(update={"max_passes": 2.0}) for phase in (joint_phase(), finetune_phase())]
    for amount in (None, 10_000.0):
        joint, finetune = Planner(SIZES, SPEED).plan(bounded, amount=amount, rows=128)
        assert (joint.steps, finetune.steps) == (round(2 * 200_000 / (0.2 * 4096)), 2 * 4000 // 32)
    assert Planner(SIZES, SPEED).plan(bounded, amount=60.0, rows=128)[0].steps < joint.steps
    once = bounded[0].model_copy(update={"task": 0, "external": 1, "max_passes": 1.0})
    assert Planner(SIZES, SPEED).plan([once], amount=None, rows=128)[0].steps == round(500_000 / 4096)
    for phases, expected in (([joint_phase()], PASSES_OVER_SELECTION), ([once, finetune_phase()], 1.0)):
        assert passes_over_selection(phases) == expected
        planned = plan_selection(RandomConfig(), amount=100.0, tokens_per_unit=10_000.0, passes=expected)
        assert planned.max_tokens == int(1_000_000 / expected)


def test_a_phase_on_soft_labels_of_passages_is_limited_by_its_share_and_not_by_passes_over_few_labels() -> None:
    few = Sizes(train_examples=100, labels=2, train_tokens=5_000, dev_tokens=1, test_tokens=0, external_tokens=500_000)
    terms = (Classify(), Distil(on="external"))
    soft = finetune_phase().model_copy(update={"terms": terms, "external": 4, "batch_size": 4096, "batch_unit": "tokens"})
    _, planned = Planner(few, SPEED).plan([joint_phase(), soft], amount=600, rows=128)
    assert Planner(few, SPEED).amount_of(planned) == pytest.approx(0.3 * 600, rel=0.02)
    assert planned.dropout == 0.0
    with pytest.raises(UsageError, match="'finetune' has no steps and there is no budget"):
        Planner(few, SPEED).plan([soft], amount=None, rows=128)


@pytest.mark.parametrize(("examples", "share"), [(4_000, 0.3), (8_000, 0.4), (100_000, 0.6)])
def test_many_labels_get_a_larger_share_of_the_budget(examples: int, share: float) -> None:
    many = replace(SIZES, train_examples=examples, train_tokens=50 * examples, dev_tokens=1)
    budget = 2 * 400_000 / SPEED.finetune / 0.4  # two passes over 8,000 texts are two fifths of it
    _, finetune = Planner(many, SPEED).plan([joint_phase(), finetune_phase()], amount=budget, rows=128)
    assert Planner(many, SPEED).amount_of(finetune) == pytest.approx(share * budget, rel=0.02)


@pytest.mark.parametrize("retriever", [Bm25Config(), RandomConfig(), UnionConfig(retrievers=(Bm25Config(), RandomConfig()))])
def test_every_retriever_is_limited_to_the_text_of_one_and_a_half_passes(retriever: RetrieverConfig) -> None:
    planned = plan_selection(retriever, amount=270, tokens_per_unit=10_000)
    assert (planned.max_tokens, planned.max_documents) == (1_800_000, None)
    assert plan_selection(retriever, amount=1, tokens_per_unit=10_000).max_tokens == MIN_TOKENS
    for explicit in ({"max_documents": 5}, {"max_tokens": 7_000}):
        bounded = retriever.model_copy(update=explicit)
        assert plan_selection(bounded, amount=270, tokens_per_unit=10_000) == bounded


def test_without_a_budget_only_a_selection_of_the_whole_corpus_is_limited() -> None:
    both = UnionConfig(retrievers=(Bm25Config(), RandomConfig()))
    small = UnionConfig(retrievers=(Bm25Config(), RandomConfig(max_documents=9)))
    planned = [plan_selection(retriever, amount=None, tokens_per_unit=10_000) for retriever in (Bm25Config(), RandomConfig(), both, small)]
    assert [retriever.max_documents for retriever in planned] == [None, UNPLANNED_DOCUMENTS, UNPLANNED_DOCUMENTS, None]


def test_rows_hold_nearly_every_training_text_whole() -> None:
    assert row_length(np.array([10] * 99 + [500]), longest=512) == 64
    assert row_length(np.full(10, 100), longest=512) == 128
    assert row_length(np.full(10, 1000), longest=512) == 256
    assert row_length(np.full(10, 1000), longest=64) == 64


@given(st.floats(1_000, 100_000), st.sampled_from([10, 1_000, 50_000, 10_000_000]))
@pytest.mark.parametrize("phases", [[joint_phase(), finetune_phase()], [finetune_phase()], [joint_phase()]])
def test_the_minimum_amount_can_be_planned_at_any_cost_of_a_dev_evaluation(phases: list[PhaseConfig], rate: float, dev_tokens: int) -> None:
    sizes, speed = replace(SIZES, dev_tokens=dev_tokens), Speed(joint=rate, finetune=1.2 * rate)
    least = Planner(sizes, speed).minimum_amount(phases)
    planned = Planner(sizes, speed).plan(phases, amount=least, rows=128)
    assert all((phase.steps or 0) >= MIN_STEPS for phase in planned)
    with pytest.raises(UsageError):
        Planner(sizes, speed).plan(phases, amount=0.98 * least, rows=128)


intervals = st.none() | st.integers(1, 30)


@given(
    every=st.tuples(intervals, intervals),
    phases=st.sampled_from([[joint_phase(), finetune_phase()], [finetune_phase()], [joint_phase()], [finetune_phase(), finetune_phase()]]),
    steps=st.none() | st.integers(1, 50),
    examples=st.integers(2, 100_000),
    dev_tokens=st.integers(10, 10_000_000),
    rate=st.floats(1e-9, 1e6),
)
def test_a_plan_succeeds_with_its_minimum_amount_at_any_interval_of_evaluations(
    every: tuple[int | None, int | None], phases: list[PhaseConfig], steps: int | None, examples: int, dev_tokens: int, rate: float
) -> None:
    changed = [
        phase.model_copy(update={"name": f"phase-{number}", "evaluate_every": interval})
        for number, (phase, interval) in enumerate(zip(phases, every, strict=False))
    ]
    fixed = [changed[0].model_copy(update={"steps": steps}), *changed[1:]]
    sizes = replace(SIZES, train_examples=examples, train_tokens=50 * examples, dev_tokens=dev_tokens)
    speed = Speed(joint=rate, finetune=1.2 * rate)
    least = Planner(sizes, speed).minimum_amount(fixed)
    planned = Planner(sizes, speed).plan(fixed, amount=least, rows=128)
    assert all(phase.steps >= MIN_STEPS for phase, before in zip(planned, fixed, strict=True) if phase.steps and before.steps is None)


def test_a_budget_of_operations_gives_the_steps_of_the_time_that_they_take() -> None:
    seconds, flops_per_second = 300.0, 2e11
    per_operation = Speed(SPEED.joint / flops_per_second, SPEED.finetune / flops_per_second)
    by_time = Planner(SIZES, SPEED).plan([joint_phase(), finetune_phase()], amount=seconds, rows=128)
    by_operations = Planner(SIZES, per_operation).plan(
        [joint_phase(), finetune_phase()], amount=seconds * flops_per_second * (1 + 1e-9), rows=128
    )
    assert by_operations == by_time


def test_a_phase_that_took_twice_its_time_halves_the_planned_speed() -> None:
    assert drift(10.0, 20.0) == 0.5
    assert drift(10.0, 10_000.0) == 1 / MAX_DRIFT
    assert drift(0.0, 3.0) == 1.0


@pytest.mark.parametrize("slowdown", [0.6, 0.8, 1.0, 1.2, 1.4])
def test_the_second_phase_compensates_the_time_of_the_first(slowdown: float) -> None:
    seconds, phases = 600.0, [joint_phase(), finetune_phase()]
    joint, _ = Planner(SIZES, SPEED).plan(phases, amount=seconds, rows=128)
    took = slowdown * Planner(SIZES, SPEED).amount_of(joint)
    real = Speed(SPEED.joint / slowdown, SPEED.finetune / slowdown)
    factor = drift(Planner(SIZES, SPEED).amount_of(joint), took)
    assumed = Speed(SPEED.joint * factor, SPEED.finetune * factor)
    (finetune,) = Planner(SIZES, assumed).plan(phases[1:], amount=seconds - took, rows=128)
    ended = took + Planner(SIZES, real).amount_of(finetune)
    assert ended <= 1.01 * seconds
    if slowdown >= 1.2:  # labels passed over often enough may leave time unused, but not here
        assert ended >= 0.9 * seconds


@pytest.mark.parametrize("recipe", ["tfidf", "static"])
def test_a_linear_model_has_no_plan(recipe: str) -> None:
    config = RECIPES[recipe](train="", corpus=["raw"])
    with pytest.raises(UsageError, match=f"model '{recipe}' is linear"):
        forecast_runs([config], emit=silent)


def test_a_step_beyond_the_memory_of_the_machine_is_refused_before_it_runs() -> None:
    config = tlm(train="", corpus=[""], budget="20m")
    large = config.model_copy(update={"phases": (config.phases[0].model_copy(update={"batch_size": 10**12}), *config.phases[1:])})
    [refused] = forecast_runs([large], emit=silent)
    assert refused.cost is None
    assert re.fullmatch(
        r"a step of phase 'joint' needs at least [\d,.]+ GB of memory and [\d.]+ GB are available; pass .*", refused.refused
    )


def test_a_step_that_takes_longer_than_allowed_is_estimated_and_a_fixed_speed_kept() -> None:
    tiny = EncoderConfig(layers=1, hidden=32, heads=2, intermediate=32, max_positions=64)
    narrow = {"encoder": tiny, "tokenizer": TokenizerConfig(vocab_size=200), "threads": 1}
    config = tlm(train="", corpus=[""], budget="20m").model_copy(update=narrow)
    measure = partial(measure_machine, limit=Budget(flops=1e12), precision="fp32")
    assert not measure(config).joint.rough
    assert not measure(config, longest_step=1e9).joint.rough
    rough = measure(config, longest_step=0.0)
    assert rough.joint.rough
    assert rough.finetune.rough
    fixed = measure(config.model_copy(update={"tokens_per_second": 10.0}), longest_step=0.0)
    assert (fixed.joint.rough, fixed.joint.tokens_per_second, fixed.joint.starved) == (True, 10.0, False)


FORECAST = CostForecast((), None, 1, 0, (), 60.0, 1e12, memory=3_000_000_000, disk=2_000_000_000, gpu_memory=5_000_000_000)


@pytest.mark.parametrize(
    ("available", "line"),
    [
        ({"memory": 2_900_000_000}, "needs about 3.0 GB of memory and 2.9 GB are available; pass a smaller"),
        ({"gpu_memory": 4_900_000_000}, "needs about 5.0 GB of memory on the GPU and 4.9 GB are available; pass a smaller"),
        ({"disk": 12_000_000}, "runs/x: this run needs about 2.0 GB of disk and 12 MB are free; free space, or pass"),
        ({"disk": 1_900_000_000}, "runs/x: this run needs about 2.0 GB of disk and 1.9 GB are free; free space, or pass"),
        ({"memory": None, "gpu_memory": None}, None),
        ({}, None),
    ],
)
def test_a_run_that_needs_more_than_the_machine_has_is_refused_with_both_numbers(available: dict[str, Any], line: str | None) -> None:
    just_enough = {"memory": 3_000_000_000, "gpu_memory": 5_000_000_000, "disk": 2_000_000_000}
    with nullcontext() if line is None else pytest.raises(EnvironmentFault, match=line):
        check_resources(FORECAST, **just_enough | available, folder="runs/x")


def test_the_memory_of_a_gpu_is_counted_apart_from_that_of_the_machine() -> None:
    measured = Measurement(1_000.0, 2, 1.0, 1e7, 8_000_000_000)
    texts, config = TextSizes(Sizes(100, 2, 5000, 5000, 5000, 0), 64, 0), tlm(train="", corpus=["corpus.txt"], budget="1e13flops")
    machines = (Machine(measured, measured, 1000, gpu) for gpu in (False, True))
    on_cpu, on_gpu = (forecast_cost(config, texts, machine, resident=10**9) for machine in machines)
    assert on_cpu.gpu_memory is None
    assert on_cpu.memory > 9e9 > 8e9 < on_gpu.gpu_memory < 9e9
    assert 1e9 < on_gpu.memory < 2e9
    assert "of memory, 8.3 GB of the GPU's, " in on_gpu.describe()


def forecast(budget: str, measured: Measurement, corpus_bytes: int = 0, preset: str = "tiny", every: int | None = None) -> CostForecast:
    texts = TextSizes(Sizes(100, 2, 5000, 5000, 5000, 0), 64, corpus_bytes)
    config = tlm(train="", corpus=["corpus.txt"])
    config = config.model_copy(update={"encoder": PRESETS[preset], "threads": measured.threads, "budget": budget})
    config = config.model_copy(update={"phases": tuple(phase.model_copy(update={"evaluate_every": every}) for phase in config.phases)})
    return forecast_cost(config, texts, Machine(measured, measured, 1000))


def test_a_short_time_is_accepted_on_a_busy_machine_and_too_few_operations_never() -> None:
    busy = Measurement(100.0, 2, 0.2, 1e7, None)
    for budget in ("20s", "1e13flops"):
        assert all(phase.steps for phase in forecast(budget, busy).phases)
    with pytest.raises(UsageError, match="at least 20 are needed"):
        forecast("1e10flops", busy)


@pytest.mark.parametrize("cpu_share", [1.0, 0.2])
def test_a_time_that_leaves_none_to_train_is_refused_with_one_that_does(cpu_share: float) -> None:
    measured = Measurement(1_000.0, 2, cpu_share, 1e7, None)
    message = r"leaves no time to train: reading and counting 500 MB of raw text .* about \d+ s; pass --budget (\S+) or more$"
    with pytest.raises(UsageError, match=message) as refused:
        forecast("20s", measured, corpus_bytes=500_000_000)
    (named,) = re.findall(r"--budget (\S+) or more", str(refused.value))
    assert all(phase.steps for phase in forecast(named, measured, corpus_bytes=500_000_000).phases)


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("too_small", ["1e10flops", "3.3e11flops", "1s", "30s"])
def test_a_budget_that_is_too_small_is_refused_with_one_that_is_not(too_small: str, every: int | None) -> None:
    quiet = Measurement(1_000.0, 2, 1.0, 1e7, None)
    remedy = "more" if too_small == "1s" else "more, or a smaller --preset"  # no preset makes reading shorter
    with pytest.raises(UsageError, match=rf"pass --budget \S+ or {remedy}$"):
        forecast(too_small, quiet, corpus_bytes=10_000_000, preset="mini", every=every)
    with pytest.raises(UsageError, match=r"pass --budget \S+ or more$") as refused:
        forecast(too_small, quiet, corpus_bytes=10_000_000, every=every)
    (named,) = re.findall(r"--budget (\S+) or more", str(refused.value))
    assert all(phase.steps for phase in forecast(named, quiet, corpus_bytes=10_000_000, every=every).phases)


@pytest.mark.parametrize(("texts", "dev_share"), [(500, 0.25), (2000, 0.25), (8000, 0.1)])
def test_the_budget_that_an_error_names_suffices_after_it_is_rounded(texts: int, dev_share: float) -> None:
    quiet = Measurement(1_000.0, 2, 1.0, 1e7, None)
    config = tlm(train="", corpus=["corpus.txt"])
    joint, finetune = config.phases
    config = config.model_copy(update={"phases": (joint.model_copy(update={"batch_size": 16_384}), finetune)})
    for length in (100, 256):
        sizes = TextSizes(Sizes(texts, 10, texts * length, int(dev_share * texts * length), 0, 0), 256, 0)

        def plan(budget: str, sizes: TextSizes = sizes) -> CostForecast:
            return forecast_cost(config.model_copy(update={"threads": 2, "budget": budget}), sizes, Machine(quiet, quiet, 1000))

        with pytest.raises(UsageError, match="or more") as refused:
            plan("1e9flops")
        (named,) = re.findall(r"--budget (\S+) or more", str(refused.value))
        assert all(phase.steps for phase in plan(named).phases)


@pytest.mark.parametrize(
    ("preset", "flops_per_token", "dev_tokens", "chosen"),
    [("bert-large", 2.5e9, 5000, (LONG_BATCH, PRESETS["bert-large"].hidden)), (None, 1e7, 6_000_000, (4096, PRESETS["mini"].hidden))],
)
def test_the_budget_that_an_error_names_suffices_for_what_the_recipe_chooses_with_it(
    preset: str | None, flops_per_token: float, dev_tokens: int, chosen: tuple[int, int]
) -> None:
    texts = TextSizes(Sizes(100, 2, 17_000, dev_tokens, 0, 0), 256, 0)

    def plan(budget: str) -> tuple[RunConfig, CostForecast]:
        config = tlm(train="", corpus=["corpus.txt"], budget=budget)
        config = config if preset is None else with_preset(config, preset)
        as_large = 3.5 if config.encoder.hidden == PRESETS["mini"].hidden else 1.0
        measured = Measurement(1_000.0, 1, 1.0, as_large * flops_per_token, None)
        return config, forecast_cost(config, texts, Machine(measured, measured, 1000))

    with pytest.raises(UsageError, match="or more") as refused:
        plan("1e13flops")
    (named,) = re.findall(r"--budget (\S+) or more", str(refused.value))
    config, cost = plan(named)
    assert (config.phases[0].batch_size, config.encoder.hidden) == chosen
    assert all(phase.steps for phase in cost.phases)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("1e6flops", r"at least \d+ are needed; pass --budget \S+flops or more"),
        ("2s", r"leaves no time to train: .* raw text .* about 3 s; pass --budget \d+s or more$"),
    ],
)
def test_a_budget_that_is_too_small_on_any_machine_is_refused_before_anything_is_fitted(budget: str, message: str, tmp_path: Path) -> None:
    config = tiny_config(write_task(tmp_path / "data", documents=60), budget=budget)
    config["phases"] = [{**phase, "steps": None} for phase in config["phases"]]
    with pytest.raises(UsageError, match=message):
        run(load_config(config), out=tmp_path / "run", store=tmp_path / "store")
    assert {event["stage"] for event in read_jsonl(tmp_path / "run/events.jsonl")} == {"task", "machine"}


def test_fixed_steps_that_take_more_than_the_budget_are_a_warning() -> None:
    quiet, texts = Measurement(1_000.0, 2, 1.0, 1e7, None), TextSizes(Sizes(100, 2, 5000, 5000, 5000, 0), 64, 0)
    open_steps = tlm(train="", corpus=["corpus.txt"])
    fixed = open_steps.model_copy(update={"phases": tuple(each.model_copy(update={"steps": 5000}) for each in open_steps.phases)})
    for config, expected in ((open_steps, False), (fixed, True)):
        for text in ("10m", "1e13flops"):
            named = config.model_copy(update={"budget": text})
            message = beyond_budget(named, forecast_cost(named, texts, Machine(quiet, quiet, 1000)))
            assert (message is not None) == expected
            assert message is None or (f"more than its budget of {text}" in message and "joint, finetune" in message)


def test_a_time_budget_leaves_out_what_reading_and_counting_the_corpus_takes() -> None:
    quiet = Measurement(10_000.0, 1, 1.0, 1e7, None)
    none, some, many = (sum(forecast("600s", quiet, size).phase_seconds) for size in (0, 500_000_000, 5_000_000_000))
    assert none == pytest.approx(600, rel=0.05)
    assert some == pytest.approx(600 - 25 - 27 - 21 - 50, rel=0.05)  # reading, factorizing, counting, training
    assert many > 100, "of a larger corpus a sample is counted and trained on"


def test_a_run_that_will_be_late_says_whether_training_or_the_stages_before_it_are_slow() -> None:
    assert late_message(121.4, 80.0) == "the stages before training took longer than planned: the run will end about 121 s late"
    assert late_message(19.0, -3.0) == "training is slower than measured before: the run will end about 19 s late"

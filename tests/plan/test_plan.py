"""Tests of plans: statements of a valid plan, and every contradiction as one error that names its place."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.examples import CONFIG, CONTENT, PREDICTION, changed, one_stage, read
from steelyard.errors import InvalidModelError, InvalidPlanError
from steelyard.model.read import chain_from_config, config_hash, load_model
from steelyard.plan.plan import Fallback
from steelyard.plan.stages import fold_runs, stages_of
from steelyard.search import enumerate_strategies

LAYERS_OF = ["stages", 0, "runs", 0, "layers"]


def test_the_example_has_a_strategy_for_every_layer():
    assert [str(strategy) for strategy in read(CONTENT).strategies] == [
        "dp2",
        "dp2",
        "fsdp2",
        "tp2+sp remat=full",
        "tp2+sp remat=full",
        "fsdp2 zero2",
    ]


def test_a_plan_counts_its_devices_and_samples():
    plan = read(CONTENT)
    assert (plan.num_devices, plan.microbatch_samples) == (4, 4)


def test_stages_know_their_layers():
    assert [(stage.first_layer, stage.last_layer) for stage in read(CONTENT).parts] == [(0, 2), (3, 5)]


def test_predictions_of_a_stage_add_up():
    prediction = read(CONTENT).prediction
    assert prediction is not None
    assert [stage.total_bytes for stage in prediction.stages] == [30, 30]
    assert [stage.total_time_s for stage in prediction.stages] == [0.25, 0.625]


def test_the_chain_of_a_plan_is_that_of_its_config():
    assert read(CONTENT).chain() == chain_from_config(CONFIG, name="tiny")


def test_a_plan_without_a_config_means_the_packaged_model():
    runs = [{"layers": [0, 9], "parallel": "dp2"}]
    stages = [{"ranks": [0, 1], "runs": runs}]
    plan = read({**CONTENT, "model": {"name": "llama-demo"}, "stages": stages, "prediction": None})
    assert plan.chain() == load_model("llama-demo")


def test_a_minimal_plan_takes_the_defaults():
    plan = read(
        {
            "model": {"name": "tiny", "config": CONFIG},
            "cluster": "1x1xcpu",
            "seq_len": 8,
            "global_batch": 1,
            "num_microbatches": 1,
            "precision": "fp32",
            "stages": [{"ranks": [0, 0], "runs": [{"layers": [0, 5], "parallel": "single"}]}],
        }
    )
    assert (plan.version, plan.schedule, plan.prediction) == (1, "1f1b", None)
    assert {str(strategy) for strategy in plan.strategies} == {"single"}


def test_the_right_hash_is_accepted():
    assert read(changed((["model", "config_hash"], config_hash(CONFIG)))).model.config_hash == config_hash(CONFIG)


def test_gpipe_may_have_fewer_microbatches_than_stages():
    content = changed((["num_microbatches"], 1), (["schedule"], "gpipe"))
    assert read(content).num_microbatches == 1


@given(st.integers(0, 20), st.lists(st.sampled_from(enumerate_strategies(4)), min_size=1, max_size=12))
def test_folded_runs_give_the_strategies_back(first_layer, strategies):
    runs = fold_runs(first_layer, tuple(strategies))
    assert [run.strategy for run in runs for _ in range(run.layers[0], run.layers[1] + 1)] == strategies


@given(st.integers(0, 20), st.lists(st.sampled_from(enumerate_strategies(2)[:3]), min_size=1, max_size=12))
def test_folded_runs_follow_each_other_and_neighbours_differ(first_layer, strategies):
    runs = fold_runs(first_layer, tuple(strategies))
    assert runs[0].layers[0] == first_layer
    for run, following in pairwise(runs):
        assert following.layers[0] == run.layers[1] + 1
        assert following.strategy != run.strategy


@pytest.mark.parametrize(
    ("layers", "place"),
    [
        ([[0, 2], [4, 5]], r"stages\[1\]\.runs\[0\]\.layers: found \[4, 5\]\n.*from layer 3 on"),
        ([[0, 3], [3, 5]], r"stages\[1\]\.runs\[0\]\.layers: found \[3, 5\]\n.*from layer 4 on"),
        ([[0, 2], [3, 6]], r"stages\[1\]\.runs\[0\]\.layers: found \[3, 6\]\n.*within 0 to 5 \(tiny has 6 layers"),
        ([[0, 2], [3, 4]], r"stages: found layers 0 to 4\n.*layers 0 to 5"),
        ([[3, 5], [0, 2]], r"stages\[0\]\.runs\[0\]\.layers: found \[3, 5\]\n.*from layer 0 on"),
        ([[1, 2], [3, 5]], r"stages\[0\]\.runs\[0\]\.layers: found \[1, 2\]\n.*from layer 0 on"),
        ([[0, 5], [6, 6]], r"stages\[1\]\.runs\[0\]\.layers: found \[6, 6\]\n.*within 0 to 5"),
        ([[0, 5], [6, 5]], r"stages\[1\]\.runs\[0\]\.layers: found \[6, 5\]\n"),
        ([[-1, 2], [3, 5]], r"stages\[0\]\.runs\[0\]\.layers: found \[-1, 2\]\n"),
    ],
    ids=["gap", "overlap", "too many", "too few", "order", "no embedding", "too many stages", "empty run", "negative"],
)
def test_stages_that_do_not_cover_the_layers_are_named(layers, place):
    stages = [
        {"ranks": [2 * index, 2 * index + 1], "runs": [{"layers": span, "parallel": "dp2"}]}
        for index, span in enumerate(layers)
    ]
    with pytest.raises(InvalidPlanError, match=f"^{place}"):
        read({**CONTENT, "stages": stages})


def test_runs_of_one_stage_that_leave_a_gap_are_named():
    with pytest.raises(InvalidPlanError, match=r"^stages\[0\]\.runs\[1\]\.layers: found \[2, 2\]\n.*from layer 1"):
        read(changed((LAYERS_OF, [0, 0])))


@pytest.mark.parametrize(
    ("ranks", "place"),
    [
        ([[1, 2], [3, 4]], r"stages\[0\]\.ranks: found \[1, 2\]\n.*\[0, 1\]: consecutive ranks"),
        ([[0, 1], [3, 4]], r"stages\[1\]\.ranks: found \[3, 4\]\n.*\[2, 3\]: consecutive ranks"),
        ([[0, 1], [1, 2]], r"stages\[1\]\.ranks: found \[1, 2\]\n.*\[2, 3\]"),
        ([[2, 3], [0, 1]], r"stages\[0\]\.ranks: found \[2, 3\]\n.*\[0, 1\]"),
        ([[0, -1], [0, -1]], r"stages\[0\]\.ranks: found \[0, -1\]\n.*\[0, 0\]"),
        ([[1, 0], [2, 3]], r"stages\[0\]\.ranks: found \[1, 0\]\n.*\[0, 0\]"),
    ],
    ids=["first", "gap", "overlap", "order", "none", "backwards"],
)
def test_wrong_ranks_are_named(ranks, place):
    with pytest.raises(InvalidPlanError, match=f"^{place}"):
        read(changed((["stages", 0, "ranks"], ranks[0]), (["stages", 1, "ranks"], ranks[1])))


@pytest.mark.parametrize(
    ("parallel", "config", "reason"),
    [
        ("tp16", {}, "found tp16 for the embedding layers|tp 16 does not divide the 8 attention heads"),
        ("tp3", {}, "tp 3 does not divide the 8 attention heads"),
        ("tp4", {"intermediate_size": 98}, "tp 4 does not divide the 98 inputs of mlp.down_proj entries"),
        ("tp4", {"vocab_size": 98}, "tp 4 does not divide the 98 vocabulary entries"),
    ],
    ids=["heads", "heads by three", "width", "vocabulary"],
)
def test_a_tensor_parallel_degree_that_does_not_divide_is_named(parallel, config, reason):
    content = one_stage(parallel, devices=int(parallel[2:]), model={"name": "tiny", "config": {**CONFIG, **config}})
    with pytest.raises(InvalidPlanError, match=rf"^stages\[0\]\.runs\[0\]\.parallel: .*\n.*{reason}"):
        read(content)


@pytest.mark.parametrize("parallel", ["dp8", "fsdp8", "dp3"])
def test_a_microbatch_that_the_data_degree_does_not_divide_is_named(parallel):
    reason = f"data degree {parallel[-1]} .* does not divide the 4 samples of a microbatch"
    with pytest.raises(InvalidPlanError, match=rf"^stages\[0\]\.runs\[0\]\.parallel: found {parallel} .*\n.*{reason}"):
        read(one_stage(parallel, devices=int(parallel[-1])))


def test_sp_that_does_not_divide_the_sequence_is_named():
    with pytest.raises(InvalidPlanError, match=r"^stages\[1\]\.runs\[0\].*\n.*does not divide the sequence length 63"):
        read(changed((["seq_len"], 63)))


@pytest.mark.slow
def test_levels_across_the_mesh_are_named():
    config = {**CONFIG, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}
    content = one_stage("dp2-tp3", devices=6, model={"name": "tiny", "config": config})
    with pytest.raises(
        InvalidPlanError, match=r"^stages\[0\]\.runs\[0\]\.parallel: .*\n.*not consecutive axes of the stage mesh"
    ):
        read(content)


@pytest.mark.parametrize("parallel", ["single", "dp4", "dp2-tp2"])
def test_degrees_that_do_not_span_the_stage_are_named(parallel):
    place = rf"stages\[0\]\.runs\[1\]\.parallel: found {parallel}, which spans . devices\n.*the 2 devices of the stage"
    with pytest.raises(InvalidPlanError, match=f"^{place}"):
        read(changed((["stages", 0, "runs", 1, "parallel"], parallel)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_microbatches": 3}, "num_microbatches: found 3\n.*a divisor of the global batch of 16 samples"),
        ({"num_microbatches": 32}, "num_microbatches: found 32\n.*a divisor of the global batch of 16 samples"),
        ({"num_microbatches": 1}, "num_microbatches: found 1 for 2 stages\n.*at least as many microbatches as stages"),
    ],
    ids=["no divisor", "more than samples", "fewer than stages under 1f1b"],
)
def test_wrong_microbatches_are_named(changes, message):
    with pytest.raises(InvalidPlanError, match=f"^{message}"):
        read({**CONTENT, **changes})


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"parallel": "dp2", "sp": True}, r"sp: found dp2\+sp\n.*\+sp only together with tp"),
        ({"parallel": "dp2", "zero": 2}, r"zero: found dp2 zero2\n.*zero2 only together with fsdp"),
        ({"parallel": "fsdp2-dp2"}, r"parallel: found fsdp2-dp2\n.*dp outside fsdp in a layer with both"),
        ({"parallel": "tp2-tp2"}, r"parallel: found tp2-tp2\n.*each parallelism dimension on one level only"),
        ({"parallel": "dp1"}, r"parallel: found dp1\n.*a degree of 2 or more"),
        ({"parallel": "pp2"}, r"parallel: found 'pp2'\n.*dimensions dp, fsdp, tp, cp, or single"),
        ({"parallel": ""}, r"parallel: found ''\n.*dimensions dp, fsdp, tp, cp, or single"),
        ({"parallel": "dp2", "remat": "some"}, r"remat: found 'some'\n.*'none', 'selective' or 'full'"),
        ({"parallel": "dp2", "remat": None}, r"remat: found None\n.*'none', 'selective' or 'full'"),
        ({"parallel": "fsdp2", "zero": 0}, r"zero: found 0\n.*one of 3, 2, 1"),
        ({"parallel": "fsdp2", "zero": "2"}, r"zero: found '2'\n.*one of 3, 2, 1"),
        ({"parallel": "tp2", "sp": 1}, r"sp: found 1\n.*one of False, True"),
        ({"parallel": 2}, r"parallel: found 2\n.*a valid string"),
    ],
)
def test_a_contradiction_in_a_run_is_named_with_its_place(run, message):
    with pytest.raises(InvalidPlanError, match=rf"^stages\[0\]\.runs\[1\]\.{message}"):
        read(changed((["stages", 0, "runs", 1], {"layers": [2, 2], **run})))


def test_a_config_that_was_changed_after_planning_is_named():
    content = changed((["model", "config_hash"], config_hash(CONFIG)), (["model", "config", "hidden_size"], 128))
    with pytest.raises(
        InvalidPlanError, match=r"(?s)^model\.config_hash: found .*hash of the config in this file.*plan again"
    ):
        read(content)


def test_the_hash_of_another_packaged_model_is_named():
    model = {"name": "llama-demo", "config_hash": load_model("llama3-8b").config_hash}
    with pytest.raises(InvalidPlanError, match=r"^model\.config_hash: .*\n.*hash of the config of the packaged model"):
        read({**CONTENT, "model": model})


@pytest.mark.parametrize("num_stages", [0, 1, 3])
def test_a_prediction_for_another_number_of_stages_is_named(num_stages):
    content = changed((["prediction", "stages"], [PREDICTION["stages"][0]] * num_stages))
    with pytest.raises(
        InvalidPlanError, match=rf"^prediction\.stages: found {num_stages} stages\n.*each of the 2 stages"
    ):
        read(content)


def test_an_unknown_model_names_the_nearest_one():
    with pytest.raises(InvalidModelError, match=r"(?s)^model: found 'llama-dem'.*did you mean .*llama-demo"):
        read({**CONTENT, "model": {"name": "llama-dem"}})


def test_a_config_of_an_unknown_family_is_named():
    with pytest.raises(InvalidModelError, match=r"^model_type: found 'lama'"):
        read(changed((["model", "config", "model_type"], "lama")))


def interleaved(*stages, **changes):
    """Content of a plan of four devices whose stages are (first rank, last rank, layers of each chunk …)."""
    written = [
        {
            "ranks": [first, last],
            "chunks": [[{"layers": list(each), "parallel": f"dp{last - first + 1}"}] for each in chunks],
        }
        for first, last, *chunks in stages
    ]
    return {**CONTENT, "schedule": "interleaved-1f1b", "stages": written, "prediction": None, **changes}


TWO_CHUNKS = ((0, 1, (0, 1), (3, 3)), (2, 3, (2, 2), (4, 5)))


def test_an_interleaved_plan_counts_stages_chunks_and_devices():
    plan = read(interleaved(*TWO_CHUNKS))
    assert (plan.num_stages, plan.num_chunks, plan.num_devices) == (2, 2, 4)


def test_a_plan_that_is_not_interleaved_has_one_chunk_a_stage():
    plan = read(CONTENT)
    assert (plan.num_stages, plan.num_chunks) == (2, 1)


def test_the_parts_of_an_interleaved_plan_are_the_chunks_of_all_stages_in_turn():
    plan = read(interleaved(*TWO_CHUNKS))
    assert [(part.ranks, part.first_layer) for part in plan.parts] == [
        ((0, 1), 0),
        ((2, 3), 2),
        ((0, 1), 3),
        ((2, 3), 4),
    ]
    assert (plan.parts[0], plan.parts[2]) == plan.stages[0].parts


def test_an_interleaved_plan_survives_a_file():
    plan = read(interleaved(*TWO_CHUNKS))
    assert read(plan.model_dump(mode="json")) == plan
    assert stages_of(plan.parts) == plan.stages


RUN = {"layers": [0, 1], "parallel": "dp2"}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((TWO_CHUNKS[0], (2, 3, (2, 2), (4, 4), (5, 5))), r"stages\[1\]\.chunks: found 3 chunks\n.*2, as many as"),
        (((0, 1, (0, 2)), (2, 3, (3, 5))), r"stages\[0\]\.chunks: found \[.*\n.*at least 2 in the list"),
        (((0, 3, (0, 2), (3, 5)),), r"stages: found 1 stage under interleaved-1f1b\n.*two or more stages"),
        (((0, 1, (0, 1), (2, 2)), (2, 3, (3, 3), (4, 5))), r"stages\[1\]\.chunks\[0\]\[0\]\.layers: found \[3, 3\]"),
        (
            (TWO_CHUNKS[0], (2, 3, (2, 2), (3, 5))),
            r"stages\[1\]\.chunks\[1\]\[0\]\.layers: found \[3, 5\]\n.*from layer 4 on",
        ),
        ((TWO_CHUNKS[0], (2, 3, (2, 2), (4, 4))), r"stages: found layers 0 to 4\n.*layers 0 to 5"),
        (
            ((0, 0, (0, 1), (3, 3)), (1, 3, (2, 2), (4, 5))),
            r"stages\[1\]\.ranks: found \[1, 3\]\n.*\[1, 1\]: consecutive ranks",
        ),
    ],
)
def test_chunks_that_do_not_make_a_pipeline_are_named(stages, message):
    with pytest.raises(InvalidPlanError, match=f"^{message}"):
        read(interleaved(*stages, global_batch=24, num_microbatches=2))


@pytest.mark.parametrize(
    ("schedule", "keys", "message"),
    [
        ("interleaved-1f1b", {"runs": [RUN]}, r"stages\[0\]\.chunks: found runs\n.*the runs of each chunk.*\n.*once"),
        ("interleaved-1f1b", {"runs": [RUN], "chunks": [[RUN], [RUN]]}, r"stages\[0\]\.chunks: found runs and chunks"),
        ("interleaved-1f1b", {}, r"stages\[0\]\.chunks: found nothing"),
        ("interleaved-1f1b", {"chunks": []}, r"stages\[0\]\.chunks: found \[\]\n.*at least 2 in the list"),
        ("interleaved-1f1b", {"chunks": [[RUN], []]}, r"stages\[0\]\.chunks\[1\]: found \[\]\n.*at least 1"),
        ("1f1b", {"chunks": [[RUN], [RUN]]}, r"stages\[0\]\.runs: found chunks\n.*only runs.*under 1f1b"),
        ("1f1b", {"runs": [RUN], "chunks": [[RUN], [RUN]]}, r"stages\[0\]\.runs: found runs and chunks"),
        ("1f1b", {}, r"stages\[0\]\.runs: found nothing"),
    ],
)
def test_a_stage_has_its_layers_once_as_the_schedule_takes_them(schedule, keys, message):
    content = changed((["stages", 0], {"ranks": [0, 1], **keys}), (["schedule"], schedule))
    with pytest.raises(InvalidPlanError, match=f"^{message}"):
        read(content)


def test_microbatches_that_do_not_make_equal_rounds_are_named():
    message = r"^num_microbatches: found 5 for 2 stages under interleaved-1f1b\n.*multiple of its 2 rounds"
    with pytest.raises(InvalidPlanError, match=message):
        read(interleaved(*TWO_CHUNKS, num_microbatches=5, global_batch=10))


def test_an_interleaved_prediction_has_one_entry_for_each_stage_not_each_chunk():
    content = interleaved(*TWO_CHUNKS, prediction=PREDICTION)
    assert len(read(content).prediction.stages) == 2
    content["prediction"] = {**PREDICTION, "stages": PREDICTION["stages"] * 2}
    with pytest.raises(InvalidPlanError, match=r"prediction\.stages: found 4 stages"):
        read(content)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_a_remat_choice_of_a_block_survives_a_file(remat):
    plan = read(changed((["stages", 1, "runs", 0, "remat"], remat)))
    assert plan.strategies[3].remat == remat
    assert read(plan.model_dump(mode="json")) == plan


@pytest.mark.parametrize(("stage", "run", "layer_type"), [(0, 0, "embedding"), (1, 1, "head")])
def test_selective_remat_of_another_layer_than_a_block_is_refused(stage, run, layer_type):
    with pytest.raises(InvalidPlanError, match=rf"remat=selective for the {layer_type} layers\n.*only for blocks"):
        read(changed((["stages", stage, "runs", run, "remat"], "selective")))


def test_a_whole_training_is_its_steps_its_devices_and_their_price():
    plan = read(CONTENT)
    tokens_per_step = plan.global_batch * plan.seq_len
    training = plan.with_training(1000 * tokens_per_step - 1, price=2.0).training
    assert training is not None
    assert plan.prediction is not None
    hours = 1000 * plan.prediction.step_time_s / 3600
    assert training.steps == 1000
    assert training.days == pytest.approx(hours / 24)
    assert training.device_hours == pytest.approx(4 * hours)
    assert training.cost == pytest.approx(8 * hours)


def test_without_a_price_a_training_has_no_cost():
    training = read(CONTENT).with_training(10**9).training
    assert training is not None
    assert training.cost is None
    assert "$" not in str(training)


def test_a_fallback_does_not_claim_the_days_of_its_plan():
    plan = read(CONTENT)
    own = {name: getattr(plan, name) for name in ("num_microbatches", "schedule", "stages")}
    with_fallback = plan.with_training(10**9).model_copy(update={"fallbacks": (Fallback(**own),)})
    assert with_fallback.fallback_plan(0).training is None


def test_a_rule_that_every_stage_repeats_counts_as_one_group_of_layers() -> None:
    def groups(*stages: str) -> int:
        """Groups of six layers; a letter is a layer, and equal letters have equal strategies."""
        found, first = [], 0
        for place, letters in enumerate(stages):
            runs = []
            for letter in letters:
                remat = {"f": "full", "s": "selective", "n": "none"}[letter]
                runs.append({"layers": [first, first], "parallel": "dp2", "remat": remat})
                first += 1
            found.append({"ranks": [2 * place, 2 * place + 1], "runs": runs})
        devices = 2 * len(stages)
        return read({**CONTENT, "cluster": f"1x{devices}xcpu", "stages": found, "prediction": None}).num_groups

    assert groups("nnnnnn") == groups("nnn", "nnn") == groups("nn", "nn", "nn") == 1
    assert groups("ffn", "ffn") == groups("fn", "fn", "fn") == 2
    assert groups("ffn", "nnn") == 2
    assert groups("nff", "nnn") == groups("nfn", "nnn") == groups("fn", "sn", "nn") - 1 == 3

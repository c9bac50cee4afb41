"""Benchmark of levers on 13 open rows of its table; `lever_data/runs.csv` gives source and licence of each."""

import csv
import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from lever_runs.forecast import COLUMNS, Forecast, Outcome, Unpredicted, forecast, write_predictions
from lever_runs.jobs import Case, case_of
from lever_runs.models import config_of, targets_of
from lever_runs.rows import Row, read_rows
from lever_runs.score import Pair, Summary, Verdicts, figures, pairs_of
from lever_runs.score import targets_of as all_targets
from published_runs.rows import InvalidRunsError

from steelyard.units import GIB

SAMPLE = Path(__file__).parent / "lever_data"
ROWS = {row.id: row for row in read_rows(SAMPLE)}
COMPILED = "lv-0282"

pytestmark = pytest.mark.slow


@cache
def outcome(name: str) -> Outcome:
    return forecast(ROWS[name])


def predicted(name: str) -> Forecast:
    found = outcome(name)
    assert isinstance(found, Forecast), found
    return found


def reason(row: Row) -> str:
    found = forecast(row)
    assert isinstance(found, Unpredicted), found
    return found.reason


def run_command() -> None:
    """Run the script by its path, because a folder of tests has its name."""
    script = Path(__file__).parents[2] / "benchmarks" / "levers.py"
    runpy.run_path(str(script), run_name="__main__")


def with_cells(name: str, **cells: str) -> Row:
    return Row(cells={**ROWS[name].cells, **cells})


@pytest.mark.parametrize(
    ("name", "kind"), [("lv-0468", "allocated"), ("lv-0102", "reserved"), ("lv-0906", "allocated")]
)
def test_memory_of_adapters_is_near_what_was_measured(name: str, kind: str) -> None:
    ours, theirs = figures(predicted(name))[kind]
    assert ours == pytest.approx(theirs, rel=0.05)


def test_a_row_is_held_against_the_kind_of_memory_that_it_has() -> None:
    assert set(figures(predicted("lv-0437"))) == {"allocated"}
    assert set(figures(predicted("lv-0102"))) == {"reserved", "time"}
    assert set(figures(predicted("lv-0610"))) == {"kind not stated", "time"}


def test_a_quantized_base_takes_less_and_never_half_of_what_the_row_says_of_the_other() -> None:
    whole, quantized = (predicted(name).allocated_bytes for name in ("lv-0410", "lv-0412"))
    assert 0.45 < quantized / whole < 0.7


def test_what_ran_out_of_memory_is_refused_and_what_ran_is_not() -> None:
    verdicts = Verdicts.of([outcome("lv-0477"), outcome("lv-0468"), outcome("lv-0102")])
    assert verdicts == Verdicts(num_ran=2, refused=0, num_oom=1, accepted=0)


def test_pairs_are_of_rows_that_name_them() -> None:
    (pair,) = pairs_of([outcome("lv-0468"), outcome("lv-0471")])
    assert (pair.lever, pair.kind) == ("batch", "allocated")
    assert pair.theirs == pytest.approx(11.269 / 9.025)
    assert pair.is_right
    assert abs(pair.error) < 0.1


def test_a_pair_that_differs_in_nothing_has_no_sign() -> None:
    equal = Pair(name="a", lever="rank", kind="time", ours=1.001, theirs=0.999)
    assert not equal.has_sign
    assert equal.is_right
    assert not replace(equal, ours=1.2).is_right


def test_tokens_and_seconds_of_padded_batches_follow_the_mean_length() -> None:
    found = predicted("lv-0102")
    assert found.step_time_s is not None
    assert found.tokens_per_s == pytest.approx(4198051 / 5000 / found.step_time_s)


def test_rows_without_a_length_have_no_time() -> None:
    assert predicted("lv-0468").step_time_s is None


def case(name: str, **cells: str) -> Case:
    found = case_of(with_cells(name, **cells))
    assert isinstance(found, Case), found
    return found


def test_prompts_make_texts_longer_and_prefixes_do_not() -> None:
    settings, lora = '{"num_virtual_tokens": 200}', case("lv-0102")
    prompt, prefix = (
        case("lv-0102", method=each, method_config=settings) for each in ("prompt_tuning", "prefix_tuning")
    )
    assert (prompt.seq_len, prefix.seq_len) == (lora.seq_len + 200, lora.seq_len)
    assert prompt.prompt_bytes > 0 == lora.prompt_bytes


@pytest.mark.parametrize("cells", [{"method": "vblora"}, {"optimizer": "lora-fa"}])
def test_adapters_whose_matrices_or_steps_are_not_priced_have_memory_and_no_time(cells: dict[str, str]) -> None:
    assert case("lv-0102").mean_len is not None
    assert case("lv-0102", **cells).mean_len is None


def test_what_a_script_states_fills_a_row_that_leaves_it_out() -> None:
    left_out = {"source": "msswift_tuners", "batch_per_gpu": "", "seq_len": "", "framework": "ms-swift"}
    found = case("lv-0102", **left_out)
    assert (found.settings.micro_batch, found.seq_len) == (1, 2048)
    assert case("lv-0102", **left_out | {"seq_len": "512"}).seq_len == 512


def test_the_loss_of_torchtitan_is_compiled_since_may_2025() -> None:
    cells = {"framework": "torchtitan", "method": "full", "compile": "1", "target_modules": "", "rank": ""}
    cells["torch_version"] = ""
    before, since = (
        case("lv-0102", **cells, date=date).framework.engine.execution.kernels for date in ("2024-12-26", "2025-06-14")
    )
    assert before is not None
    assert since is not None
    assert not before.loss
    assert since.loss
    assert since.loss_bytes < before.loss_bytes


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"offload": "optimizer+gradients"}, "offload of optimizer+gradients is no lever"),
        ({"method": "boft"}, "boft is no lever"),
        ({"batch_per_gpu": ""}, "batch_per_gpu not stated"),
        ({"model": "someone/else"}, "config not known: someone/else"),
        ({"framework": "another"}, "framework without an engine: another"),
        ({"scope": "op"}, "a measurement of scope op"),
        ({"optimizer": "muon"}, "optimizer muon is no lever"),
        ({"gpu": "K80"}, "device not known: K80 40"),
        ({"quant_type": "awq", "quant_bits": "4", "method": "qlora"}, "base awq is no lever"),
    ],
)
def test_what_is_skipped_says_why(cells: dict[str, str], words: str) -> None:
    assert reason(with_cells("lv-0468", **cells)) == words


def test_devices_that_work_one_after_another_have_a_part_of_the_layers_each() -> None:
    whole = case_of(ROWS["lv-0468"])
    parts = case_of(with_cells("lv-0468", num_gpus="2", notes="split over the GPUs by layers (device_map)"))
    assert isinstance(whole, Case)
    assert isinstance(parts, Case)
    assert (whole.parts, parts.parts, parts.cluster.num_devices) == (1, 2, 1)
    assert 2 * parts.config["num_hidden_layers"] == whole.config["num_hidden_layers"]
    assert parts.global_batch == whole.global_batch


def test_eager_attention_is_said_in_the_config() -> None:
    case = case_of(with_cells("lv-0468", attention="eager"))
    assert isinstance(case, Case)
    assert case.config["attn_implementation"] == "eager"


def test_every_reason_of_the_sample_is_of_a_lever() -> None:
    assert reason(ROWS["lv-0489"]) == "adapter is no lever"


@pytest.mark.nightly
def test_a_row_with_compiled_blocks_is_predicted() -> None:
    """Inductor compiles its blocks for 10 s; tests/levers/test_compiled_blocks.py counts smaller ones."""
    assert isinstance(forecast(ROWS[COMPILED]), Forecast)


def test_sealed_rows_are_predicted_and_not_scored() -> None:
    sealed = forecast(with_cells("lv-0468", split="sealed", peak_allocated_gib="", step_time_s="", status=""))
    assert isinstance(sealed, Forecast)
    assert sealed.allocated_bytes == predicted("lv-0468").allocated_bytes
    assert Verdicts.of([sealed]).num_ran == 0
    assert figures(sealed) == {}


def test_targets_of_nothing_are_not_met() -> None:
    assert {each.is_met for each in all_targets([])} == {None}


def test_a_summary_keeps_the_sign_of_the_worst() -> None:
    found = Summary.of([-0.2, 0.1, 0.0])
    assert found is not None
    assert (found.worst, found.bias, found.median_abs) == (-0.2, 0.0, 0.1)
    assert Summary.of([]) is None


def test_names_of_layers_are_transformers() -> None:
    phi = config_of("microsoft/phi-2")
    llama = config_of("meta-llama/Llama-2-7b-hf")
    assert phi is not None
    assert llama is not None
    assert targets_of("projection mlp", phi) == ("dense", "fc1", "fc2")
    assert targets_of("c_attn c_proj w1 w2", llama) == (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("down_proj", "up_proj", "gate_proj"),
    )
    assert targets_of("all linear layers", llama) == ("all-linear",)
    assert targets_of("somewhere", llama) is None


def test_settings_are_the_rows() -> None:
    case = case_of(ROWS["lv-0477"])
    assert isinstance(case, Case)
    assert case.levers == (("train", "lora:r=8,targets=q_proj+v_proj,dropout=0.05"),)
    assert (case.settings.micro_batch, case.global_batch, case.seq_len) == (4, 128, 1304)


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        (
            {"method": "oft", "rank": "32", "method_config": '{"bias": "none", "eps": 6e-05, "init_weights": true}'},
            "oft:targets=q_proj+v_proj,r=32,oft_block_size=0,init_weights=true",
        ),
        ({"method": "ln_tuning", "rank": "", "target_modules": "norm"}, "ln_tuning:targets=norm"),
        (
            {"method": "bone", "rank": "64", "method_config": '{"init_weights": "bat"}'},
            "miss:targets=q_proj+v_proj,r=64,init_weights=bat",
        ),
        ({"method": "dora"}, "lora:r=8,targets=q_proj+v_proj,dropout=0.05,use_dora=true"),
        (
            {"method": "lora+embeddings"},
            "lora:r=8,targets=q_proj+v_proj,dropout=0.05,modules_to_save=embed_tokens+lm_head",
        ),
    ],
)
def test_settings_of_adapters_are_those_of_peft(cells: dict[str, str], text: str) -> None:
    case = case_of(with_cells("lv-0477", **{"target_modules": "q_proj v_proj"} | cells))
    assert isinstance(case, Case)
    assert case.levers == (("train", text),)


def test_predictions_have_a_line_for_every_row(tmp_path: Path) -> None:
    write_predictions([outcome("lv-0102"), outcome("lv-0489")], tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        first, second = csv.DictReader(file)
    assert tuple(first) == COLUMNS
    assert float(first["peak_reserved_gib"]) == pytest.approx(predicted("lv-0102").reserved_bytes / GIB, abs=1e-3)
    assert (first["fits"], first["skipped"]) == ("1", "")
    assert second == dict.fromkeys(COLUMNS, "") | {"id": "lv-0489", "skipped": "adapter is no lever"}


def test_columns_that_are_not_known_are_ignored(tmp_path: Path) -> None:
    with (SAMPLE / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    with (tmp_path / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["more", *rows[0]])
        writer.writeheader()
        writer.writerows({"more": "of it", **row} for row in rows)
    assert [row.id for row in read_rows(tmp_path)] == list(ROWS)


def test_errors_name_the_file_and_the_column(tmp_path: Path) -> None:
    with pytest.raises(InvalidRunsError, match=r"runs\.csv"):
        read_rows(tmp_path)
    (tmp_path / "runs.csv").write_text("id,split\n1,open\n")
    with pytest.raises(InvalidRunsError, match="no column source"):
        read_rows(tmp_path)
    with pytest.raises(InvalidRunsError, match="a whole number"):
        with_cells("lv-0468", seq_len="1.5").count("seq_len")


def test_the_command_prints_tables_and_writes_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (SAMPLE / "runs.csv").read_text().splitlines(keepends=True)
    (tmp_path / "runs.csv").write_text("".join(line for line in lines if not line.startswith(f"{COMPILED},")))
    monkeypatch.setattr("sys.argv", ["levers.py", str(tmp_path), "--predictions", str(tmp_path / "out.csv")])
    run_command()
    printed = capsys.readouterr().out
    assert "| litgpt_tables lora | allocated | 2 |" in printed
    assert "| batch | allocated | 1 | 1 of 1 |" in printed
    assert "12 rows, 11 predicted, 1 skipped:" in printed
    assert len((tmp_path / "out.csv").read_text().splitlines()) == len(ROWS)  # and a line of names


def test_the_command_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["levers.py", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"runs\.csv"):
        run_command()

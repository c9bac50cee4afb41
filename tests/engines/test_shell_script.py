"""Tests that commands of shell scripts are found with the values that a shell gives their variables."""

import subprocess
from contextlib import suppress

import pytest

from steelyard.engines.megatron_arguments import CONDITIONAL, arguments
from steelyard.engines.shell_script import ShellScript

SCRIPTS = {
    "defaults, numbers and quotes": """
        TP=${TP:-"4"}
        : "${PP:=3}"
        SIZE=$((TP * (PP + 2) / 3)) ; LONG="${SIZE}k"
        run --micro-batch-size 1 --size $SIZE --pp "$PP" --long '$LONG' --name "${LONG^^} of it's"
    """,
    "branches": """
        MODE=full; LAYERS=8; EXTRA=
        if [ "$MODE" = none ]; then EXTRA="--none"
        elif [[ $MODE == fu* && $LAYERS -gt 4 ]] && [ -z "$UNSET" ]; then
            EXTRA="$EXTRA --full"; (( LAYERS % 3 == 2 )) && EXTRA+=" --two"
        else EXTRA=--other; fi
        if ! [ $LAYERS -le 4 ] || [ -n "" ]; then EXTRA+=" --many"; fi
        case "${MODE}" in none|some) EXTRA=--case ;; f*l) EXTRA="$EXTRA --glob" ;; *) EXTRA=--rest ;; esac
        while [ $# -gt 0 ]; do EXTRA="--given $1"; shift; done
        run --micro-batch-size $LAYERS $EXTRA
    """,
    "arrays, here-documents and a launcher": """
        declare -a ARGS=(--a 1 # the first
            --b "$(( 2*3 ))"
            #--c 4
        )
        UNUSED=(--never 1)
        [ "${ARGS[*]}" = x ] || ARGS+=(--d 5)
        ARGS=("${ARGS[@]}" --e 6)
        CMD="launch --nodes 2 train.py --micro-batch-size 1 ${ARGS[@]}"
        run <<EOF
#SBATCH --nodes=3
sh -c "$CMD" 2>&1 | tee log
EOF
    """,
    "the last value and no command after an operator": """
        GBS=8
        GBS=16
        false_name=1 run --micro-batch-size 1 --global-batch-size $GBS > /dev/null 2>&1 || run --never 1
        true && X=--x || X=--y
        run --micro-batch-size 1 --last ${GBS} $X
    """,
}
EXPECTED = {
    "defaults, numbers and quotes": {"size": "6", "pp": "3", "long": "$LONG", "name": "6K"},
    "branches": {"micro_batch_size": "8", "full": True, "two": True, "many": True, "glob": True},
    "arrays, here-documents and a launcher": {"a": "1", "b": "6", "d": "5", "e": "6", "micro_batch_size": "1"},
    "the last value and no command after an operator": {"global_batch_size": "16", "last": "16", "x": True},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_options_have_the_values_that_a_shell_gives_them(name: str) -> None:
    found = dict(arguments(SCRIPTS[name]))
    assert {"micro_batch_size": "1"} | EXPECTED[name] == found


@pytest.mark.parametrize("name", SCRIPTS)
def test_commands_are_those_that_bash_runs(name: str) -> None:
    shown = 'run() { printf "%s " "$@"; [ -t 0 ] || cat; echo; }; launch() { run "$@"; }; tee() { cat; }\n'
    script = shown + "\n".join(line.strip(" ") for line in SCRIPTS[name].splitlines()).replace("> /dev/null 2>&1", "")
    ran = subprocess.run(["bash", "-c", script], input="", capture_output=True, text=True, check=True).stdout
    assert dict(arguments(f"run {' '.join(ran.replace('#', '').split())}")) == dict(arguments(SCRIPTS[name]))


def test_what_an_open_condition_decides_is_read_and_named() -> None:
    text = """
        TP=2
        if [ -f here ]; then TP=4; MORE="--bf16"; else MORE="--fp16"; fi
        if [ "$GIVEN" = 1 ]; then MORE="$MORE --recompute-activations"; fi
        run --micro-batch-size 1 --tensor-model-parallel-size $TP $MORE
    """
    found = dict(arguments(text))
    assert found.pop(CONDITIONAL) == ("bf16", "fp16", "recompute_activations")
    assert found == {
        **{"micro_batch_size": "1", "tensor_model_parallel_size": "$TP"},
        **{"bf16": True, "fp16": True, "recompute_activations": True},
    }


def test_lines_for_slurm_set_its_variables() -> None:
    text = "#SBATCH --nodes 2\n#SBATCH --gpus-per-node=4 # of a node\nrun $((SLURM_NNODES * SLURM_GPUS_PER_NODE))\n"
    assert ShellScript.read(text).commands == ["run 8"]


@pytest.mark.parametrize(
    "text",
    [
        "run '",
        'run "${x:-',
        "run $(( ",
        "A=(",
        "fi; done; esac; then; else",
        "case x in",
        "cat <<EOF\nx",
        "${",
        "((",
        "[[",
    ],
)
def test_a_script_that_ends_too_early_is_read_to_its_end(text: str) -> None:
    ShellScript.read(text)


@pytest.mark.parametrize(
    "text",
    ["A=12345678\n" + "A=$A$A\n" * 40, "${a:-" * 20_000, "run $((" + "9*" * 60 + "9))" + "$(" * 20_000, '"`' * 20_000],
)
def test_a_hostile_script_ends_soon(text: str) -> None:
    with suppress(ValueError):  # a value of more than a million characters, or nested too deeply
        arguments(text + "\nrun --micro-batch-size 1")

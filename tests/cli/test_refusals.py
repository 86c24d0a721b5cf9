"""What is refused: in one style, with the option as it was typed, with exit code 2, before torch
is imported, and leaving nothing behind.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.cli.refusals import as_typed
from lockstep.config.settings import Settings
from lockstep.errors import TaskError, UsageError
from tests.cli.command import in_a_fresh_interpreter

REFUSED = """
missing-argument: train -> TASK is missing & `lockstep train -h`
task-file-missing: train missing.py
unknown-task: train digit
not-python: train syntax.py -> syntax.py, line 1
task-function-missing: train nothing.py
override-unknown: train mine.py --set rate=1 -> it takes lr
override-wrong-value: train mine.py --set lr=fast
wrong-command-line: train digits more
wrong-argument: train digits --epochs two -> --epochs two: & a whole number
epochs-and-steps: train digits --epochs 2 --steps 3 -> --epochs 2 and --steps 3
wrong-argument: train digits --timeout=soon -> --timeout soon: & a number
wrong-value: train digits --max-restarts -1 -> --max-restarts -1: & at least 0
witness-without-exact: train digits --witness 1% -> --witness 1% & --exact
wrong-value: train digits --exact --witness 2 -> --witness 2 & at most 1
nothing-to-exclude: train digits --on-corruption exclude -> --on-corruption exclude & --ray
unknown-choice: train digits --device tpu
unknown-choice: train digits --precision bf8 -> --precision bf8 & fp32, bf16
unknown-choice: train digits --reduce gossip
exact-with-reduce: train digits --exact --reduce central -> --reduce central with --exact
exact-with-compress: train digits --exact --compress bf16 -> --compress bf16 with --exact
unknown-choice: train digits --update servers -> --update servers & server
staleness-without-server: train digits --staleness 3 -> --staleness 3 & Choose server as update
wrong-value: train digits --workers 0 -> --workers 0:
unknown-name: train digits --mesh=rows=2 -> --mesh rows=2: & data
mesh-of-other-size: train digits --workers 3 --mesh data=2
range-of-workers: train digits --workers 1:2 --mesh data=2
mesh-with-exact: train digits --exact --mesh shard=2
no-pipeline: train digits --schedule gpipe
wrong-value: train digits --balance fast
balance-of-other-count: train digits --workers 3 --balance 1,2
range-of-workers: train digits --workers 1:2 --balance 2,1
resume-without-run: train digits --resume
resume-without-run: train digits --run new --resume --fresh -> --fresh
not-a-run-directory: train digits --run finished
run-directory-not-writable: train digits --run finished/result.json
run-directory-not-writable: train digits --run finished/result.json/run
unknown-option: train digits --settings missing.json -> --settings
unknown-checkpoint-url: train digits --checkpoints nothing://there
incomplete-settings: train digits --nodes 2
unknown-option: train digits --worker 2 -> (did you mean --workers
not-a-run-directory: evaluate digits --run missing
not-a-run-directory: evaluate digits --run finished
no-checkpoint: evaluate digits --run begun
no-best-checkpoint: evaluate digits --run trained --best -> trained
wrong-value: evaluate digits --run trained --workers 0
unknown-choice: evaluate digits --run trained --device tpu
unknown-option: evaluate digits --devise cpu -> (did you mean --device
not-a-run-directory: predict digits --run missing
wrong-ending: predict digits --run finished --out rows.txt
not-a-run-directory: report missing
not-a-run-directory: report .
not-a-run-directory: report finished/result.json
cannot-write: report begun --out /nowhere/page.html
cannot-write: report begun --out .
cannot-write: report begun --json /nowhere/page.json
not-a-run-directory: checkpoints ls missing
no-checkpoint: checkpoints ls .
not-a-run-directory: checkpoints export missing --out model.safetensors -> missing
not-a-run-directory: checkpoints diff missing missing
task-file-missing: verify missing.py
override-unknown: verify digits --set rate=1
wrong-value: verify digits --steps 0
exact-with-reduce: verify digits --exact --reduce central
wrong-value: verify digits --workers 2
wrong-value: verify digits --workers 1,two
wrong-value: verify digits --workers 1,0
not-a-run-directory: verify missing missing
task-or-two-runs: verify a b c -> 3 arguments
options-exclude-each-other: verify a b --exact --steps 3 -> --exact, --steps and RUN_A RUN_B
task-or-two-runs: verify . -> the folder .
nothing-to-run: run -> nothing to run. Give a script (lockstep run train.py)
script-not-found: run missing.py
module-not-found: run -m missing.module
wrong-value: run --workers 0 mine.py -> --workers 0: give a number of at least 1
wrong-value: run --workers 2:1 mine.py -> --workers 2:1: & as in 1:4
no-restarts-here: run --nodes 2 --node-rank 0 --rdzv-endpoint here:29400 --max-restarts 1 mine.py -> --max-restarts 1: & fixed set
no-restarts-here: train digits --nodes 2 --node-rank 0 --rdzv-endpoint here:29400 --on-stall restart -> --on-stall restart
workers-not-divisible: run --nodes 2 --node-rank 0 --rdzv-endpoint here:29400 -n 1:2 mine.py -> 1:2
unknown-option: run --wrokers 2 mine.py -> --wrokers is not an option of `lockstep run`
option-missing: run --debug -m this -> --debug needs --log DIR too
cannot-make-folder: run --log /dev/null/x -m this -> --log /dev/null/x cannot be made (Not a directory)
option-missing: plan -> a TASK or --gradient-mb
task-file-missing: plan missing.py
wrong-value: plan digits --workers 0
wrong-value: plan digits --workers 4..1
too-many-ranks-to-plan: plan digits --workers 4097
unknown-choice: plan digits --network slow
wrong-value: plan digits --nodes-of 0
unknown-choice: plan digits --compress zip
cannot-write: plan digits --json /nowhere/at/all
option-of-another-plan: plan digits --step-ms 5 -> --step-ms
option-of-another-plan: plan digits --buckets 2 -> --buckets
option-missing: plan --gradient-mb 9 -> --step-ms
option-of-another-plan: plan digits --step-ms 30 --network 10Gbit --gradient-mb 94 -> --gradient-mb
option-of-another-plan: plan --gradient-mb 94 --step-ms 30 --network 10Gbit --weak
task-file-missing: slurm missing.py --nodes 2 -> missing.py
not-python: slurm syntax.py --nodes 2 -> syntax.py, line 1
unknown-task: slurm digit --nodes 2 -> digit
wrong-value: doctor --workers 0 -> --workers 0: give a whole number of at least 1
incomplete-settings: doctor --nodes 2 -> --nodes 2 & --node-rank and --rdzv-endpoint
options-exclude-each-other: doctor --ray --nodes 2 -> --ray and --nodes 2 exclude each other
cannot-write: doctor --json /nowhere/x -> --json /nowhere/x cannot be written
task-file-missing: bench train missing.py
wrong-value: bench train digits --steps 0
unknown-choice: bench train digits --device gpu
cannot-write: bench train digits --json missing/x
task-file-missing: bench scaling missing.py
wrong-value: bench scaling digits --workers 0
wrong-value: bench scaling digits --steps 0
wrong-ending: bench scaling digits --plot times.png
cannot-write: bench scaling digits --out missing/x.svg
wrong-value: bench collectives --workers 0
wrong-value: bench collectives --runs 0
wrong-value: bench collectives --sizes few
cannot-write: bench collectives --json missing/x
cannot-read: lint missing.py
cannot-write: lint mine.py --json missing/x
unknown-code: explain no-sbach
wrong-command-line: show nothing -> no such command 'nothing' & lockstep show -h
wrong-command-line: show all_reduce -> Did you mean 'all-reduce'
wrong-value: show ring --workers 0
option-without-effect: show ring --ranks-per-node 2 -> --ranks-per-node
wrong-ending: show ring --out picture.txt
unknown-name: show mesh --mesh rows=2
nodes-not-even: show mesh --mesh data=4 --nodes 3
unknown-choice: show pipeline --schedule none
schedule-does-not-fit: show pipeline --stages 4 --micro-batches 3
wrong-value: show pipeline --stages 0
wrong-value: show pipeline --backward 0
wrong-argument: show data --split halves -> --split halves: & interleaved, blocks
option-without-effect: show broadcast --op sum
option-without-effect: show all-gather --root 1
"""
"""The code and the command. The sentence names the last word, or else what follows the arrow."""


def test_nothing_heavy_is_imported_to_refuse_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "syntax.py").write_text("def task(:\n")
    (tmp_path / "nothing.py").write_text("lr = 0.1\n")
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\ndef task(lr: float = 0.1):\n    return torch\n"
    )
    (tmp_path / "finished").mkdir()
    for name in ("lock", "result.json"):
        (tmp_path / "finished" / name).write_text("{}")
    (tmp_path / "trained" / "checkpoints" / "step-0000002").mkdir(parents=True)
    (tmp_path / "begun").mkdir()
    for name in ("trained", "begun"):
        Settings(task="digits", workers=1).write(tmp_path / name)
    codes: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for row in REFUSED.strip().splitlines():
        code, _, rest = row.partition(": ")
        line, _, words = rest.partition(" -> ")
        codes[line] = code
        names[line] = words.split(" & ") if words else [line.split()[-1]]
    missing = "train digits --resume --run missing"
    answers = in_a_fresh_interpreter([missing, *codes], tmp_path)
    for line, answer in answers.items():
        assert answer.code == (77 if line == missing else 2), (line, answer.text)
        assert not {"torch", "sklearn"} & {*answer.heavy}, line
        assert not answer.written, line
        assert answer.text.startswith("error: "), answer.text
        assert answer.text.count("\n") == 1, answer.text
    for line, code in codes.items():
        assert answers[line].text.endswith(f"[{code}]\n"), (line, answers[line].text)
        unnamed = [name for name in names[line] if name not in answers[line].text]
        assert unnamed == [], (line, answers[line].text)


def test_a_number_is_shown_as_it_was_typed_and_what_a_task_has_set_is_no_option() -> None:
    error = UsageError("wrong-value", name="bucket_mb", value=0.0, expected="a number")
    assert as_typed(error, ["--bucket-mb=0", "--exact"]).startswith("--bucket-mb 0: ")
    named = {"nodes_name": "--nodes", "nodes": 2, "each_name": "LOCAL_WORLD_SIZE", "each": 1}
    stands = UsageError("workers-differ-from-variables", workers=4, share=2, **named)
    assert as_typed(stands, ["--nodes", "2", "--workers", "4"]) == str(stands)
    task = TaskError("wrong-value", name="epochs", value=0, expected="a whole number")
    assert as_typed(task, ["--epochs", "3"]) == str(task)
    other = UsageError("wrong-value", name="global_batch", value=0, expected="a number")
    assert as_typed(other, ["--epochs", "3"]) == str(other)

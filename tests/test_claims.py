"""tests/claims.py: the claims of the papers, the figures that are kept, the runs that make more."""

import dataclasses
import json
import shutil

import pytest

import claims
import common
import eval as evaluation
import train
from helpers import write_files

RUNS = {"a": ("zeroshot", "--method sparc"),
        "b": ("zeroshot", "--method sparc --objective clip", 0.001, 0.002, 0.004),
        "variant": ("a", "--method sparc --align dense")}
CLAIMS = [("A is above B", "Table 1", "2, 1", "a b", "zeroshot", "no note"),
          ("A's slots are above B's", "Table 2", "4, 3", "a b", "slots/all/zeroshot miou", "noise"),
          ("The variant is worse", "Table 3", "5, 1", "a variant", "zeroshot")]
OLDER = {"method": "sparc", "claim": "a b: zeroshot", "greater": [0.7, 0.01],
         "smaller": [0.5, None], "differences": [0.3, -0.1, 0.4], "from": "a README"}
SUMMARY = {"method": "sparc", "summary": "photos", "figures": {"x": [0.5, 0.01], "y": [3]}}
BAM = {"method": "bam", "claim": "x y: knn", "from": "µ"}


@pytest.fixture
def printed(monkeypatch, tmp_path, capsys):
    """A function: flags -> lines that claims.py sparc prints in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(claims.RUNS, "sparc", RUNS)
    monkeypatch.setitem(claims.CLAIMS, "sparc", CLAIMS)
    monkeypatch.setattr(claims, "RECORDS", tmp_path / "claims.json")
    claims.RECORDS.write_text(json.dumps([OLDER, SUMMARY, BAM]))

    def lines(*flags):
        claims.main(["sparc", *flags])
        return capsys.readouterr().out.splitlines()

    return lines


def flags(run, rate, seed):
    out = f"runs/claims/sparc/{run}-{rate}-{seed}"
    return f"{RUNS[run][1]} --lr {rate} --seed {seed} --out {out} --resume auto"


def write(root, run, rate, seed, figures, **settings):
    """Add a line of figures to a run; settings are what they depend on, if not the usual."""
    out, given = root / f"runs/claims/sparc/{run}-{rate}-{seed}", flags(run, rate, seed).split()
    args = train.parse_args(given[:-4])
    config = dataclasses.asdict(args) | {"argv": ["train.py", *given], "git": "c0ffee"}
    write_files(out, {"config.json": json.dumps(config), "eval.json": "{}"})
    usual = evaluation.settings_of(evaluation.own_options(args))
    del usual["on_training_images"]  # which older lines lack
    with open(out / "evals.jsonl", "a") as file:
        file.write(json.dumps({"settings": usual | settings} | figures) + "\n")


def test_first_the_learning_rates_then_the_seeds_then_the_table(printed, tmp_path):
    swept = [*(("a", rate) for rate in (0.0005, 0.001, 0.002)),
             *(("b", rate) for rate in (0.001, 0.002, 0.004))]
    assert printed("--again") == [f"python train.py {flags(*run, 0)}" for run in swept]
    table = printed()
    assert table[2:5] == [
        "| A is above B | Table 1 | 2, 1 | 0.700 ± 0.010, 0.500 | +0.300 -0.100 +0.400"
        " | holds in the mean * |",
        "| A's slots are above B's | Table 2 | 4, 3 |  |  | not run yet |",
        "| The variant is worse | Table 3 | 5, 1 |  |  | not run yet |"]
    assert "none yet" in table[-3] and table[-1] == "- photos: x 0.5 ± 0.01, y 3"

    best = {"a": 0.002, "b": 0.001}
    for run, rate in swept:  # on the test split the rates' order is another
        write(tmp_path, run, rate, 0, {"zeroshot": 1 - rate, "miou": 0.1})
    val = "python eval.py runs/claims/sparc/{}-{}-0 --split val --task zeroshot"
    assert printed("--again") == [val.format(*run) for run in swept]
    for run, rate in swept:
        for value in (0.5, rate == best[run]):  # the last is taken
            write(tmp_path, run, rate, 0, {"zeroshot": value}, split="val")
        for other in ({"limit": 3}, {"data": "photos"}, {"checkpoint": "stage-1.pt"},
                      {"probe": "sgd"}):
            write(tmp_path, run, rate, 0, {"zeroshot": 0.75}, split="val", **other)
    commands = printed("--again")
    bam, *figures, summary, older = json.loads(claims.RECORDS.read_text("utf-8"))
    assert (bam, len(figures), summary, older) == (BAM, 6, SUMMARY, OLDER)
    assert figures[2] == {"method": "sparc", "run": "a", "rate": 0.002, "seed": 0, "split": "val",
                          "metric": "zeroshot", "value": True, "commit": "c0ffee"}
    rates = best | {"variant": 0.002}
    assert len(commands) == 9
    for seed in (3, 4, 5):
        assert {f"python train.py {flags(run, rates[run], seed)}" for run in RUNS} < {*commands}
    assert "with seed 0: a 0.002, b 0.001, variant 0.002." in printed()[-3]

    for seed in (3, 4, 5):
        write(tmp_path, "a", 0.002, seed, {"zeroshot": 0.5 + seed / 10})
        write(tmp_path, "b", 0.001, seed, {"zeroshot": 0.4, "miou": seed / 10})
        write(tmp_path, "variant", 0.002, seed, {"zeroshot": 0.95})
    slots = "python eval.py runs/claims/sparc/a-0.002-{} --split test --task slots"
    assert printed("--again") == [slots.format(seed) for seed in (3, 4, 5)]
    for seed in (3, 4, 5):
        write(tmp_path, "a", 0.002, seed, {"slots/all/zeroshot": 0.2})
    assert printed("--again") == []
    shutil.rmtree(tmp_path / "runs")  # the figures are kept
    assert printed()[2:5] == [
        "| A is above B | Table 1 | 2, 1 | 0.900 ± 0.100, 0.400 ± 0.000 | +0.400 +0.500 +0.600"
        " | holds in every seed |",
        "| A's slots are above B's | Table 2 | 4, 3 | 0.200 ± 0.000, 0.400 ± 0.100"
        " | -0.100 -0.200 -0.300 | reversed: noise |",
        "| The variant is worse | Table 3 | 5, 1 | 0.900 ± 0.100, 0.950 ± 0.000"
        " | -0.150 -0.050 +0.050 | not shown |"]


@pytest.mark.parametrize("differences, expected", [
    ([0.1, 0.2, 0.3], "holds in every seed"), ([0.0, 0.1, 0.1], "holds in the mean"),
    ([0.1, -0.1, -0.1], "not shown"), ([0.0, 0.0, 0.0], "not shown"),
    ([-0.1, -0.2, -0.3], "reversed"), ([0.1, float("nan"), 0.2], "not shown")])
def test_verdicts(differences, expected):
    assert claims.verdict(differences) == expected


@pytest.mark.parametrize("old, new", [("--lr", "--beta2"), ("objects=4", "objects=3"),
                                      ('"argv"', '"arguments"')])
def test_a_run_of_other_flags_or_of_an_old_preset_is_refused(printed, tmp_path, old, new):
    write(tmp_path, "a", 0.001, 0, {"zeroshot": 0.5})
    config = tmp_path / "runs/claims/sparc/a-0.001-0/config.json"
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(common.UserError, match="a-0.001-0 was not trained with --method sparc "):
        printed("--again")


@pytest.mark.parametrize("method", claims.RUNS)
def test_the_data_of_claims_are_sound(method):
    settings, runs = {}, claims.RUNS[method]
    for run, (chosen_by, run_flags, *rates) in runs.items():
        assert len(rates) in (0, 3) and sorted(rates) == rates
        settings[run] = train.parse_args([*run_flags.split(), "--lr", "0.001"])
        root = runs.get(chosen_by, (chosen_by, ""))
        assert root[0] in ("zeroshot", "knn") and root[1] != run_flags
    used, named = {chosen_by for chosen_by, *_ in runs.values()}, []
    for claim in claims.CLAIMS[method]:
        assert len(claim) in (5, 6) and all(isinstance(x, str) and x for x in claim)
        used |= {*claim[3].split()}
        named.append(f"{claim[3]}: {claim[4]}")
        budgets = [(x.steps, x.batch, x.data) for x in map(settings.get, claim[3].split())]
        assert budgets[0] == budgets[1], "two runs that saw different data, or for longer"
    assert used >= runs.keys(), "a run that no claim uses"
    assert len({*named}) == len(named), "two claims with one record"
    kept = [record for record in claims.read_records().values() if record["method"] == method]
    assert {record.get("claim", named[0]) for record in kept} <= {*named}
    assert {record["run"] for record in kept if "run" in record} <= runs.keys()


@pytest.mark.parametrize("names", [["sparc"], ["sparo", "dino"], ["stair"], ["bam"]])
def test_every_metric_of_a_claim_exists(run_of, tmp_path, names):
    metrics = {x for claim in claims.CLAIMS[names[0]] for x in claim[4].split()}
    tasks, found = {metric.split("/")[0] for metric in metrics} & evaluation.TASKS.keys(), set()
    asked = [task for task in tasks if evaluation.TASKS[task].default != "text"]
    for name in names:
        run = shutil.copytree(run_of(name), tmp_path / name)
        mine = [task for task in asked if name == names[0] or task in ("knn", "linear")]
        found |= json.loads((run / "eval.json").read_text()).keys()
        if mine:
            evaluation.main([str(run), "--task", ",".join(mine)])
            found |= json.loads((run / "evals.jsonl").read_text().splitlines()[-1]).keys()
    assert metrics <= found

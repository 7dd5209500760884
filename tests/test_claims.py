"""tests/claims.py: the claims of the papers, the figures that are kept, the runs that make more."""

import functools
import json
import re
import shutil
from pathlib import Path

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
SEEDS = 3, 4, 5
CHOOSING = "zeroshot", "t2i/R@1", "miou_fg/colour", "knn", "linear", "classification"  # a rate
BAM = {"method": "bam", "claim": "x y: knn", "from": "µ"}


@pytest.fixture
def printed(monkeypatch, tmp_path, capsys):
    """A function: flags -> lines that claims.py sparc prints in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(claims.RUNS, "sparc", RUNS)
    monkeypatch.setitem(claims.CLAIMS, "sparc", CLAIMS)
    monkeypatch.setitem(claims.SEEDS, "sparc", SEEDS)
    monkeypatch.setattr(claims, "RECORDS", tmp_path / "claims.json")
    claims.RECORDS.write_text(json.dumps([OLDER, SUMMARY, BAM]))

    def lines(*flags):
        claims.main(["sparc", *flags])
        return capsys.readouterr().out.splitlines()

    return lines


def flags(run, rate, seed):
    out = f"runs/claims/sparc/{run}-{rate}-{seed}"
    given = claims.RUNS["sparc"][run][1].replace("{seed}", str(seed))
    return f"{given} --lr {rate} --seed {seed} --out {out} --resume auto"


def write(root, run, rate, seed, figures, **settings):
    """Add a line of figures to a run; settings are what they depend on, if not the usual."""
    out, given = root / f"runs/claims/sparc/{run}-{rate}-{seed}", flags(run, rate, seed).split()
    args = train.parse_args(given[:-4])
    config = vars(args) | {"argv": ["train.py", *given], "git": "c0ffee"}
    write_files(out, {"config.json": json.dumps(config), "eval.json": "{}"})
    usual = evaluation.settings_of(evaluation.options_of({}, args))
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
        " | not shown: no note * |",
        "| A's slots are above B's | Table 2 | 4, 3 |  |  | not run yet |",
        "| The variant is worse | Table 3 | 5, 1 |  |  | not run yet |"]
    assert "none yet" in table[-3] and table[-1] == "- photos: x 0.5 ± 0.01, y 3 (no flags)"

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
    for seed in SEEDS:
        assert {f"python train.py {flags(run, rates[run], seed)}" for run in RUNS} < {*commands}
    edge = "(at the edge of its sweep)"
    assert f"with seed 0: a 0.002 {edge}, b 0.001 {edge}, variant 0.002." in printed()[-3]

    for seed in SEEDS:
        write(tmp_path, "a", 0.002, seed, {"zeroshot": 0.5 + seed / 10})
        write(tmp_path, "b", 0.001, seed, {"zeroshot": 0.4, "miou": seed / 10})
        write(tmp_path, "variant", 0.002, seed, {"zeroshot": 0.95})
    slots = "python eval.py runs/claims/sparc/a-0.002-{} --split test --task slots"
    assert printed("--again") == [slots.format(seed) for seed in SEEDS]
    for seed in SEEDS:
        write(tmp_path, "a", 0.002, seed, {"slots/all/zeroshot": 0.2})
    assert printed("--again") == []
    shutil.rmtree(tmp_path / "runs")  # the figures are kept
    assert printed()[2:5] == [
        "| A is above B | Table 1 | 2, 1 | 0.900 ± 0.100, 0.400 ± 0.000 | +0.400 +0.500 +0.600"
        " | holds |",
        "| A's slots are above B's | Table 2 | 4, 3 | 0.200 ± 0.000, 0.400 ± 0.100"
        " | -0.100 -0.200 -0.300 | reversed: noise |",
        "| The variant is worse | Table 3 | 5, 1 | 0.900 ± 0.100, 0.950 ± 0.000"
        " | -0.150 -0.050 +0.050 | not shown |"]


@pytest.mark.parametrize("differences, expected", [
    ([0.1, 0.2, 0.3], "holds"), ([0.2, 0.2, 0.2], "holds"),
    ([0.01, 0.01, 0.4], "holds weakly"),                    # mean .14, standard error .13
    ([0.0, 0.2, 0.2, 0.2], "holds weakly"),                 # mean .15, standard error .05
    ([-0.1, 0.2, 0.2, 0.2], "not shown"),                   # mean .125, standard error .075
    ([0.1, -0.1, -0.1], "not shown"), ([0.0, 0.0, 0.0], "not shown"),
    ([-0.1, -0.2, -0.3], "reversed"), ([-0.01, -0.01, -0.4], "reversed"),
    ([0.1, float("nan"), 0.2], "not shown")])
def test_verdicts(differences, expected):
    assert claims.verdict(differences) == expected


def test_older_records_without_differences_have_their_signs_alone():
    older = {"greater": [0.7, None], "smaller": [0.5, 0.1], "differences": [], "from": "a README"}
    for kept, shown in (("holds in every seed", "holds weakly *"), ("reversed", "reversed: why *"),
                        ("not shown", "not shown: why *")):
        assert claims.cells(older | {"verdict": kept}, "why")[2] == shown


def test_the_rate_within_a_sweep_is_no_edge(printed, tmp_path):
    records = [dict(zip(claims.PLACE, ("a", rate, 0, "val", "zeroshot"))) | {"value": value}
               for rate, value in ((0.0005, 0.5), (0.001, 0.7), (0.002, 0.6))]
    claims.RECORDS.write_text(json.dumps([record | {"method": "sparc"} for record in records]))
    assert "with seed 0: a 0.001, variant 0.001." in printed()[-2]


FLAGGED = {  # flags of eval.py, what of the settings they change
    "--data shapes:noise=.12,background=.5": {"data": "shapes:noise=.12,background=.5",
                                              "limit": None, "learn_limit": None},
    "--templates {}": {"templates": ["{}"], "prompts": ["{}"]},
    "--checkpoint step-1.pt": {"checkpoint": "step-1.pt"},
    "--label-fraction .01 --probe lbfgs": {"label_fraction": ".01", "probe": "lbfgs"}}


@pytest.mark.parametrize("asked", FLAGGED)
def test_a_claim_names_flags_of_the_evaluation(printed, tmp_path, monkeypatch, asked):
    metric = "linear" if "probe" in asked else "i2t/R@1"
    task = "linear" if "probe" in asked else "retrieval"
    claim = ("Claim", "Table 1", "2, 1", "a a", f"{metric} [{asked}] {metric}")
    monkeypatch.setitem(claims.CLAIMS, "sparc", [claim])
    monkeypatch.setitem(claims.RUNS, "sparc", {"a": ("zeroshot", "--method sparc", 0.001)})
    for seed in SEEDS:  # a single rate is not tried on val
        write(tmp_path, "a", 0.001, seed, {"zeroshot": 0.5})
    evals = "python eval.py runs/claims/sparc/a-0.001-{} --split test --task " + task
    both = f"{evals} {asked} && {evals}"
    assert printed("--again") == [both.replace("-{} ", f"-{seed} ") for seed in SEEDS]
    for seed in SEEDS:
        write(tmp_path, "a", 0.001, seed, {metric: 0.25})
        for other in FLAGGED.values():  # other settings, and each of these but another split
            write(tmp_path, "a", 0.001, seed, {metric: 0.125}, **other | {"split": "val"})
            if other != FLAGGED[asked]:
                write(tmp_path, "a", 0.001, seed, {metric: 0.625}, **other)
    alone = f"{evals} {asked}"
    assert printed("--again") == [alone.replace("-{} ", f"-{seed} ") for seed in SEEDS]
    for seed in SEEDS:
        write(tmp_path, "a", 0.001, seed, {metric: seed / 4}, **FLAGGED[asked])
    assert printed("--again") == []
    kept = json.loads(claims.RECORDS.read_text("utf-8"))
    values = {(x["seed"], x.get("flags")): x["value"] for x in kept if x.get("metric") == metric}
    assert values == {(s, f): s / 4 if f else 0.25 for s in SEEDS for f in (asked, None)}
    assert "| 1.000 ± 0.250, 0.250 ± 0.000 | +0.500 +0.750 +1.000 | holds |" in printed()[2]


def test_a_run_starts_from_one_of_its_seed(printed, tmp_path, monkeypatch):
    tuned = ("classification", "--finetune runs/claims/sparc/a-0.002-{seed}", 0.001)
    monkeypatch.setitem(claims.RUNS, "sparc", {"a": RUNS["a"], "tuned": tuned})
    monkeypatch.setitem(claims.CLAIMS, "sparc", [("C", "T", "2, 1", "tuned a", "classification")])
    for rate in claims.RATES:
        write(tmp_path, "a", rate, 0, {"zeroshot": rate}, split="val")
    starts = {f"python train.py {flags('a', 0.002, seed)}" for seed in SEEDS}
    assert {*printed("--again")} == starts  # what starts from them comes later
    for seed in SEEDS:
        write(tmp_path, "a", 0.002, seed, {"classification": 0.5})
    commands = [f"python train.py {flags('tuned', 0.001, seed)}" for seed in SEEDS]
    assert printed("--again") == commands
    assert "--finetune runs/claims/sparc/a-0.002-4 --lr 0.001 --seed 4 " in commands[1]
    for seed in SEEDS:
        write(tmp_path, "tuned", 0.001, seed, {"classification": 0.75})
    assert printed("--again") == []
    assert "| +0.250 +0.250 +0.250 | holds |" in printed()[2]


def test_a_figure_of_a_record_needs_no_run(printed, tmp_path, monkeypatch):
    """Of what other runs start from, the run must be there."""
    tuned = ("classification", "--finetune runs/claims/sparc/a-0.002-{seed}", 0.001)
    monkeypatch.setitem(claims.RUNS, "sparc", {"a": RUNS["a"], "tuned": tuned})
    monkeypatch.setitem(claims.CLAIMS, "sparc", [("C", "T", "2, 1", "tuned a", "zeroshot")])
    places = [("a", rate, 0, "val", "zeroshot") for rate in claims.RATES]
    places += [("a", 0.002, seed, "test", "zeroshot") for seed in SEEDS]
    claims.add_records({"method": "sparc", "value": place[1]} | dict(zip(claims.PLACE, place))
                       for place in places)
    commands = [f"python train.py {flags('a', 0.002, seed)}" for seed in SEEDS]
    assert printed("--again") == commands
    for seed in SEEDS:
        write(tmp_path, "a", 0.002, seed, {"linear": 0.5})  # not the metric on record
    assert printed("--again") == [f"python train.py {flags('tuned', 0.001, s)}" for s in SEEDS]
    assert len(claims.read_records()) == 9


def test_folders_have_no_splits(printed, tmp_path, monkeypatch):
    (tmp_path / "folders").mkdir()
    run = ("zeroshot", "--method sparc --eval-data folders", 0.001)
    monkeypatch.setitem(claims.RUNS, "sparc", {"a": run})
    monkeypatch.setitem(claims.CLAIMS, "sparc", [("C", "T", "2, 1", "a a", "zeroshot i2t/R@1")])
    for seed in SEEDS:
        write(tmp_path, "a", 0.001, seed, {"zeroshot": 0.5 + seed / 10},
              prompts=evaluation.TEMPLATES)
    runs = [f"runs/claims/sparc/a-0.001-{seed}" for seed in SEEDS]
    assert printed("--again") == [f"python eval.py {run} --task retrieval" for run in runs]
    for seed in SEEDS:
        write(tmp_path, "a", 0.001, seed, {"i2t/R@1": 0.5})
    assert printed("--again") == [] and "| +0.300 +0.400 +0.500 | holds |" in printed()[2]


def test_a_run_is_another_at_a_rate_of_its_own(printed, tmp_path, monkeypatch):
    monkeypatch.setitem(claims.RUNS, "sparc", {"b": RUNS["b"], "b-probe": ("linear", "b")})
    monkeypatch.setitem(claims.CLAIMS, "sparc", [("C", "T", "2, 1", "b-probe b", "linear")])
    for rate in RUNS["b"][2:]:
        scores = {"zeroshot": rate, "linear": 1 - abs(rate - 0.002)}
        write(tmp_path, "b", rate, 0, scores, split="val")
    assert {*printed("--again")} == {f"python train.py {flags('b', rate, seed)}"
                                     for rate in (0.002, 0.004) for seed in SEEDS}
    edge = "b 0.004 (at the edge of its sweep), b-probe 0.002."
    assert edge in printed()[-3]


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
        assert len(rates) != 2 and sorted(rates) == rates
        root = runs.get(chosen_by, (chosen_by, ""))
        assert root[0] in CHOOSING and root[1] != run_flags
        if run_flags in runs:
            assert not rates and runs[run_flags][0] not in runs, "rates that are tried already"
        start = re.search(r"--finetune runs/claims/(\w+)/(\w+)-[\d.]+-{seed}", run_flags)
        if start:
            assert start[1] == method and start[2] in runs, "a run that is not trained first"
            run_flags = run_flags.replace(start[0], "--method classifier")
        run_flags = runs.get(run_flags, (None, run_flags))[1]
        settings[run] = train.parse_args([*run_flags.split(), "--lr", "0.001"])
    used, named = {chosen_by for chosen_by, *_ in runs.values()}, []
    for claim in claims.CLAIMS[method]:
        assert len(claim) in (5, 6) and all(isinstance(x, str) and x for x in claim)
        used |= {*claim[3].split()} | {claims.trained(method, run)[0] for run in claim[3].split()}
        named.append(f"{claim[3]}: {claim[4]}")
        metrics = claims.METRIC.findall(claim[4])
        assert len(metrics) in (1, 2)
        written = [f"{name} [{flags}]" if flags else name for name, flags in metrics]
        assert " ".join(written) == claim[4]
        assert all(re.fullmatch(r"[-\w ./:,={}]*", flags) for _, flags in metrics), "for a shell"
        for world in re.findall(r"--data (shapes\S*)", claim[4]):
            own = common.open_data(settings[claim[3].split()[0]].data)
            assert common.open_data(world.rstrip("]")).fillers == own.fillers, "unknown words"
        budgets = [(x.steps * x.batch, x.data) for x in map(settings.get, claim[3].split())]
        assert budgets[0] == budgets[1], "two runs that saw different data, or more of it"
    assert used >= runs.keys(), "a run that no claim uses"
    assert len({*named}) == len(named), "two claims with one record"
    kept = [record for record in claims.read_records().values() if record["method"] == method]
    assert {record.get("claim", named[0]) for record in kept} <= {*named}
    assert {record["run"] for record in kept if "run" in record} <= runs.keys()


def test_the_figures_of_the_texts_are_those_of_the_tables(capsys):
    root, texts = Path(claims.__file__).parents[1], {}
    for method in claims.RUNS:
        claims.print_table(method)
        text = (root / f"{method}.py").read_text("utf-8")
        found = text[text.index("# What was found out"):].split("\n\n")[0]
        texts[method] = text.split('"""')[1] + found
    texts["README"] = (root / "README.md").read_text("utf-8")
    tables = re.sub(r"\b0\.", ".", capsys.readouterr().out)
    figures = {f"{float(x):.3f}".lstrip("0") for x in re.findall(r"\d*\.\d+", tables)}
    for name, text in texts.items():
        assert {*re.findall(r"(?<!\d)\.\d{3}(?!\d)", text)} <= figures, name
        paired = re.findall(r"[+-]\.\d{3} [+-]\.\d{3} [+-]\.\d{3}|\.\d{3} \+?[±-]+ \.\d{3}", text)
        assert all(pair.replace("+-", "±").removesuffix("0") in tables for pair in paired), name


@pytest.mark.parametrize("names", [["sparc"], ["sparo", "dino"], ["stair"], ["bam", "classifier"]])
def test_every_metric_of_a_claim_exists(run_of, tmp_path, monkeypatch, names):
    """What --again would run, with the tiny runs of the tests: the figure is found afterwards."""
    monkeypatch.chdir(Path(claims.__file__).parents[1])  # where the files of the flags lie
    fast = functools.partial(evaluation.lbfgs_probe, strengths=[1.0])
    monkeypatch.setattr(evaluation, "lbfgs_probe", fast)
    metrics = {x for claim in claims.CLAIMS[names[0]] if "--classes" not in claim[4]  # of folders
               for x in claims.METRIC.findall(claim[4].replace("=.13", "=.14"))}  # of 16 pixels
    runs = {name: shutil.copytree(run_of(name), tmp_path / name) for name in names}
    configs = {name: common.read_config(run) for name, run in runs.items()}

    def find(name):
        return {(metric, given) for metric, given in metrics if claims.last_figure(
            runs[name], configs[name], metric, f"--split test {given}") is not None}

    for name, flags in sorted({(metric.split("/")[0], flags) for metric, flags in metrics}):
        task = claims.TASK_OF.get(name, name)
        is_other = task == "classification" or ("dino" in names and task in ("knn", "linear"))
        for run in names if is_other else names[:1]:
            if (task == "classification") == (run == "classifier"):
                evaluation.main([str(runs[run]), "--split", "test", "--task", task, *flags.split()])
    assert set.union(*map(find, names)) == metrics

"""tests/claims.py: the choice of rates, the commands for missing runs, the table and the verdicts.

Each claim in claims-runs.json can be run. Figures in README.md and the method files are recorded.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import claims
import common
import eval as evaluation
import train
from helpers import picture, write_files

SEEDS = 3, 4, 5
RUNS = {"a": {"rate_by": "zeroshot", "flags": "--method sparc"},
        "b": {"rate_by": "zeroshot", "flags": "--method sparc --objective clip",
              "rates": [0.001, 0.002, 0.004]},
        "a-probe": {"rate_by": "linear", "repeats": "a"},
        "tuned": {"rates": [0.001], "seeds": [4, 5, 6],
                  "flags": "--finetune runs/claims/sparc/a-0.002-{seed}"},
        "idle": {"rates": [0.0], "flags": "--method sparc --steps 1 --warmup 1"}}
CLAIMS = [("A is above B", "a b", "zeroshot"), ("A's slots are", "a b", "slots/all/zeroshot miou"),
          ("Its probe", "a-probe a", "linear [--probe sgd] linear"),
          ("Tuned", "tuned a", "classification")]
CLAIMS = [{"claim": claim, "source": "Table 1", "paper": "2, 1", "runs": runs, "metrics": metrics,
           "why_not": "noise"} for claim, runs, metrics in CLAIMS]
CLAIMS[1] |= {"paper": "", "untrained": "idle"}
CLAIMS[2] |= {"paper": "", "seeds": [3, 4]}
# The metrics by which a rate may be chosen.
CHOOSING = ("zeroshot", "t2i/R@1", "miou_fg/colour", "knn", "linear", "classification",
            "detection/AP")


@pytest.fixture
def printed(monkeypatch, tmp_path, capsys):
    """A function: flags -> the lines that `claims.py sparc` prints for the made-up claims."""
    monkeypatch.chdir(tmp_path)
    table = {"title": "T", "seeds": [*SEEDS], "runs": RUNS, "claims": CLAIMS, "notes": ["a note"]}
    monkeypatch.setitem(claims.TABLES, "sparc", table)
    monkeypatch.setattr(claims, "RECORDS", tmp_path / "claims.json")
    claims.RECORDS.write_text("[]")

    def lines(*flags):
        claims.main(["sparc", *flags])
        return capsys.readouterr().out.splitlines()

    return lines


def command(run, rate, seed):
    """Return the command that trains a run, as --again prints it."""
    out = f"runs/claims/sparc/{run}-{rate}-{seed}"
    given = RUNS[run]["flags"].replace("{seed}", str(seed))
    return f"python train.py {given} --lr {rate} --seed {seed} --out {out} --resume auto"


def write(root, run, rate, seed, figures, **settings):
    """Add a line of figures to a run's evals.jsonl. settings: options that are not the run's."""
    _, *argv = command(run, rate, seed).split()
    args = train.parse_args([*RUNS["a"]["flags"].split(), *argv[-8:-4]])
    vars(args).update(folder_captions=False, data_path=args.data)
    files = {"config.json": json.dumps(vars(args) | {"argv": argv, "git": "c0ffee"})}
    out = root / f"runs/claims/sparc/{run}-{rate}-{seed}"
    write_files(out, files | {"eval.json": "{}"})
    usual = evaluation.metric_options(evaluation.options_of({}, args))
    del usual["on_training_images"]  # an older line lacks this option
    with open(out / "evals.jsonl", "a") as file:
        file.write(json.dumps({"settings": usual | settings} | figures) + "\n")


def test_again_first_trains_the_run_of_another_group_that_a_run_fine_tunes(
        printed, monkeypatch, capsys):
    flags = "--method detector --finetune runs/claims/sparc/a-0.001-{seed}"
    claim = {"runs": "found found", "metrics": "detection/AP"}
    table = {"seeds": [4], "runs": {"found": {"flags": flags, "rates": [0.1]}}, "claims": [claim]}
    monkeypatch.setitem(claims.TABLES, "other", table)
    claims.train_again("other")
    assert capsys.readouterr().out.splitlines() == [command("a", 0.001, 4)]


def test_again_chooses_rates_then_trains_seeds_then_fills_the_table(printed, tmp_path):
    swept = [*(("a", rate) for rate in claims.RATES), *(("b", rate) for rate in RUNS["b"]["rates"])]
    assert printed("--again") == [command(*run, 0) for run in swept] + [
        *(command("idle", 0.0, seed) for seed in SEEDS),
        *(command("a", 0.002, seed) for seed in (4, 5))]  # the runs that `tuned` fine-tunes
    table = [line for line in printed() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in table] == [
        "| claim: A above B", "| A is above B", "| Tuned",  # the paper's claims
        "| claim: A above B", "| A's slots are", "| Its probe"]  # those without a paper's figure
    assert table[1].endswith(" | 2, 1 |  |  |  |  |  | not run yet |") and "* a note" in printed()

    for run, rate in swept:  # on the test split, or with other options, another rate is best
        write(tmp_path, run, rate, 0, {"zeroshot": 1 - rate})
        for other in ({"limit": 3}, {"data": "photos"}, {"checkpoint": "stage-1.pt"}):
            write(tmp_path, run, rate, 0, {"zeroshot": 1 - rate}, split="val", **other)
    val = "python eval.py runs/claims/sparc/{}-{}-0 --split val --task zeroshot"
    assert {val.format(*run) for run in swept} <= {
        part for line in printed("--again") for part in line.split(" && ")}
    for run, rate in swept:
        for value in (0.5, rate == {"a": 0.002, "b": 0.001}[run]):  # the last line counts
            scores = {"zeroshot": value, "linear": 1 - abs(rate - 0.001)}
            write(tmp_path, run, rate, 0, scores, split="val")
    wanted = {command(run, rate, seed) for seed in SEEDS
              for run, rate in (("a", 0.002), ("b", 0.001), ("idle", 0.0))}
    wanted |= {command("a", 0.001, seed) for seed in (3, 4)}  # the claim has seeds of its own
    assert {*printed("--again")} == wanted
    chosen = next(line for line in printed() if line.startswith("* Learning rates"))
    edge = "(at the edge of its sweep)"
    assert f": a 0.002 {edge}, b 0.001 {edge}, a-probe 0.001, tuned 0.001 (not swept)." in chosen

    for seed in SEEDS:
        write(tmp_path, "a", 0.002, seed, {
            "zeroshot": 0.5 + seed / 10, "slots/all/zeroshot": 0.2, "linear": 0.5,
            "classification": 0.5})
        write(tmp_path, "b", 0.001, seed, {"zeroshot": 0.4, "miou": seed / 10})
        write(tmp_path, "a", 0.001, seed, {"linear": 0.5})  # another probe's accuracy
        write(tmp_path, "idle", 0.0, seed, {"slots/all/zeroshot": 0.2 + seed / 100})
    evals = "python eval.py runs/claims/sparc/a-0.001-{} --split test --task linear --probe sgd"
    assert {*printed("--again")} == {evals.format(3), evals.format(4)} | {
        command("tuned", 0.001, seed) for seed in SEEDS[1:]}
    for seed, value in zip(SEEDS, (0.4, 0.7, 0.6)):
        write(tmp_path, "a", 0.001, seed, {"linear": value}, probe="sgd")
        write(tmp_path, "tuned", 0.001, seed, {"classification": 0.75})
    assert printed("--again") == []
    shutil.rmtree(tmp_path / "runs")  # the figures are kept
    claims.add_records({"method": "sparc", "run": run, "metric": "training", "value": value}
                       for run, value in (("a", 12.34), ("b", 0.5)))
    table = [line for line in printed() if line.startswith("| ")]
    assert [line.split(" | ", 3)[3] for line in table if "claim:" not in line] == [
        "12.3, 0.5 | 0.900 ± 0.100, 0.400 ± 0.000 |  | +0.400 +0.500 +0.600 | +0.252 to +0.748 | "
        "not decided (n = 3): noise |",
        " | 0.750 ± 0.000, 0.500 ± 0.000 |  | +0.250 +0.250 | +0.250 to +0.250 | "
        "not decided (n = 2): noise |",
        "12.3, 0.5 | 0.200 ± 0.000, 0.400 ± 0.100 | 0.240 ± 0.010 | -0.100 -0.200 -0.300 | "
        "-0.448 to +0.048 | A did not train: noise |",
        "12.3, 12.3 | 0.550 ± 0.212, 0.500 ± 0.000 |  | -0.100 +0.200 | -1.856 to +1.956 | "
        "not decided (n = 2): noise |"]
    kept = json.loads(claims.RECORDS.read_text("utf-8"))
    assert {
        "method": "sparc", "run": "a", "rate": 0.001, "seed": 4, "split": "test", "value": 0.7,
        "metric": "linear", "flags": "--probe sgd", "commit": "c0ffee", "torch": None,
        "threads": None} in kept


def test_the_interval_is_students():
    """t(.975, 2) is 4.303, and a deviation of .1 gives a half width of .248 for three pairs."""
    assert claims.interval([0.1]) is None and claims.interval([]) is None
    assert claims.interval([0.1, 0.2, 0.3]) == pytest.approx((-0.0484, 0.4484), abs=1e-4)
    table = [4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228]
    for n, quantile in (*enumerate(table, 3), (21, 2.086), (101, 1.984)):
        values = [0.0, 1.0] * (n // 2) + [0.5] * (n % 2)
        half = (claims.interval(values)[1] - 0.5) * n**0.5 / np.std(values, ddof=1)
        assert half == pytest.approx(quantile, abs=1e-3)


@pytest.mark.parametrize("differences, expected", [
    ([0.1, 0.2, 0.3, 0.2, 0.2], "holds (n = 5)"), ([0.2] * 6, "holds (n = 6)"),
    ([-0.1, 0.2, 0.2, 0.2, 0.2], "not shown (n = 5)"),      # mean .14, 2.776 standard errors .166
    ([-0.01, 0.2, 0.2, 0.2, 0.2], "holds (n = 5)"),         # mean .158, 2.776 errors .117
    ([-0.1, -0.2, -0.3, -0.2, -0.2], "reversed (n = 5)"),
    ([-0.01, -0.01, -0.01, -0.01, -0.4], "not shown (n = 5)"), ([0.0] * 5, "not shown (n = 5)"),
    ([0.1, float("nan"), 0.2, 0.1, 0.1], "not shown (n = 5)"),
    ([0.2, 0.2, 0.2, 0.2], "not decided (n = 4)"), ([0.1], "not decided (n = 1)")])
def test_verdicts_follow_the_rule(differences, expected):
    assert claims.verdict(differences) == expected


def test_a_side_that_is_no_better_than_an_untrained_network_did_not_train():
    found = {"greater": [0.3, 0.5] * 3, "smaller": [0.2, 0.4] * 3}
    for untrained, verdict in (([0.2], "holds (n = 6)"), ([0.2, 0.4], "B did not train: noise"),
                               ([0.5], "A and B did not train: noise"), (None, "holds (n = 6)")):
        assert claims.cells(found | {"untrained": untrained}, "noise")[-1] == verdict
    # A log-likelihood is negative. It says nothing where no untrained network was measured.
    below = {"greater": [-0.9] * 5, "smaller": [-5.3] * 5, "untrained": None}
    assert claims.cells(below)[-1] == "holds (n = 5)"


@pytest.mark.parametrize("old, new", [("--lr", "--beta2"), ("objects=4", "objects=3"),
                                      ('"argv"', '"arguments"')])
def test_a_run_with_other_flags_or_an_old_preset_is_refused(printed, tmp_path, old, new):
    write(tmp_path, "a", 0.001, 0, {"zeroshot": 0.5})
    config = tmp_path / "runs/claims/sparc/a-0.001-0/config.json"
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(common.UserError, match="a-0.001-0 was not trained with --method sparc "):
        printed("--again")


@pytest.mark.parametrize("method", claims.TABLES)
def test_every_claim_has_runs_and_metrics_with_valid_flags(method):
    settings, table = {}, claims.TABLES[method]
    runs, used, named = table["runs"], set(), []
    for name, run in runs.items():
        base, rates = claims.trained(method, name)
        by = run.get("rate_by", "knn").partition(" [")[0]
        assert by in {*runs, *CHOOSING} and [*rates] == sorted(rates)
        assert "rate_by" in run or len(rates) == 1
        flags = runs[base]["flags"]
        if start := re.search(r" ?--finetune runs/claims/(\w+)/([-\w]+)-[\d.]+-{seed}", flags):
            assert start[2] in claims.TABLES[start[1]]["runs"]
            flags = flags.replace(start[0], "" if "--method" in flags else "--method classifier")
        settings[name] = train.parse_args([*flags.split(), "--lr", str(rates[0])])
        used |= {run.get("rate_by")}
    for claim in table["claims"]:
        needed = {"claim", "source", "paper", "runs", "metrics"}
        assert claim.keys() - {"why_not", "untrained", "seeds", "budget"} == needed
        names, metrics = claim["runs"].split(), claims.METRIC.findall(claim["metrics"])
        used |= {*names} | {claims.trained(method, name)[0] for name in names}
        if "untrained" in claim:
            used |= {claim["untrained"]}
            assert runs[claim["untrained"]]["rates"] == [0.0]
        named.append(f"{claim['runs']}: {claim['metrics']}")
        for metric, flags in metrics:
            assert re.fullmatch(r"[-\w ./:,={}]*", flags), "a shell would change the flags"
            task = metric.split("/")[0]
            assert claims.TASK_OF.get(task, task) in evaluation.TASKS
            evaluation.parse_args(["RUN", *flags.split()])
        budgets = [(x.epochs or x.steps * x.batch, x.data) for x in map(settings.get, names)]
        assert budgets[0] == budgets[-1] or claim.get("budget") == "FLOPs"
    for plot in table.get("plots", ()):
        used |= {*plot["runs"].values()}
    for metrics in table.get("table", {"columns": {}})["columns"].values():
        used |= {name for names in metrics.values() for name in names.split()}
    assert used >= runs.keys(), "a run that no claim uses"
    assert len({*named}) == len(named), "two claims have the same record"
    kept = [record for record in claims.read_records().values() if record["method"] == method]
    assert {record["run"] for record in kept} <= runs.keys()


def test_the_file_of_results_is_that_of_the_figures():
    """After a change of claims.json or claims-runs.json, run `python tests/claims.py`."""
    assert claims.RESULTS.read_text("utf-8") == claims.results()


def test_figures_in_readme_and_docstrings_are_those_of_the_results():
    """Figures with three decimals, and pairs of a mean and its deviation, are in RESULTS.md."""
    root, texts = Path(claims.__file__).parents[1], {}
    for method in ("sparo", "stair", "sparc", "bam"):
        texts[method] = (root / f"{method}.py").read_text("utf-8").split('"""')[1]
    texts["README"] = (root / "README.md").read_text("utf-8")
    tables = re.sub(r"\b0\.", ".", claims.results())
    figures = {f"{float(x):.3f}".lstrip("0") for x in re.findall(r"\d*\.\d+", tables)}
    for name, text in texts.items():
        assert {*re.findall(r"(?<!\d)\.\d{3}(?!\d)", text)} <= figures, name
        paired = re.findall(r"\.\d{3} \+?[±-]+ \.\d{3}", text)
        assert all(pair.replace("+-", "±").removesuffix("0") in tables for pair in paired), name


def test_class_folders_become_shards_with_captions_and_a_val_split(printed, tmp_path):
    """Files that exist are not overwritten."""
    classes = (Path(claims.__file__).with_name("claims-classes.txt")).read_text().split()
    write_files(tmp_path, {f"cifar10/train/{i}/{j}.png": picture(format="PNG")
                           for i in range(len(classes)) for j in range(10)})
    printed("--again")
    pairs = list(common.TarShards("cifar10/{00000..00003}.tar").each("caption"))
    shown = " ".join(caption for _, (caption,) in pairs)
    assert len(pairs) == 10 * len(classes)
    assert all(shown.count(f" {name}") == 10 for name in classes)
    fit, val = ([*Path("cifar10", part).glob("*/*.png")] for part in ("fit", "val"))
    names = {"/".join(path.parts[-2:]) for path in fit + val}
    assert len(val) == len(classes) and len(fit) == 9 * len(val) and len(names) == len(pairs)
    Path("cifar10/00000.tar").write_text("the user's")
    shutil.rmtree("cifar10/val")
    shutil.rmtree("cifar10/fit")
    printed("--again")
    assert Path("cifar10/00000.tar").read_text() == "the user's"
    assert all(path.exists() for path in fit + val)


def test_the_table_has_the_best_mean_of_a_metric_in_bold_if_it_is_decided(printed, monkeypatch):
    """Figures of two metrics are not compared. Five seeds decide, if the interval lies above 0. A
    plot has a bar of 40 signs for the largest mean."""
    columns = {"k-NN": {"knn": "a idle"}, "both": {"knn": "a", "linear": "idle"}}
    table = {"rows": {"A": "a", "idle": "idle"}, "columns": columns}
    plot = {"title": "A plot", "runs": {"A": "a", "idle": "idle"}, "metrics": {"k-NN": "knn"}}
    for name, value in dict(table=table, seeds=[1, 2, 3, 4, 5], plots=[plot]).items():
        monkeypatch.setitem(claims.TABLES["sparc"], name, value)
    runs = {"a": dict(rates=[0.1]), "idle": dict(rates=[0.0])}
    monkeypatch.setitem(claims.TABLES["sparc"], "runs", RUNS | runs)
    claims.add_records({"method": "sparc", "run": run, "rate": rate, "seed": seed, "split": "test",
                        "metric": metric, "value": value + seed / 1000}
                       for run, rate, value in (("a", 0.1, 0.5), ("idle", 0.0, 0.2))
                       for seed in range(1, 6) for metric in ("knn", "linear"))
    lines = printed()
    rows = [line for line in lines if line.startswith(("| A |", "| idle |"))]
    assert rows == ["| A | – | – | – | **0.503 ± 0.002** | 0.503 ± 0.002 |",
                    "| idle | – | – | – | 0.203 ± 0.002 | 0.203 ± 0.002 |"]
    start = lines.index("**A plot**")
    assert [line.split() for line in lines[start + 3 : start + 6]] == [
        ["k-NN"], ["A", "0.503", "±", "0.002", "█" * 40], ["idle", "0.203", "±", "0.002", "█" * 16]]

"""The claims of the papers: their data in the method files, and eval.py --claims."""

import json
import shutil

import pytest

import common
import eval as evaluation
import train

RUNS = {"a": ("zeroshot", "--method sparc"),
        "b": ("zeroshot", "--method sparc --objective clip", 0.001, 0.002, 0.004),
        "variant": ("a", "--method sparc --align dense")}
CLAIMS = [("A is above B", "Table 1", "2, 1", "a zeroshot", "b zeroshot", "no note"),
          ("A's slots are above B's", "Table 2", "4, 3", "a slots/all/zeroshot", "b miou", "noise"),
          ("The variant is worse", "Table 3", "5, 1", "a zeroshot", "variant zeroshot"),
          ("It flies", "Table 4", "1, 0")]


@pytest.fixture
def claims(monkeypatch, tmp_path, capsys):
    """A function: -> lines on stdout, lines on stderr of --claims sparc in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluation.METHODS["sparc"], "RUNS", RUNS)
    monkeypatch.setattr(evaluation.METHODS["sparc"], "CLAIMS", CLAIMS)

    def printed():
        evaluation.main(["--claims", "sparc"])
        return [text.splitlines() for text in capsys.readouterr()]

    return printed


def flags(run, rate, seed):
    out = f"runs/claims/sparc/{run}-{rate}-{seed}"
    return f"{RUNS[run][1]} --lr {rate} --seed {seed} --out {out} --resume auto"


def write(root, run, rate, seed, figures, val=None):
    out = root / f"runs/claims/sparc/{run}-{rate}-{seed}"
    out.mkdir(parents=True)
    argv = ["train.py", *flags(run, rate, seed).split()]
    config = evaluation.METHODS["sparc"].PRESETS["tiny"] | {"objective": "clip", "lr": rate}
    config |= {"method": "sparc", "preset": "tiny", "argv": argv}
    (out / "config.json").write_text(json.dumps(config))
    (out / "eval.json").write_text(json.dumps({"settings": {}} | figures))
    if val is not None:
        name = f"eval-{evaluation.file_name(config['data'])}-val.json"
        (out / name).write_text(json.dumps({"settings": {}, "zeroshot": val}))


def test_first_the_learning_rates_then_the_seeds_then_the_table(claims, tmp_path):
    commands, table = claims()
    swept = [*(("a", rate) for rate in (0.0005, 0.001, 0.002)),
             *(("b", rate) for rate in (0.001, 0.002, 0.004))]
    assert commands == [
        f"python train.py {flags(run, rate, 0)} && python eval.py runs/claims/sparc/{run}-{rate}-0"
        " --split val --task zeroshot" for run, rate in swept]
    assert [line.split(" | ")[-1] for line in table[2:6]] == 3 * ["not run yet |"] + ["not tried |"]
    assert "none yet" in table[-1]

    best = {"a": 0.002, "b": 0.001}
    for run, rate in swept:  # on the test split the rates' order is another
        write(tmp_path, run, rate, 0, {"zeroshot": 1 - rate, "miou": 0.1}, rate == best[run])
    commands, table = claims()
    rates = best | {"variant": 0.002}
    expected = {run: [f"python train.py {flags(run, rates[run], seed)}" for seed in (3, 4, 5)]
                for run in RUNS}
    more = " && python eval.py runs/claims/sparc/a-0.002-{} --split test --task slots"
    expected["a"] = [x + more.format(seed) for x, seed in zip(expected["a"], (3, 4, 5))]
    assert sorted(commands) == sorted(sum(expected.values(), []))
    assert "with seed 0: a 0.002, b 0.001;" in table[-1]

    for seed in (3, 4, 5):
        write(tmp_path, "a", 0.002, seed, {"zeroshot": 0.5 + seed / 10})
        write(tmp_path, "b", 0.001, seed, {"zeroshot": 0.4, "miou": seed / 10})
        write(tmp_path, "variant", 0.002, seed, {"zeroshot": 0.95})
    commands, _ = claims()
    assert commands == [f"python eval.py runs/claims/sparc/a-0.002-{seed} --split test --task slots"
                        for seed in (3, 4, 5)]
    for seed in (3, 4, 5):
        path = tmp_path / f"runs/claims/sparc/a-0.002-{seed}/eval.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"slots/all/zeroshot": 0.2}))
    table, nothing = claims()
    assert nothing == [] and table[2:6] == [
        "| A is above B | Table 1 | 2, 1 | 0.900 ± 0.100, 0.400 ± 0.000 | +0.400 +0.500 +0.600"
        " | holds in every seed |",
        "| A's slots are above B's | Table 2 | 4, 3 | 0.200 ± 0.000, 0.400 ± 0.100"
        " | -0.100 -0.200 -0.300 | reversed: noise |",
        "| The variant is worse | Table 3 | 5, 1 | 0.900 ± 0.100, 0.950 ± 0.000"
        " | -0.150 -0.050 +0.050 | not shown |",
        "| It flies | Table 4 | 1, 0 |  |  | not tried |"]
    assert claims() == [table, []]


@pytest.mark.parametrize("differences, expected", [
    ([0.1, 0.2, 0.3], "holds in every seed"), ([-0.1, 0.1, 0.1], "holds in the mean"),
    ([0.1, -0.1, -0.1], "not shown"), ([0.0, 0.0, 0.0], "not shown"), ([0.0, 0.1, 0.1],
                                                                    "holds in the mean"),
    ([-0.1, -0.2, -0.3], "reversed"), ([float("nan")] * 3, "not shown"),
    ([0.1, float("nan"), 0.2], "not shown"), ([-0.3, 0.1, 0.1], "not shown"),
    ([0.3, -0.1, -0.1], "holds in the mean")])
def test_verdicts(differences, expected):
    assert evaluation.verdict(differences) == expected


@pytest.mark.parametrize("old, new", [("--lr", "--beta2"), ("objects=4", "objects=3"),
                                      ('"argv"', '"arguments"')])
def test_a_run_of_other_flags_or_of_an_old_preset_is_refused(claims, tmp_path, old, new):
    write(tmp_path, "a", 0.001, 0, {"zeroshot": 0.5})
    config = tmp_path / "runs/claims/sparc/a-0.001-0/config.json"
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(common.UserError, match="a-0.001-0 was not trained with --method sparc "):
        claims()


def test_a_run_or_claims_must_be_named(claims):
    for argv in ([], ["run", "--claims", "sparc"]):
        with pytest.raises(common.UserError, match="Give the directory of a run"):
            evaluation.main(argv)
    with pytest.raises(common.UserError, match="takes no other flag"):
        evaluation.main(["--claims", "sparc", "--split", "val"])
    with pytest.raises(common.UserError, match="takes no other flag"):
        evaluation.main(["--claims", "sparc", "--query", "a dog"])
    with pytest.raises(common.UserError, match="no task alignmnt; there are .*, alignment, "):
        evaluation.main(["run", "--task", "alignmnt"])


@pytest.mark.parametrize("method", evaluation.METHODS)
def test_the_data_of_claims_are_sound(method):
    module = evaluation.METHODS[method]
    assert module.CLAIMS and module.RUNS
    settings = {}
    for run, (chosen_by, run_flags, *rates) in module.RUNS.items():
        assert len(rates) in (0, 3) and sorted(rates) == rates
        settings[run] = train.parse_args([*run_flags.split(), "--lr", "0.001"])
        root = module.RUNS.get(chosen_by, (chosen_by, ""))
        assert root[0] in ("zeroshot", "knn") and root[1] != run_flags
    used = {chosen_by for chosen_by, *_ in module.RUNS.values()}
    for claim in module.CLAIMS:
        assert len(claim) in (3, 5, 6) and all(isinstance(x, str) and x for x in claim)
        runs = [side.split()[0] for side in claim[3:5]]
        used |= {*runs}
        budgets = [(a.steps, a.batch, a.data) for a in map(settings.get, runs)]
        assert budgets[:1] == budgets[1:], "two runs that saw different data, or for longer"
    assert used >= module.RUNS.keys(), "a run that no claim uses"


@pytest.mark.parametrize("names", [["sparc"], ["sparo", "dino"], ["stair"], ["bam"]])
def test_every_metric_of_a_claim_exists(run_of, tmp_path, names):
    claims = evaluation.METHODS[names[0]].CLAIMS
    metrics, found = {side.split()[1] for claim in claims for side in claim[3:5]}, set()
    tasks = {metric.split("/")[0] for metric in metrics} & evaluation.TASKS.keys()
    asked = [task for task in tasks if evaluation.TASKS[task].default != "text"]
    for name in names:
        run = shutil.copytree(run_of(name), tmp_path / name)
        mine = [task for task in asked if name == names[0] or task in ("knn", "linear")]
        if mine:
            evaluation.main([str(run), "--task", ",".join(mine)])
        found |= json.loads((run / "eval.json").read_text()).keys()
    assert metrics <= found

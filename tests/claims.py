"""What of the papers holds on the embedded world, beside the papers' own figures.

    python tests/claims.py sparc           # the table, from tests/claims.json
    python tests/claims.py sparc --again   # commands for what neither it nor runs/claims has
    for i in 1 2 3 4 5; do python tests/claims.py sparc --again | xargs -P 2 -I{} sh -c {}; done

--again first adds the figures that it finds in runs/claims to claims.json: four rounds train with
each learning rate, measure, train with other seeds, measure, the fifth keeps the last. A record is
a figure of one run (delete those of a preset that changes), or what is left of older trainings: of
a claim mean and deviation of A and of B, their difference by seed; in a summary mean and deviation
of several metrics of a run. `flags` of a figure are those of eval.py, without them it is of the
run's own evaluation. Photos are CIFAR-10's in class folders, as the README makes them, of which
--again makes four shards with captions, and the folders fit and val of train, to choose rates by.
(On record: 2,000 of each class of the training set, in the folders, too, and 200 of the test set.)

tests/claims-runs.json has the claims of each method and what they are tried with. A run has
    rate_by   the metric, perhaps with [flags of eval.py], whose best value on the val split chooses
              the learning rate, the mean of the table's rate_seeds, or the run whose rate it takes
    flags     of train.py; {seed} is the run's. Or:
    repeats   the run that it is, at a rate of its own
    rates     to try; without them RATES; a single one is taken as it is
    seeds     without them the method's
A claim is that A is above B:
    paper     its A and B
    runs      A and B
    metrics   one or two, each perhaps with [flags of eval.py], which no shell may change
    why_not   if it does not hold here
    untrained the metric of an untrained network: a side at or below it did not train
"""

import argparse
import collections
import io
import json
import random
import re
import sys
import tarfile
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import common
import eval as evaluation

RECORDS = Path(__file__).with_suffix(".json")
TABLES = json.loads(Path(__file__).with_name("claims-runs.json").read_text("utf-8"))
PLACE = "run", "rate", "seed", "split", "metric", "flags"  # of a figure
METRIC = re.compile(r"(\S+)(?: \[(.+?)\])?")  # of a claim: name, flags of eval.py or ""
TASK_OF = {"i2t": "retrieval", "t2i": "retrieval", "faithfulness": "retrieval",
           "active": "sparsity", "miou": "segmentation",
           "miou_fg": "segmentation"}  # of metrics not called as their task
RATES = (0.0005, 0.001, 0.002)  # learning rates, tried with seed 0, if a run has no others
CAPTIONS = ("a photo of {}.", "a blurry photo of {}.", "a close-up of {}.",
            "a small picture of {}.", "{} in a low resolution photo.")


def key_of(record):
    return tuple(str(record.get(name, "")) for name in ("method", "claim", "summary", *PLACE))


def read_records():
    """claims.json -> {key: record}."""
    return {key_of(record): record for record in json.loads(RECORDS.read_text("utf-8"))}


def add_records(found):
    """Put records into claims.json, in place of those with the same key."""
    records = read_records() | {key_of(record): record for record in found}
    lines = [json.dumps(records[key], ensure_ascii=False) for key in sorted(records)]
    with common.replacing(RECORDS) as file:
        file.write("[\n{}\n]\n".format(",\n".join(lines)).encode())


def trained(method, name):
    """-> name of the run that is trained, itself or the one that it repeats; its rates."""
    runs = TABLES[method]["runs"]
    name = runs[name].get("repeats", name)
    return name, runs[name].get("rates", RATES)


def rate_of(method, name, figure):
    """The learning rate that is best on the val split, None while one was not tried."""
    rate_by = TABLES[method]["runs"][name]["rate_by"]
    if rate_by in TABLES[method]["runs"]:
        return rate_of(method, rate_by, figure)
    base, rates = trained(method, name)
    if len(rates) == 1:
        return rates[0]
    metric, seeds = METRIC.match(rate_by).groups(""), TABLES[method].get("rate_seeds", [0])
    scores = {rate: [figure(base, rate, seed, "val", *metric) for seed in seeds] for rate in rates}
    if any(None in values for values in scores.values()):
        return None
    return max(scores, key=lambda rate: mean(scores[rate]))


def seeds_of(method, names):
    """The seeds that all of these runs have."""
    table = TABLES[method]
    seeds = [table["runs"][trained(method, name)[0]].get("seeds", table["seeds"]) for name in names]
    return [seed for seed in seeds[0] if all(seed in others for others in seeds)]


def compare(method, claim, figure):
    """{"greater": [mean, deviation], "smaller": ..., "differences": by seed}, None while a figure
    is missing. figure(run, rate, seed, split, metric, flags="") -> float or None."""
    names, sides = claim["runs"].split(), []
    for name, metric in zip(names, METRIC.findall(claim["metrics"]) * 2):
        rate, (base, _) = rate_of(method, name, figure), trained(method, name)
        seeds = seeds_of(method, names) if rate else []
        sides.append([figure(base, rate, seed, "test", *metric) for seed in seeds] or [None])
    if None in sides[0] + sides[1]:
        return None
    deviation = lambda side: [np.std(side, ddof=1)] if len(side) > 1 else []
    greater, smaller = ([mean(side), *deviation(side)] for side in sides)
    found = {"greater": greater, "smaller": smaller,
             "differences": [a - b for a, b in zip(*sides)]}
    return found | {"untrained": claim["untrained"]} if "untrained" in claim else found


# the 97.5 % quantile of Student's t with n - 1 degrees of freedom
QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
RULE = ("A claim holds (is reversed) if the mean difference of n >= 5 seeds is above (below) 0 by "
        "more than t(.975, n - 1) standard errors; else it is not shown; with fewer seeds it is "
        "not decided. By chance alone 1 claim in 40 holds, and 1 is reversed.")


def interval(differences):
    """The 95 % interval of their mean; None of one."""
    n = len(differences)
    if n < 2:
        return None
    half = QUANTILES[n] * np.std(differences, ddof=1) / n**0.5
    return mean(differences) - half, mean(differences) + half


def verdict(differences):
    """By RULE."""
    n = len(differences)
    if n < 5:
        return f"not decided (n = {n})" if n else "not decided"
    low, high = interval(differences)
    kind = "holds" if low > 0 else "reversed" if high < 0 else "not shown"  # nan: not shown
    return f"{kind} (n = {n})"


def cells(found, why_not=None):
    """What was found of a claim: figures, differences seed by seed, their interval, verdict."""
    if found is None:
        return "", "", "", "not run yet"
    sides = [" ± ".join(f"{x:.3f}" for x in found[side] if x is not None) or "?"
             for side in ("greater", "smaller")]
    differences = found["differences"]
    between = interval(differences)
    between = f"{between[0]:+.3f} to {between[1]:+.3f}" if between else ""
    means = {"A": found["greater"][0], "B": found["smaller"][0]}
    untrained = found.get("untrained", -1)  # what a network without a training has
    idle = [name for name, value in means.items() if value is not None and value <= untrained]
    holds = f"{' and '.join(idle)} did not train" if idle else verdict(differences)
    holds += f": {why_not}" if why_not and not holds.startswith("holds") else ""
    holds += " *" if "from" in found else ""
    return ", ".join(sides), " ".join(f"{x:+.3f}" for x in differences), between, holds


def print_table(method):
    records, table = read_records(), TABLES[method]

    def figure(*place):
        return records.get(key_of({"method": method} | dict(zip(PLACE, place))), {}).get("value")

    header = ("claim: A above B", "source", "in the paper", "here", "difference by seed",
              "95 % interval", "verdict")
    print("| " + " | ".join(header) + " |\n" + "| --- " * len(header) + "|")
    for claim in table["claims"]:
        key = key_of({"method": method, "claim": f"{claim['runs']}: {claim['metrics']}"})
        found = compare(method, claim, figure) or records.get(key)
        row = cells(found, claim.get("why_not"))
        print("| " + " | ".join([claim["claim"], claim["source"], claim["paper"], *row]) + " |")
    chosen = []
    for name, run in table["runs"].items():
        rate, (_, rates) = rate_of(method, name, figure), trained(method, name)
        edge = ""
        if len(rates) == 1:
            edge = " (not swept)"
        elif run["rate_by"] not in table["runs"] and rate in (rates[0], rates[-1]):
            edge = " (at the edge of its sweep)"
        chosen += [f"{name} {rate}{edge}"] if rate else []
    tried = ", ".join(map(str, table.get("rate_seeds", [0])))
    print(f"\nTest split, mean ± deviation of seeds {tuple(table['seeds'])}, of * those of its "
          f"record. {RULE}\nLearning rates, the best of {RATES} or of its own, on the val split "
          f"with seed {tried}: {', '.join(chosen) or 'none yet'}.\n* An older record in "
          f"claims.json, of which single figures were not kept.")
    for note in table["notes"]:
        print(f"note: {note}")
    for name, run in table["runs"].items():
        if "about" in run:
            print(f"{name}: {run['about']}")
    for record in records.values():
        if record["method"] == method and "summary" in record:
            figures = record["figures"].items()
            shown = [f"{metric} {' ± '.join(map(str, values))}" for metric, values in figures]
            print(f"- {record['summary']}: {', '.join(shown)} ({record.get('flags', 'no flags')})")


def check_run(out, config, flags):
    """Raise UserError if a run has other flags, or values of a preset that changed since."""
    argv = config.get("argv", [])
    preset = evaluation.METHODS[config["method"]].PRESETS[config["preset"]]
    given = {flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")}
    given |= {"image_encoder"} if "finetune" in given else set()  # it is the other run's
    given |= {"steps"} if "epochs" in given else set()
    stale = [name for name in preset.keys() - given if config.get(name) != preset[name]]
    if argv[1:-4] != flags or stale:  # the last four are --out OUT --resume auto
        raise common.UserError(f"{out} was not trained with {' '.join(flags)}, or the preset has "
                               f"changed since: remove it.")


def last_figure(out, config, metric, flags):
    """A metric in the last line of evals.jsonl that has it, of flags of eval.py, the other options
    the run's own; whatever its --task. Older lines lack options that came later."""
    given = vars(evaluation.build_parser().parse_args([str(out), *flags.split()]))
    given["data"] = given["data"] and given["data"][0]
    run = argparse.Namespace(**config)
    own = evaluation.figure_options(evaluation.options_of({}, run))
    wanted = evaluation.figure_options(evaluation.options_of(given, run))
    del wanted["tasks"]
    path, value = out / "evals.jsonl", None
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        settings = own | record["settings"]
        if settings | wanted == settings:
            value = record.get(metric, value)
    return value


def make_shards(root):
    """Of ROOT/train/CLASS/i.png the shards ROOT/00000.tar to 00003.tar: 2,000 images a class, their
    captions with the names of claims-classes.txt, which are in the order of the folders."""
    rng, samples = random.Random(0), []
    names = common.read_lines(Path(__file__).with_name("claims-classes.txt"), "--classes")
    for folder, name in zip(sorted(Path(root, "train").iterdir()), names):
        samples += [(path, name) for path in sorted(folder.iterdir())[:2000]]
    rng.shuffle(samples)
    for shard in range(4):
        with tarfile.open(Path(root, f"{shard:05}.tar"), "w") as tar:
            for i, (path, name) in enumerate(samples[shard::4]):
                caption = rng.choice(CAPTIONS).format(common.article(name))
                for suffix, data in ((".png", path.read_bytes()), (".txt", caption.encode())):
                    member = tarfile.TarInfo(f"{i:06}{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def hold_out(root):
    """Of ROOT/train/CLASS a tenth, links, to ROOT/val/CLASS, the others to ROOT/fit/CLASS."""
    for folder in Path(root, "train").iterdir():
        images = sorted(folder.iterdir())
        held = set(random.Random(0).sample(images, len(images) // 10))
        for image in images:
            link = Path(root, "val" if image in held else "fit", folder.name, image.name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(image.resolve())


def train_again(method):
    """Put what the runs have into claims.json and print the commands for the rest."""
    if Path("cifar10/train").is_dir():
        if not Path("cifar10/00000.tar").exists():
            make_shards("cifar10")
        if not Path("cifar10/val").exists():
            hold_out("cifar10")
    records, found = read_records(), []
    missing = collections.defaultdict(dict)  # commands of a run, each once

    def place_of(name, rate, seed):
        given = f"{TABLES[method]['runs'][name]['flags']} --lr {rate} --seed {seed}"
        return Path("runs/claims", method, f"{name}-{rate}-{seed}"), given.format(seed=seed)

    def train(name, rate, seed):
        out, given = place_of(name, rate, seed)
        start = re.search(r"--finetune (\S+)", given)
        if start and not Path(start[1], "eval.json").exists():
            return train(*Path(start[1]).name.rsplit("-", 2))  # this one in a later round
        missing[out][f"python train.py {given} --out {out} --resume auto"] = None

    def figure(name, rate, seed, split, metric, flags=""):
        place = dict(zip(PLACE, (name, rate, seed, split, metric, flags)))
        out, given = place_of(name, rate, seed)
        record = records.get(key_of({"method": method} | place))
        if not (out / "eval.json").exists():
            return record["value"] if record else train(name, rate, seed)
        config = common.read_config(out)
        check_run(out, config, given.split())
        of = "" if config["eval_data"] else f"--split {split} "  # folders have no splits
        value, task = last_figure(out, config, metric, of + flags), metric.split("/")[0]
        if value is None and record:
            return record["value"]
        if value is None:
            task = TASK_OF.get(task, task)
            missing[out][f"python eval.py {out} {of}--task {task} {flags}".strip()] = None
        else:
            place = {name: x for name, x in place.items() if x != ""}
            found.append({"method": method, **place, "value": value, "commit": config["git"],
                          "torch": config.get("torch"), "threads": config.get("threads")})
        return value

    for claim in TABLES[method]["claims"]:
        compare(method, claim, figure)
    add_records(found)
    for commands in missing.values():
        print(" && ".join(commands))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=TABLES)
    parser.add_argument("--again", action="store_true", help="train: print commands")
    args = parser.parse_args(argv)
    if args.again:
        train_again(args.method)
    else:
        print_table(args.method)


if __name__ == "__main__":
    common.prepare_output()
    try:
        main()
    except common.UserError as error:
        sys.exit(f"error: {error}")

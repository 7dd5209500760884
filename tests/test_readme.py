"""Each file, flag, preset, task and command that README.md names exists."""

import dataclasses
import re
import shlex

import pytest

import common
import eval as evaluation
import mutants
import train
from helpers import ROOT
from train import METHODS

TEXT = (ROOT / "README.md").read_text("utf-8")
# commands stand in indented lines; a backslash continues a line
COMMANDS = [line.partition("  #")[0].strip() for line in TEXT.replace("\\\n", " ").splitlines()
            if re.match(r" {4}.*\b(train|eval)\.py ", line)]


def flags_of(*classes):
    return {common.flag_of(field.name) for each in classes for field in dataclasses.fields(each)}


TRAIN = flags_of(train.Config, *(method.Settings for method in METHODS.values()))
TRAIN |= {"--method"} | {flag.replace("--", "--no-", 1) for flag in TRAIN}
EVAL = flags_of(evaluation.Flags)
PRESETS = {name for method in METHODS.values() for name in method.PRESETS}


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)]*)\)", TEXT)
    assert len(links) > 15
    for link in links:
        assert link.startswith("http") or (ROOT / link).exists(), link
    for name in re.findall(r"\b(?:tests/)?\w+\.py\b|\.ci/run", TEXT):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_presets_and_tasks_of_commands_exist(command):
    words = shlex.split(command)
    place = next(i for i, word in enumerate(words) if word.endswith((".py")))
    known = EVAL if words[place] == "eval.py" else TRAIN
    for word in words[place + 1 :]:
        assert not word.startswith("--") or word in known, word
    for flag, value in zip(words, words[1:]):
        if flag == "--method":
            assert value in METHODS
        if flag == "--preset":
            assert value in PRESETS
        if flag == "--task":
            assert {*value.split(",")} <= evaluation.TASKS.keys() | evaluation.PICTURES.keys()


def test_flags_and_presets_in_the_text_exist():
    known = TRAIN | EVAL | {"--help", "--shm-size", "--nproc_per_node", "--computed"}
    assert {*re.findall(r"(?<!\w)--[a-z][\w-]*", TEXT)} <= known
    table = re.search(r"presets of the papers.*?gpu_bench", TEXT, re.S)[0]
    presets = {name for name in re.findall(r"`([a-z0-9]+-?[\w-]*)`", table)
               if re.search(r"\d", name) or name.startswith("gloria-")}
    assert len(presets) > 9 and presets <= PRESETS


def test_the_lines_to_read_are_those_before_the_line_that_says_to_stop():
    rows = re.findall(r"^\| \[(\w+\.py)\].*?\. \| (\d+) \|", TEXT, re.MULTILINE)
    assert len(rows) == 4
    for name, lines in rows:
        assert "stop here. ---" in (ROOT / name).read_text("utf-8").splitlines()[int(lines)]


def test_each_mistake_of_mutants_stands_once_in_its_file():
    for file, _, _, old, *_ in mutants.mistakes():
        assert (ROOT / file).read_text("utf-8").count(old) == 1, (file, old)

"""``hpp import``, ``estimate``, ``export`` and ``evaluate``: help, options, and what has no effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_plans import cluster, plan, profile

from planner import cli, evaluate, exporters, importers
from planner.exporters.layers import NAMES
from planner.plans import Plan
from planner.profile import ModelProfile

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 100}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the inputs of `test_plans` and a config, as the working directory."""
    profile().save(tmp_path / "profile.json")
    cluster().save(tmp_path / "cluster.yaml")
    plan().save(tmp_path / "plan.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def helped(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command's help prints."""
    with pytest.raises(SystemExit) as left:
        cli.main([*arguments, "--help"])
    assert not left.value.code
    return capsys.readouterr().out


def test_help_of_a_format_lists_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    """`hpp import FORMAT --help` has every option of it, of the network too, and of no other; without one all have."""
    text = helped(capsys, "import", "galvatron")
    for of_network in (False, True):
        for option in importers.options("galvatron", of_network=of_network):
            assert f"  {option.name}=" in text
    assert "link=p2p|all_reduce" in text and "(default 16.0)" in text
    assert "metis:" not in text
    every = helped(capsys, "import")
    names = {*importers.FORMATS, *importers.NETWORKS}
    assert all(f"\n{name}:" in every for name in names)
    assert "metis --network:\n  no options" in every
    assert max(map(len, every.splitlines())) <= 112


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("import", {*importers.FORMATS, *importers.NETWORKS}),
        ("export", {*exporters.FORMATS, *(name for name in NAMES if name != "torchtitan-output")}),
        ("evaluate", {*evaluate.FORMATS}),
    ],
)
def test_help_names_every_format(capsys: pytest.CaptureFixture[str], command: str, names: set[str]) -> None:
    """No format has to be guessed."""
    text = "".join(helped(capsys, command).split())
    assert [name for name in names if name not in text] == []


ESTIMATE = ["estimate", "--config", "config.json", "--device", "T4", "--device", "slow=P40", "--dtype", "fp32", "-o"]


def estimated(*arguments: str) -> ModelProfile:
    """The profile that `hpp estimate` makes."""
    assert cli.main([*ESTIMATE, "made.json", "--sequence-length", "64", *arguments]) == 0
    return ModelProfile.load("made.json")


def test_estimate_reaches_what_the_library_takes(here: Path) -> None:
    """Adapters on chosen matrices, a name, and a run on the second device."""
    assert estimated("--name", "tiny").name == "tiny"
    notes = estimated("--lora", "2", "--lora-targets", "q,v,o").conditions.notes
    assert any("LoRA of rank 2 on q, v, o" in note for note in notes)
    fast, slow = (estimated("--measured", "2e5", "--measured-device", each) for each in ("T4", "slow"))
    assert fast.cells[0].forward_s != slow.cells[0].forward_s
    assert "measured on 1 x slow" in slow.warnings[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora-targets", "q"], "hpp: --lora-targets: no effect without --lora"),
        (["--measured-tp", "2"], "hpp: --measured-tp: no effect without --measured"),
        (["--images", "0"], "hpp: images: per_sample is 0, expected at least 1"),
        (["--sequence-length", "0"], "hpp: sequence_length: [0], expected whole numbers of at least 1"),
        (["--measured", "1e5", "--measured-device", "H100"], "hpp: measured_on: tp 1 on 'H100' is not in the profile"),
    ],
)
def test_estimate_says_what_is_wrong_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """Exit code 2, one line, and no file."""
    assert cli.main([*ESTIMATE, "made.json", "--sequence-length", "64", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(words) and err.count("\n") == 1
    assert not Path("made.json").exists()


def test_an_export_evaluates_to_its_plan_with_its_rank_map(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HexiScale's flags do not name devices, the map beside them does."""
    assert cli.main(["export", "plan.json", "--to", "hexiscale", "--ends", "1,1", "-o", "out"]) == 0
    given = ["evaluate", "profile.json", "cluster.yaml", "out/hexiscale.args", "--from", "hexiscale", "--ends", "1,1"]
    assert cli.main([*given, "--ranks", "out/ranks.csv", "-o", "again.json"]) == 0
    devices = [[stage.devices for stage in pipeline.stages] for pipeline in Plan.load("again.json").pipelines]
    assert devices == [[stage.devices for stage in pipeline.stages] for pipeline in plan().pipelines]
    capsys.readouterr()
    Path("out/ranks.csv").write_text("rank\n0\n")
    assert cli.main([*given, "--ranks", "out/ranks.csv"]) == 2
    assert "out/ranks.csv: line 1: column 'device' is missing" in capsys.readouterr().err

"""``hpp import``: measurements of others."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from planner import files
from planner.plans import wrapped


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the commands."""
    importer = commands.add_parser("import", help="convert another planner's measurements")
    importer.set_defaults(run=_import)
    importer.add_argument("format", metavar="FORMAT", help="sailor, metis")
    importer.add_argument("path", metavar="PATH", help="file or directory of the measurements")
    importer.add_argument("-o", "--output", required=True, metavar="OUT", help="file, or directory for several models")
    importer.add_argument("--model", metavar="NAME", help="only this model")


def _import(options: argparse.Namespace) -> int:
    from planner.importers import FORMATS

    if options.format not in FORMATS:
        raise ValueError(f"format {options.format!r} is not among {files.did_you_mean(options.format, FORMATS)}")
    profiles = FORMATS[options.format](options.path)
    if options.model is not None:
        names = [profile.name for profile in profiles]
        if options.model not in names:
            raise ValueError(f"--model: {options.model!r} is not among {files.did_you_mean(options.model, names)}")
        profiles = tuple(profile for profile in profiles if profile.name == options.model)
    output = Path(options.output)
    paths = [output]
    if not output.suffix:
        output.mkdir(parents=True, exist_ok=True)
        paths = [output / f"{_file_name(profile.name)}.json" for profile in profiles]
    elif len(profiles) > 1:
        models = ", ".join(profile.name for profile in profiles)
        raise ValueError(f"{output}: one file cannot hold {models}; name one of them with --model, or a directory")
    for path, profile in zip(paths, profiles):
        profile.save(path)
        devices = ", ".join(profile.device_types)
        print(f"{path}: {profile.name}, {profile.num_layers} layers of {len(profile.kinds)} kinds on {devices}")
        for warning in profile.warnings:
            print("\n".join(wrapped("  warning", warning)))
    return 0


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "profile"

"""``python -m inductor_grpo.tools.peers make DIR | run DIR [NAME ...] | here [NAME ...] | list``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from inductor_grpo.tools.peers import environment, table
from inductor_grpo.tools.peers.case import all_cases
from inductor_grpo.tools.peers.judge import Result, judge


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0, or 1 where a case is not equal to eager."""
    parser = argparse.ArgumentParser("python -m inductor_grpo.tools.peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("make", help="make, or complete, an environment with the packages in it")
    one.add_argument("folder", type=Path)
    one.add_argument("--torch", default=environment.TORCH, help="the requirement that torch is held to")
    for name, text in (("run", "run cases in an environment"), ("here", "run cases of what is installed here")):
        one = commands.add_parser(name, help=text)
        if name == "run":
            one.add_argument("folder", type=Path)
        one.add_argument("names", nargs="*", metavar="NAME", help="parts of the names of cases; all without one")
        one.add_argument(
            "--codegen", choices=("eager", "inductor"), default="eager", help="'eager': no code is generated"
        )
        form = one.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true")
        form.add_argument("--markdown", action="store_true")
    commands.add_parser("list", help="every case and what it calls")
    options = parser.parse_args(argv)
    if options.command == "make":
        environment.make(options.folder, options.torch)
        return 0
    if options.command == "list":
        for case in all_cases().values():
            print(f"{case.name}  {case.function}: {case.how}")
        return 0
    results = _here(options) if options.command == "here" else _run(options)
    show = table.as_json if options.json else table.as_markdown if options.markdown else table.as_text
    print(show(results))
    return int(not all(r.equal or r.stock for r in results))


def _here(options: argparse.Namespace) -> list[Result]:
    """Every case whose package is installed beside this one."""
    warnings.simplefilter("ignore")
    found = [case for case in all_cases().values() if case.installed]
    chosen = [c for c in found if not options.names or any(name in c.name for name in options.names)]
    return [judge(case, options.codegen) for case in chosen]


def _run(options: argparse.Namespace) -> list[Result]:
    """The cases in the environment, then those of each older release in a process that sees that one."""
    results: dict[str, Result] = {}
    for older in (None, *environment.OLDER):
        names = options.names or [older or ""]
        command = [str(environment.python(options.folder)), "-m", "inductor_grpo.tools.peers", "here", *names]
        command += ["--json", "--codegen", options.codegen]
        done = subprocess.run(
            command, env=environment.variables(options.folder, older), stdout=subprocess.PIPE, text=True
        )
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
        for result in table.from_json(done.stdout[done.stdout.index("[") :]):
            results.setdefault(result.name, result)
    order = list(all_cases())
    return sorted(results.values(), key=lambda r: order.index(r.name))


if __name__ == "__main__":
    sys.exit(main())

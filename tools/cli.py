"""The command ``inductor-grpo``."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from inductor_grpo.capture import Capture
from inductor_grpo.report import RequireError
from inductor_grpo.tools import errors, explain
from inductor_grpo.tools.progress import progress
from inductor_grpo.tools.target import Outcome, Target, TargetError

OK, UNMET, USAGE, FAILED = 0, 1, 2, 3
EPILOG = """exit codes:
  0  done
  1  an expectation (--expect, --set require=1) was not met, a pattern failed its check, two dumps differ, or doctor
     found a fault
  2  the command line or the target cannot be understood
  3  the target raised an exception, or compiled nothing (what was seen before is still shown)
"""
TARGET = """a script (train.py), run as python would run it, with what stands after -- as its arguments; or
module:function, where the function takes no arguments and returns (function to compile, (its, arguments)), or compiles
and runs what you want to see; or any function with --inputs"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv``; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    options.arguments = words[at + 1 :]
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except TargetError as error:
        print(f"inductor-grpo: {error}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("inductor-grpo", description=__doc__, epilog=EPILOG, formatter_class=formatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=text, description=text, epilog=EPILOG, formatter_class=formatter)
        found.set_defaults(run=run)
        return found

    one = command("explain", _explain, "What was rewritten, what was not, why, and what to change. Generates no code.")
    _target_options(one)
    one.add_argument("--json", action="store_true", help="JSON on stdout; the target's own output goes to stderr")
    one.add_argument(
        "--expect",
        metavar="NAME=COUNT",
        action="append",
        default=[],
        help="exit with 1 unless a pattern, 'engine', 'segment_sums', a rejection code, 'rewrites' or 'rejections' "
        "occurs COUNT times",
    )
    one = command("dump", _dump, "Numbered files of each graph: every stage as text, script and picture, code, report.")
    _target_options(one, codegen="inductor", fresh=True)
    one.add_argument("-o", "--output", metavar="DIR", required=True, type=Path, help="folder to write to")
    one = command("diff", _diff, "The differences of two dumps, or of two .txt files of dumps.")
    one.add_argument("a", type=Path)
    one.add_argument("b", type=Path)
    one.add_argument("--exact", action="store_true", help="numbers of values and source lines in comments count, too")
    one = command(
        "report", _report, "One HTML page: summary, graphs side by side, live memory, rejections with source."
    )
    _target_options(one, fresh=True)
    one.add_argument("-o", "--output", metavar="FILE", default=Path("report.html"), type=Path, help="file to write")
    one = command("patterns", _patterns, "The catalogue of patterns and rules; with TARGET, what it made of them.")
    _target_options(one, needed=False, fresh=True)
    one.add_argument(
        "--check", action="store_true", help="run the examples and near misses of each pattern and the seam"
    )
    one = command("doctor", _doctor, "Whether the package works here: versions, device, caches, a try.")
    one.add_argument("--quick", action="store_true", help="without a compilation by Inductor")
    from inductor_grpo.tools import bench

    one = command("bench", bench.run, "Time, memory and error of losses, beside the matmuls alone and other packages.")
    bench.add_options(one)
    return parser


def _target_options(
    parser: argparse.ArgumentParser, codegen: str = "eager", needed: bool = True, fresh: bool = False
) -> None:
    parser.add_argument("target", metavar="TARGET", nargs=None if needed else "?", help=TARGET)
    parser.add_argument("--inputs", metavar="FUNCTION", help="a function of no arguments that returns TARGET's")
    parser.add_argument(
        "--codegen",
        choices=("eager", "inductor"),
        default=codegen,
        help=f"'eager' generates no code (here: {codegen})",
    )
    caches = parser.add_mutually_exclusive_group()
    caches.add_argument(
        "--fresh",
        action="store_true",
        default=fresh,
        help="do not use Inductor's caches" + " (always so here, unless --cached is given)" * fresh,
    )
    if fresh:
        caches.add_argument(
            "--cached",
            dest="fresh",
            action="store_false",
            help="use Inductor's caches; of a graph that comes from them only the stored report is known",
        )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a setting of inductor_grpo for the run, such as min_logits_bytes=0",
    )
    parser.add_argument("--quiet", action="store_true", help="no signs of life on stderr")


def _run(options: argparse.Namespace) -> Outcome:
    settings = {}
    for text in options.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise TargetError(f"--set {text}: must be NAME=VALUE")
        settings[name.removeprefix("grpo.")] = value
    target = Target(options.target, options.inputs, options.arguments, options.codegen, options.fresh, settings)
    watch = contextlib.nullcontext if options.quiet else progress()
    return target.run(watch)  # type: ignore[arg-type]


def _ended(outcome: Outcome) -> int:
    """Tells how the target ended; the exit code for it."""
    if outcome.error is not None:
        return _failed(outcome.error)
    if not outcome.capture.graphs:
        print("inductor-grpo: the target compiled nothing", file=sys.stderr)
        return FAILED
    return OK


def _failed(error: BaseException) -> int:
    required = next((e for e in errors.chain(error) if isinstance(e, RequireError)), None)
    if required is not None:
        count = len(required.report.obstacles)
        what = "vocabulary-sized tensor stays" if count == 1 else "vocabulary-sized tensors stay"
        first = required.report.obstacles[0]
        print(f"inductor-grpo: require: {count} {what} in the graph: {first}", file=sys.stderr)
        return UNMET
    if isinstance(error, SystemExit):
        print(f"inductor-grpo: the target called sys.exit({error.code!r}); above is what was seen", file=sys.stderr)
        return FAILED
    print(errors.text(error), end="", file=sys.stderr)
    last = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
    print(f"inductor-grpo: the target ended with {last}; above is what was seen before", file=sys.stderr)
    return FAILED


def _explain(options: argparse.Namespace) -> int:
    try:
        expected = [explain.parse_expectation(text) for text in options.expect]
    except ValueError as error:
        raise TargetError(f"--expect: {error}") from None
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        outcome = _run(options)
    captured = outcome.capture
    print(explain.as_json(captured) if options.json else explain.as_text(captured, _width()), end="")
    code = _ended(outcome)
    unmet = explain.unmet(captured.report, expected)
    for sentence in unmet:
        print(f"inductor-grpo: {sentence}", file=sys.stderr)
    return code or (UNMET if unmet else OK)


def _dump(options: argparse.Namespace) -> int:
    from inductor_grpo.tools.dump import dump

    outcome = _run(options)
    if outcome.capture.graphs:
        written, kept = dump(outcome.capture, options.output)
        print("\n".join(map(str, written)))
        for folder in kept:
            print(
                f"inductor-grpo: {folder} keeps its earlier dump, since this graph came from Inductor's cache;"
                " the stored report is in its cached_report.txt; leave out --cached to dump it anew",
                file=sys.stderr,
            )
    return _ended(outcome)


def _diff(options: argparse.Namespace) -> int:
    from inductor_grpo.tools.dump import diff

    try:
        lines = diff(options.a, options.b, options.exact)
    except FileNotFoundError as error:
        raise TargetError(str(error)) from None
    print("\n".join(lines) if lines else "no difference")
    return UNMET if lines else OK


def _report(options: argparse.Namespace) -> int:
    try:
        from inductor_grpo.tools.page import page
    except ImportError as error:
        how = 'pip install "inductor-grpo[report]", or in a checkout: pip install ".[report]"'
        raise TargetError(f"the report needs {error.name}: {how}") from None
    outcome = _run(options)
    options.output.write_text(page(outcome.capture, options.target), encoding="utf-8")
    print(f"{options.output}: {outcome.capture.report.summary()}")
    return _ended(outcome)


def _patterns(options: argparse.Namespace) -> int:
    from inductor_grpo.tools import catalogue

    if options.check:
        checks, found = catalogue.check()
        print(catalogue.as_text(found))
        print("\n".join(map(str, checks)))
        failed = [c for c in checks if not c.ok]
        print(f"{len(checks)} checks, {len(failed)} failed")
        return UNMET if failed else OK
    if options.target is None:
        print(catalogue.as_text(), end="")
        return OK
    outcome = _run(options)
    print(catalogue.heading(outcome.capture))
    print(catalogue.as_text(catalogue.trials(outcome.capture)), end="")
    return _ended(outcome)


def _doctor(options: argparse.Namespace) -> int:
    from inductor_grpo.tools.doctor import examine

    findings = examine(options.quick)
    print("\n".join(map(str, findings)))
    return UNMET if any(f.ok is False for f in findings) else OK


def _width() -> int:
    return min(120, shutil.get_terminal_size((100, 24)).columns)


__all__ = ["FAILED", "OK", "UNMET", "USAGE", "Capture", "main"]

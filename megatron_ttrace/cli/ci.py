# SPDX-License-Identifier: Apache-2.0
"""``ttrace ci``: check a pull request: the recipes that its changes can reach, and no others."""

import argparse
import sys
from contextlib import ExitStack

from megatron_ttrace.cli import command
from megatron_ttrace.jobs import flags
from megatron_ttrace.trace.errors import TTraceError

SUMMARY = "check a pull request: the recipes that its changes can reach"
DESCRIPTION = (
    "Check the recipes of a Megatron checkout that the changes of a pull request "
    "can reach, and annotate its lines with the culprit."
)
EPILOG = """\
examples:
  ttrace ci . --base origin/main --recipes ci/recipes
  ttrace ci . --base origin/main --recipe examples/gpt3/train.sh --format github

Recipes (model_config.yaml files, and shell scripts that start a training) are shrunk and checked at
HEAD. What each check runs is kept in --directory: a recipe is skipped if none of its code differs
from its last common commit with --base. If HEAD diverges, that commit is checked too: divergences
already present there are not attributed to the pull request. A recipe that HEAD changes, breaks or
removes is still checked as it was. The files of the checkout are not touched. Code of the pull
request runs without the variables of this environment that may be secret (docs/pull-requests.md).

exit code: 0 the pull request adds no divergence; 1 it does; 2 it removes or breaks a recipe, or
keeps one from being checked, or no recipe that runs changed code can be
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("checkout", type=flags.path, metavar="CHECKOUT")
    parser.add_argument(
        "--base", required=True, metavar="REF", help="branch that the pull request is merged into"
    )
    for option, metavar, kind in (
        ("--recipes", "DIR", "directory of recipes"),
        ("--recipe", "FILE", "recipe"),
    ):
        parser.add_argument(
            option,
            dest="places",
            type=flags.path,
            action="append",
            default=[],
            metavar=metavar,
            help=f"{kind}, below CHECKOUT; may be repeated (default: the "
            "functional tests and examples of Megatron-LM)",
        )
    parser.add_argument(
        "--format",
        choices=("plain", "github", "gitlab", "json"),
        default="plain",
        help="of annotations: text, GitHub's workflow commands, GitLab's code quality, or JSON",
    )
    command.add_max_ranks(parser)
    parser.add_argument("--quiet", action="store_true", help="do not print progress")
    command.add_directory(parser, "ttrace-ci")


def run(args: argparse.Namespace) -> int:
    """Check what the changes reach, and annotate them."""
    from megatron_ttrace.evaluation.recipes import pull
    from megatron_ttrace.jobs.processes.worktrees import Checkout
    from megatron_ttrace.report import review
    from megatron_ttrace.trace import owned, shared
    from megatron_ttrace.trace.sanitise import log_line

    if not args.checkout.is_dir():
        raise TTraceError(f"{args.checkout}: no such directory; give a checkout of Megatron-LM")
    folder = args.checkout.resolve()
    checkout = Checkout(folder)
    head = checkout.commit("HEAD")
    base = checkout.fork_point(checkout.commit(args.base), head)
    # Standard output has nothing but JSON, where it is JSON.
    out = sys.stderr if args.format in ("gitlab", "json") else sys.stdout

    def report(line: str) -> None:
        print(log_line(line), file=out, flush=True)

    if checkout.is_edited():
        report(f"uncommitted changes are not checked, only {head[:12]}")
    inside = folder.relative_to(checkout.root)
    directory = args.directory.absolute()
    with shared.alone(directory, pull.NAMES):
        try:
            with ExitStack() as stack:
                request = pull.Pull(checkout, inside, directory, head, base, args.quiet, stack)
                todo = pull.plan(request, folder, args.places, args.max_ranks, report)
                code, annotations = pull.check(request, todo, report)
        finally:
            owned.discard(directory / "trees")
    if args.format == "gitlab":
        print(review.code_quality(annotations))
    if args.format == "json":
        print(review.records(annotations))
    show = review.workflow_command if args.format == "github" else review.text
    for annotation in annotations:
        print(show(annotation), file=out, flush=True)
    return code

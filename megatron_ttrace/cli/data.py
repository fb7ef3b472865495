# SPDX-License-Identifier: Apache-2.0
"""``ttrace data``: convert text files into a data set for Megatron."""

import argparse
import json
import shlex

from megatron_ttrace.jobs import flags, inputs
from megatron_ttrace.trace.errors import ExitCode

SUMMARY = "convert text files into Megatron's .bin and .idx"
EPILOG = """\
example:
  ttrace data --output data/library --glob '*.py' --append-eod --max-bytes 2000000 src/ README.md

Each byte is a token, and each file is a document. The vocabulary has 257 entries; the last one is
the end-of-document token. Nothing is downloaded. The flags to train with are printed at the end.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "sources",
        metavar="FILE_OR_DIR",
        nargs="+",
        type=flags.path,
        help="files, or directories of files",
    )
    parser.add_argument(
        "--output",
        metavar="PREFIX",
        required=True,
        type=flags.path,
        help="write PREFIX.bin and PREFIX.idx",
    )
    parser.add_argument(
        "--glob",
        metavar="PATTERN",
        default="*",
        help="files of a directory to read (default: all but hidden ones)",
    )
    parser.add_argument(
        "--max-bytes",
        metavar="N",
        type=flags.integer(1),
        help="stop after N bytes of text (default: no limit)",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the token 256"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the data set and print the arguments that train on it.

    Raises ``TTraceError`` on input that is missing or empty, and output that cannot be written.
    """
    # Megatron takes seconds to import; `ttrace --help` must not pay for that.
    from megatron_ttrace.jobs import text_data

    own = {args.output.with_name(args.output.name + end).resolve() for end in (".bin", ".idx")}
    found = text_data.find_files(args.sources, args.glob)
    # They may be below a source, from the last time.
    files = [file for file in found if file.resolve() not in own]
    inputs.require_regular(files)
    texts = text_data.read_documents(files, args.max_bytes)
    documents, tokens = text_data.write_corpus(texts, args.output, append_eod=args.append_eod)
    split = text_data.split_flags(documents)
    trained_with = shlex.join([*text_data.training_flags(args.output), *split])
    if args.json:
        counts = {"documents": documents, "tokens": tokens}
        print(json.dumps({"prefix": str(args.output), **counts, "flags": trained_with}))
    else:
        print(f"{args.output}.bin, .idx: {documents} documents, {tokens} tokens")
        print(f"train with: {trained_with}")
    return ExitCode.EQUIVALENT

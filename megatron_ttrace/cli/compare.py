# SPDX-License-Identifier: Apache-2.0
def add_parser(subparsers):
    pass

"""Runs the program ``weft`` that the package carries."""

import os
import sys

from weft import program


def main() -> None:
    path = program()
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    main()

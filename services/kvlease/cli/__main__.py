"""``python -m kvlease.cli``: the command, also where no script is installed in PATH."""

from kvlease.cli.main import main

main()

"""The `kvlease` command: one file a subcommand, imported when it is called."""

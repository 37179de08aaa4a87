"""The `mmpack` command: one file a subcommand; exit codes and error lines in main.py."""

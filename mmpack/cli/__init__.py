"""The command `mmpack`: one thin file per subcommand; exit codes and error lines in main.py."""

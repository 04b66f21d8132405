"""The commands of the command line: one module each, with `run(args)` returning the exit code."""

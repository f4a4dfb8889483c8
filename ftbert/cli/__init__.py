"""The command line: loads a model where one is needed, prints. A module for each group of commands."""

from ftbert.cli.program import main

__all__ = ["main"]

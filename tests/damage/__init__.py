"""Fuzzing: random damage of user inputs, through every reader and command."""

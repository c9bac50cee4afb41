"""One file per command: read, call one function, print."""

"""The command line, one file a sub-command; it starts without importing torch."""

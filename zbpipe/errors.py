"""The errors that zbpipe raises."""


class ZbpipeError(RuntimeError):
    """Base of every error that zbpipe raises itself."""


class ConfigError(ZbpipeError, ValueError):
    """What the caller asked for cannot be done; the message says what would be right."""

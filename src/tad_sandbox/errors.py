"""The errors that a caller of the sandbox is meant to read: one line each, with the fix."""


class SandboxError(Exception):
    """The sandbox cannot be used as it is set up."""


class NoSandboxError(SandboxError):
    """Programs cannot be contained on this machine."""

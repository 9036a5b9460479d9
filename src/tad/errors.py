"""The one exception a user is meant to read.

Raise it where the cause is known, with a single line that names the file or field and the fix. The command line
prints that line and exits with code 2; a library caller can catch it. Programming errors stay what they are.
"""


class TadError(Exception):
    """Bad input or an unusable environment: the message says what is wrong and what to do."""

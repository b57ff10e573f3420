"""`UserError`: an error that a user can fix."""


class UserError(ValueError):
    """A one-line message: what and where, what was found, what was expected and what to do.

    The command line prints it without a traceback and ends with exit status 2.
    """

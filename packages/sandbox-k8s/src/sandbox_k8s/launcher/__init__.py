"""The server that runs inside a sandbox, and the keeper that watches it from outside.

Both are programs of the standard library alone (``python -I -S``), so that they start fast and need nothing
from the image. The client shares `archive`, `frames` and `keeper`'s file names with them and nothing else.
"""

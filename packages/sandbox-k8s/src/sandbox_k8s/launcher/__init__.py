"""The server that runs inside a sandbox (`server` on this machine, `pod` in a pod) and what serves it.

`keeper` watches a local sandbox from outside, `install` copies the tree that a pod's launcher runs from.
All are programs of the standard library alone (``python -I -S``), so that they start fast and need nothing
from the image. The client shares `archive`, `frames` and `keeper`'s file names with them and nothing else.
"""

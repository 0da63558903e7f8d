# Read by every bash that the launcher starts, and by none that those start (BASH_ENV is unset at once).
# PS1 is set while ~/.bashrc runs, because many such files return early without it.
unset BASH_ENV
if [ -r "${HOME:-}/.bashrc" ]; then
    PS1='$ '
    . "$HOME/.bashrc"
    unset PS1
fi

"""Shell functions that bring the files of a work folder into an index of ours.

For the scripts of `base_commit` and `patch`. Both have to take the same files: what one of them alone takes
would be a change of the agent's.
"""

from __future__ import annotations

FUNCTIONS = r"""
# Files above a size as patterns of an ignore file, so that git need not read them. `?` is any character, as a
# pattern cannot name a line's end.
large() {
  find . -name .git -prune -o -type f -size +"$1"c -print0 | tr '\n\0' '\001\n' \
    | sed 's/[][*?\\!#]/\\&/g; s/ $/\\ /; s/^\.//' | tr '\001' '?'
}
# Run a git that reads the files until it has read all of them, or says of some that it cannot (1). All that
# it read is lost when it is killed, when a file shrinks under it (135) or vanishes before it is read (128).
settled() {
  trap resume EXIT
  for attempt in 1 2 3; do
    ended=0
    "$@" 2> "$own/errors" || ended=$?
    if grep -qE '^(error|fatal): (unable to (create|write)|file write|insufficient perm)' "$own/errors"; then
      ended=74
    fi
    case "$ended-$attempt" in 0-* | 1-[23]) return 0 ;; esac
    rm -f "$GIT_INDEX_FILE.lock"
    halt
  done
  tail -c 2000 "$own/errors" >&2
  exit 69
}
# Stage the files that a list names. 1: some cannot be read, the others are staged.
stage() {
  git update-index --add --remove --replace -z --stdin < "$1" && return 0
  rm -f "$GIT_INDEX_FILE.lock"
  xargs -0 sh -c 'for path; do [ ! -L "$path" ] && [ ! -r "$path" ] || printf "%s\0" "$path"; done' sh \
    < "$1" > "$own/readable"
  git update-index --add --remove --replace -z --stdin < "$own/readable" || return
  return 1
}
# Stage every file of a folder that is no repository: no ignore file hides one, and neither does a `.git`.
stage_folder() {
  find . -name .git -prune -o \( -type f ! -size +"$limit"c -o -type l \) -print0 > "$own/found"
  some=0
  stage "$own/found" || some=$?
  [ "$some" -le 1 ] || return "$some"
  git ls-files -z --deleted > "$own/found"
  git update-index --remove -z --stdin < "$own/found" && return "$some"
  rm -f "$GIT_INDEX_FILE.lock"  # one by one: it gives up at the first that it cannot look at
  xargs -0 -n 1 git update-index --remove -- < "$own/found" || [ $? -eq 123 ] || return 128
  return 1
}
# Submodules of the index.
links() {
  git ls-files --stage | sed -n 's/^160000 [^\t]*\t//p' > "$own/links"
}
# Their files.
of_links() {
  tr '\n' '\0' < "$own/links" | xargs -0 sh -c '
    for folder; do find "./$folder" -name .git -prune -o \( -type f -o -type l \) -print0; done' sh || :
}
# Files of repositories inside that are neither submodules nor ignored. `git add` would make a link of such a
# repository, or fail for one without commits, so it is told to leave them.
inner() {
  find . -mindepth 2 -name .git -prune -exec sh -c '
    links=$1; shift
    for path; do
      folder=${path#./}
      folder=${folder%/.git}
      grep -qxF -e "$folder" "$links" && continue
      told=0
      git check-ignore -q -- "$folder" 2>/dev/null || told=$?
      [ "$told" -ne 1 ] || printf "./%s\0" "$folder"  # 128: in a submodule
    done
  ' sh "$own/links" {} + > "$own/inner"
  xargs -0 sh -c '
    limit=$1; shift
    for folder; do
      find "$folder" -name .git -prune -o \( -type f ! -size +"$limit"c -o -type l \) -print0
    done' sh "$limit" < "$own/inner" > "$own/found"
  tr '\n\0' '\001\n' < "$own/inner" | sed 's/[][*?\\!#]/\\&/g; s/^\.//; s/$/\//' | tr '\001' '?' \
    >> "$own/exclude"
}
# What no patch can hold.
odd() {
  find . -mindepth 1 -name .git -prune -o \( -type d -empty -o ! -type f ! -type d ! -type l \) -print0 || :
}
# Stop what works in this folder. `resume` lets it go on.
halt() {
  here=$(pwd -P)
  [ "$here" != / ] || return 0
  for link in /proc/[0-9]*/cwd; do
    case $(readlink "$link" 2>/dev/null || :) in "$here" | "$here"/*) ;; *) continue ;; esac
    process=${link#/proc/}
    process=${process%/cwd}
    if [ "$process" != $$ ] && kill -STOP "$process" 2>/dev/null; then echo "$process" >> "$own/halted"; fi
  done
}
resume() {
  if [ -s "$own/halted" ]; then kill -CONT $(cat "$own/halted") 2>/dev/null || :; fi
}
"""

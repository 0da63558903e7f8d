"""Who an agent is to git in a sandbox, which knows nobody."""

from __future__ import annotations

GIT_IDENTITY = {
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@sandbox.invalid",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@sandbox.invalid",
    "GIT_CONFIG_NOSYSTEM": "1",
}

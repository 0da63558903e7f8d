"""`Permits`: what a key may say HELLO as, and for which producer."""

from __future__ import annotations

from collections.abc import Callable

from trainer_bridge.errors import ErrorCode, ProtocolError
from trainer_bridge.keys import CurveKeys
from trainer_bridge.messages import Hello
from trainer_bridge.owners import Owners
from trainer_bridge.store import Store

PLACES = {
    "producer": "in the allow-list's folder itself",
    "observer": "in the allow-list's folder observers",
    "rank": "in the allow-list's folder ranks",
}


class Permits:
    """Judges a HELLO by the key that its connection was authenticated with.

    Args:
        keys: the receiver's; what its peers may do.
        owners: which key speaks for which producer; keys that are not among the peers lose theirs.
    """

    def __init__(self, keys: CurveKeys, owners: Owners) -> None:
        self._keys = keys
        self._owners = owners
        owners.keep_only(keys.peers)

    def check(self, hello: Hello, user: str) -> None:
        """Let a HELLO pass.

        Args:
            hello: as it came.
            user: name of the key.

        Raises:
            ProtocolError: the key must not have this role, or not speak for this producer.
        """
        roles = self._keys.roles_of(user)
        if hello.role not in roles:
            raise ProtocolError(
                ErrorCode.ROLE_NOT_ALLOWED,
                f"key {user or '(none)'} may connect as {' or '.join(roles) or 'nothing'}, not as "
                f"{hello.role}: if it should, put its .pub file {PLACES[hello.role]} (in Python: "
                "CurveKeys.roles) and restart the receiver",
            )
        if hello.role == "producer":
            self._owners.claim(hello.peer, user)


def admission(keys: CurveKeys | None, store: Store | None) -> Callable[[Hello, str], None] | None:
    """What a receiver's session asks of each HELLO. None: without keys nobody is known, and all may enter.

    Args:
        keys: the receiver's.
        store: keeps over restarts which key speaks for which producer. None: known in this process only.
    """
    if keys is None:
        return None
    return Permits(keys, Owners() if store is None else store.owners).check

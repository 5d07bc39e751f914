"""Limits of what the system holds for a TCP connection."""

from __future__ import annotations

import socket
import sys

if sys.platform == "darwin":
    _TCP_RXT_CONNDROPTIME = 0x80  # netinet/tcp.h
    _TCP_NOTSENT_LOWAT = 0x201


def limit_unsent(connection: socket.socket, unsent_bytes: int, seconds: int) -> None:
    """Hold at most so much unsent data, and reset the connection once data is unacknowledged for so long."""
    # By default the kernel buffers megabytes before unread data is noticed, and tries for a quarter of an hour to
    # deliver data to a client that is gone.
    if sys.platform == "darwin":
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent_bytes)
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, seconds)
    else:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
